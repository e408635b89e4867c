"""Array code that treats every row alone, run on the rows taken instead of on whole chunks.

For ``da.log1p(X * s)`` the rows wanted of the result need the same rows of X and of s, nothing else.
`_Compiler` walks the graph of an array from each of its row chunks down to the stored matrices and
turns it into nodes that know which of their own rows each row needs:

- `Read`: rows (and columns) of a stored matrix;
- `Take`: some rows of a node, in some order: a getitem task;
- `Concat`: the rows of several nodes one after another;
- `Apply`: any other task, whose row i comes from row i of each of its inputs.

A fetch asks the nodes what rows they need, reads each matrix once, and computes from the leaves up. Row chunks
whose graphs differ only in the names of what goes in are computed as one: the rows of a fetch lie in as many
chunks as there are blocks of them.

That a graph has this shape follows from the indices of Dask's blockwise layers and from block numbers.
That a *function* treats every row alone cannot be read off a graph; `dasksc.pushdown.trust` says who vouches for it.
Before the first row is served, all functions are tried on made-up rows, together, in parts and one by one. Where some
are merely believed, the first row chunk of each kind that is fetched from is also computed whole, once in each process,
and compared.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import dask.array as da
import numpy as np
import scipy.sparse as sp
from dask._task_spec import Alias, DataNode, GraphNode, Task, TaskRef, convert_legacy_graph
from dask.array import chunk
from dask.array._shuffle import _getitem as shuffle_getitem
from dask.array._shuffle import concatenate_arrays
from dask.array.core import concatenate_shaped, getter, getter_inline, getter_nofancy
from dask.blockwise import Blockwise
from dask.utils import ensure_dict
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.pushdown.computed import DaskMatrix, as_layout, check_shape, runs_by_block, stack
from dasksc.pushdown.elementwise import Elementwise
from dasksc.pushdown.known import owned, without_copies
from dasksc.pushdown.leaf import MatrixRows, gather_block
from dasksc.pushdown.trust import calls, trust_in
from dasksc.storage import Columns, FetchCost, Fetched, Matrix, as_matrix, join
from dasksc.storage.matrices import check_rows
from dasksc.storage.matrix import Layout

__all__ = ["NotRowLocalError", "RowLocalMatrix"]

logger = logging.getLogger("dasksc.lazy.rowlocal")

GETITEMS = (chunk.getitem, operator.getitem, getter, getter_inline, getter_nofancy)

# Rows computed together, about: what a layer makes of fewer would still be in the cache for the next one, but threads
# that come back to Python oftener wait for each other, which costs more.
N_COMPUTED = 4096

# Made-up rows of the trial: of functions that are known, and of others, whose mixing may depend on how many there are.
N_TRIED = {True: 6, False: 41}

# Rows computed together, about, where functions are merely believed: pieces of several chunks may be nearly twice as
# many, and no more than were tried.
N_BELIEVED = N_TRIED[False] // 2

# Rows compared at a time, dense.
N_COMPARED = 64

Key = Any
Rows = range | NDArray[np.int64]


class NotRowLocalError(Exception):
    """Why an array cannot be computed row by row; never leaves this package."""


class RowLocalMatrix(DaskMatrix):
    """Rows of a Dask array whose every row comes from single rows of stored matrices.

    Parameters
    ----------
    array
        Two-dimensional, with known chunk sizes.
    label
        What to call it in errors. Default: the array's name.
    strict
        Believe no function that is neither known nor declared to treat every row alone.

    Raises
    ------
    NotRowLocalError
        If the graph of the array combines rows, or a function in it is not known to leave them alone.
    """

    def __init__(self, array: da.Array, label: str | None = None, *, strict: bool = False) -> None:
        super().__init__(array, label)
        try:
            self._blocks = _Compiler(self.array, strict=strict).blocks()
            self._kinds = _kinds_of(self._blocks)
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # Whole chunks are right for any graph, also for one that is not written as expected here.
            raise NotRowLocalError(f"its graph could not be followed ({error!r})") from error
        # The kinds of row chunks that were found right; those that are known to be need no reading.
        self._proven: set[int] = set()
        self._believed = True
        self._lock = threading.Lock()
        self._layout = self._found_layout()

    def _found_layout(self) -> Layout:
        """What the blocks are, where Dask was told by SciPy what matrix products and powers of them would be."""
        nodes = self._blocks[0] if self._blocks else []
        if self.layout == "csr" or not _may_stay_csr(nodes):
            return self.layout
        need = np.zeros(min(1, int(self._bounds[1])), dtype=np.int64)
        run = _Run.made_up([(nodes, need)])
        try:
            with np.errstate(all="ignore"):
                return "csr" if all(sp.issparse(run.value((node,), (need,))) for node in nodes) else self.layout
        except Exception:  # whatever a function raises on rows that it was not written for; the trial will tell
            return self.layout

    @property
    def cost(self) -> FetchCost:
        """What memory a fetch takes, an estimate: rows as stored, after every layer, and put together.

        Layers are taken to leave zeros as they are, so that a sparse row has as many values as it has in storage.
        """
        run = _Run()
        for node in self._blocks[0] if self._blocks else []:
            run.demand(node, np.zeros(min(1, self.shape[0]), dtype=np.int64))
        costs = [matrix.cost for matrix, _ in run.needs.values()]
        row = self._row_bytes()
        if self.layout == "csr" and costs:
            itemsize = self.dtype.itemsize + np.dtype(np.int32).itemsize
            # Column numbers of a stored row are of two bytes at the least.
            values = sum(
                cost.row / (matrix.stored_dtype.itemsize + 2)
                for cost, (matrix, _) in zip(costs, run.needs.values(), strict=True)
            )
            row = 8 + min(values, self.shape[1]) * itemsize
        # One chunk is computed whole, for once, where functions are merely believed.
        once = 0 if self._is_all_known else super().cost.fixed
        return FetchCost(
            row=row,
            held=row,
            working=sum(cost.held + cost.working for cost in costs) + (2 + len(run.memory)) * row,
            fixed=sum(cost.fixed for cost in costs),
            kept=sum(cost.kept for cost in costs) + once,
            chunk_rows=max((cost.chunk_rows for cost in costs), default=0.0),
        )

    def fetch(self, rows: NDArray[np.int64]) -> Fetched:
        """Read the rows that `rows` need, once from each stored matrix, and compute on those.

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
            If rows do not ascend within [0, n_obs), or what is computed has another shape than the array
            was declared to have.
        """
        rows = check_rows(self.label, self.shape[0], rows)
        if not self._rows_are_independent(rows):
            return super().fetch(rows)
        blocks = self._computed(rows)
        if len({tuple(array.dtype for array in _arrays(block)) for block in blocks}) != 1:
            blocks = [stack(blocks, self.layout, self.shape[1], self.dtype)]
        # Side by side as they are: to copy them into one costs as much as a layer of the graph.
        return join([_all_rows(block, self.label) for block in blocks])

    def _computed(self, rows: NDArray[np.int64]) -> list[Any]:
        """Compute `rows`, some at a time."""
        n_together = N_COMPUTED if self._is_all_known else N_BELIEVED
        wanted = [
            (number, first, rows[first : min(first + n_together, stop)] - self._bounds[number])
            for number, start, stop in runs_by_block(rows, self._bounds)
            for first in range(start, stop, n_together)
        ]
        run = _Run.reading([(self._blocks[number], need) for number, _, need in wanted])
        blocks = []
        for _, several in itertools.groupby(wanted, key=lambda one: (self._kinds[one[0]], one[1] // n_together)):
            numbers, _, needs = zip(*several, strict=True)
            blocks.append(_joined([self._blocks[number] for number in numbers], needs, run, self))
            # Their memory, which is still in the cache, is taken for the next ones.
            run.values.clear()
        return blocks

    def _rows_are_independent(self, rows: NDArray[np.int64]) -> bool:
        """Try what computes `rows`: each kind of row chunk once in each process."""
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
        reason = self._trial(number, N_TRIED[is_known])
        if reason is None and not is_known:
            reason = self._difference(number, need)
        if reason is None:
            self._proven.add(self._kinds[number])
            return
        self._believed = False
        logger.warning(
            "%s: the functions in its graph were believed to treat every row alone, but %s. Its row chunks are "
            "computed whole.",
            self.label,
            reason,
        )

    def _trial(self, number: int, n_tried: int) -> str | None:
        """What shows with made-up values that the rows of a block are not independent, if anything does."""
        nodes = self._blocks[number]
        n_rows = int(self._bounds[number + 1] - self._bounds[number])
        generator = np.random.default_rng(0)
        # Some come twice, in small blocks most.
        together = np.sort(generator.integers(n_rows, size=n_tried))
        together[-1] = together[-2]
        places = np.arange(n_tried)
        alone = np.unique(np.linspace(0, n_tried - 1, 6).astype(np.int64))
        parts = [places[i : i + 1] for i in alone] + [places[:7], places[7:20], places[20:]]

        def computed(need: NDArray[np.int64]) -> NDArray[Any]:
            with np.errstate(all="ignore"):
                values = as_layout(_joined([nodes], (need,), run, self), "dense")
            return np.asarray(values)

        try:
            run = _Run.made_up([(nodes, together)])
            expected = computed(together)
            for part in parts:
                if len(part) and not _equal(computed(together[part]), expected[part]):
                    return "made-up rows gave other values alone than among others"
            for order in (places[::-1], generator.permutation(places)):
                if not _equal(computed(together[order]), expected[order]):
                    return "made-up rows gave other values in another order"
        except InputError as error:
            return f"with made-up rows, {error}"
        except Exception as error:  # whatever a function raises on rows that it was not written for
            return f"made-up rows made one raise {error!r}"
        return None

    def _difference(self, number: int, need: NDArray[np.int64]) -> str | None:
        """What shows that rows of a block are others when all of it is computed, if anything does."""
        whole = self._block(number, need)
        # Every other row: all rows of a small block, computed in one piece, are the block itself.
        for places in (slice(0, None, 2), slice(1, None, 2)):
            wanted = self._bounds[number] + need[places]
            rows = stack(self._computed(wanted), self.layout, self.shape[1], self.dtype)
            for first in range(0, len(wanted), N_COMPARED):
                piece = slice(first, first + N_COMPARED)
                if not _equal(as_layout(rows[piece], "dense"), as_layout(whole[places][piece], "dense")):
                    first, last = wanted[piece][[0, -1]].tolist()
                    return f"of rows {first} to {last} some are others when row chunk {number} is computed whole"
        return None

    @cached_property
    def _n_kinds(self) -> int:
        return len(set(self._kinds))

    @cached_property
    def _is_all_known(self) -> bool:
        return all(self._is_known(kind) for kind in set(self._kinds))

    def _is_known(self, kind: int) -> bool:
        """Whether nothing that computes row chunks of a kind is merely believed."""
        nodes = self._blocks[self._kinds.index(kind)]
        return not any(isinstance(node, Apply) and node.is_believed for node in _all_nodes(nodes))


def _joined(blocks: list[list[Node]], needs: Needs, run: _Run, matrix: DaskMatrix) -> Any:
    """The rows `needs` of row chunks of one kind, each given by its column chunks."""
    n_rows = sum(map(len, needs))
    parts = []
    for nodes, width in zip(zip(*blocks, strict=True), matrix.array.chunks[1], strict=True):
        part = run.value(nodes, needs)
        check_shape(part, (n_rows, width), matrix)
        parts.append(as_layout(part, matrix.layout))
    if len(parts) == 1:
        return parts[0]
    return sp.csr_matrix(sp.hstack(parts, format="csr")) if matrix.layout == "csr" else np.hstack(parts)


def _arrays(block: Any) -> tuple[NDArray[Any], ...]:
    return (block.data, block.indices) if sp.issparse(block) else (block,)


def _all_rows(block: NDArray[Any] | sp.csr_matrix, label: str) -> Fetched:
    return as_matrix(block, label).fetch(np.arange(block.shape[0], dtype=np.int64))


def _equal(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.shape == b.shape and np.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)


def _stacked(blocks: list[Any]) -> Any:
    if len(blocks) == 1:
        return blocks[0]
    return sp.vstack(blocks, format="csr") if any(map(sp.issparse, blocks)) else np.concatenate(blocks)


# Nodes: `n_rows` is how many rows a node has; the demand for its rows goes down, their values come up, those of
# alike nodes one after the other.


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Rows of a stored matrix."""

    matrix: Matrix
    rows: Rows
    # Which columns, or all.
    columns: NDArray[np.int64] | None = None

    @property
    def n_rows(self) -> int:
        return len(self.rows)

    def demand(self, need: NDArray[np.int64], run: _Run) -> None:
        run.needs.setdefault(id(self.matrix), (self.matrix, []))[1].append(_chosen(self.rows, need))

    def value(self, nodes: tuple[Read, ...], needs: Needs, run: _Run) -> Any:
        rows, fetched = run.fetched[id(self.matrix)]
        wanted = [_chosen(node.rows, need) for node, need in zip(nodes, needs, strict=True)]
        positions = np.searchsorted(rows, np.concatenate(wanted))
        n_vars = self.matrix.shape[1]
        if self.columns is None:
            return gather_block(fetched, positions)
        if len(np.unique(self.columns)) < len(self.columns):
            return gather_block(fetched, positions)[:, self.columns]
        return gather_block(fetched, positions, columns=Columns(positions=self.columns, n_vars=n_vars))


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """Some rows of a node, and what else a getitem does to them."""

    child: Node
    rows: Rows
    rest: tuple[Any, ...] = ()

    @property
    def n_rows(self) -> int:
        return len(self.rows)

    def demand(self, need: NDArray[np.int64], run: _Run) -> None:
        run.demand(self.child, self._chosen(need, run))

    def value(self, nodes: tuple[Take, ...], needs: Needs, run: _Run) -> Any:
        chosen = tuple(node._chosen(need, run) for node, need in zip(nodes, needs, strict=True))
        if all(map(operator.is_, chosen, needs)):
            chosen = needs
        taken = run.value(tuple(node.child for node in nodes), chosen)
        return taken[(slice(None), *self.rest)] if self.rest else taken

    def _chosen(self, need: NDArray[np.int64], run: _Run) -> NDArray[np.int64]:
        # The very same need, where the rows are all rows, so that what is computed for it is found again.
        if isinstance(self.rows, range) and self.rows == range(self.child.n_rows):
            return need
        chosen: NDArray[np.int64] = run.kept(("take", id(self), id(need)), lambda: _chosen(self.rows, need), need)
        return chosen


