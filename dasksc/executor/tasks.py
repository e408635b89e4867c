"""Tasks of fetches, which read the same rows of several matrices, and an epoch as one lazy Dask array.

Large fetches are divided into several tasks. These let all cores work on one fetch and keep less memory in flight.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import scipy.sparse as sp
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import DataNode, Task, TaskRef
from numpy.typing import NDArray

from dasksc.plan.epoch_plan import EpochPlan
from dasksc.storage import Columns, Layout, Matrix, RowBuffer, join, mapping, mapping_of
from dasksc.storage.arrays import ThreadTimes, clock


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FetchedMatrices:
    """Fetched rows of every matrix, by name, and the time that the task spent reading and decoding."""

    parts: Mapping[str, RowBuffer]
    spent: ThreadTimes | None = None

    @property
    def nbytes(self) -> int:
        """Anonymous memory held, in bytes."""
        return sum(part.nbytes for part in self.parts.values())

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.nbytes

    def compact(self) -> FetchedMatrices:
        """Return the same rows in arrays that hold nothing else and can be sent without conversion."""
        return FetchedMatrices({name: part.compact() for name, part in self.parts.items()}, self.spent)


@dataclass(frozen=True, slots=True)
class FetchMatrices:
    """Task of a fetch: a pure function of its row numbers, which maps no files of the matrices labeled `unmapped`."""

    matrices: Mapping[str, Matrix]
    unmapped: frozenset[str] = frozenset()

    def __call__(self, rows: NDArray[np.int64]) -> FetchedMatrices:
        """Fetch `rows`, ascending row numbers, from every matrix."""
        parts = {}
        with clock() as spent, mapping(True, unmapped=self.unmapped):
            for name, matrix in self.matrices.items():
                with mapping_of(matrix.label):
                    parts[name] = matrix.fetch(rows)
        return FetchedMatrices(parts, spent)


def fetch_name(source: str, plan: EpochPlan) -> str:
    """Return the name of the fetch tasks of an epoch, such as ``"epoch 3: dasksc-fetch-pbmc-r1"``."""
    # The progress panel of Dask's dashboard shows a single bar per epoch for all ranks, since it cuts names at ``r1``.
    return f"epoch {plan.epoch}: dasksc-fetch-{source}-r{plan.rank}"


def assembled(window: Iterator[tuple[int, FetchedMatrices]], n_parts: int) -> Iterator[tuple[int, FetchedMatrices]]:
    """Yield ``(k, fetched)`` for each fetch, whose `n_parts` parts a window yields."""
    while taken := list(itertools.islice(window, n_parts)):
        parts = [part.parts for _, part in taken]
        yield taken[0][0] // n_parts, FetchedMatrices({name: join([one[name] for one in parts]) for name in parts[0]})
        del taken, parts


def epoch_array(
    matrix: Matrix,
    plan: EpochPlan,
    *,
    name: str,
    layout: Layout,
    dtype: np.dtype[Any] | None,
    columns: Columns | None,
) -> da.Array:
    """Return the rows of a rank's epoch as a Dask array, in the order in which the epoch yields them."""
    # There is one chunk and one task per fetch. A task computes the row numbers of its own fetch from the plan; a
    # pickled task carries them instead.
    dtype = matrix.dtype if dtype is None else dtype
    n_vars = matrix.shape[1] if columns is None else len(columns)
    # Dask computes equal keys only once, and a matrix in memory has no identifier, so the name must be unique.
    name = f"{name}-{uuid.uuid4().hex}"
    source = f"{name}-source"
    graph: dict[Any, Any] = {source: DataNode(source, (matrix, layout, dtype, columns))}
    for k in range(plan.n_fetches):
        graph[name, k, 0] = Task((name, k, 0), _chunk, TaskRef(source), _PlannedRows(plan, k))
    if not plan.n_fetches:  # Dask's arrays have at least one chunk
        none = np.empty(0, dtype=np.int64)
        graph[name, 0, 0] = Task((name, 0, 0), _chunk, TaskRef(source), _Rows(none, none))
    full, rest = divmod(plan.n_rank_rows, plan.fetch_rows)
    rows = (plan.fetch_rows,) * full + ((rest,) if rest else ())
    meta = sp.csr_matrix((0, 0), dtype=dtype) if layout == "csr" else np.empty((0, 0), dtype=dtype)
    return _EpochArray(
        HighLevelGraph.from_collections(name, graph), name, chunks=(rows or (0,), (n_vars,)), dtype=dtype, meta=meta
    )


class _EpochArray(da.Array):
    """Dask array in which each delayed chunk has a graph of its own, without the row numbers of the whole epoch."""

    __slots__ = ()

    def to_delayed(self, optimize_graph: bool = True) -> NDArray[Any]:
        """Return the delayed chunks, shape (n_fetches, 1)."""
        tasks = self.dask.layers[self.name]
        chunks = np.empty(self.numblocks, dtype=object)
        for key in (key for of_rows in self.__dask_keys__() for key in of_rows):
            needed = {key, *tasks[key].dependencies} if key in tasks else ()
            chunks[key[1:]] = Delayed(key, {one: tasks[one] for one in needed})
        return chunks


@dataclass(frozen=True, slots=True, eq=False)
class _PlannedRows:
    """Row numbers of one fetch, computed when they are used or pickled; the pickle contains them, not the plan."""

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


def _chunk(
    shared: tuple[Matrix, Layout, np.dtype[Any], Columns | None], fetch: _PlannedRows | _Rows
) -> NDArray[Any] | sp.csr_matrix:
    matrix, layout, dtype, columns = shared
    rows, order = fetch()
    fetched = matrix.fetch(rows)
    n_vars = fetched.shape[1] if columns is None else len(columns)
    shape = (len(order), n_vars)
    if layout == "csr":
        indptr, indices, data = fetched.gather_csr(order, dtype=dtype, columns=columns)
        return sp.csr_matrix((data, indices, indptr), shape=shape, copy=False)
    out = np.empty(shape, dtype=dtype)
    fetched.gather(order, out=out, columns=columns)
    return out
