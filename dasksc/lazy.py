"""A `Matrix` as a Dask array, and a Dask array as a `Matrix`.

`to_dask` is for laziness, metadata and whole-array work: one task per row chunk, `csr_matrix` or
`ndarray` chunks. Minibatches never index that array; they go the other way, through `matrix_of`,
which finds the `Matrix` behind an array that `to_dask` made and reads it directly. Any other Dask
array becomes a `DaskMatrix`, which computes whole row chunks and so costs more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any

import cloudpickle
import dask.array as da
import numpy as np
import scipy.sparse as sp
from dask.array.chunk import getitem
from dask.base import normalize_token, tokenize
from dask.utils import format_bytes
from numpy.typing import NDArray

from dasksc import config
from dasksc.errors import InputError
from dasksc.storage import Columns, Fetched, Matrix, as_matrix
from dasksc.storage.matrices import check_rows
from dasksc.storage.matrix import Layout

__all__ = ["DaskMatrix", "MatrixRows", "chunk_rows_for", "gather_block", "matrix_of", "row_bytes", "to_dask"]

logger = logging.getLogger(__name__)

# A CSR matrix that does not know how many values it stores is taken to hold this share of them.
ASSUMED_DENSITY = 0.1

MATRIX_KEY_PREFIX = "original-"


def to_dask(matrix: Matrix, *, chunk_rows: int | None = None, token: str | None = None) -> da.Array:
    """Wrap a matrix as a Dask array, reading nothing.

    Parameters
    ----------
    matrix
        What to wrap.
    chunk_rows
        Rows per chunk. Default: as many as fill ``dasksc.chunk-bytes`` of Dask's configuration.
    token
        What tells this array from others in its keys. Default: Dask's token of the matrix, which is the
        identity of the file for stored ones, but for those in memory costs a pass over the values.

    Returns
    -------
    da.Array
        Chunked by rows only; chunks are ``csr_matrix`` where the layout is CSR, else ``ndarray``. A
        chunk is read when it is computed, by one task, and slices are pushed into that read. The
        same stored array opened twice gives the same keys.
    """
    n_obs, n_vars = matrix.shape
    if chunk_rows is None:
        chunk_rows = chunk_rows_for(matrix)
    if chunk_rows < 1:
        raise InputError(f"chunk_rows={chunk_rows} must be at least 1")
    row_chunks = tuple(min(chunk_rows, n_obs - start) for start in range(0, n_obs, chunk_rows)) or (0,)
    rows = MatrixRows(matrix=matrix)
    token = tokenize(rows if token is None else token, row_chunks)
    array: da.Array = da.from_array(
        rows,
        chunks=(row_chunks, (n_vars,)),
        name=f"dasksc-{_short(matrix.label)}-{token}",
        # Of the functions whose slices Dask fuses into the read, the one that leaves sparse blocks be.
        getitem=getitem,
        asarray=False,
        meta=_empty_block(matrix.layout, matrix.dtype),
    )
    return array


def matrix_of(array: da.Array) -> Matrix:
    """Find the matrix from which to fetch rows of a Dask array.

    Parameters
    ----------
    array
        Two-dimensional, with known chunk sizes.

    Returns
    -------
    Matrix
        The very matrix that `to_dask` wrapped, when `array` is what it returned (also after
        pickling). Otherwise a `DaskMatrix`; one log warning says what that costs.

    Raises
    ------
    InputError
        If the array is not two-dimensional, or does not know its shape or chunk sizes.
    """
    if array.ndim != 2:
        raise InputError(
            f"the Dask array {array.name!r} has {array.ndim} dimensions; rows can be fetched from "
            "two-dimensional arrays (cells by columns) only. Reshape it first."
        )
    if any(np.isnan(size) for sizes in array.chunks for size in sizes):
        raise InputError(
            f"the Dask array {array.name!r} does not know its chunk sizes ({array.chunks}), so its rows "
            "cannot be numbered. Call its compute_chunk_sizes() first."
        )
    leaf = _leaf_matrix(array)
    if leaf is not None:
        return leaf
    matrix = DaskMatrix(array)
    _warn_of_cost(matrix)
    return matrix


def gather_block(
    fetched: Fetched, positions: NDArray[np.int64], *, columns: Columns | None = None
) -> NDArray[Any] | sp.csr_matrix:
    """Copy rows of a fetch into a block of their own, in the stored dtype.

    Parameters
    ----------
    fetched
        Where the rows are.
    positions
        Which of them, shape (n_rows,), int64, in the order wanted; repeats allowed.
    columns
        Keep only these columns.

    Returns
    -------
    NDArray or csr_matrix
        n_rows rows, in the layout of `fetched`.
    """
    n_columns = fetched.shape[1] if columns is None else len(columns)
    shape = (len(positions), n_columns)
    if fetched.layout == "dense":
        out = np.empty(shape, dtype=fetched.dtype)
        fetched.gather(positions, out=out, columns=columns)
        return out
    indptr, indices, data = fetched.gather_csr(positions, columns=columns)
    return _csr(data, indices, indptr, shape)


def chunk_rows_for(*matrices: Matrix) -> int:
    """Rows per chunk, so that a chunk of the widest matrix holds about ``dasksc.chunk-bytes``."""
    budget = config.get_bytes("chunk-bytes")
    return max(1, int(budget / max(row_bytes(matrix) for matrix in matrices)))


class DaskMatrix:
    """Rows of any Dask array, by computing every row chunk that they touch.

    Chunks are computed one after another on the calling thread, and only the wanted rows of each are
    kept, so memory holds one row of chunks and the result.

    Parameters
    ----------
    array
        Two-dimensional, with known chunk sizes.
    label
        What to call it in errors. Default: the array's name.
    """

    def __init__(self, array: da.Array, label: str | None = None) -> None:
        self._array = array
        self._label = label or f"Dask array {array.name}"
        self._layout = _layout_of(array)
        self._bounds = np.concatenate([[0], np.cumsum(array.chunks[0])]).astype(np.int64)

    @property
    def array(self) -> da.Array:
        """The Dask array whose rows these are."""
        return self._array

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, columns."""
        n_obs, n_vars = self._array.shape
        return int(n_obs), int(n_vars)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values."""
        dtype: np.dtype[Any] = self._array.dtype
        return dtype

    @property
    def layout(self) -> Layout:
        """``"csr"`` if the array's meta is sparse, else ``"dense"``."""
        return self._layout

    @property
    def label(self) -> str:
        """What to call it in errors."""
        return self._label

    def fetch(self, rows: NDArray[np.int64]) -> Fetched:
        """Compute the row chunks that `rows` touch and keep those rows.

        Parameters
        ----------
        rows
            Ascending row numbers, shape (n_rows,), int64; repeats allowed.

        Returns
        -------
        Fetched
            Position i is ``rows[i]``; held in memory.

        Raises
        ------
        InputError
            If rows do not ascend within [0, n_obs).
        """
        rows = check_rows(self.label, self.shape[0], rows)
        kept = [
            self._block(number, rows[start:stop] - self._bounds[number])
            for number, start, stop in _runs_by_block(rows, self._bounds)
        ]
        return as_matrix(_stack(kept, self.layout, self.shape[1], self.dtype), self.label).fetch(
            np.arange(len(rows), dtype=np.int64)
        )

    def _block(self, number: int, rows: NDArray[np.int64]) -> NDArray[Any] | sp.csr_matrix:
        # Without callbacks of its own, the inner computation would report to those of the outer one.
        block = self._array.blocks[number].compute(scheduler="synchronous", callbacks=())
        return _as_layout(block, self.layout)[rows]

    def __dask_tokenize__(self) -> object:
        return ("dasksc.DaskMatrix", normalize_token(self._array), self._label)

    def __reduce__(self) -> tuple[Any, ...]:
        # Plain pickle, which DataLoader workers get, fails on the lambdas of a map_blocks.
        return _load_dask_matrix, (type(self), cloudpickle.dumps((self._array, self._label)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._array!r})"