@dataclass(frozen=True, slots=True, eq=False)
class Concat:
    """The rows of several nodes, one after another."""

    children: tuple[Node, ...]
    bounds: NDArray[np.int64]

    @property
    def n_rows(self) -> int:
        return int(self.bounds[-1])

    def demand(self, need: NDArray[np.int64], run: _Run) -> None:
        for child, _, rows in self._parts(need, run):
            run.demand(child, rows)

    def value(self, nodes: tuple[Concat, ...], needs: Needs, run: _Run) -> Any:
        return _stacked([node._whole(need, run) for node, need in zip(nodes, needs, strict=True)])

    def _whole(self, need: NDArray[np.int64], run: _Run) -> Any:
        parts = self._parts(need, run)
        blocks = [run.value((child,), (rows,)) for child, _, rows in parts]
        order = np.argsort(np.concatenate([places for _, places, _ in parts]), kind="stable")
        return _stacked(blocks)[order]

    def _parts(self, need: NDArray[np.int64], run: _Run) -> list[tuple[Node, NDArray[np.int64], NDArray[np.int64]]]:
        parts: list[tuple[Node, NDArray[np.int64], NDArray[np.int64]]] = run.kept(
            ("concat", id(self), id(need)), lambda: list(self._split(need)), need
        )
        return parts

    def _split(self, need: NDArray[np.int64]) -> Iterator[tuple[Node, NDArray[np.int64], NDArray[np.int64]]]:
        which = np.searchsorted(self.bounds, need, side="right") - 1
        # Without rows to take, the first child says what no rows look like.
        for number in np.unique(which).tolist() or [0]:
            places = np.flatnonzero(which == number)
            yield self.children[number], places, need[places] - self.bounds[number]


