"""Dask arrays that wrap a matrix, the leaves of every graph over stored cells: their rows and reductions.

Dask's reductions call ``chunk.sum(axis=..., keepdims=True)``, which SciPy's matrices do not support. Neither library
lets others register an implementation. On dense chunks, Dask accumulates sums of float32 in float32, and its variances
need several times the memory of a chunk. The arrays that `to_dask` and `dasksc.normalize` return therefore have methods
of their own. Slices of these arrays, and what is computed from them, are plain Dask arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Any

import dask.array as da
import numpy as np
import scipy.sparse as sp
from dask.array import chunk
from dask.base import normalize_token, tokenize
from numpy.typing import NDArray

from dasksc import config
from dasksc._compat import write_as_dask_array
from dasksc.storage import Columns, Matrix, RowBuffer, hashing
from dasksc.storage.arrays import memory_dtype

# `da.from_array` puts this before the name of an array to form the key of its source.
_SOURCE = "original-"


def to_dask(matrix: Matrix, *, chunk_rows: int | None = None, token: str | None = None) -> da.Array:
    """Wrap a matrix as a Dask array without reading any values."""
    n_obs, n_vars = matrix.shape
    if chunk_rows is None:
        chunk_rows = chunk_rows_for(matrix)
    row_chunks = tuple(min(chunk_rows, n_obs - start) for start in range(0, n_obs, chunk_rows)) or (0,)
    rows = MatrixRows(matrix=matrix)
    token = tokenize(rows if token is None else token, row_chunks)
    array = da.from_array(
        rows,
        chunks=(row_chunks, (n_vars,)),
        name=f"dasksc-{_short(matrix.label)}-{token}",
        # Dask fuses slices into the read only for a few getter functions. `chunk.getitem` is one of them, and it does
        # not convert sparse blocks to ndarray.
        getitem=chunk.getitem,
        asarray=False,
        meta=(sp.csr_matrix if matrix.layout == "csr" else np.empty)((0, 0), dtype=matrix.dtype),
    )
    return CellsArray.of(array)


class MatrixRows:
    """Matrix with the indexing of an array, for the graphs of `to_dask` and for hooks."""

    ndim = 2

    def __init__(self, matrix: Matrix) -> None:
        self.matrix, self.shape, self.dtype = matrix, matrix.shape, matrix.dtype

    def __len__(self) -> int:
        return self.matrix.shape[0]

    def __getitem__(self, index: Any) -> Any:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        n_obs, n_vars = self.matrix.shape
        if isinstance(rows, Integral) or isinstance(columns, Integral):
            # NumPy and SciPy represent a single row or column differently, so the block itself is indexed.
            single = [isinstance(one, Integral) for one in (rows, columns)]
            ranges = [slice(i, i + 1 or None) if one else i for i, one in zip((rows, columns), single, strict=True)]
            return self[tuple(ranges)][tuple(0 if one else slice(None) for one in single)]
        wanted = np.arange(n_obs, dtype=np.int64)[rows]
        kept = np.arange(n_vars, dtype=np.int64)[columns]
        order, positions = np.unique(wanted, return_inverse=True)
        fetched = self.matrix.fetch(order)
        is_all = len(kept) == n_vars and isinstance(columns, slice) and columns.step in (None, 1)
        return gather_block(fetched, positions, None if is_all else kept)

    def __dask_tokenize__(self) -> object:
        with hashing():
            return ("dasksc.rows", normalize_token(self.matrix))


def leaf_matrix(array: da.Array) -> Matrix | None:
    """Return the matrix that an array wraps if the array is a direct result of `to_dask`, otherwise None."""
    key = _SOURCE + array.name
    layer = array.dask.layers.get(key)
    if layer is None or array.name not in array.dask.layers:
        return None
    node = layer[key]
    rows = getattr(node, "value", node)
    return rows.matrix if isinstance(rows, MatrixRows) and rows.shape == array.shape else None


def leaves_of(array: da.Array) -> list[Matrix]:
    """Return all matrices wrapped by `to_dask` that an array is computed from."""
    return [
        leaf.matrix
        for key, layer in array.dask.layers.items()
        if key.startswith(_SOURCE)
        for node in layer.values()
        if isinstance(leaf := getattr(node, "value", node), MatrixRows)
    ]


def gather_block(
    fetched: RowBuffer, positions: NDArray[np.int64], wanted: NDArray[np.int64] | None = None
) -> NDArray[Any] | sp.csr_matrix:
    """Copy rows of a fetch, with all or the `wanted` columns, into a new block, in the data type of computations."""
    if wanted is not None and len(np.unique(wanted)) < len(wanted):
        return gather_block(fetched, positions)[:, wanted]
    n_vars = fetched.shape[1]
    columns = None if wanted is None else Columns(positions=wanted, n_vars=n_vars)
    shape = (len(positions), n_vars if wanted is None else len(wanted))
    if fetched.layout == "dense":
        out = np.empty(shape, dtype=fetched.dtype)
        fetched.gather(positions, out=out, columns=columns)
        return out
    indptr, indices, data = fetched.gather_csr(positions, columns=columns)
    # SciPy widens both index arrays to the wider of the two; most blocks fit the narrow type.
    if indptr[-1] <= np.iinfo(np.int32).max:
        indptr = indptr.astype(np.int32)
    block = sp.csr_matrix((data, indices, indptr), shape=shape, copy=False)
    # Gathered rows are canonical. Checking that again would take a pass over the column indices.
    block.has_canonical_format = True
    return block


def chunk_rows_for(*matrices: Matrix) -> int:
    """Return the rows per chunk for which a chunk of the widest matrix takes about ``dasksc.chunk-bytes``."""

    def row_bytes(matrix: Matrix) -> float:  # values may be wider in memory than in the file
        columns = 4 if matrix.layout == "csr" else 0
        stored = memory_dtype(matrix.stored_dtype).itemsize
        return matrix.cost.row * (matrix.dtype.itemsize + columns) / (stored + columns)

    return max(1, int(config.get_bytes("chunk-bytes") / max(map(row_bytes, matrices))))


def _short(label: str) -> str:
    """Return the readable part of a key: ``atlas.h5ad:layers.counts`` for ``/data/atlas.h5ad:/layers/counts``."""
    path, _, key = label.rpartition(":")
    name = path.rstrip("/").rpartition("/")[2]
    return ":".join(filter(None, [name, key.strip("/").replace("/", ".").replace(" ", "_")]))


Axis = int | tuple[int, ...] | None
Reduction = Callable[..., NDArray[Any]]

# Partial moments of a chunk: number of values, mean, and sum of squared deviations from the mean.
MOMENTS = np.dtype([("n", "i8"), ("mean", "f8"), ("squares", "f8")])

# Number of values, or of stored values, that are converted to wide types at a time.
_PIECE_VALUES = 2**18


class _AnyDaskArray(type):
    # Functions of Dask refuse types that are no parents of the type of an argument, such as AnnData's views.
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, da.Array)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, da.Array)


class CellsArray(da.Array, metaclass=_AnyDaskArray):
    """Dask array with reductions for dense and sparse chunks, of which all Dask arrays count as instances."""

    __slots__ = ()

    @classmethod
    def of(cls, array: da.Array) -> CellsArray:
        return cls(array.dask, array.name, array.chunks, meta=array._meta)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in (np.sum, np.mean, np.var, np.std, np.max, np.min) and args and args[0] is self:
            return getattr(self, func.__name__)(*args[1:], **kwargs)
        return super().__array_function__(func, types, args, kwargs)

    def sum(self, axis: Axis = None, dtype: Any = None, keepdims: bool = False, split_every: Any = None) -> da.Array:
        result = np.dtype(np.empty(0, self.dtype).sum().dtype if dtype is None else dtype)
        wide = np.result_type(result, np.float64) if result.kind == "f" else result
        total = _reduce(self, partial(chunk_sum, dtype=wide), np.sum, axis, split_every, wide)
        return _shaped(total.astype(result), axis, keepdims=keepdims)

    def mean(self, axis: Axis = None, dtype: Any = None, keepdims: bool = False, split_every: Any = None) -> da.Array:
        result = np.dtype(np.ones(1, self.dtype).mean().dtype if dtype is None else dtype)
        wide = np.result_type(result, np.float64)
        total = _reduce(self, partial(chunk_sum, dtype=wide), np.sum, axis, split_every, wide)
        n = math.prod(self.shape[number] for number in ((0, 1) if axis is None else np.atleast_1d(axis)))
        # Of no values, the mean is NaN.
        return _shaped((total / n if n else total * np.nan).astype(result), axis, keepdims=keepdims)

    def var(
        self,
        axis: Axis = None,
        dtype: Any = None,
        keepdims: bool = False,
        ddof: int = 0,
        split_every: Any = None,
    ) -> da.Array:
        result = np.dtype(np.ones(1, self.dtype).mean().dtype if dtype is None else dtype)
        moments = _reduce(self, chunk_moments, combine_moments, axis, split_every, MOMENTS)
        finished = moments.map_blocks(partial(variance_of, ddof=ddof), dtype=np.float64, meta=np.empty((0, 0)))
        return _shaped(finished.astype(result), axis, keepdims=keepdims)

    def std(self, *args: Any, **kwargs: Any) -> da.Array:
        return da.sqrt(self.var(*args, **kwargs))

    def max(self, axis: Axis = None, keepdims: bool = False, split_every: Any = None) -> da.Array:
        largest = _reduce(self, chunk_extreme, np.max, axis, split_every, self.dtype)
        return _shaped(largest, axis, keepdims=keepdims)

    def min(self, axis: Axis = None, keepdims: bool = False, split_every: Any = None) -> da.Array:
        smallest = _reduce(self, partial(chunk_extreme, name="min"), np.min, axis, split_every, self.dtype)
        return _shaped(smallest, axis, keepdims=keepdims)


write_as_dask_array(CellsArray)


def _reduce(array: da.Array, chunk: Reduction, aggregate: Reduction, axis: Axis, split_every: Any, dtype: Any) -> Any:
    # Without keepdims=True, Dask before 2026 sums an empty array of type `dtype`, which fails for a structured type.
    meta = np.empty((0, 0), dtype)
    return da.reduction(
        array, chunk, aggregate, axis=axis, keepdims=True, split_every=split_every, dtype=dtype, meta=meta
    )


def _shaped(reduced: da.Array, axis: Axis, *, keepdims: bool) -> Any:
    """Remove the reduced axes, unless `keepdims` is True."""
    return reduced if keepdims else da.squeeze(reduced, axis=(0, 1) if axis is None else axis)


def chunk_sum(block: Any, axis: tuple[int, ...], keepdims: bool, *, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Sum the values of a chunk, converted to `dtype`."""
    return _in_pieces(block, axis, partial(_sum_of_piece, dtype=dtype), np.sum)