def _load_dask_matrix(kind: type[DaskMatrix], state: bytes) -> DaskMatrix:
    array, label = cloudpickle.loads(state)
    return kind(array, label)


@dataclass(frozen=True, slots=True, eq=False)
class MatrixRows:
    """A matrix indexed as an array is: inside the graph of `to_dask`, and as what a hook indexes."""

    matrix: Matrix

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, columns."""
        return self.matrix.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values."""
        return self.matrix.dtype

    @property
    def ndim(self) -> int:
        """Two."""
        return 2

    def __len__(self) -> int:
        return self.matrix.shape[0]

    def __getitem__(self, index: Any) -> Any:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        n_obs, n_vars = self.matrix.shape
        if isinstance(rows, Integral) or isinstance(columns, Integral):
            # NumPy and SciPy differ in what one row or column is; let the block's own type say.
            whole = self[_as_range(rows), _as_range(columns)]
            return whole[
                0 if isinstance(rows, Integral) else slice(None),
                0 if isinstance(columns, Integral) else slice(None),
            ]
        wanted = np.arange(n_obs, dtype=np.int64)[rows]
        kept = np.arange(n_vars, dtype=np.int64)[columns]
        order, positions = np.unique(wanted, return_inverse=True)
        fetched = self.matrix.fetch(order)
        if len(kept) == n_vars and isinstance(columns, slice) and columns.step in (None, 1):
            return gather_block(fetched, positions)
        if len(np.unique(kept)) < len(kept):
            return gather_block(fetched, positions)[:, kept]
        return gather_block(fetched, positions, columns=Columns(positions=kept, n_vars=n_vars))

    def __dask_tokenize__(self) -> object:
        return ("dasksc.rows", normalize_token(self.matrix))


