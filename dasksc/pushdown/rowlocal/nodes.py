"""Nodes of compiled array code, and their evaluation on the rows of a fetch.

Each node has `n_rows` rows. Demand for rows passes down to the leaves and values pass up. The values of nodes of the
same kind are concatenated.
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
from dasksc.storage import Columns, Matrix, RowBuffer

__all__ = ["Apply", "Concat", "Needs", "Node", "Read", "Rows", "Run", "Take", "all_nodes", "chosen_rows", "joined"]

Rows = range | NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Rows of a stored matrix."""

    matrix: Matrix
    rows: Rows
    # Column numbers; None stands for all columns.
    columns: NDArray[np.int64] | None = None

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def demand(self, need: NDArray[np.int64], run: Run) -> None:
        """Record the matrix rows from which the rows in `need` are computed."""
        run.needs.setdefault(id(self.matrix), (self.matrix, []))[1].append(chosen_rows(self.rows, need))

    def value(self, nodes: tuple[Read, ...], needs: Needs, run: Run) -> Any:
        """Compute and concatenate rows of nodes of the same kind; `needs` holds the row numbers for each node."""
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
    """Selection of rows of a node by a getitem task; the task's indices for other axes are applied afterwards."""

    child: Node
    rows: Rows
    rest: tuple[Any, ...] = ()

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def demand(self, need: NDArray[np.int64], run: Run) -> None:
        """Record the matrix rows from which the rows in `need` are computed."""
        run.demand(self.child, self._chosen(need, run))

    def value(self, nodes: tuple[Take, ...], needs: Needs, run: Run) -> Any:
        """Compute and concatenate rows of nodes of the same kind; `needs` holds the row numbers for each node."""
        chosen = tuple(node._chosen(need, run) for node, need in zip(nodes, needs, strict=True))
        if all(map(operator.is_, chosen, needs)):
            chosen = needs
        selected = run.value(tuple(node.child for node in nodes), chosen)
        return selected[(slice(None), *self.rest)] if self.rest else selected

    def _chosen(self, need: NDArray[np.int64], run: Run) -> NDArray[np.int64]:
        # If all rows are taken, return `need` itself, so that values cached under its id are found.
        if isinstance(self.rows, range) and self.rows == range(self.child.n_rows):
            return need
        chosen: NDArray[np.int64] = run.kept(("take", id(self), id(need)), lambda: chosen_rows(self.rows, need), need)
        return chosen


@dataclass(frozen=True, slots=True, eq=False)
class Concat:
    """Rows of several nodes, concatenated."""

    children: tuple[Node, ...]
    bounds: NDArray[np.int64]

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return int(self.bounds[-1])

    def demand(self, need: NDArray[np.int64], run: Run) -> None:
        """Record the matrix rows from which the rows in `need` are computed."""
        for child, _, rows in self._parts(need, run):
            run.demand(child, rows)

    def value(self, nodes: tuple[Concat, ...], needs: Needs, run: Run) -> Any:
        """Compute and concatenate rows of nodes of the same kind; `needs` holds the row numbers for each node."""
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
        # If no rows are requested, the first child supplies an empty block of the right class.
        for number in np.unique(which).tolist() or [0]:
            places = np.flatnonzero(which == number)
            yield self.children[number], places, need[places] - self.bounds[number]


@dataclass(frozen=True, slots=True, eq=False)
class Apply:
    """Task applied to the same rows of all its inputs."""

    task: GraphNode
    # In the order in which the task refers to them.
    inputs: Mapping[Key, Node]
    # Inputs that do not depend on a stored matrix, in the same order. Each input maps to True if its rows are the rows
    # of the block.
    constants: Mapping[Key, bool]
    graph: Graph
    n_rows: int
    # True if the task calls a function that is neither known nor declared to treat every row independently.
    is_believed: bool

    def demand(self, need: NDArray[np.int64], run: Run) -> None:
        """Record the matrix rows from which the rows in `need` are computed."""
        for child in self.inputs.values():
            run.demand(child, need)

    def value(self, nodes: tuple[Apply, ...], needs: Needs, run: Run) -> Any:
        """Compute and concatenate rows of nodes of the same kind; `needs` holds the row numbers for each node."""
        # One call of the first task serves all nodes: their tasks differ only in the names of their inputs.
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
    """Concatenate rows of the constants of several nodes; `needs` holds the row numbers for each node."""
    constants = [node.graph.constant(key, run) for node, key in zip(nodes, keys, strict=True)]
    if len(set(keys)) == 1 and constants[0].shape[0] == 1 != min(node.n_rows for node in nodes):
        # A single row, shared by all nodes, is broadcast.
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
    """Translate positions in `rows` to row numbers of the underlying matrix or node."""
    return rows.start + rows.step * need if isinstance(rows, range) else rows[need]


