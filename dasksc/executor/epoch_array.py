"""A rank's epoch as one lazy Dask array."""

from __future__ import annotations

import pickle
import uuid
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import dask.array as da
import numpy as np
import scipy.sparse as sp
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import DataNode, Task, TaskRef
from numpy.typing import NDArray

from dasksc.planning.plan import EpochPlan
from dasksc.storage import Columns, Layout, Matrix

__all__ = ["epoch_array"]


def epoch_array(
    matrix: Matrix,
    plan: EpochPlan,
    *,
    name: str,
    layout: Layout,
    dtype: np.dtype[Any] | None,
    columns: Columns | None,
) -> da.Array:
    """Return the rows of a rank's epoch as a Dask array, in the order in which the epoch yields them.

    Parameters
    ----------
    matrix
        Matrix to read from.
    plan
        Plan of the epoch. A task computes the row numbers of its own fetch from the plan. If the plan takes more than
        16 KiB, a pickled task carries the row numbers instead of the plan.
    name
        Prefix of the name of the array. A unique suffix is appended.
    layout, dtype, columns
        Layout of the chunks (`csr_matrix` or ndarray), their data type (None: that of `matrix`), and their
        columns (None: all).

    Returns
    -------
    dask.array.Array
        Shape (plan.n_rank_rows, n_vars), with one chunk and one task per fetch.
    """
    dtype = matrix.dtype if dtype is None else dtype
    n_vars = matrix.shape[1] if columns is None else len(columns)
    # Dask computes equal keys only once, and a matrix in memory has no identifier, so the name must be unique.
    name = f"{name}-{uuid.uuid4().hex}"
    source = f"{name}-source"
    small = _n_bytes(plan) <= _SMALL_PLAN_BYTES
    spec = _ChunkSpec(matrix, plan if small else None, layout, dtype, columns)
    graph: dict[Any, Any] = {source: DataNode(source, spec)}
    for k in range(plan.n_fetches):
        graph[name, k, 0] = Task((name, k, 0), _chunk, TaskRef(source), k if small else _PlannedRows(plan, k))
    full, rest = divmod(plan.n_rank_rows, plan.fetch_rows)
    rows = (plan.fetch_rows,) * full + ((rest,) if rest else ())
    meta = sp.csr_matrix((0, 0), dtype=dtype) if layout == "csr" else np.empty((0, 0), dtype=dtype)
    return _EpochArray(
        HighLevelGraph.from_collections(name, graph), name, chunks=(rows or (0,), (n_vars,)), dtype=dtype, meta=meta
    )


class _EpochArray(da.Array):
    """Dask array in which each delayed chunk has a graph of its own.

    A Client sends the whole graph of a delayed chunk to the scheduler, which then drops the unneeded tasks. With a
    shared graph, the row numbers of the whole epoch would be sent with every chunk.
    """

    __slots__ = ()

    def to_delayed(self, optimize_graph: bool = True) -> NDArray[Any]:
        """Return the delayed chunks, shape (n_fetches, 1). Their graphs need no optimization."""
        tasks = self.dask.layers[self.name]
        chunks = np.empty(self.numblocks, dtype=object)
        for key in (key for of_rows in self.__dask_keys__() for key in of_rows):
            needed = {key, *tasks[key].dependencies} if key in tasks else ()
            chunks[key[1:]] = Delayed(key, {one: tasks[one] for one in needed})
        return chunks


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkSpec:
    """Arguments that all chunks share."""

    matrix: Matrix
    # None if the task of each chunk carries its row numbers.
    plan: EpochPlan | None
    layout: Layout
    dtype: np.dtype[Any]
    columns: Columns | None

    def __reduce__(self) -> tuple[Any, ...]:
        plan = None if self.plan is None else _undrawn(self.plan)
        return _ChunkSpec, (self.matrix, plan, self.layout, self.dtype, self.columns)


# Maximum size of a plan that is sent with every chunk.
_SMALL_PLAN_BYTES = 16_384


def _undrawn(plan: EpochPlan) -> EpochPlan:
    """Return the plan without its cached values."""
    return replace(plan)


def _n_bytes(plan: EpochPlan) -> int:
    """Return the pickled size of a plan, in bytes, including the arrays of `indices` or weights."""
    buffers: list[pickle.PickleBuffer] = []
    rest = cloudpickle.dumps(_undrawn(plan), protocol=5, buffer_callback=buffers.append)
    return len(rest) + sum(buffer.raw().nbytes for buffer in buffers)


@dataclass(frozen=True, slots=True, eq=False)
class _PlannedRows:
    """Row numbers of one fetch, computed when they are used or pickled.

    The pickle contains the row numbers instead of the plan. Tasks of small plans contain the number of the fetch
    instead of this object.
    """

    plan: EpochPlan
    k: int

    def __call__(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        fetch = self.plan.fetch(self.k)
        return fetch.rows, fetch.order

    def __reduce__(self) -> tuple[Any, ...]:
        rows, order = self()
        return _Rows, (rows, order.astype(np.min_scalar_type(len(rows))))


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Row numbers of a fetch after unpickling."""

    rows: NDArray[np.int64]
    order: NDArray[np.integer[Any]]

    def __call__(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.rows, self.order.astype(np.int64)


def _chunk(spec: _ChunkSpec, fetch: Any) -> NDArray[Any] | sp.csr_matrix:
    # `fetch` is the number of a fetch, or an object that returns its row numbers.
    rows, order = _PlannedRows(spec.plan, fetch)() if spec.plan is not None else fetch()
    fetched = spec.matrix.fetch(rows)
    n_vars = fetched.shape[1] if spec.columns is None else len(spec.columns)
    shape = (len(order), n_vars)
    if spec.layout == "csr":
        indptr, indices, data = fetched.gather_csr(order, dtype=spec.dtype, columns=spec.columns)
        return sp.csr_matrix((data, indices, indptr), shape=shape, copy=False)
    out = np.empty(shape, dtype=spec.dtype)
    fetched.gather(order, out=out, columns=spec.columns)
    return out
