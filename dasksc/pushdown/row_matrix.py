"""Matrix over a Dask array, each row of which is computed from single rows of stored matrices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from dasksc.pushdown.compiler import Compiler
from dasksc.pushdown.dask_matrix import DaskMatrix, Key, concatenate_rows, runs_by_block
from dasksc.pushdown.nodes import Needs, Plan, RowsRead, Step
from dasksc.storage import FetchCost, Matrix, RowBuffer, as_matrix, join
from dasksc.storage.matrices import check_rows
from dasksc.storage.matrix import Layout

__all__ = ["RowLocalMatrix"]

# Approximate number of rows computed together. With fewer rows, results would stay in the CPU cache from one layer to
# the next, but threads would return to Python more often and wait for each other, which costs more.
N_COMPUTED = 4096


class RowLocalMatrix(DaskMatrix):
    """Matrix over a Dask array, each row of which comes from single rows of stored matrices."""

    def __init__(self, array: da.Array, label: str | None = None) -> None:
        super().__init__(array, label)
        compiler = Compiler(array, self._tasks)
        self._blocks = compiler.blocks()
        self._constants: dict[Key, Any] = {}
        if self.layout == "dense" and compiler.has_elementwise and self.shape[0]:
            self.layout = self._computed_layout()

    def _computed_layout(self) -> Layout:
        """Return the layout of a row that is computed from empty stored rows."""
        # Dask's meta may be wrong for elementwise functions, since Dask infers it from SciPy's matrix products and
        # powers.
        source = RowsRead(self._tasks, self._constants)
        steps = self._steps(Plan(source), (0,), (np.zeros(1, dtype=np.int64),))
        if not any(matrix.layout == "csr" for matrix, _ in source.needs.values()):
            return self.layout
        source.read(_empty_rows)
        try:
            with np.errstate(all="ignore"):
                return "csr" if all(sp.issparse(step()) for step in steps) else self.layout
        except Exception:  # a function may raise anything for empty rows
            return self.layout

    def _steps(self, plan: Plan, numbers: Sequence[int], needs: Needs) -> list[Step]:
        """Plan rows of row chunks of one kind; return one step per column chunk."""
        return [plan.step(nodes, needs) for nodes in zip(*(self._blocks[number] for number in numbers), strict=True)]

    @property
    def cost(self) -> FetchCost:
        """Estimated memory of a fetch: stored rows, results of all layers of the graph, and the concatenated result."""
        # The estimate assumes that layers keep zeros, so that a sparse row has as many values as it has in storage.
        source = RowsRead(self._tasks, self._constants)
        plan = Plan(source)
        if self.shape[0]:
            self._steps(plan, (0,), (np.zeros(1, dtype=np.int64),))
        matrices = [matrix for matrix, _ in source.needs.values()]
        costs = [matrix.cost for matrix in matrices]
        row = self._row_bytes()
        if self.layout == "csr" and costs:
            itemsize = self.dtype.itemsize + np.dtype(np.int32).itemsize
            # Stored column indices take at least two bytes each.
            values = sum(matrix.cost.row / (matrix.stored_dtype.itemsize + 2) for matrix in matrices)
            row = 8 + min(values, self.shape[1]) * itemsize
        return FetchCost(
            row=row,
            held=row,
            working=sum(cost.held + cost.working for cost in costs) + (2 + len(plan)) * row,
            fixed=sum(cost.fixed for cost in costs),
            kept=sum(cost.kept for cost in costs),
            chunk_rows=max((cost.chunk_rows for cost in costs), default=0.0),
        )

    def fetch(self, rows: NDArray[np.int64]) -> RowBuffer:
        """Read the rows that `rows` depend on, with one fetch per stored matrix, and compute on them."""
        rows = check_rows(self.label, self.shape[0], rows)
        if not len(rows):
            return self._fetched(self._empty())
        wanted = [
            (number, first, rows[first : min(first + N_COMPUTED, stop)] - self._bounds[number])
            for number, start, stop in runs_by_block(rows, self._bounds)
            for first in range(start, stop, N_COMPUTED)
        ]

        def kinds(one: tuple[int, int, Any]) -> tuple[list[int], int]:
            return [node.kind for node in self._blocks[one[0]]], one[1] // N_COMPUTED

        source = RowsRead(self._tasks, self._constants)
        groups: list[tuple[int, list[Step]]] = []
        for _, several in itertools.groupby(wanted, key=kinds):
            numbers, _, needs = zip(*several, strict=True)
            groups.append((sum(map(len, needs)), self._steps(Plan(source), numbers, needs)))
        source.read(lambda matrix, rows: matrix.fetch(rows))
        blocks = []
        while groups:
            # The values of a group are freed before those of the next, which find its memory in the CPU cache.
            n_rows, steps = groups.pop(0)
            blocks.append(self._joined((step() for step in steps), n_rows))
        if len({_dtypes(block) for block in blocks}) > 1:
            blocks = [concatenate_rows(blocks)]
        # The blocks stay separate: copying them into one costs as much as a layer of the graph.
        return join(list(map(self._fetched, blocks)))


def _dtypes(block: Any) -> tuple[np.dtype[Any], ...]:
    return (block.dtype, block.indices.dtype) if sp.issparse(block) else (block.dtype,)


def _empty_rows(matrix: Matrix, rows: NDArray[np.int64]) -> RowBuffer:
    shape = len(rows), matrix.shape[1]
    block = sp.csr_matrix(shape, dtype=matrix.dtype) if matrix.layout == "csr" else np.zeros(shape, matrix.dtype)
    return as_matrix(block, "empty rows").fetch(np.arange(len(rows), dtype=np.int64))
