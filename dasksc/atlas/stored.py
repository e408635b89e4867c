"""Atlases at paths: what a reader's store holds, as AnnData of Dask arrays."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import pandas as pd
from anndata import AnnData

from dasksc.atlas.assemble import Elements, raw_of, unchecked
from dasksc.atlas.lookup import known_columns
from dasksc.errors import InputError, StorageError
from dasksc.readers.arrays import lazily
from dasksc.readers.hdf5 import Hdf5Reader
from dasksc.readers.interface import Store
from dasksc.readers.locations import where_of
from dasksc.readers.names import is_nameless, nameless_index
from dasksc.readers.options import OpenOptions
from dasksc.readers.registry import opened, reader_of
from dasksc.readers.survey import surveyed
from dasksc.storage import Cache, RemoteLocation, UseMmap, is_url, redact_url
from dasksc.storage.remote.remote_file import RemoteFile, files_ahead

__all__ = ["Extent", "open_elements", "open_modalities", "path_names", "remote_files", "split_columns"]

Extent = Literal["all", "batches", "joined"]
"""Elements to open: all, those that batches may need (obs, var, X, layers, obsm), or those of joined atlases."""


def open_elements(
    path: str, obs: Sequence[str] | None, options: OpenOptions, extent: Extent = "all", file: RemoteFile | None = None
) -> Elements:
    """Open elements of the atlas at a path or URL; `file` is the object at the URL, if it is known."""
    if extent == "joined":
        found = _surveyed(path, obs, options, file)
        if found is not None:
            return found
    with _single(path, options) as (store, where):
        return _read(store, where, obs, options, extent)


def _surveyed(path: str, obs: Sequence[str] | None, options: OpenOptions, file: RemoteFile | None) -> Elements | None:
    """Open the usual elements of an HDF5 file that is local or known; None for other files."""
    chooses = options.reader_options or options.feature_types or options.genomes
    where = where_of(path, options)
    source = where if isinstance(where, str) else file
    if chooses or source is None or not isinstance(reader_of(where), Hdf5Reader):
        return None
    found = surveyed(source, obs, options)
    if found is None:
        return None
    if obs is not None:
        known_columns(obs, found.columns, where, may_lack=options.may_lack)
    groups: dict[str, dict[str, Any]] = {"layers": {}, "obsm": {}}
    for key, matrix in found.matrices.items():
        group, _, name = key.partition("/")
        if group in groups:
            groups[group][name] = matrix
    raw = None if found.raw_var is None else {"X": found.matrices["raw/X"], "var": found.raw_var, "varm": {}}
    return Elements(obs=found.obs, var=found.var, X=found.matrices.get("X"), raw=raw, **groups)


def remote_files(data: Sequence[Any], options: OpenOptions) -> Iterator[RemoteFile | None]:
    """Yield the objects of atlases at URLs, requested ahead; None for other atlases."""
    places = [RemoteLocation.of(one, options.storage_options) if isinstance(one, str) and is_url(one) else None
              for one in data]  # fmt: skip
    remote = [one for one in places if one is not None and one.local is None]
    files = files_ahead(remote, cache=options.cache_of(remote[0])) if remote else iter(())
    for one in places:
        yield None if one is None or one.local is not None else next(files)


@contextmanager
def _single(path: str, options: OpenOptions) -> Iterator[tuple[Store, str | RemoteLocation]]:
    where = where_of(path, options)
    with opened(where, options) as store:
        if store.modalities():
            raise InputError(
                f"{redact_url(path) if is_url(path) else path} contains several modalities. Open it with "
                "dasksc.Modalities(...), which accepts the same path and storage_options and can be passed to scDataset"
            )
        yield store, where


def open_modalities(
    path: str,
    obs: Sequence[str] | None,
    *,
    mmap: UseMmap,
    storage_options: Mapping[str, Any] | None,
    cache: str | os.PathLike[str] | Mapping[str, Any] | None,
    raw: bool,
) -> tuple[AnnData, dict[str, AnnData]]:
    """Open a stored MuData: its own obs and obsm, and its modalities, as AnnData of Dask arrays with rows as stored."""
    options = OpenOptions(mmap=mmap, storage_options=dict(storage_options or {}), cache=Cache.of(cache))
    where = where_of(path, options)
    with unchecked(), opened(where, options) as store:
        parts, keys = store.modalities(), store.keys()
        if not parts or "obs" not in keys:
            raise StorageError(
                f"{where} is not a MuData: it contains {', '.join(keys) or 'nothing'}. Give an .h5mu file or a Zarr "
                "store that mudata wrote"
            )
        own, columns = split_columns(
            obs, store.columns("obs"), {name: part.columns("obs") for name, part in parts.items()}
        )
        mod = {name: _read(part, where, columns[name], options) for name, part in parts.items()}
        table = _obs(store, where, own, options)
        shared = Elements(obs=table, obsm=_entries(store, keys, "obsm", table, options)).to_anndata()
        held = {name: raw_of(part, name) for name, part in mod.items()} if raw else mod
        return shared, {name: part.to_anndata() for name, part in held.items()}


def path_names(path: str, options: OpenOptions | None = None) -> Iterator[list[str]]:
    """Yield the names of the cells of the atlas at a path, in pieces."""
    options = OpenOptions() if options is None else options
    with opened(where_of(path, options), options) as store:
        yield from map(list, store.names())


def split_columns(
    obs: Sequence[str] | None, own: Collection[str], held: Mapping[str, Collection[str]]
) -> tuple[list[str] | None, dict[str, list[str] | None]]:
    """Assign requested columns to the obs of a MuData and to those of its modalities; None stands for all."""
    if obs is None:
        return None, dict.fromkeys(held)
    of_own: list[str] = []
    of_modality: dict[str, list[str]] = {name: [] for name in held}
    for name in obs:
        modality, _, column = name.partition(":")
        if modality in held and (column in held[modality] or name not in own) and column:
            of_modality[modality].append(column)
        else:
            of_own.append(name)
    return of_own, dict(of_modality)


def _read(
    store: Store,
    where: str | RemoteLocation,
    obs: Sequence[str] | None,
    options: OpenOptions,
    extent: Extent = "all",
) -> Elements:
    keys = store.keys()
    missing = [name for name in ("obs", "var") if name not in keys]
    if missing:
        raise StorageError(
            f"{where} is not an AnnData: it has no {' and no '.join(missing)}, and contains "
            f"{', '.join(sorted(keys)) or 'nothing else of it'}. Give a file that AnnData wrote, or a 10x file of "
            "counts, such as filtered_feature_bc_matrix.h5"
        )

    def genes(name: str) -> pd.DataFrame:
        # Annotations of genes are not joined.
        return store.table(name, []) if extent == "joined" else store.table(name)

    table = _obs(store, where, obs, options)
    for_cells = Elements(
        obs=table,
        var=genes("var"),
        X=lazily(store.matrix("X"), "X", options) if "X" in keys else None,
        layers=_entries(store, keys, "layers", table, options),
        obsm=_entries(store, keys, "obsm", table, options),
    )
    if extent == "batches":
        return for_cells

    def values(group: str) -> dict[str, Any]:
        found = {key.removeprefix(f"{group}/"): store.value(key) for key in keys if key.startswith(f"{group}/")}
        return {name: value for name, value in found.items() if value is not None}

    raw = None
    if "raw/X" in keys and "raw/var" in keys:
        x_of_raw = lazily(store.matrix("raw/X"), "raw/X", options)
        raw = {"X": x_of_raw, "var": genes("raw/var"), "varm": {} if extent == "joined" else values("raw/varm")}
    if extent == "joined":
        return replace(for_cells, raw=raw)
    return replace(
        for_cells,
        uns=store.value("uns") if "uns" in keys else {},
        varm=values("varm"),
        obsp=_entries(store, keys, "obsp", table, options),
        varp=values("varp"),
        raw=raw,
    )


def _obs(store: Store, where: str | RemoteLocation, obs: Sequence[str] | None, options: OpenOptions) -> pd.DataFrame:
    wanted = None
    if obs is not None:
        wanted = known_columns(obs, store.columns("obs"), where, may_lack=options.may_lack)
    table = store.table("obs", wanted)
    if wanted is not None and list(table.columns) != wanted:  # avoids a copy of the columns
        table = table[wanted]
    if not options.has_names and not is_nameless(table.index):
        return table.set_axis(nameless_index(len(table)))
    return table.set_axis(table.index.astype(str)) if isinstance(table.index, pd.RangeIndex) else table


def _entries(
    store: Store, keys: Collection[str], group: str, table: pd.DataFrame, options: OpenOptions
) -> dict[str, Any]:
    """Return the entries of layers, obsm or obsp, with matrices lazy; tables get the names of the cells."""
    found = {}
    for key in keys:
        if key.startswith(f"{group}/"):
            value = lazily(store.matrix(key), key, options)
            found[key.removeprefix(f"{group}/")] = (
                value.set_axis(table.index) if isinstance(value, pd.DataFrame) else value
            )
    return found
