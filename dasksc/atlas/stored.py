"""Elements of an atlas at a path, which a reader's store holds, or of an AnnData: in memory, backed, or lazy."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import dask.array as da
import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray

from dasksc.atlas.elements import Elements, known_columns, matrix_behind, require_key
from dasksc.errors import CorruptDataError, DaskscError, InputError, StorageError
from dasksc.plan.arrays import index_array
from dasksc.pushdown import MatrixRows, gather_block, require_unchanged, to_dask
from dasksc.readers.arrays import Lazy, lazily
from dasksc.readers.interface import Store
from dasksc.readers.names import names_in_pieces
from dasksc.readers.options import ACCEPTED, OpenOptions, naming_errors, refuse_feature_choice, where_of
from dasksc.readers.registry import Hdf5Reader, opened, reader_of
from dasksc.readers.survey import SurveyStore
from dasksc.storage import Matrix, RemoteLocation, caused_by_data, is_url, redact_url
from dasksc.storage.hdf5.reader import BlockReader
from dasksc.storage.remote.remote_file import RemoteFile, files_ahead

Extent = Literal["all", "batches", "joined"]
"""Elements to open: all, those that batches may need (obs, var, X, layers, obsm), or those of joined atlases."""


def open_one(
    data: Any,
    obs: Sequence[str] | None,
    options: OpenOptions,
    extent: Extent = "all",
    file: RemoteFile | None = None,
) -> Elements:
    """Open elements of one atlas: an AnnData, or a path or URL; `file` is the object at the URL, if it is known."""
    if isinstance(data, AnnData):
        return _of_anndata(data, obs, options)
    if isinstance(getattr(data, "mod", None), Mapping):  # MuData, or Modalities, whose import would be circular
        names = list(data.mod)
        raise InputError(
            f"a {type(data).__name__} holds several modalities ({', '.join(names)}), where one atlas is expected. Give "
            f"one of them: {f'data[{names[0]!r}]' if names else 'an AnnData'}"
        )
    if not isinstance(data, str | os.PathLike):
        raise InputError(
            f"cannot open an object of type {type(data).__module__}.{type(data).__qualname__}; expected {ACCEPTED}"
        )
    path = os.fspath(data)
    where = where_of(path, options)
    if extent == "joined":
        source = where if isinstance(where, str) else file
        chooses = options.reader_options or options.feature_types or options.genomes
        if not chooses and source is not None and isinstance(reader_of(where), Hdf5Reader):
            found = _surveyed(source, obs, options)
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
    source: str | RemoteFile, obs: Sequence[str] | None, options: OpenOptions, reader: BlockReader | None = None
) -> Elements | None:
    """Open the usual elements of an HDF5 file; None if it must be opened otherwise, which also reports errors."""
    try:
        where = source if isinstance(source, str) else source.location
        return _read(SurveyStore(source, options, reader), where, obs, options, "joined")
    except Exception as error:
        if not caused_by_data(error):
            raise
        return None


def _blocks_ahead(file: RemoteFile, obs: Sequence[str] | None, options: OpenOptions) -> BlockReader:
    """Read the blocks of an object that opening it needs, on any thread; they are kept along with the result."""
    reader = BlockReader(file, waits=False)
    with suppress(DaskscError):  # opening the object reports it
        _surveyed(file, obs, options, reader)
        while reader.read_missing():
            _surveyed(file, obs, options, reader)
    return reader


def remote_files(data: Sequence[Any], obs: Sequence[str] | None, options: OpenOptions) -> Iterator[RemoteFile | None]:
    """Yield the objects of atlases at URLs, requested ahead; None for other atlases."""
    places = [RemoteLocation.of(one, options.storage_options) if isinstance(one, str) and is_url(one) else None
              for one in data]  # fmt: skip
    remote = [one for one in places if one is not None and one.local is None]
    read = partial(_blocks_ahead, obs=obs, options=options)
    files = files_ahead(remote, cache=options.cache_of(remote[0]), read=read) if remote else iter(())
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


def _require_unchanged(of: AnnData | Elements) -> None:
    """Raise `CorruptDataError` if X has changed since it was opened; `predict` may replace entries of obsm."""
    if isinstance(of.X, da.Array | Lazy):
        require_unchanged(matrix_behind(of.X))


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

    # Matrices come first: X shows if a store was replaced before all tables were read. An HDF5 file is opened once.
    for_cells = Elements(
        X=lazily(store.matrix("X"), "X", options) if "X" in keys else None,
        layers=_entries(store, keys, "layers", options),
        obsm=_entries(store, keys, "obsm", options),
        obs=_obs(store, where, obs, options),
        var=genes("var"),
    )
    if isinstance(where, str) and os.path.isdir(where):
        _require_unchanged(for_cells)
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


def _of_anndata(adata: AnnData, obs: Sequence[str] | None, options: OpenOptions) -> Elements:
    """Return the elements of an AnnData, with its matrices lazy."""
    refuse_feature_choice(options, "an AnnData")
    if options.reader_options:
        raise InputError("reader_options= are for paths; give them when the path is opened")
    if not options.mmap and not adata.isbacked and isinstance(adata.X, da.Array):
        raise InputError(
            "mmap=False has no effect on an AnnData that is already open; give it when the file is opened: "
            "dasksc.open(path, mmap=False)"
        )
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
    if not adata.file.is_open:
        adata.file.open()
    if "X" not in adata.file:
        return None
    # A modality of a MuData is a group of the file.
    stored: Lazy = lazily(adata.file["X"], "X", options)
    if not adata.is_view:
        return stored
    # Select by the indices that AnnData keeps for a view, in private attributes, since names may repeat.
    array = to_dask(stored.matrix)
    n_obs, n_vars = array.shape
    selected: da.Array = array[np.arange(n_obs)[adata._oidx], :][:, np.arange(n_vars)[adata._vidx]]
    return selected


# Attributes of an AnnData that do not depend on the names of its cells.
_WITHOUT_NAMES = {"isbacked", "layers", "n_obs", "n_vars", "raw", "shape", "uns", "var", "var_names", "varm", "varp"}


class AnnDataView:
    """View of an AnnData of Dask arrays, passed to the `fetch_callback` of an `scDataset`.

    ``view[rows]`` reads X, layers and obsm with one fetch per matrix. All other attributes are those of the AnnData.

    Parameters
    ----------
    adata
        Result of `open`.
    opening
        Function with the interface of `open`, except for its first argument, that opens the same AnnData when cell
        names or missing columns of obs are used; None if `adata` has all of them.
    path
        Path of the file or store of `adata`; None if there are several, or none.
    names
        Names of cells, if they are in memory although `adata` lacks them.

    Examples
    --------
    >>> def totals(view, rows):
    ...     return view[rows].X.sum(axis=1).A1
    >>> dataset = dasksc.scDataset("atlas.h5ad", "stream", batch_size=4, fetch_callback=totals)
    >>> next(iter(dataset))
    array([23., 70., 23., 42.], dtype=float32)
    """

    __slots__ = ("_has_names", "_matrices", "_names", "_opened", "_opening", "path")

    def __init__(
        self,
        adata: AnnData | Elements,
        opening: Callable[..., AnnData] | None = None,
        path: str | None = None,
        names: pd.Index[Any] | None = None,
    ) -> None:
        self.path = path
        self._names = names
        self._opened: AnnData | Elements = adata
        self._opening = opening
        self._has_names = opening is None
        self._matrices: dict[str, Matrix] = {}

    @property
    def adata(self) -> AnnData:
        """AnnData behind this view."""
        if self._opening is not None and not self._has_names:
            self._opened, self._has_names = self._open_again(list(self.table)), True
        return self._unnamed

    @property
    def table(self) -> pd.DataFrame:
        """Columns of obs that were read; the index has the names of the cells, if they were read."""
        return self._opened.obs

    @property
    def X(self) -> Any:
        """X as an array whose rows are read on indexing."""
        array = self._opened.X
        return MatrixRows(matrix=self._matrix("X", array)) if isinstance(array, da.Array | Lazy) else array

    def column(self, name: str) -> pd.Series[Any]:
        """Return a column of obs, which is read on first use."""
        if self._opening is not None and name not in self.table:
            return self._open_again([name], names=False).obs[name]
        return self.table[require_key("obs", name, self.table, of=self._opened)]

    def name_pieces(self) -> Iterator[list[str]] | None:
        """Return an iterator over pieces of the names of cells, or None if the cells have no names.

        For a single file or store, names are read piece by piece, so they are never all in memory at once.
        """
        if self.path is not None:
            return self._path_names(self.path)
        names = self.adata.obs_names if self._names is None else self._names
        return None if isinstance(names, pd.RangeIndex) else names_in_pieces(names)

    def _path_names(self, path: str) -> Iterator[list[str]]:
        yield from path_names(path)
        _require_unchanged(self._opened)

    def __len__(self) -> int:
        return int(self._opened.n_obs)

    def __getattr__(self, name: str) -> Any:
        # Pickle looks up special methods before the slots are set.
        if name.startswith("__") or name in self.__slots__:
            raise AttributeError(name)
        if name in ("n_obs", "n_vars", "var"):
            return getattr(self._opened, name)
        return getattr(self._unnamed if name in _WITHOUT_NAMES else self.adata, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._opened, self._opening, self.path, self._names)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self._unnamed!r}"

    @property
    def _unnamed(self) -> AnnData:
        """AnnData whose cells may lack names."""
        if isinstance(self._opened, Elements):
            if self._opening is None or self.path is None:
                self._opened = self._opened.to_anndata()
            else:  # the elements of a single path are only those that batches need
                self._opened = self._open_again(list(self._opened.obs), names=False)
        return self._opened

    def _open_again(self, obs: list[str], *, names: bool = True) -> AnnData:
        assert self._opening is not None
        adata = self._opening(obs=obs, names=names)
        if adata.n_obs != len(self):
            raise CorruptDataError(
                f"the files have {adata.n_obs} cells now, but {len(self)} when they were opened: some were added, "
                "removed or replaced. Open them again"
            )
        _require_unchanged(self._opened)
        return adata

    def _matrix(self, name: str, array: Any) -> Matrix:
        if name not in self._matrices:
            self._matrices[name] = matrix_behind(array)
        return self._matrices[name]

    def __getitem__(self, index: Any) -> AnnData:
        """Read rows into memory."""
        if isinstance(index, tuple):
            rows, columns = index
            return self[rows][:, columns].copy()
        adata = self.adata
        rows = _row_numbers(index, len(self))
        unique, positions = np.unique(rows, return_inverse=True)

        def read(name: str, array: Any) -> Any:
            if isinstance(array, da.Array) and array.ndim == 2:
                return gather_block(self._matrix(name, array).fetch(unique), positions)
            if isinstance(array, pd.DataFrame):
                return array.iloc[rows].set_axis(numbers)
            return array[rows].compute() if isinstance(array, da.Array) else array[rows]

        # AnnData warns about repeated names on construction; here they only mean that rows were drawn repeatedly.
        numbers = pd.RangeIndex(len(rows)).astype(str)
        obs = adata.obs.iloc[rows]
        result = AnnData(
            X=None if adata.X is None else read("X", adata.X),
            obs=obs.set_axis(numbers),
            # Hooks may change what is not of the rows, as `scanpy.pp.log1p` does.
            var=adata.var.copy(),
            uns=copy.deepcopy(dict(adata.uns)),
            layers={name: read(f"layers/{name}", array) for name, array in layers_of(adata).items()},
            obsm={name: read(f"obsm/{name}", array) for name, array in adata.obsm.items()},
            varm={name: element.copy() for name, element in adata.varm.items()},
        )
        result.obs_names = obs.index
        return result


def _row_numbers(index: Any, n_obs: int) -> NDArray[np.int64]:
    """Convert row numbers, a boolean mask or a slice to row numbers of at least 0."""
    if isinstance(index, slice):
        return np.arange(*index.indices(n_obs), dtype=np.int64)
    rows = index_array(np.atleast_1d(index), name="rows")
    if rows.dtype == bool:
        if len(rows) != n_obs:
            raise IndexError(f"a boolean mask has {len(rows)} entries for {n_obs} rows; give one entry per row")
        return np.flatnonzero(rows)
    rows = rows.astype(np.int64)
    if len(rows) and (rows.min() < -n_obs or rows.max() >= n_obs):
        raise IndexError(f"rows from {rows.min()} to {rows.max()} were requested; the rows are 0 to {n_obs - 1}")
    return np.where(rows < 0, rows + n_obs, rows)