def all_nodes(nodes: list[Node]) -> Iterator[Node]:
    """Yield the given nodes and all nodes that they depend on, each once."""
    # A loop instead of recursion, since graphs may be deeper than Python's stack.
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
    """State of one fetch: rows needed of each matrix, rows read from it, and computed values."""

    needs: dict[int, tuple[Matrix, list[NDArray[np.int64]]]] = field(default_factory=dict)
    fetched: dict[int, tuple[NDArray[np.int64], RowBuffer]] = field(default_factory=dict)
    memory: dict[Key, Any] = field(default_factory=dict)
    values: dict[Key, Any] = field(default_factory=dict)

    @classmethod
    def reading(cls, wanted: list[tuple[list[Node], NDArray[np.int64]]]) -> Run:
        """Start a run for the nodes and rows in `wanted`, with one fetch per matrix."""
        return cls.started(wanted, lambda matrix, rows: matrix.fetch(rows))

    @classmethod
    def started(
        cls,
        wanted: list[tuple[list[Node], NDArray[np.int64]]],
        fetch: Callable[[Matrix, NDArray[np.int64]], RowBuffer],
    ) -> Run:
        """Start a run for the nodes and rows in `wanted`, and call `fetch` once per matrix to obtain its rows."""
        run = cls()
        for nodes, need in wanted:
            for node in nodes:
                run.demand(node, need)
        for key, (matrix, parts) in run.needs.items():
            rows = np.unique(np.concatenate(parts))
            run.fetched[key] = rows, fetch(matrix, rows)
        return run

    def demand(self, node: Node, need: NDArray[np.int64]) -> None:
        """Record the matrix rows from which the rows in `need` of `node` are computed."""
        # A repeated call has no effect.
        self.kept(("demand", id(node), id(need)), lambda: node.demand(need, self), need)

    def value(self, nodes: tuple[Node, ...], needs: Needs) -> Any:
        """Compute and concatenate rows of nodes of the same kind; `needs` holds the row numbers for each node."""
        # A repeated call with the same objects returns the cached result.
        first: Any = nodes[0]
        key = (*map(id, nodes), *map(id, needs))
        if key not in self.values:
            # Keep the arrays in `needs` alive, so that their ids in the key are not reused.
            self.values[key] = first.value(nodes, needs, self), needs
        return self.values[key][0]

    def kept(self, key: Key, compute: Callable[[], Any], *alive: Any) -> Any:
        """Return a cached value, computed at the first call."""
        # `alive` are the objects whose ids are in the key. They are kept alive, so that no id is reused.
        if key not in self.memory:
            self.memory[key] = compute(), alive
        return self.memory[key][0]


def joined(blocks: list[list[Node]], needs: Needs, run: Run, matrix: DaskMatrix) -> Any:
    """Compute and concatenate rows of row chunks of one kind."""
    # For each row chunk, `blocks` holds one node per column chunk, and `needs` holds the row numbers.
    n_rows = sum(map(len, needs))
    parts = []
    for nodes, width in zip(zip(*blocks, strict=True), matrix.array.chunks[1], strict=True):
        part = run.value(nodes, needs)
        check_shape(part, (n_rows, width), matrix)
        parts.append(as_layout(part, matrix.layout))
    if len(parts) == 1:
        return parts[0]
    return sp.csr_matrix(sp.hstack(parts, format="csr")) if matrix.layout == "csr" else np.hstack(parts)
