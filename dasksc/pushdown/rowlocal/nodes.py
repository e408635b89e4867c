"""What compiled array code consists of, and its run on the rows that a fetch takes.

`n_rows` is how many rows a node has; the demand for its rows goes down, their values come up, those of alike nodes one
after the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp
from dask.task_spec import GraphNode
from numpy.typing import NDArray

from dasksc.pushdown.computed_chunks import DaskMatrix, as_layout, check_shape
from dasksc.pushdown.csr_functions import owned
from dasksc.pushdown.dask_leaf import gather_block
from dasksc.pushdown.rowlocal.graph import Graph, Key
from dasksc.storage import Columns, Fetched, Matrix

__all__ = ["Apply", "Concat", "Needs", "Node", "Read", "Rows", "Run", "Take", "all_nodes", "chosen_rows", "joined"]

Rows = range | NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Rows of a stored matrix."""

    matrix: Matrix
    rows: Rows
    # Which columns, or all.
    columns: NDArray[np.int64] | None = None

    @property
    def n_rows(self) -> int:
        """How many rows there are."""
        return len(self.rows)

    def demand(self, need: NDArray[np.int64], run: Run) -> None:
        """Note what `need` of the rows comes down to."""
        run.needs.setdefault(id(self.matrix), (self.matrix, []))[1].append(chosen_rows(self.rows, need))

    def value(self, nodes: tuple[Read, ...], needs: Needs, run: Run) -> Any:
        """Compute `needs` of alike nodes, one after the other."""
        rows, fetched = run.fetched[id(self.matrix)]
        wanted = [chosen_rows(node.rows, need) for node, need in zip(nodes, needs, strict=True)]
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
        """How many rows there are."""
        return len(self.rows)

    def demand(self, need: NDArray[np.int64], run: Run) -> None:
        """Note what `need` of the rows comes down to."""
        run.demand(self.child, self._chosen(need, run))

    def value(self, nodes: tuple[Take, ...], needs: Needs, run: Run) -> Any:
        """Compute `needs` of alike nodes, one after the other."""
        chosen = tuple(node._chosen(need, run) for node, need in zip(nodes, needs, strict=True))
        if all(map(operator.is_, chosen, needs)):
            chosen = needs
        taken = run.value(tuple(node.child for node in nodes), chosen)
        return taken[(slice(None), *self.rest)] if self.rest else taken

    def _chosen(self, need: NDArray[np.int64], run: Run) -> NDArray[np.int64]:
        # The very same need, where the rows are all rows, so that what is computed for it is found again.
        if isinstance(self.rows, range) and self.rows == range(self.child.n_rows):
            return need
        chosen: NDArray[np.int64] = run.kept(("take", id(self), id(need)), lambda: chosen_rows(self.rows, need), need)
        return chosen


@dataclass(frozen=True, slots=True, eq=False)
class Concat:
    """The rows of several nodes, one after another."""

    children: tuple[Node, ...]
    bounds: NDArray[np.int64]

    @property
    def n_rows(self) -> int:
        """How many rows there are."""
        return int(self.bounds[-1])

    def demand(self, need: NDArray[np.int64], run: Run) -> None:
        """Note what `need` of the rows comes down to."""
        for child, _, rows in self._parts(need, run):
            run.demand(child, rows)

    def value(self, nodes: tuple[Concat, ...], needs: Needs, run: Run) -> Any:
        """Compute `needs` of alike nodes, one after the other."""
        return _stacked([node._whole(need, run) for node, need in zip(nodes, needs, strict=True)])

    def _whole(self, need: NDArray[np.int64], run: Run) -> Any:
        parts = self._parts(need, run)
        blocks = [run.value((child,), (rows,)) for child, _, rows in parts]
        order = np.argsort(np.concatenate([places for _, places, _ in parts]), kind="stable")
        return _stacked(blocks)[order]

    def _parts(self, need: NDArray[np.int64], run: Run) -> list[tuple[Node, NDArray[np.int64], NDArray[np.int64]]]:
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

    def demand(self, need: NDArray[np.int64], run: Run) -> None:
        """Note what `need` of the rows comes down to."""
        for child in self.inputs.values():
            run.demand(child, need)

    def value(self, nodes: tuple[Apply, ...], needs: Needs, run: Run) -> Any:
        """Compute `needs` of alike nodes, one after the other."""
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


def _aligned(nodes: tuple[Apply, ...], keys: tuple[Key, ...], needs: Needs, run: Run) -> Any:
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


def _stacked(blocks: list[Any]) -> Any:
    if len(blocks) == 1:
        return blocks[0]
    return sp.vstack(blocks, format="csr") if any(map(sp.issparse, blocks)) else np.concatenate(blocks)


def chosen_rows(rows: Rows, need: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers in a matrix, or in a node, of some of the rows taken from it."""
    return rows.start + rows.step * need if isinstance(rows, range) else rows[need]


def all_nodes(nodes: list[Node]) -> Iterator[Node]:
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


@dataclass(slots=True, eq=False)
class Run:
    """One fetch: what is needed of each matrix, what was read of it, and what was computed."""

    needs: dict[int, tuple[Matrix, list[NDArray[np.int64]]]] = field(default_factory=dict)
    fetched: dict[int, tuple[NDArray[np.int64], Fetched]] = field(default_factory=dict)
    memory: dict[Key, Any] = field(default_factory=dict)
    values: dict[Key, Any] = field(default_factory=dict)

    @classmethod
    def reading(cls, wanted: list[tuple[list[Node], NDArray[np.int64]]]) -> Run:
        """Fetch what `wanted` needs: one fetch of each matrix."""
        return cls.started(wanted, lambda matrix, rows: matrix.fetch(rows))

    @classmethod
    def started(
        cls,
        wanted: list[tuple[list[Node], NDArray[np.int64]]],
        fetch: Callable[[Matrix, NDArray[np.int64]], Fetched],
    ) -> Run:
        """Take what `wanted` needs from what `fetch` returns, once for each matrix."""
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


def joined(blocks: list[list[Node]], needs: Needs, run: Run, matrix: DaskMatrix) -> Any:
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