def chunk_moments(block: Any, axis: tuple[int, ...], keepdims: bool) -> NDArray[np.void]:
    """Return the `MOMENTS` of a chunk."""
    return _in_pieces(block, axis, _moments_of_piece, combine_moments)


def chunk_extreme(block: Any, axis: tuple[int, ...], keepdims: bool, *, name: str = "max") -> NDArray[Any]:
    """Return the largest or smallest values of a chunk; NaN where there is one."""
    if not sp.issparse(block):
        return np.asarray(getattr(block, name)(axis=axis, keepdims=True))
    found = getattr(sp.csr_array(block), name)(axis=axis[0] if len(axis) == 1 else None)
    return (found.toarray() if sp.issparse(found) else np.asarray(found)).reshape(_reduced_shape(block.shape, axis))


def _in_pieces(block: Any, axis: tuple[int, ...], reduce: Reduction, combine: Reduction) -> NDArray[Any]:
    """Reduce a few rows of a chunk at a time, so that their conversion to wide types takes little memory."""
    n_rows = block.shape[0]
    n_values = block.nnz if sp.issparse(block) else block.size
    step = max(1, n_rows * _PIECE_VALUES // max(1, n_values))
    parts: list[NDArray[Any]] = []
    for start in range(0, max(1, n_rows), step):
        parts.append(reduce(block[start : start + step], axis))
        if 0 in axis and len(parts) > 1:
            parts = [combine(np.concatenate(parts), axis=(0,), keepdims=True)]
    return np.concatenate(parts)


def _sum_of_piece(rows: Any, axis: tuple[int, ...], *, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not sp.issparse(rows):
        return np.asarray(rows.sum(axis=axis, dtype=dtype, keepdims=True))
    # SciPy accumulates in the data type of the values and ignores its dtype argument.
    total = sp.csr_array(rows, dtype=dtype).sum(axis=axis[0] if len(axis) == 1 else None)
    return np.asarray(total, dtype=dtype).reshape(_reduced_shape(rows.shape, axis))


def _moments_of_piece(rows: Any, axis: tuple[int, ...]) -> NDArray[np.void]:
    moments = np.zeros(_reduced_shape(rows.shape, axis), MOMENTS)
    n = math.prod(rows.shape[number] for number in axis)
    if not n:
        return moments
    moments["n"] = n
    if not sp.issparse(rows):
        wide = rows.astype(np.float64)
        moments["mean"] = mean = wide.mean(axis=axis, keepdims=True)
        wide -= mean
        moments["squares"] = np.square(wide, out=wide).sum(axis=axis, keepdims=True)
        return moments
    stored = sp.coo_array(rows)
    # For each stored value, the position of its row or column in the result.
    where = np.zeros_like(stored.row) if len(axis) == 2 else stored.coords[1 - axis[0]]
    n_stored = np.bincount(where, minlength=moments.size)
    means = np.bincount(where, weights=stored.data, minlength=moments.size) / n
    squares = np.bincount(where, weights=(stored.data - means[where]) ** 2, minlength=moments.size)
    squares = squares + (n - n_stored) * means**2
    moments["mean"] = means.reshape(moments.shape)
    moments["squares"] = squares.reshape(moments.shape)
    return moments


def combine_moments(parts: NDArray[np.void], axis: tuple[int, ...], keepdims: bool) -> NDArray[np.void]:
    """Merge the moments of disjoint parts with the algorithm of Chan, Golub and LeVeque (1983)."""
    n = parts["n"].sum(axis=axis, keepdims=True)
    mean = (parts["n"] * parts["mean"]).sum(axis=axis, keepdims=True) / np.maximum(n, 1)
    squares = (parts["squares"] + parts["n"] * (parts["mean"] - mean) ** 2).sum(axis=axis, keepdims=True)
    merged = np.empty(n.shape, MOMENTS)
    merged["n"], merged["mean"], merged["squares"] = n, mean, squares
    return merged if keepdims else merged.squeeze(axis)


def variance_of(moments: NDArray[np.void], *, ddof: int) -> NDArray[np.float64]:
    """Return the variances; NaN where there are at most `ddof` values."""
    free = moments["n"] - ddof
    return np.where(free > 0, moments["squares"] / np.maximum(free, 1), np.nan)


def _reduced_shape(shape: tuple[int, ...], axis: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if number in axis else size for number, size in enumerate(shape))
