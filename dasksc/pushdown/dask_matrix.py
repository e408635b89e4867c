"""Rows of any Dask array, computed from whole row chunks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import cloudpickle
import dask.array as da
import numpy as np
import scipy.sparse as sp
from dask.base import normalize_token
from dask.local import get_sync
from dask.optimization import cull
from dask.sizeof import sizeof
from dask.task_spec import DataNode, GraphNode
from dask.utils import ensure_dict
from numpy.typing import NDArray

from dasksc._compat.dask import convert_legacy_graph
from dasksc.errors import InputError
from dasksc.pushdown.functions import with_blocks
from dasksc.storage import FetchCost, RowBuffer, as_matrix
from dasksc.storage.matrices import check_rows
from dasksc.storage.matrix import Layout

Key = Any

# The number of values in a CSR chunk is unknown until the chunk is computed.
_ASSUMED_DENSITY = 0.1
# Largest total size of the results that row chunks share. A statistic per gene takes far less.
_KEPT_BYTES = 2**26


class DaskMatrix:
    """Matrix over any Dask array; a fetch computes every row chunk that contains a requested row."""

    # Chunks are computed one after another on the calling thread. Only the requested rows of each are kept, so memory
    # holds one row chunk at a time, and the result. Intermediate results that both the first and the last row chunk
    # use, such as a mean over the rows, are computed by the first fetch and kept if they are small.

    def __init__(self, array: da.Array, label: str | None = None) -> None:
        self.array = array
        self.label = label or f"Dask array {array.name}"
        self.layout = _layout_of(array)
        self.shape: tuple[int, int] = (int(array.shape[0]), int(array.shape[1]))
        self.dtype: np.dtype[Any] = array.dtype
        self.stored_dtype = self.dtype  # values are computed, not stored
        self._pickled: bytes | None = None
        self._bounds = np.concatenate([[0], np.cumsum(array.chunks[0])]).astype(np.int64)
        self._with_shared: Mapping[Key, GraphNode] | None = None
        self._sharing = threading.Lock()

    @property
    def cost(self) -> FetchCost:
        """Estimated memory of a fetch; the number of values in a sparse chunk is an assumption."""
        row = self._row_bytes()
        chunk_rows = max(self.array.chunks[0], default=0)
        return FetchCost(
            row=row,
            held=row,
            working=row,
            fixed=int(3 * row * chunk_rows),
            chunk_rows=chunk_rows,
            decoded_rows=chunk_rows,
        )

    def _row_bytes(self) -> float:
        n_vars, itemsize = self.shape[1], self.dtype.itemsize
        if self.layout == "dense":
            return max(1, n_vars * itemsize)
        return 8 + n_vars * _ASSUMED_DENSITY * (itemsize + 4)

    @cached_property
    def _tasks(self) -> dict[Key, GraphNode]:
        tasks: dict[Key, GraphNode] = convert_legacy_graph(ensure_dict(self.array.dask))
        return tasks

    def _keys(self, number: int) -> list[Key]:
        """Return the keys of a row chunk, one per column chunk."""
        return [(self.array.name, number, place) for place in range(self.array.numblocks[1])]

    def fetch(self, rows: NDArray[np.int64]) -> RowBuffer:
        """Compute the row chunks that contain `rows` and return those rows."""
        rows = check_rows(self.label, self.shape[0], rows)
        with self._sharing:
            if self._with_shared is None:
                keys = _shared_keys(self._tasks, self._keys(0), self._keys(len(self._bounds) - 2))
                self._with_shared = _with_computed(self._tasks, keys)
        kept = [
            self._joined(_computed(self._with_shared, self._keys(number)), self.array.chunks[0][number])[
                rows[start:stop] - self._bounds[number]
            ]
            for number, start, stop in runs_by_block(rows, self._bounds)
        ]
        return self._fetched(concatenate_rows(kept) if kept else self._empty())

    def _fetched(self, block: NDArray[Any] | sp.csr_matrix) -> RowBuffer:
        return as_matrix(block, self.label).fetch(np.arange(block.shape[0], dtype=np.int64))

    def _empty(self) -> NDArray[Any] | sp.csr_matrix:
        shape = (0, self.shape[1])
        return sp.csr_matrix(shape, dtype=self.dtype) if self.layout == "csr" else np.empty(shape, dtype=self.dtype)

    def _joined(self, parts: Iterable[Any], n_rows: int) -> NDArray[Any] | sp.csr_matrix:
        """Join the column chunks of `n_rows` rows, and check their shapes."""
        blocks = []
        for part, width in zip(parts, self.array.chunks[1], strict=True):
            if np.shape(part) != (n_rows, width):
                raise InputError(
                    f"{self.label}: array {self.array.name!r} computed a block of shape {np.shape(part)}, but "
                    f"{(n_rows, width)} was declared. If a function in map_blocks changes the number of columns, "
                    "declare it: map_blocks(f, chunks=(array.chunks[0], (n_columns,)), dtype=..., meta=...). It must "
                    "not change the number of rows."
                )
            if self.layout == "csr":
                blocks.append(sp.csr_matrix(part))
            else:
                blocks.append(part.toarray() if sp.issparse(part) else np.asarray(part))
        if len(blocks) == 1:
            return blocks[0]
        return sp.csr_matrix(sp.hstack(blocks, format="csr")) if self.layout == "csr" else np.hstack(blocks)

    def __dask_tokenize__(self) -> object:
        return ("dasksc.DaskMatrix", normalize_token(self.array), self.label)

    def __reduce__(self) -> tuple[Any, ...]:
        # DataLoader workers receive the matrix by plain pickle, which cannot serialize lambdas given to map_blocks.
        if self._pickled is None:
            self._pickled = cloudpickle.dumps((self.array, self.label))
        return _load_dask_matrix, (type(self), self._pickled)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.array!r})"


# Matrices are sent to other processes with every fetch. The cache avoids unpickling the same graphs each time.
@lru_cache(maxsize=8)
def _load_dask_matrix(kind: type[DaskMatrix], state: bytes) -> DaskMatrix:
    array, label = cloudpickle.loads(state)
    return kind(array, label)


def _layout_of(array: da.Array) -> Layout:
    # If the class of the blocks has no ``dtype``, the public ``da.utils.meta_from_array`` returns the array instead.
    meta = array._meta
    if sp.issparse(meta):
        return "csr"
    if isinstance(meta, np.ndarray):
        return "dense"
    raise InputError(
        f"the Dask array {array.name!r} has chunks of {type(meta).__module__}.{type(meta).__qualname__}; "
        "numpy and scipy.sparse chunks can be read. Convert them, e.g. array.map_blocks(np.asarray)."
    )


def runs_by_block(rows: NDArray[np.int64], bounds: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Yield ``(number, start, stop)`` for each block with some of the ascending `rows`, namely ``rows[start:stop]``."""
    cuts = np.searchsorted(rows, bounds)
    for number, (start, stop) in enumerate(pairwise(cuts.tolist())):
        if stop > start:
            yield number, start, stop