@dataclass(frozen=True, slots=True, eq=False)
class Apply:
    """A task on the same rows of all its inputs."""

    task: GraphNode
    # In the order in which the task names them.
    inputs: Mapping[Key, Node]
    # Inputs that no stored matrix is behind, and whether their rows are the rows of the block; in that order, too.
    constants: Mapping[Key, bool]
    graph: Graph
    n_rows: int
    # Whether it calls what is neither known nor declared to treat every row alone.
    is_believed: bool

    def demand(self, need: NDArray[np.int64], run: _Run) -> None:
        for child in self.inputs.values():
            run.demand(child, need)

    def value(self, nodes: tuple[Apply, ...], needs: Needs, run: _Run) -> Any:
        # The first task is called for all: the others say the same of their own inputs.
        children = zip(*(node.inputs.values() for node in nodes), strict=True)
        values = {key: run.value(several, needs) for key, several in zip(self.inputs, children, strict=True)}
        constants = zip(*(node.constants for node in nodes), strict=True)
        for (key, aligned), keys in zip(self.constants.items(), constants, strict=True):
            if aligned:
                values[key] = _aligned(nodes, keys, needs, run)
            else:
                values[key] = self.graph.constant(key, None)
        function = getattr(self.task, "func", None)
        return self.task({key: owned(function, value) for key, value in values.items()})


