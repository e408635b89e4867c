"""Writing of an atlas chunk by chunk, in the layout that AnnData writes."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
import zarr
from anndata.io import write_elem
from numpy.typing import NDArray

from dasksc.checks import check_flags
from dasksc.datasets.design import names
from dasksc.errors import InputError

__all__ = ["Chunk", "partial_path", "write_atlas"]

_NAMES_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """CSR rows of a run of cells, and the number of molecules in each cell.

    Attributes
    ----------
    rows
        Range of the cells.
    indices, data
        Genes and counts, shape (nnz,), int32 and float32.
    total
        Molecules of each cell, shape (n_rows,), float32.
    """

    rows: slice
    indices: NDArray[np.int32]
    data: NDArray[np.float32]
    total: NDArray[np.float32]


@contextlib.contextmanager
def partial_path(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary path next to `path`, which is renamed to `path` when the block succeeds.

    Raises
    ------
    InputError
        If `path` exists and `overwrite` is False.
    """
    check_flags(overwrite=overwrite)
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists. Give another path, or overwrite=True (--overwrite).")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    _remove(partial)
    try:
        yield partial
        if overwrite:
            _remove(path)
        os.replace(partial, path)
    finally:
        _remove(partial)


def write_atlas(
    path: Path,
    make: Callable[[int], Chunk],
    starts: Iterable[int],
    *,
    is_zarr: bool,
    depths: NDArray[np.int32],
    n_vars: int,
    labels: Mapping[str, Any],
    dense: bool,
    filters: dict[str, Any],
    progress: bool,
) -> None:
    """Write the chunks that `make` returns for `starts`, and the tables, to `path`.

    Memory holds a few chunks and the obs columns.

    Parameters
    ----------
    path
        Path of the file or store, which must not exist.
    make
        Function that makes the chunk that begins at a given row; it runs on threads.
    starts
        First row of each chunk.
    is_zarr
        Write a Zarr v3 store rather than an HDF5 file.
    depths
        Number of stored elements of each row, shape (n_obs,).
    n_vars
        Number of genes.
    labels
        Columns of obs; ``n_counts`` is added.
    dense
        Write X as a dense array rather than CSR.
    filters
        Options of HDF5 datasets.
    progress
        Show a progress bar.
    """
    n_obs = len(depths)
    indptr = np.zeros(n_obs + 1, dtype=np.int64)
    np.cumsum(depths, out=indptr[1:])
    if indptr[-1] <= np.iinfo(np.int32).max:
        indptr = indptr.astype(np.int32)
    root = zarr.open_group(path, mode="w", zarr_format=3) if is_zarr else h5py.File(path, "w")
    try:
        _mark(root, "anndata", "0.1.0")
        total = np.empty(n_obs, dtype=np.float32)
        matrix = _Matrix(root, (n_obs, n_vars), indptr, dense=dense, filters=filters)
        with _progress(n_obs, path, show=progress) as advance:
            for chunk in _ahead(make, starts):
                matrix.append(chunk, depths[chunk.rows])
                total[chunk.rows] = chunk.total
                advance(len(chunk.total))
        matrix.close()
        genes = pd.DataFrame(index=pd.Index(names("gene", n_vars), dtype=object))
        with anndata.settings.override(auto_shard_zarr_v3=bool(anndata.settings.auto_shard_zarr_v3)):
            _write_obs(root, {**labels, "n_counts": total}, filters=filters)
            write_elem(root, "var", genes, dataset_kwargs=filters)
            for empty in ("layers", "obsm", "varm", "obsp", "varp", "uns"):
                write_elem(root, empty, {})
    finally:
        if isinstance(root, h5py.File):
            root.close()
    if is_zarr:
        # AnnData also consolidates metadata, although the Zarr v3 specification does not define how.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*[Cc]onsolidated metadata", UserWarning)
            zarr.consolidate_metadata(root.store)


