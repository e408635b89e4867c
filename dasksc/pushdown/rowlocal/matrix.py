"""Matrix over a Dask array, each row of which is computed from single rows of stored matrices."""

from __future__ import annotations

import itertools
import logging
import threading
from functools import cached_property
from typing import Any

import dask.array as da
import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from dasksc._compat.unsupported import UnsupportedVersionError, warn_once
from dasksc.pushdown.computed_chunks import DaskMatrix, as_layout, concatenate_blocks, runs_by_block
from dasksc.pushdown.elementwise import Elementwise
from dasksc.pushdown.rowlocal.chunk_kinds import kinds_of_chunks
from dasksc.pushdown.rowlocal.compiler import Compiler
from dasksc.pushdown.rowlocal.graph import NotRowLocalError
from dasksc.pushdown.rowlocal.nodes import Apply, Node, Read, Run, all_nodes, joined
from dasksc.pushdown.rowlocal.trial import N_TRIED, are_equal, synthetic_run, trial
from dasksc.pushdown.trust import calls
from dasksc.storage import FetchCost, RowBuffer, as_matrix, join
from dasksc.storage.matrices import check_rows
from dasksc.storage.matrix import Layout

__all__ = ["RowLocalMatrix"]

logger = logging.getLogger("dasksc.lazy.rowlocal")

# Approximate number of rows computed together. With fewer rows, results would stay in the CPU cache from one layer to
# the next, but threads would return to Python more often and wait for each other, which costs more.
N_COMPUTED = 4096

# Number of rows computed together if functions are merely believed to treat rows independently
# (`dasksc.pushdown.trust`). Pieces of several chunks may add up to nearly twice this number of rows, and even that must
# not exceed the number of rows in the trial.
N_BELIEVED = N_TRIED[False] // 2

# Number of rows that are made dense and compared at a time.
N_COMPARED = 64