Node = Read | Take | Concat | Apply
Needs = tuple[NDArray[np.int64], ...]


def _aligned(nodes: tuple[Apply, ...], keys: tuple[Key, ...], needs: Needs, run: _Run) -> Any:
    """Constants of several nodes, the rows that are needed of each, one after another."""
    constants = [node.graph.constant(key, run) for node, key in zip(nodes, keys, strict=True)]
    if len(set(keys)) == 1 and constants[0].shape[0] == 1 != min(node.n_rows for node in nodes):
        # One row for all, which is broadcast.
        return constants[0]
    return _stacked(
        [
            constant[need if constant.shape[0] == node.n_rows else np.zeros(len(need), dtype=np.int64)]
            for node, constant, need in zip(nodes, constants, needs, strict=True)
        ]
    )


def _may_stay_csr(nodes: list[Node]) -> bool:
    """Whether some nodes come of CSR rows, by functions of which Dask was told wrongly what they make of them."""
    below = list(_all_nodes(nodes))
    return any(isinstance(node, Read) and node.matrix.layout == "csr" for node in below) and any(
        isinstance(function, Elementwise)
        for node in below
        if isinstance(node, Apply)
        for function, _ in calls(node.task)
    )


def _all_nodes(nodes: list[Node]) -> Iterator[Node]:
    """Yield nodes and all that they are computed from."""
    # Without recursion, since graphs may be deeper than Python's stack.
    todo, seen = list(nodes), set()
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, Apply):
            todo.extend(node.inputs.values())
        elif isinstance(node, Concat):
            todo.extend(node.children)
        elif isinstance(node, Take):
            todo.append(node.child)


