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
    """Return the rows of a rank's epoch in the order in which they are yielded.

    Parameters
    ----------
    matrix
        Whose rows.
    plan
        Which rows. Each task works out those of its own fetch. To another process it takes them along, unless
        the plan is smaller than they are likely to be.
    name
        Of the array, before what makes it unique.
    layout, dtype, columns
        What the chunks hold: `csr_matrix` or ndarray, of this type (None: that of `matrix`), these columns.

    Returns
    -------
    dask.array.Array
        Shape (plan.n_rank_rows, n_vars); one chunk and one task a fetch.
    """
    dtype = matrix.dtype if dtype is None else dtype
    n_vars = matrix.shape[1] if columns is None else len(columns)
    # Unique, for equal keys are computed once, and a matrix in memory has nothing that tells it from another.
    name = f"{name}-{uuid.uuid4().hex}"
    source = f"{name}-source"
    small = _n_bytes(plan) <= _SMALL_PLAN_BYTES
    what = _What(matrix, plan if small else None, layout, dtype, columns)
    graph: dict[Any, Any] = {source: DataNode(source, what)}
    for k in range(plan.n_fetches):
        graph[name, k, 0] = Task((name, k, 0), _chunk, TaskRef(source), k if small else _RowsOf(plan, k))
    full, rest = divmod(plan.n_rank_rows, plan.fetch_rows)
    rows = (plan.fetch_rows,) * full + ((rest,) if rest else ())
    meta = sp.csr_matrix((0, 0), dtype=dtype) if layout == "csr" else np.empty((0, 0), dtype=dtype)
    return _EpochArray(
        HighLevelGraph.from_collections(name, graph), name, chunks=(rows or (0,), (n_vars,)), dtype=dtype, meta=meta
    )


class _EpochArray(da.Array):
    """An array whose chunks, made into delayed ones, have a graph each.

    A client sends the whole graph that a chunk comes from to the scheduler, which leaves out what is not needed there:
    the rows of an epoch would travel with every chunk of it.
    """

    __slots__ = ()

    def to_delayed(self, optimize_graph: bool = True) -> NDArray[Any]:
        """Return the chunks, of shape (n_fetches, 1); there is nothing to optimize in their graphs."""
        tasks = self.dask.layers[self.name]
        chunks = np.empty(self.numblocks, dtype=object)
        for key in (key for of_rows in self.__dask_keys__() for key in of_rows):
            needed = {key, *tasks[key].dependencies} if key in tasks else ()
            chunks[key[1:]] = Delayed(key, {one: tasks[one] for one in needed})
        return chunks


@dataclass(frozen=True, slots=True, eq=False)
class _What:
    """What every chunk needs."""

    matrix: Matrix
    # None if chunks come with their rows.
    plan: EpochPlan | None
    layout: Layout
    dtype: np.dtype[Any]
    columns: Columns | None

    def __reduce__(self) -> tuple[Any, ...]:
        plan = None if self.plan is None else _undrawn(self.plan)
        return _What, (self.matrix, plan, self.layout, self.dtype, self.columns)


# What a plan may weigh to travel with every chunk.
_SMALL_PLAN_BYTES = 16_384


def _undrawn(plan: EpochPlan) -> EpochPlan:
    """The plan without what it has derived."""
    return replace(plan)


def _n_bytes(plan: EpochPlan) -> int:
    """What a plan weighs when it travels: with `indices` or weights as much as they do."""
    buffers: list[pickle.PickleBuffer] = []
    rest = cloudpickle.dumps(_undrawn(plan), protocol=5, buffer_callback=buffers.append)
    return len(rest) + sum(buffer.raw().nbytes for buffer in buffers)


@dataclass(frozen=True, slots=True, eq=False)
class _RowsOf:
    """The rows of one fetch, worked out where they are used and when they travel, which is without the plan."""

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
    """The rows of a fetch that has travelled."""

    rows: NDArray[np.int64]
    order: NDArray[np.integer[Any]]

    def __call__(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.rows, self.order.astype(np.int64)


def _chunk(what: _What, which: Any) -> NDArray[Any] | sp.csr_matrix:
    # The number of a fetch, or its rows.
    rows, order = _RowsOf(what.plan, which)() if what.plan is not None else which()
    fetched = what.matrix.fetch(rows)
    n_vars = fetched.shape[1] if what.columns is None else len(what.columns)
    shape = (len(order), n_vars)
    if what.layout == "csr":
        indptr, indices, data = fetched.gather_csr(order, dtype=what.dtype, columns=what.columns)
        return sp.csr_matrix((data, indices, indptr), shape=shape, copy=False)
    out = np.empty(shape, dtype=what.dtype)
    fetched.gather(order, out=out, columns=what.columns)
    return out