class RowLocalMatrix(DaskMatrix):
    """Matrix over a Dask array, each row of which comes from single rows of stored matrices."""

    def __init__(self, array: da.Array, label: str | None = None, *, strict: bool = False) -> None:
        super().__init__(array, label)
        try:
            self._blocks = Compiler(self.array, strict=strict).blocks()
            self._kinds = kinds_of_chunks(self._blocks)
        except RecursionError as error:
            raise NotRowLocalError(
                f"its graph is nested too deeply to be followed ({error!r}). Combine the steps in one function with "
                "map_blocks"
            ) from error
        except UnsupportedVersionError as error:
            # Computing whole chunks is correct for any graph, including graphs of an unexpected form.
            warn_once(error, without="Dask operations on X are computed on whole chunks")
            raise NotRowLocalError(str(error)) from error
        # Kinds of row chunks that passed the trial. If some of their functions are merely believed to be row-local,
        # they also passed the comparison with a whole row chunk.
        self._proven: set[int] = set()
        self._believed = True
        self._lock = threading.Lock()
        self._layout = self._found_layout()

    def _found_layout(self) -> Layout:
        """Return the layout of the computed blocks."""
        # Dask's meta may be wrong for elementwise functions, since Dask infers it from SciPy's matrix products and
        # powers.
        nodes = self._blocks[0] if self._blocks else []
        if self.layout == "csr" or not _may_stay_csr(nodes):
            return self.layout
        need = np.zeros(min(1, int(self._bounds[1])), dtype=np.int64)
        run = synthetic_run([(nodes, need)])
        try:
            with np.errstate(all="ignore"):
                return "csr" if all(sp.issparse(run.value((node,), (need,))) for node in nodes) else self.layout
        except Exception:  # a function may raise anything on synthetic rows; the trial reports it
            return self.layout

    @property
    def cost(self) -> FetchCost:
        """Estimated memory of a fetch: stored rows, results of all layers of the graph, and the concatenated result."""
        # The estimate assumes that layers keep zeros, so that a sparse row has as many values as it has in storage.
        run = Run()
        for node in self._blocks[0] if self._blocks else []:
            run.demand(node, np.zeros(min(1, self.shape[0]), dtype=np.int64))
        costs = [matrix.cost for matrix, _ in run.needs.values()]
        row = self._row_bytes()
        if self.layout == "csr" and costs:
            itemsize = self.dtype.itemsize + np.dtype(np.int32).itemsize
            # Stored column indices take at least two bytes each.
            values = sum(
                cost.row / (matrix.stored_dtype.itemsize + 2)
                for cost, (matrix, _) in zip(costs, run.needs.values(), strict=True)
            )
            row = 8 + min(values, self.shape[1]) * itemsize
        # Where functions are merely believed to be row-local, one chunk per kind is computed whole, once.
        once = 0 if self._is_all_known else super().cost.fixed
        return FetchCost(
            row=row,
            held=row,
            working=sum(cost.held + cost.working for cost in costs) + (2 + len(run.memory)) * row,
            fixed=sum(cost.fixed for cost in costs),
            kept=sum(cost.kept for cost in costs) + once,
            chunk_rows=max((cost.chunk_rows for cost in costs), default=0.0),
        )

    def fetch(self, rows: NDArray[np.int64]) -> RowBuffer:
        """Read the rows that `rows` depend on, with one fetch per stored matrix, and compute on them."""
        rows = check_rows(self.label, self.shape[0], rows)
        if not self._rows_are_independent(rows):
            return super().fetch(rows)
        blocks = self._computed(rows)
        if len({tuple(array.dtype for array in _arrays(block)) for block in blocks}) != 1:
            blocks = [concatenate_blocks(blocks, self.layout, self.shape[1], self.dtype)]
        # The blocks stay separate: copying them into one costs as much as a layer of the graph.
        return join([_all_rows(block, self.label) for block in blocks])

    def _computed(self, rows: NDArray[np.int64]) -> list[Any]:
        """Compute `rows`, a limited number at a time."""
        n_together = N_COMPUTED if self._is_all_known else N_BELIEVED
        wanted = [
            (number, first, rows[first : min(first + n_together, stop)] - self._bounds[number])
            for number, start, stop in runs_by_block(rows, self._bounds)
            for first in range(start, stop, n_together)
        ]
        run = Run.reading([(self._blocks[number], need) for number, _, need in wanted])
        blocks = []
        for _, several in itertools.groupby(wanted, key=lambda one: (self._kinds[one[0]], one[1] // n_together)):
            numbers, _, needs = zip(*several, strict=True)
            blocks.append(joined([self._blocks[number] for number in numbers], needs, run, self))
            # Freeing the values lets the next group use their memory while it is still in the CPU cache.
            run.values.clear()
        return blocks

    def _rows_are_independent(self, rows: NDArray[np.int64]) -> bool:
        """Return True if every row chunk that `rows` touch passes its trial, run once per kind and process."""
        if len(self._proven) == self._n_kinds and self._believed:
            return True
        with self._lock:
            for number, start, stop in runs_by_block(rows, self._bounds):
                if not self._believed:
                    break
                if self._kinds[number] not in self._proven:
                    self._prove(number, rows[start:stop] - self._bounds[number])
        return self._believed

    def _prove(self, number: int, need: NDArray[np.int64]) -> None:
        is_known = self._is_known(self._kinds[number])
        n_rows = int(self._bounds[number + 1] - self._bounds[number])
        reason = trial(self._blocks[number], self, n_rows=n_rows, n_tried=N_TRIED[is_known])
        if reason is None and not is_known:
            reason = self._difference(number, need)
        if reason is None:
            self._proven.add(self._kinds[number])
            return
        self._believed = False
        logger.warning(
            "%s: the functions in its graph were assumed to compute each row from that row alone, but %s. Row "
            "chunks are computed as a whole instead.",
            self.label,
            reason,
        )

    def _difference(self, number: int, need: NDArray[np.int64]) -> str | None:
        """Compare rows computed separately with those of the whole block; return a description of a difference."""
        whole = self._block(number, need)
        # The requested rows may be all rows of a small block. Computing them together would only repeat the computation
        # of the whole block, so even and odd rows are computed separately.
        for places in (slice(0, None, 2), slice(1, None, 2)):
            wanted = self._bounds[number] + need[places]
            rows = concatenate_blocks(self._computed(wanted), self.layout, self.shape[1], self.dtype)
            for first in range(0, len(wanted), N_COMPARED):
                piece = slice(first, first + N_COMPARED)
                if not are_equal(as_layout(rows[piece], "dense"), as_layout(whole[places][piece], "dense")):
                    first, last = wanted[piece][[0, -1]].tolist()
                    return f"some of rows {first} to {last} differ when row chunk {number} is computed as a whole"
        return None

    @cached_property
    def _n_kinds(self) -> int:
        return len(set(self._kinds))

    @cached_property
    def _is_all_known(self) -> bool:
        return all(self._is_known(kind) for kind in set(self._kinds))

    def _is_known(self, kind: int) -> bool:
        """Return True if every function in row chunks of a kind is known or declared to be row-local."""
        nodes = self._blocks[self._kinds.index(kind)]
        return not any(isinstance(node, Apply) and node.is_believed for node in all_nodes(nodes))


def _arrays(block: Any) -> tuple[NDArray[Any], ...]:
    return (block.data, block.indices) if sp.issparse(block) else (block,)


def _all_rows(block: NDArray[Any] | sp.csr_matrix, label: str) -> RowBuffer:
    return as_matrix(block, label).fetch(np.arange(block.shape[0], dtype=np.int64))


def _may_stay_csr(nodes: list[Node]) -> bool:
    """Return True if nodes depend on CSR rows and on an `Elementwise` function, so that Dask's meta may be wrong."""
    below = list(all_nodes(nodes))
    return any(isinstance(node, Read) and node.matrix.layout == "csr" for node in below) and any(
        isinstance(function, Elementwise)
        for node in below
        if isinstance(node, Apply)
        for function, _ in calls(node.task)
    )
