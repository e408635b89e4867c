"""Atlases at paths: what a reader's store holds, as AnnData of Dask arrays."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pandas as pd
from anndata import AnnData

from dasksc.atlas.assemble import Elements, raw_of, unchecked
from dasksc.atlas.lookup import known_columns
from dasksc.errors import InputError, StorageError
from dasksc.readers.arrays import lazily
from dasksc.readers.interface import Store
from dasksc.readers.locations import where_of
from dasksc.readers.names import is_nameless, nameless_index
from dasksc.readers.options import OpenOptions
from dasksc.readers.registry import opened
from dasksc.storage import Cache, RemoteLocation, UseMmap, is_url, redact_url

__all__ = ["open_elements", "open_modalities", "open_path", "path_names", "split_columns"]


def open_path(path: str, obs: Sequence[str] | None, options: OpenOptions) -> AnnData:
    """Open the AnnData at a path or URL."""
    with _single(path, options) as (store, where):
        return _read(store, where, obs, options).to_anndata()


def open_elements(path: str, obs: Sequence[str], options: OpenOptions) -> Elements:
    """Open what batches may need of the atlas at a path or URL: columns of obs, var, X, layers and obsm."""
    with _single(path, options) as (store, where):
        found = _read(store, where, obs, options, for_batches=True)
    found.obs.index = pd.RangeIndex(found.n_obs)
    return found


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
        mod = {name: _read(part, where, columns[name], options).to_anndata() for name, part in parts.items()}
        table = _obs(store, where, own, options)
        shared = Elements(obs=table, obsm=_entries(store, keys, "obsm", table, options)).to_anndata()
    return shared, {name: raw_of(adata, name) for name, adata in mod.items()} if raw else mod


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
    *,
    for_batches: bool = False,
) -> Elements:
    keys = store.keys()
    missing = [name for name in ("obs", "var") if name not in keys]
    if missing:
        raise StorageError(
            f"{where} is not an AnnData: it has no {' and no '.join(missing)}, and contains "
            f"{', '.join(sorted(keys)) or 'nothing else of it'}. Give a file that AnnData wrote, or a 10x file of "
            "counts, such as filtered_feature_bc_matrix.h5"
        )
    table = _obs(store, where, obs, options)
    for_cells = Elements(
        obs=table,
        var=store.table("var"),
        X=lazily(store.matrix("X"), "X", options) if "X" in keys else None,
        layers=_entries(store, keys, "layers", table, options),
        obsm=_entries(store, keys, "obsm", table, options),
    )
    if for_batches:
        return for_cells

    def values(group: str) -> dict[str, Any]:
        found = {key.removeprefix(f"{group}/"): store.value(key) for key in keys if key.startswith(f"{group}/")}
        return {name: value for name, value in found.items() if value is not None}

    raw = None
    if "raw/X" in keys and "raw/var" in keys:
        x_of_raw = lazily(store.matrix("raw/X"), "raw/X", options)
        raw = {"X": x_of_raw, "var": store.table("raw/var"), "varm": values("raw/varm")}
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