def _leaf_matrix(array: da.Array) -> Matrix | None:
    """The matrix `to_dask` wrapped, if `array` is exactly what it returned."""
    key = MATRIX_KEY_PREFIX + array.name
    layer = array.dask.layers.get(key)
    if layer is None or array.name not in array.dask.layers:
        return None
    node = layer[key]
    rows = getattr(node, "value", node)
    return rows.matrix if isinstance(rows, MatrixRows) and rows.shape == array.shape else None


def _short(label: str) -> str:
    """The readable part of a key: ``/data/atlas.h5ad:/layers/counts`` gives ``atlas.h5ad:layers.counts``."""
    path, colon, key = label.rpartition(":")
    if not colon:
        path, key = "", label
    name = path.replace("\\", "/").rstrip("/").rpartition("/")[2]
    key = key.strip("/").replace("/", ".").replace(" ", "_")
    return f"{name}:{key}" if name else key


def row_bytes(matrix: Matrix) -> float:
    """Bytes of one row in memory, on average; an estimate where nothing says how many values are stored."""
    n_obs, n_vars = matrix.shape
    if matrix.layout == "dense":
        return max(1, n_vars * matrix.dtype.itemsize)
    nnz = getattr(matrix, "nnz", None)
    per_row = n_vars * ASSUMED_DENSITY if nnz is None else nnz / max(1, n_obs)
    # One int32 index a value, and an int64 row pointer.
    return 8 + per_row * (matrix.dtype.itemsize + 4)


def _empty_block(layout: Layout, dtype: np.dtype[Any]) -> NDArray[Any] | sp.csr_matrix:
    if layout == "csr":
        return sp.csr_matrix((0, 0), dtype=dtype)
    return np.empty((0, 0), dtype=dtype)


def _csr(
    data: NDArray[Any], indices: NDArray[np.int32], indptr: NDArray[np.int64], shape: tuple[int, int]
) -> sp.csr_matrix:
    # SciPy widens both index arrays to the wider of the two; most blocks fit the narrow type.
    if indptr[-1] <= np.iinfo(np.int32).max:
        return sp.csr_matrix((data, indices, indptr.astype(np.int32)), shape=shape, copy=False)
    return sp.csr_matrix((data, indices, indptr), shape=shape, copy=False)


def _as_range(index: Any) -> Any:
    return slice(index, index + 1 or None) if isinstance(index, Integral) else index


def _runs_by_block(rows: NDArray[np.int64], bounds: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Each block that ascending `rows` touch: its number, and the half-open range of `rows` inside it."""
    cuts = np.searchsorted(rows, bounds)
    for number, (start, stop) in enumerate(pairwise(cuts.tolist())):
        if stop > start:
            yield number, start, stop


def _layout_of(array: da.Array) -> Layout:
    meta = array._meta
    if sp.issparse(meta):
        return "csr"
    if isinstance(meta, np.ndarray):
        return "dense"
    raise InputError(
        f"the Dask array {array.name!r} has chunks of {type(meta).__module__}.{type(meta).__qualname__}; "
        "numpy and scipy.sparse chunks can be read. Convert them, e.g. array.map_blocks(np.asarray)."
    )


def _as_layout(block: Any, layout: Layout) -> NDArray[Any] | sp.csr_matrix:
    if layout == "csr":
        return sp.csr_matrix(block)
    return block.toarray() if sp.issparse(block) else np.asarray(block)


def _stack(blocks: list[Any], layout: Layout, n_columns: int, dtype: np.dtype[Any]) -> NDArray[Any] | sp.csr_matrix:
    if not blocks:
        return sp.csr_matrix((0, n_columns), dtype=dtype) if layout == "csr" else np.empty((0, n_columns), dtype=dtype)
    if len(blocks) == 1:
        return blocks[0]
    return sp.csr_matrix(sp.vstack(blocks, format="csr")) if layout == "csr" else np.concatenate(blocks)


_warned: set[str] = set()


def _warn_of_cost(matrix: DaskMatrix) -> None:
    array = matrix.array
    if array.name in _warned:
        return
    _warned.add(array.name)
    row_chunks = array.chunks[0]
    chunk_bytes = max(row_chunks, default=0) * array.shape[1] * array.dtype.itemsize
    logger.warning(
        "%s is not an array that dasksc opened: every fetch computes each of its row chunks that the "
        "wanted rows touch, whole (%d chunks, of up to %d rows, about %s each if dense). With scattered rows "
        "that is the whole array, once per fetch. Fewer rows per chunk, a larger block_size, or writing the "
        "array to a file and opening that file costs less.",
        matrix.label,
        len(row_chunks),
        max(row_chunks, default=0),
        format_bytes(chunk_bytes),
    )
