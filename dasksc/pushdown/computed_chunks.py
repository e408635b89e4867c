"""Rows of any Dask array, computed from whole row chunks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import cloudpickle
import dask.array as da
import numpy as np
import scipy.sparse as sp
from dask.base import normalize_token
from numpy.typing import NDArray

from dasksc._compat.dask import meta_of
from dasksc.errors import InputError
from dasksc.pushdown.computed_once import shared_keys, with_computed
from dasksc.pushdown.elementwise import elementwise
from dasksc.storage import FetchCost, RowBuffer, as_matrix
from dasksc.storage.matrices import check_rows
from dasksc.storage.matrix import Layout

__all__ = ["DaskMatrix", "as_layout", "check_shape", "runs_by_block", "concatenate_blocks"]

# The number of values in a CSR chunk is unknown until the chunk is computed.
_ASSUMED_DENSITY = 0.1


class DaskMatrix:
    """Matrix over any Dask array; a fetch computes every row chunk that contains a requested row."""

    # Chunks are computed one after another on the calling thread. Only the requested rows of each are kept, so memory
    # holds one row chunk at a time, and the result. Intermediate results that most row chunks use, such as a mean over
    # the rows, are computed by the first fetch and cached if they are small.

    def __init__(self, array: da.Array, label: str | None = None) -> None:
        self._array = elementwise(array)
        self._label = label or f"Dask array {array.name}"
        self._layout = _layout_of(array)
        self._pickled: bytes | None = None
        self._bounds = np.concatenate([[0], np.cumsum(array.chunks[0])]).astype(np.int64)
        self._with_shared: da.Array | None = None
        self._sharing = threading.Lock()

    @property
    def array(self) -> da.Array:
        """Underlying Dask array."""
        return self._array

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and of columns."""
        n_obs, n_vars = self._array.shape
        return int(n_obs), int(n_vars)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type of the values."""
        dtype: np.dtype[Any] = self._array.dtype
        return dtype

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """Data type of the values; the same as `dtype`, since the values are computed and not stored."""
        return self.dtype

    @property
    def layout(self) -> Layout:
        """``"csr"`` if the meta of the array is sparse, otherwise ``"dense"``."""
        return self._layout

    @property
    def label(self) -> str:
        """Name of the matrix in error messages."""
        return self._label

    @property
    def cost(self) -> FetchCost:
        """Estimated memory of a fetch; the number of values in a sparse chunk is an assumption."""
        row = self._row_bytes()
        chunk_rows = max(self._array.chunks[0], default=0)
        return FetchCost(row=row, held=row, working=row, fixed=int(3 * row * chunk_rows), chunk_rows=chunk_rows)

    def _row_bytes(self) -> float:
        n_vars, itemsize = self.shape[1], self.dtype.itemsize
        if self.layout == "dense":
            return max(1, n_vars * itemsize)
        return 8 + n_vars * _ASSUMED_DENSITY * (itemsize + 4)

    @cached_property
    def shared(self) -> set[Any]:
        """Keys of the intermediate results that most row chunks use, such as a mean over the rows."""
        return shared_keys(self._array)

    def fetch(self, rows: NDArray[np.int64]) -> RowBuffer:
        """Compute the row chunks that contain `rows` and return those rows."""
        rows = check_rows(self.label, self.shape[0], rows)
        kept = [
            self._block(number, rows[start:stop] - self._bounds[number])
            for number, start, stop in runs_by_block(rows, self._bounds)
        ]
        return as_matrix(concatenate_blocks(kept, self.layout, self.shape[1], self.dtype), self.label).fetch(
            np.arange(len(rows), dtype=np.int64)
        )

    def _block(self, number: int, rows: NDArray[np.int64]) -> NDArray[Any] | sp.csr_matrix:
        with self._sharing:
            if self._with_shared is None:
                self._with_shared = with_computed(self._array, self.shared)
        # Without callbacks=(), the inner computation would report to the callbacks of the outer one.
        block = self._with_shared.blocks[number].compute(scheduler="synchronous", callbacks=())
        check_shape(block, (self._array.chunks[0][number], self.shape[1]), self)
        return as_layout(block, self.layout)[rows]

    def __dask_tokenize__(self) -> object:
        return ("dasksc.DaskMatrix", normalize_token(self._array), self._label)

    def __reduce__(self) -> tuple[Any, ...]:
        # DataLoader workers receive the matrix by plain pickle, which cannot serialize lambdas given to map_blocks.
        if self._pickled is None:
            self._pickled = cloudpickle.dumps((self._array, self._label))
        return _load_dask_matrix, (type(self), self._pickled)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._array!r})"


# Matrices are sent to other processes with every fetch. The cache avoids unpickling the same graphs each time.
@lru_cache(maxsize=8)
def _load_dask_matrix(kind: type[DaskMatrix], state: bytes) -> DaskMatrix:
    array, label = cloudpickle.loads(state)
    return kind(array, label)


def runs_by_block(rows: NDArray[np.int64], bounds: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Yield ``(number, start, stop)`` for each block with some of the ascending `rows`, namely ``rows[start:stop]``."""
    cuts = np.searchsorted(rows, bounds)
    for number, (start, stop) in enumerate(pairwise(cuts.tolist())):
        if stop > start:
            yield number, start, stop


def check_shape(block: Any, declared: tuple[int, int], matrix: DaskMatrix) -> None:
    """Raise `InputError` if the shape of a computed block differs from `declared`."""
    if np.shape(block) != declared:
        raise InputError(
            f"{matrix.label}: array {matrix.array.name!r} computed a block of shape {np.shape(block)}, but "
            f"{declared} was declared. If a function in map_blocks changes the number of columns, declare it: "
            "map_blocks(f, chunks=(array.chunks[0], (n_columns,)), dtype=..., meta=...). It must not change the "
            "number of rows."
        )


def _layout_of(array: da.Array) -> Layout:
    meta = meta_of(array)
    if sp.issparse(meta):
        return "csr"
    if isinstance(meta, np.ndarray):
        return "dense"
    raise InputError(
        f"the Dask array {array.name!r} has chunks of {type(meta).__module__}.{type(meta).__qualname__}; "
        "numpy and scipy.sparse chunks can be read. Convert them, e.g. array.map_blocks(np.asarray)."
    )


def as_layout(block: Any, layout: Layout) -> NDArray[Any] | sp.csr_matrix:
    """Convert a block to the class of `layout`: ``csr_matrix`` or ``ndarray``."""
    if layout == "csr":
        return sp.csr_matrix(block)
    return block.toarray() if sp.issparse(block) else np.asarray(block)


def concatenate_blocks(
    blocks: list[Any], layout: Layout, n_columns: int, dtype: np.dtype[Any]
) -> NDArray[Any] | sp.csr_matrix:
    """Concatenate blocks along the rows."""
    if not blocks:
        return sp.csr_matrix((0, n_columns), dtype=dtype) if layout == "csr" else np.empty((0, n_columns), dtype=dtype)
    if len(blocks) == 1:
        return blocks[0]
    return sp.csr_matrix(sp.vstack(blocks, format="csr")) if layout == "csr" else np.concatenate(blocks)