def _chosen(rows: Rows, need: NDArray[np.int64]) -> NDArray[np.int64]:
    return rows.start + rows.step * need if isinstance(rows, range) else rows[need]


@dataclass(slots=True, eq=False)
class _Run:
    """One fetch: what is needed of each matrix, what was read of it, and what was computed."""

    needs: dict[int, tuple[Matrix, list[NDArray[np.int64]]]] = field(default_factory=dict)
    fetched: dict[int, tuple[NDArray[np.int64], Fetched]] = field(default_factory=dict)
    memory: dict[Key, Any] = field(default_factory=dict)
    values: dict[Key, Any] = field(default_factory=dict)

    @classmethod
    def reading(cls, wanted: list[tuple[list[Node], NDArray[np.int64]]]) -> _Run:
        """Fetch what `wanted` needs: one fetch of each matrix."""
        return cls._started(wanted, lambda matrix, rows: matrix.fetch(rows))

    @classmethod
    def made_up(cls, wanted: list[tuple[list[Node], NDArray[np.int64]]]) -> _Run:
        """Make up what `wanted` needs, reading nothing."""
        return cls._started(wanted, _made_up)

    @classmethod
    def _started(
        cls,
        wanted: list[tuple[list[Node], NDArray[np.int64]]],
        fetch: Callable[[Matrix, NDArray[np.int64]], Fetched],
    ) -> _Run:
        run = cls()
        for nodes, need in wanted:
            for node in nodes:
                run.demand(node, need)
        for key, (matrix, parts) in run.needs.items():
            rows = np.unique(np.concatenate(parts))
            run.fetched[key] = rows, fetch(matrix, rows)
        return run

    def demand(self, node: Node, need: NDArray[np.int64]) -> None:
        """Note what `need` of `node` comes down to; once where it is used twice."""
        self.kept(("demand", id(node), id(need)), lambda: node.demand(need, self), need)

    def value(self, nodes: tuple[Node, ...], needs: Needs) -> Any:
        """Compute `needs` of alike nodes, one after the other; once where they are used twice."""
        first: Any = nodes[0]
        key = (*map(id, nodes), *map(id, needs))
        if key not in self.values:
            # With the needs, whose ids are in the key.
            self.values[key] = first.value(nodes, needs, self), needs
        return self.values[key][0]

    def kept(self, key: Key, compute: Callable[[], Any], *alive: Any) -> Any:
        """Compute once; `alive` are the objects whose ids are in the key."""
        if key not in self.memory:
            self.memory[key] = compute(), alive
        return self.memory[key][0]


