"""Elements of an atlas at a path, which a reader's store holds, or of an AnnData: in memory, backed, or lazy."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import dask.array as da
import numpy as np
import pandas as pd
from anndata import AnnData

from dasksc._compat.anndata import selected_rows_and_columns
from dasksc.atlas.assemble import Elements, known_columns
from dasksc.errors import InputError, StorageError
from dasksc.pushdown import to_dask
from dasksc.readers.arrays import Lazy, lazily
from dasksc.readers.interface import Store
from dasksc.readers.options import OpenOptions, naming_errors, where_of
from dasksc.readers.registry import Hdf5Reader, opened, reader_of
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
    return _indexed(table, options)


def _indexed(table: pd.DataFrame, options: OpenOptions) -> pd.DataFrame:
    """Return a table of cells whose index has their names, if they are wanted, and no names otherwise."""
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


def open_anndata(adata: AnnData, obs: Sequence[str] | None, options: OpenOptions) -> Elements:
    """Return the elements of an AnnData, with its matrices lazy."""
    table = _indexed(_in_memory(adata.obs), options)
    if obs is not None:
        table = table[known_columns(obs, table.columns, "the given AnnData", may_lack=options.may_lack)]
    x, raw = adata.X if not adata.isbacked else None, None
    if adata.isbacked:
        path = os.path.abspath(adata.filename)
        with naming_errors(path):
            x = _backed_x(adata, options)
            # The raw of a backed view is skipped, since AnnData creates it without X.
            if adata.raw is not None and not adata.is_view:
                key = "raw/X" if "raw/X" in adata.file else "raw.X"
                x_of_raw = lazily(adata.file[key], key, options)
                raw = {"X": x_of_raw, "var": adata.raw.var, "varm": dict(adata.raw.varm)}
    elif adata.raw is not None:
        raw = {"X": lazily(adata.raw.X, "raw/X", options), "var": adata.raw.var, "varm": dict(adata.raw.varm)}
    return Elements(
        X=lazily(x, "X", options),
        obs=table,
        var=_in_memory(adata.var),
        uns=dict(adata.uns),
        layers={name: lazily(array, f"layers/{name}", options) for name, array in layers_of(adata).items()},
        obsm={name: lazily(array, f"obsm/{name}", options) for name, array in adata.obsm.items()},
        varm=dict(adata.varm),
        obsp=dict(adata.obsp),
        varp=dict(adata.varp),
        raw=raw,
    )


def layers_of(adata: AnnData) -> dict[str, Any]:
    """Return the layers by name."""
    # From AnnData 0.13 on, layers[None] is X, which a backed file may lack.
    return {name: adata.layers[name] for name in adata.layers if name is not None}


def _in_memory(table: Any) -> pd.DataFrame:
    """Return a table as a new DataFrame that shares its columns; a lazy table is read."""
    return pd.DataFrame(table if isinstance(table, pd.DataFrame) else table.to_memory(), copy=False)


def _backed_x(adata: AnnData, options: OpenOptions) -> da.Array | Lazy | None:
    """Return the lazy X of a backed AnnData; for a view, only its rows and columns."""
    if "X" not in adata.file:
        return None
    # A modality of a MuData is a group of the file.
    stored: Lazy = lazily(adata.file["X"], "X", options)
    if not adata.is_view:
        return stored
    # Select by the indices that AnnData keeps for a view, since names may repeat.
    array = to_dask(stored.matrix)
    n_obs, n_vars = array.shape
    rows, columns = selected_rows_and_columns(adata)
    selected: da.Array = array[np.arange(n_obs)[rows], :][:, np.arange(n_vars)[columns]]
    return selected