def concatenate_rows(blocks: list[Any]) -> Any:
    """Concatenate blocks along the rows."""
    if len(blocks) == 1:
        return blocks[0]
    return sp.vstack(blocks, format="csr") if any(map(sp.issparse, blocks)) else np.concatenate(blocks)


def _computed(tasks: Mapping[Key, GraphNode], keys: list[Key]) -> list[Any]:
    """Compute keys on the calling thread; functions are elementwise for CSR blocks, too."""
    needed = {key: with_blocks(task) for key, task in cull(tasks, keys)[0].items()}
    # Without callbacks=(), the inner computation would report to the callbacks of the outer one.
    return list(get_sync(da.optimize(needed, keys), keys, callbacks=()))


def _shared_keys(tasks: Mapping[Key, GraphNode], first: list[Key], last: list[Key]) -> set[Key]:
    """Return the keys that tasks of both row chunks, but of no common result, use directly."""
    shared: set[Key] = set()
    while True:
        # The next pass finds what the results found by this one hid: the mean in (X - mean) / std(X - mean).
        cut = {**tasks, **{key: DataNode(key, None) for key in shared}}
        needed = [cull(cut, keys)[0] for keys in (first, last)]
        common = needed[0].keys() & needed[1].keys()
        used = [
            {one for key in chunk.keys() - common for one in chunk[key].dependencies if cut[one].dependencies}
            for chunk in needed
        ]
        if not (more := common & used[0] & used[1]):
            return shared
        shared |= more


def _with_computed(tasks: Mapping[Key, GraphNode], keys: set[Key]) -> Mapping[Key, GraphNode]:
    """Compute some keys, and return the tasks with the values in place of these keys, or as they are if too large."""
    # One value per layer is computed first; the layer's others are assumed to be as large.
    if not keys:
        return tasks
    samples = {layer_of(key): key for key in keys}
    values = dict(zip(samples.values(), _computed(tasks, list(samples.values())), strict=True))
    if sum(sizeof(values[samples[name]]) * n for name, n in Counter(map(layer_of, keys)).items()) > _KEPT_BYTES:
        return tasks
    if rest := list(keys - values.keys()):
        values |= zip(rest, _computed(tasks, rest), strict=True)
    return {**tasks, **{key: DataNode(key, value) for key, value in values.items()}}


def layer_of(key: Key) -> str:
    """Return the name of the layer of a key."""
    return str(key[0] if isinstance(key, tuple) else key)