def _made_up(matrix: Matrix, rows: NDArray[np.int64]) -> Fetched:
    """Rows unlike each other in scale and in sparsity, within the range of any dtype."""
    generator = np.random.default_rng(len(rows))
    largest = np.iinfo(matrix.dtype).max if matrix.dtype.kind in "iu" else 10_000
    scale = np.geomspace(1, min(largest, 10_000) - 1, max(1, len(rows)))[: len(rows)]
    share = np.linspace(0.8, 0.2, len(rows))
    shape = (len(rows), matrix.shape[1])
    values = 1 + (generator.random(shape) * scale[:, None]).astype(np.int64)
    values[generator.random(shape) >= share[:, None]] = 0
    block = values.astype(matrix.dtype)
    made_up = as_matrix(sp.csr_matrix(block) if matrix.layout == "csr" else block, f"made-up rows for {matrix.label}")
    return made_up.fetch(np.arange(len(rows), dtype=np.int64))


class Graph:
    """The tasks of an array, all layers together.

    Parameters
    ----------
    array
        The array.
    """

    def __init__(self, array: da.Array) -> None:
        self.layers = array.dask.layers
        self.nodes: dict[Key, GraphNode] = convert_legacy_graph(ensure_dict(array.dask))
        self._reaches: dict[Key, bool] = {}
        self._constants: dict[Key, Any] = {}

    def reaches(self, key: Key) -> bool:
        """Whether a stored matrix is behind a key."""
        # Without recursion, since graphs may be deeper than Python's stack.
        todo = [key]
        while todo:
            current = todo[-1]
            node = self.nodes[current]
            unknown = [dep for dep in node.dependencies if dep not in self._reaches]
            if current in self._reaches or not unknown:
                ours = isinstance(node, DataNode) and isinstance(node.value, MatrixRows)
                self._reaches[current] = ours or any(self._reaches[dep] for dep in node.dependencies)
                todo.pop()
            else:
                todo.extend(unknown)
        return self._reaches[key]

    def constant(self, key: Key, run: _Run | None) -> Any:
        """Compute a key that no stored matrix is behind; kept for this run, or, without one, for good."""
        if run is not None:
            return run.kept(("constant", key), lambda: self._computed(key))
        if key not in self._constants:
            self._constants[key] = self._computed(key)
        return self._constants[key]

    def _computed(self, key: Key) -> Any:
        values: dict[Key, Any] = {}
        todo = [key]
        while todo:
            node = self.nodes[todo[-1]]
            unknown = [dep for dep in node.dependencies if dep not in values]
            if unknown:
                todo.extend(unknown)
                continue
            values[todo.pop()] = node({dep: values[dep] for dep in node.dependencies})
        return values[key]


