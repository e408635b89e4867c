"""Dask arrays that wrap a matrix, and are the leaves of every graph over stored cells."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import dask.array as da
import numpy as np
import scipy.sparse as sp
from dask.array import chunk
from dask.base import normalize_token, tokenize
from numpy.typing import NDArray

from dasksc import config
from dasksc.pushdown.reductions import add_reductions
from dasksc.storage import Columns, Matrix, RowBuffer
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
    array: da.Array = da.from_array(
        rows,
        chunks=(row_chunks, (n_vars,)),
        name=f"dasksc-{_short(matrix.label)}-{token}",
        # Dask fuses slices into the read only for a few getter functions. `chunk.getitem` is one of them, and it does
        # not convert sparse blocks to ndarray.
        getitem=chunk.getitem,
        asarray=False,
        meta=(sp.csr_matrix if matrix.layout == "csr" else np.empty)((0, 0), dtype=matrix.dtype),
    )
    return add_reductions(array)


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
