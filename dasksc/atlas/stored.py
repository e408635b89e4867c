"""Atlases at paths: the elements that a reader's store holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pandas as pd

from dasksc.atlas.assemble import Elements, known_columns
from dasksc.errors import InputError, StorageError
from dasksc.readers.arrays import lazily
from dasksc.readers.hdf5 import Hdf5Reader
from dasksc.readers.interface import Store
from dasksc.readers.locations import where_of
from dasksc.readers.options import OpenOptions
from dasksc.readers.registry import opened, reader_of
from dasksc.readers.survey import surveyed
from dasksc.storage import RemoteLocation, is_url, redact_url
from dasksc.storage.remote.remote_file import RemoteFile, files_ahead

Extent = Literal["all", "batches", "joined"]
"""Elements to open: all, those that batches may need (obs, var, X, layers, obsm), or those of joined atlases."""


def open_elements(
    path: str, obs: Sequence[str] | None, options: OpenOptions, extent: Extent = "all", file: RemoteFile | None = None
) -> Elements:
    """Open elements of the atlas at a path or URL; `file` is the object at the URL, if it is known."""
    where = where_of(path, options)
    if extent == "joined":
        found = _surveyed(where, obs, options, file)
        if found is not None:
            return found
    with opened(where, options) as store:
        if store.modalities():
            raise InputError(
                f"{redact_url(path) if is_url(path) else path} contains several modalities. Open it with "
                "dasksc.Modalities(...), which accepts the same path and storage_options and can be passed to scDataset"
            )
        return _read(store, where, obs, options, extent)


def _surveyed(
    where: str | RemoteLocation, obs: Sequence[str] | None, options: OpenOptions, file: RemoteFile | None
) -> Elements | None:
    """Open the usual elements of an HDF5 file that is local or known; None for other files."""
    chooses = options.reader_options or options.feature_types or options.genomes
    source = where if isinstance(where, str) else file
    if chooses or source is None or not isinstance(reader_of(where), Hdf5Reader):
        return None
    found = surveyed(source, obs, options)
    if found is None:
        return None
    if obs is not None:
        known_columns(obs, found.columns, where, may_lack=options.may_lack)
    if not options.has_names:
        found.obs.index = pd.RangeIndex(len(found.obs))
    raw = None if found.raw_var is None else {"X": found.matrices["raw/X"], "var": found.raw_var, "varm": {}}
    layers, obsm = (
        {key.removeprefix(group): matrix for key, matrix in found.matrices.items() if key.startswith(group)}
        for group in ("layers/", "obsm/")
    )
    return Elements(obs=found.obs, var=found.var, X=found.matrices.get("X"), layers=layers, obsm=obsm, raw=raw)


def remote_files(data: Sequence[Any], options: OpenOptions) -> Iterator[RemoteFile | None]:
    """Yield the objects of atlases at URLs, requested ahead; None for other atlases."""
    places = [RemoteLocation.of(one, options.storage_options) if isinstance(one, str) and is_url(one) else None
              for one in data]  # fmt: skip
    remote = [one for one in places if one is not None and one.local is None]
    files = files_ahead(remote, cache=options.cache_of(remote[0])) if remote else iter(())
    for one in places:
        yield None if one is None or one.local is not None else next(files)


def open_modalities(path: str, obs: Sequence[str] | None, options: OpenOptions) -> tuple[Elements, dict[str, Elements]]:
    """Open a stored MuData: its own obs and obsm, and its modalities with rows as stored."""
    where = where_of(path, options)
    with opened(where, options) as store:
        parts, keys = store.modalities(), store.keys()
        if not parts or "obs" not in keys:
            raise StorageError(
                f"{where} is not a MuData: it contains {', '.join(keys) or 'nothing'}. Give an .h5mu file or a Zarr "
                "store that mudata wrote"
            )
        own, columns = split_columns(
            obs, store.columns("obs"), {name: part.columns("obs") for name, part in parts.items()}
        )
        shared = Elements(obs=_obs(store, where, own, options), obsm=_entries(store, keys, "obsm", options))
        return shared, {name: _read(part, where, columns[name], options) for name, part in parts.items()}


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

    for_cells = Elements(
        obs=_obs(store, where, obs, options),
        var=genes("var"),
        X=lazily(store.matrix("X"), "X", options) if "X" in keys else None,
        layers=_entries(store, keys, "layers", options),
        obsm=_entries(store, keys, "obsm", options),
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
        obsp=_entries(store, keys, "obsp", options),
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
    if not options.has_names:
        table.index = pd.RangeIndex(len(table))
    elif isinstance(table.index, pd.RangeIndex):
        table.index = table.index.astype(str)
    return table


def _entries(store: Store, keys: Collection[str], group: str, options: OpenOptions) -> dict[str, Any]:
    """Return the entries of layers, obsm or obsp, with matrices lazy."""
    return {
        key.removeprefix(f"{group}/"): lazily(store.matrix(key), key, options)
        for key in keys
        if key.startswith(f"{group}/")
    }