class _Compiler:
    """Turns the graph of an array into nodes, or raises `NotRowLocalError`."""

    def __init__(self, array: da.Array, *, strict: bool) -> None:
        self._array = array
        self._strict = strict
        self._graph = Graph(array)
        self._nodes: dict[Key, Node] = {}

    def blocks(self) -> list[list[Node]]:
        """The nodes of every row chunk, one for each chunk of columns."""
        n_row_chunks, n_column_chunks = self._array.numblocks
        blocks = []
        for i in range(n_row_chunks):
            nodes = [self._node((self._array.name, i, j)) for j in range(n_column_chunks)]
            for node in nodes:
                if node.n_rows != self._array.chunks[0][i]:
                    raise NotRowLocalError(f"its row chunk {i} is made of {node.n_rows} rows")
            blocks.append(nodes)
        return blocks

    def _node(self, key: Key) -> Node:
        if key not in self._nodes:
            if not self._graph.reaches(key):
                raise NotRowLocalError(f"{_name(key)!r} comes from no array that dasksc opened")
            self._nodes[key] = self._compiled(key, self._graph.nodes[key])
        return self._nodes[key]

    def _compiled(self, key: Key, node: GraphNode) -> Node:
        if isinstance(node, Alias):
            return self._node(node.target)
        if isinstance(node, DataNode) and isinstance(node.value, MatrixRows):
            return Read(node.value.matrix, range(node.value.shape[0]))
        if not isinstance(node, Task):
            raise NotRowLocalError(f"layer {_name(key)!r} holds a {type(node).__name__}")
        if node.func in GETITEMS and isinstance(node.args[0], TaskRef):
            return self._taken(key, node.args[0].key, self._literal(key, node.args[1]))
        if node.func is shuffle_getitem:
            return self._taken(key, node.args[0].key, self._literal(key, node.args[1])[1])
        if node.func is concatenate_arrays:
            blocks, sorter, axis = node.args
            if axis == 0:
                whole = self._concatenated([self._node(ref.key) for ref in blocks.args])
                order = np.argsort(self._literal(key, sorter)[1])
                return Take(whole, order.astype(np.int64))
        if node.func is concatenate_shaped:
            pieces, shape = node.args
            keys = _keys(pieces)
            if len(keys) == shape[0] > 1:
                return self._concatenated([self._node(piece) for piece in keys])
        return self._applied(key, node)

    def _literal(self, key: Key, value: Any) -> Any:
        """A value in the graph: itself, or behind a reference to one."""
        if isinstance(value, TaskRef):
            value = self._graph.nodes[value.key]
        if isinstance(value, GraphNode):
            if value.dependencies:
                raise NotRowLocalError(f"layer {_name(key)!r} takes rows that are computed")
            return value({}) if not isinstance(value, DataNode) else value.value
        return value

    def _taken(self, key: Key, source: Key, index: Any) -> Node:
        child = self._node(source)
        first, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(first, slice):
            rows: Rows = range(child.n_rows)[first]
        elif isinstance(first, list | np.ndarray) and np.ndim(first) == 1:
            rows = np.arange(child.n_rows, dtype=np.int64)[first]
        else:
            raise NotRowLocalError(f"layer {_name(key)!r} indexes rows with {first!r}")
        whole = not rest or (isinstance(rest[0], slice) and rest[0] == slice(None))
        known = isinstance(rest[0], slice | list | np.ndarray) if rest else True
        if not isinstance(child, Read) or len(rest) > 1 or not known:
            return Take(child, rows, tuple(rest))
        rows = child.rows[first] if isinstance(first, slice) else _chosen(child.rows, np.asarray(rows))
        if whole:
            return Read(child.matrix, rows, child.columns)
        every = np.arange(child.matrix.shape[1], dtype=np.int64)
        columns = (every if child.columns is None else child.columns)[rest[0]]
        return Read(child.matrix, rows, None if np.array_equal(columns, every) else columns)

    def _concatenated(self, children: list[Node]) -> Node:
        bounds = np.cumsum([0, *(child.n_rows for child in children)]).astype(np.int64)
        return Concat(tuple(children), bounds)

    def _applied(self, key: Key, task: Task) -> Node:
        is_believed = self._check_functions(key, task)
        aligned = self._alignment(key, task)
        named = [item.key for item in _flat(task) if isinstance(item, TaskRef)]
        dependencies = dict.fromkeys(named if set(named) == task.dependencies else task.dependencies)
        inputs = {dep: self._node(dep) for dep in dependencies if self._graph.reaches(dep)}
        constants = {dep: aligned[dep] for dep in dependencies if dep not in inputs}
        lengths = {node.n_rows for node in inputs.values()}
        if not all(aligned[dep] for dep in inputs) or len(lengths) != 1:
            raise NotRowLocalError(f"layer {_name(key)!r} combines rows with other rows")
        if type(task) is Task and (function := without_copies(task.func)) is not task.func:
            task = Task(task.key, function, *task.args, **task.kwargs)
        return Apply(task, inputs, constants, self._graph, lengths.pop(), is_believed)

    def _alignment(self, key: Key, task: Task) -> dict[Key, bool]:
        """Which inputs of a task have the rows of its result."""
        layer = self._graph.layers.get(_name(key))
        if isinstance(layer, Blockwise):
            return self._blockwise_alignment(key, task, layer)
        # Elsewhere block numbers tell: the same block of rows in, the same block of rows out.
        aligned = {}
        for dep in task.dependencies:
            same = isinstance(dep, tuple) and isinstance(key, tuple) and dep[1:2] == key[1:2] != ()
            if not same or not self._graph.reaches(dep):
                raise NotRowLocalError(f"layer {_name(key)!r} combines chunks of rows")
            aligned[dep] = True
        return aligned

    def _blockwise_alignment(self, key: Key, task: Task, layer: Blockwise) -> dict[Key, bool]:
        if layer.io_deps:
            raise NotRowLocalError(f"layer {_name(key)!r} is told where its block lies (block_info or block_id)")
        if not layer.output_indices or layer.output_indices[0] in layer.new_axes:
            raise NotRowLocalError(f"layer {_name(key)!r} keeps no rows")
        row = layer.output_indices[0]
        by_name: dict[Key, bool] = {}
        for name, indices in layer.indices:
            name = name.key if isinstance(name, TaskRef) else name
            places = [place for place, index in enumerate(indices or ()) if index == row]
            if places not in ([], [0]) or by_name.setdefault(name, bool(places)) != bool(places):
                raise NotRowLocalError(f"layer {_name(key)!r} turns rows into columns")
        return {dep: by_name.get(dep, by_name.get(_name(dep), False)) for dep in task.dependencies}

    def _check_functions(self, key: Key, task: Task) -> bool:
        """Refuse a task that calls what nobody vouches for; return whether it calls what is merely believed."""
        is_believed = False
        for function, keywords in calls(task):
            trust = trust_in(function, keywords)
            if trust is None or (trust == "believed" and self._strict):
                who = "only you know whether" if trust is None else "dasksc.array-code: strict does not believe that"
                raise NotRowLocalError(
                    f"layer {_name(key)!r} applies {getattr(function, '__qualname__', function)!r}, and {who} it "
                    "treats every row alone; if it does, say dasksc.row_local(function)"
                )
            is_believed |= trust == "believed"
        return is_believed