def _ahead(make: Callable[[int], Chunk], starts: Iterable[int]) -> Iterator[Chunk]:
    """Yield ``map(make, starts)`` in order, computed a few chunks ahead on all cores."""
    n_threads = os.cpu_count() or 1
    waiting: deque[Future[Chunk]] = deque()
    with ThreadPoolExecutor(n_threads) as pool:
        for start in starts:
            waiting.append(pool.submit(make, start))
            if len(waiting) > n_threads + 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Matrix:
    """Stored X that grows by chunks: CSR or dense."""

    def __init__(
        self, root: Any, shape: tuple[int, int], indptr: NDArray[Any], *, dense: bool, filters: dict[str, Any]
    ) -> None:
        self.n_vars = shape[1]
        self.parts: list[_Appender] = []
        self.is_dense = dense
        if dense:
            x = _create(root, "X", shape, np.float32, **filters)
            _mark(x, "array", "0.2.0")
            self.parts = [_Appender(x)]
            return
        x = root.create_group("X")
        x.attrs["shape"] = shape
        _mark(x, "csr_matrix", "0.1.0")
        nnz = (int(indptr[-1]),)
        if isinstance(root, h5py.File):
            filters = {
                **filters,
                "maxshape": (None,),
            }  # resizable and therefore chunked, as AnnData writes sparse arrays
        data = _Appender(_create(x, "data", nnz, np.float32, **filters))
        self.parts = [data, _Appender(_create(x, "indices", nnz, np.int32, **filters))]
        _create(x, "indptr", indptr.shape, indptr.dtype, **filters)[...] = indptr

    def append(self, chunk: Chunk, depths: NDArray[np.int32]) -> None:
        if self.is_dense:
            rows = np.zeros((len(depths), self.n_vars), dtype=np.float32)
            rows[np.repeat(np.arange(len(depths)), depths), chunk.indices] = chunk.data
            self.parts[0].append(rows)
        else:
            self.parts[0].append(chunk.data)
            self.parts[1].append(chunk.indices)

    def close(self) -> None:
        for part in self.parts:
            part.flush()


class _Appender:
    """Sequential writer of an array, in whole chunks or shards, so that no chunk or shard is written twice."""

    def __init__(self, array: Any) -> None:
        self.array = array
        unit = getattr(array, "shards", None) or array.chunks
        self.unit = 1 if unit is None else unit[0]
        self.written = 0
        self.waiting: list[NDArray[Any]] = []

    def append(self, rows: NDArray[Any]) -> None:
        self.waiting.append(rows)
        n_waiting = sum(map(len, self.waiting))
        if n_waiting >= self.unit:
            self._write(n_waiting - n_waiting % self.unit)

    def flush(self) -> None:
        self._write(sum(map(len, self.waiting)))

    def _write(self, n: int) -> None:
        if n == 0:
            return
        block = self.waiting[0] if len(self.waiting) == 1 else np.concatenate(self.waiting)
        self.array[self.written : self.written + n] = block[:n]
        self.written += n
        self.waiting = [block[n:]] if n < len(block) else []


def _create(group: Any, name: str, shape: tuple[int, ...], dtype: Any, **options: Any) -> Any:
    """Create an array with AnnData's layout."""
    if isinstance(group, h5py.Group):
        return group.create_dataset(name, shape=shape, dtype=dtype, **options)
    if not anndata.settings.auto_shard_zarr_v3:
        return group.create_array(name, shape=shape, dtype=dtype)
    with zarr.config.set({"array.target_shard_size_bytes": 1_000_000_000}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Automatic shard shape inference", UserWarning)
        return group.create_array(name, shape=shape, dtype=dtype, shards="auto")


def _mark(element: Any, encoding: str, version: str) -> None:
    element.attrs["encoding-type"] = encoding
    element.attrs["encoding-version"] = version


def _write_obs(root: Any, columns: Mapping[str, Any], *, filters: dict[str, Any]) -> None:
    """Write the obs table; names of cells are written in parts, since one array of all names would be large."""
    obs = root.create_group("obs")
    _mark(obs, "dataframe", "0.2.0")
    obs.attrs["_index"] = "_index"
    obs.attrs["column-order"] = list(columns)
    for name, column in columns.items():
        write_elem(obs, name, column, dataset_kwargs=filters)
    n_obs = len(columns["n_counts"])
    if isinstance(obs, h5py.Group):
        index: Any = obs.create_dataset("_index", shape=(n_obs,), dtype=h5py.string_dtype(), **filters)
    else:
        index = obs.create_array("_index", shape=(n_obs,), dtype="str", chunks=(min(n_obs, _NAMES_AT_ONCE),))
    _mark(index, "string-array", "0.2.0")
    for start in range(0, n_obs, _NAMES_AT_ONCE):
        stop = min(start + _NAMES_AT_ONCE, n_obs)
        index[start:stop] = np.array(names("cell", n_obs, start, stop), dtype=object)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _progress(n_obs: int, path: Path, *, show: bool) -> Iterator[Callable[[int], Any]]:
    """Show a progress bar; yield a callback that takes a number of written cells."""
    if not show:
        yield lambda n: None
        return
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise InputError("progress=True needs tqdm: pip install tqdm") from error
    desc = f"writing {path.name.removesuffix('.partial')}"
    with tqdm(total=n_obs, desc=desc, unit=" cells", unit_scale=True) as bar:
        yield bar.update
