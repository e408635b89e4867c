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
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import DataNode, Task, TaskRef
from numpy.typing import NDArray

from dasksc.plan.epoch_plan import EpochPlan
from dasksc.storage import Columns, Layout, Matrix, RowBuffer, join, mapping, mapping_of
from dasksc.storage.arrays import ThreadTimes, clock
from dasksc.storage.files import Map

# Most files of a fetch that are checked once more; with the dozens of small files that it may read, it takes 5% longer.
_MOST_CHECKED = 8


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

    def require_unchanged(self) -> None:
        """Raise `CorruptDataError` if one of a few memory-mapped files has changed since it was opened."""
        owners = (owner.base for part in self.parts.values() for one in part.pointers for owner in one.owners)
        maps = {owner for owner in owners if isinstance(owner, Map)}
        for mapped in maps if len(maps) <= _MOST_CHECKED else ():
            mapped.identity.require_unchanged()

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
    dtype = matrix.dtype if dtype is None else dtype
    n_vars = matrix.shape[1] if columns is None else len(columns)
    # Dask computes equal keys only once, and a matrix in memory has no identifier, so the name must be unique.
    name = f"{name}-{uuid.uuid4().hex}"
    source = f"{name}-source"
    empty = sp.csr_matrix((0, n_vars), dtype=dtype) if layout == "csr" else np.empty((0, n_vars), dtype=dtype)
    # There is one chunk and one task per fetch, which computes its rows from the plan.
    graph: dict[Any, Any] = {source: DataNode(source, (matrix, plan, layout, dtype, columns))}
    for k in range(plan.n_fetches):
        graph[name, k, 0] = Task((name, k, 0), _chunk, TaskRef(source), k)
    if not plan.n_fetches:  # Dask's arrays have at least one chunk
        graph[name, 0, 0] = DataNode((name, 0, 0), empty)
    full, rest = divmod(plan.n_rank_rows, plan.fetch_rows)
    rows = (plan.fetch_rows,) * full + ((rest,) if rest else ())
    graphs = HighLevelGraph.from_collections(name, graph)
    return da.Array(graphs, name, chunks=(rows or (0,), (n_vars,)), dtype=dtype, meta=empty[:, :0])


def _chunk(
    shared: tuple[Matrix, EpochPlan, Layout, np.dtype[Any], Columns | None], k: int
) -> NDArray[Any] | sp.csr_matrix:
    matrix, plan, layout, dtype, columns = shared
    fetch = plan.fetch(k)
    fetched = matrix.fetch(fetch.rows)
    shape = (len(fetch.order), fetched.shape[1] if columns is None else len(columns))
    if layout == "csr":
        indptr, indices, data = fetched.gather_csr(fetch.order, dtype=dtype, columns=columns)
        return sp.csr_matrix((data, indices, indptr), shape=shape, copy=False)
    out = np.empty(shape, dtype=dtype)
    fetched.gather(fetch.order, out=out, columns=columns)
    return out