def _kinds_of(blocks: list[list[Node]]) -> list[int]:
    """Number the row chunks so that those have one number that are computed alike."""
    kinds: list[int] = []
    samples: list[list[Node]] = []
    for block in blocks:
        # What is unlike its neighbours is mostly the first or the last of an array.
        for kind in range(len(samples) - 1, max(-1, len(samples) - 4), -1):
            if len(block) == len(samples[kind]) and all(map(_alike, block, samples[kind])):
                kinds.append(kind)
                break
        else:
            kinds.append(len(samples))
            samples.append(block)
    return kinds


def _alike(one: Node, other: Node) -> bool:
    """Whether two nodes do the same to rows that lie elsewhere."""
    if one is other:
        return True
    if isinstance(one, Read) and isinstance(other, Read):
        same = one.columns is other.columns or np.array_equal(one.columns, other.columns)  # type: ignore[arg-type]
        return one.matrix is other.matrix and same
    if isinstance(one, Take) and isinstance(other, Take):
        return _same(one.rest, other.rest) and _alike(one.child, other.child)
    if not (isinstance(one, Apply) and isinstance(other, Apply)):
        return False
    places = _input_places(one)
    return (
        places is not None
        and places == _input_places(other)
        and _same(one.task, other.task)
        and list(one.constants.values()) == list(other.constants.values())
        and all(a == b or aligned for (a, aligned), b in zip(one.constants.items(), other.constants, strict=True))
        and len(one.inputs) == len(other.inputs)
        and all(map(_alike, one.inputs.values(), other.inputs.values()))
    )


def _input_places(node: Apply) -> list[bool] | None:
    """Of the references in a task, in order, which are to inputs; None if some are where they cannot be seen."""
    keys = [item.key for item in _flat(node.task) if isinstance(item, TaskRef)]
    return [key in node.inputs for key in keys] if set(keys) == node.task.dependencies else None


def _same(one: Any, other: Any) -> bool:
    """Whether two tasks have the same functions and values in them, and references in the same places."""
    ones, others = list(_flat(one)), list(_flat(other))
    if len(ones) != len(others):
        return False
    names: tuple[dict[Key, int], dict[Key, int]] = ({}, {})
    for a, b in zip(ones, others, strict=True):
        if isinstance(a, TaskRef) and isinstance(b, TaskRef):
            if names[0].setdefault(a.key, len(names[0])) != names[1].setdefault(b.key, len(names[1])):
                return False
        elif a is not b and not (type(a) is type(b) and isinstance(a, _COMPARABLE) and repr(a) == repr(b)):
            return False
    return True


# Values that are the same if they are written alike, which 0.0 and -0.0 are not; others are if they are one object.
_COMPARABLE = (str, bytes, bool, int, float, complex, slice, type(None), np.generic, np.dtype)


def _flat(value: Any) -> Iterator[Any]:
    """A task as one row of functions, values and references, from which it could be written again."""
    if isinstance(value, Task):
        yield value.func
        yield from _flat((value.args, value.kwargs))
    elif isinstance(value, Alias):
        yield TaskRef(value.target)
    elif isinstance(value, DataNode):
        yield from _flat(value.value)
    elif isinstance(value, functools.partial):
        yield from _flat(("partial", value.func, value.args, value.keywords))
    elif isinstance(value, Mapping):
        yield f"mapping of {len(value)}"
        for key, one in value.items():
            yield key
            yield from _flat(one)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} of {len(value)}"
        for one in value:
            yield from _flat(one)
    else:
        yield value


def _keys(value: Any) -> list[Key]:
    """The keys in a list of references, whichever way Dask writes it."""
    parts = value.args if isinstance(value, Task) else value
    return [part.target if isinstance(part, Alias) else part.key for part in parts if isinstance(part, TaskRef | Alias)]


def _name(key: Key) -> str:
    return str(key[0] if isinstance(key, tuple) else key)
