"""Row-local array code as nodes, each of which maps its rows to the same rows of its inputs.

Requested rows of ``da.log1p(X * s)`` depend only on the same rows of X and of s. `dasksc.pushdown.compiler` turns the
tasks of every row chunk into nodes. Nodes of the same `kind` have the same computation, and rows of several are
computed together, since the rows of a fetch may come from many row chunks. Planning passes the requested rows down to
the stored matrices, and returns a step for each group of nodes. After one read per matrix, the steps compute values.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from dask.core import toposort
from dask.optimization import cull
from dask.task_spec import GraphNode, Task
from numpy.typing import NDArray

from dasksc.pushdown.dask_leaf import gather_block
from dasksc.pushdown.dask_matrix import Key, concatenate_rows
from dasksc.pushdown.functions import with_blocks
from dasksc.storage import Columns, Matrix, RowBuffer

__all__ = ["Apply", "Concat", "Needs", "Node", "Plan", "Read", "Rows", "RowsRead", "Step", "Take", "at_rows"]

Rows = range | NDArray[np.int64]
# Row numbers for each of several nodes.
Needs = tuple[NDArray[np.int64], ...]
Step = Callable[[], Any]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Node:
    """Rows of a key of a Dask graph."""

    n_rows: int
    kind: int
    # Number of nodes between this one and the matrices.
    depth: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Read(Node):
    """Rows of a stored matrix, and its columns, or all of them (None)."""

    matrix: Matrix
    rows: Rows
    columns: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Take(Node):
    """Selection of rows of a node, in any order; indices for other axes (`rest`) are applied afterwards."""

    child: Node
    rows: Rows
    rest: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Concat(Node):
    """Rows of several nodes, concatenated."""

    children: tuple[Node, ...]
    bounds: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Apply(Node):
    """Task applied to the same rows of all its inputs, in the order in which the task refers to them."""

    task: Task
    inputs: Mapping[Key, Node]
    # Inputs that do not depend on a stored matrix, and whether their rows are the rows of the block.
    constants: Mapping[Key, bool]


class RowsRead:
    """Rows that a fetch needs of each matrix, read together, and the constants that it uses."""

    def __init__(self, tasks: Mapping[Key, GraphNode], constants: dict[Key, Any]) -> None:
        self.needs: dict[int, tuple[Matrix, list[NDArray[np.int64]]]] = {}
        self._fetched: dict[int, tuple[NDArray[np.int64], RowBuffer]] = {}
        self._tasks = tasks
        # Constants that all rows share outlive this fetch.
        self._constants = constants
        self._row_constants: dict[Key, Any] = {}

    def read(self, fetch: Callable[[Matrix, NDArray[np.int64]], RowBuffer]) -> None:
        """Call `fetch` once per matrix to obtain the rows that are needed."""
        for number, (matrix, parts) in self.needs.items():
            rows = np.unique(np.concatenate(parts))
            self._fetched[number] = rows, fetch(matrix, rows)

    def block(self, matrix: Matrix, wanted: NDArray[np.int64], columns: NDArray[np.int64] | None) -> Any:
        """Return a new block of rows that were read."""
        rows, fetched = self._fetched[id(matrix)]
        positions = np.searchsorted(rows, wanted)
        if columns is None:
            return gather_block(fetched, positions)
        if len(np.unique(columns)) < len(columns):
            return gather_block(fetched, positions)[:, columns]
        return gather_block(fetched, positions, columns=Columns(positions=columns, n_vars=matrix.shape[1]))

    def constant(self, key: Key, *, aligned: bool) -> Any:
        """Return the value of a key that does not depend on a stored matrix."""
        known = self._row_constants if aligned else self._constants
        if key not in known:
            needed, dependencies = cull(self._tasks, [key])
            values: dict[Key, Any] = {}
            for one in toposort(needed, dependencies=dependencies):
                values[one] = with_blocks(needed[one])(values)
            known[key] = values[key]
        return known[key]


class Plan:
    """Steps that compute rows of a group of nodes; each is planned and computed once."""

    # Steps do not refer to the plan: a cycle would keep their values until the garbage collector runs.

    def __init__(self, source: RowsRead) -> None:
        self._source = source
        self._steps: dict[Hashable, tuple[Step, Needs]] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def step(self, nodes: tuple[Node, ...], needs: Needs) -> Step:
        """Return a function that computes and concatenates rows of nodes of the same kind."""
        key = (*map(id, nodes), *map(id, needs))
        if key not in self._steps:
            # `needs` is kept, so that the ids in the key are not reused.
            self._steps[key] = functools.cache(_PLANNED[type(nodes[0])](self, nodes, needs)), needs
        return self._steps[key][0]

    def _read(self, nodes: tuple[Read, ...], needs: Needs) -> Step:
        source, matrix, columns = self._source, nodes[0].matrix, nodes[0].columns
        wanted = np.concatenate([at_rows(node.rows, need) for node, need in zip(nodes, needs, strict=True)])
        source.needs.setdefault(id(matrix), (matrix, []))[1].append(wanted)
        return lambda: source.block(matrix, wanted, columns)

    def _take(self, nodes: tuple[Take, ...], needs: Needs) -> Step:
        chosen = tuple(_taken(node, need) for node, need in zip(nodes, needs, strict=True))
        # With `needs` itself, the step of a node that others use, too, is found again.
        same = all(map(operator.is_, chosen, needs))
        step = self.step(tuple(node.child for node in nodes), needs if same else chosen)
        rest = nodes[0].rest
        return (lambda: step()[(slice(None), *rest)]) if rest else step

    def _concat(self, nodes: tuple[Concat, ...], needs: Needs) -> Step:
        # Children of the same kind are computed together.
        groups: dict[int, list[tuple[Node, NDArray[np.int64], NDArray[np.int64]]]] = {}
        n_before = 0
        for node, need in zip(nodes, needs, strict=True):
            which = np.searchsorted(node.bounds, need, side="right") - 1
            for number in np.unique(which).tolist():
                child, here = node.children[number], np.flatnonzero(which == number)
                part = child, need[here] - node.bounds[number], n_before + here
                groups.setdefault(child.kind, []).append(part)
            n_before += len(need)
        children, rows, places = zip(*(zip(*group, strict=True) for group in groups.values()), strict=True)
        steps = list(map(self.step, children, rows))
        order = np.argsort(np.concatenate([place for group in places for place in group]), kind="stable")
        return lambda: concatenate_rows([step() for step in steps])[order]

    def _apply(self, nodes: tuple[Apply, ...], needs: Needs) -> Step:
        # One call of the first task serves all nodes: their tasks differ only in the names of their inputs.
        first, source = nodes[0], self._source
        children = zip(*(node.inputs.values() for node in nodes), strict=True)
        steps = {key: self.step(several, needs) for key, several in zip(first.inputs, children, strict=True)}

        def value() -> Any:
            values = {key: step() for key, step in steps.items()}
            keys = zip(*(node.constants for node in nodes), strict=True)
            for (key, aligned), several in zip(first.constants.items(), keys, strict=True):
                constants = [source.constant(one, aligned=aligned) for one in several]
                values[key] = _aligned(constants, nodes, needs) if aligned else constants[0]
            return with_blocks(first.task)(values)

        return value


_PLANNED: dict[type[Node], Callable[..., Step]] = {
    Read: Plan._read,
    Take: Plan._take,
    Concat: Plan._concat,
    Apply: Plan._apply,
}


def _taken(node: Take, need: NDArray[np.int64]) -> NDArray[np.int64]:
    is_whole = isinstance(node.rows, range) and node.rows == range(node.child.n_rows)
    return need if is_whole else at_rows(node.rows, need)


def _aligned(constants: list[Any], nodes: tuple[Apply, ...], needs: Needs) -> Any:
    """Concatenate the needed rows of the constants of several nodes."""
    first = constants[0]
    if all(one is first for one in constants) and first.shape[0] == 1 != min(node.n_rows for node in nodes):
        return first  # a single row, shared by all nodes, is broadcast
    return concatenate_rows(
        [
            constant[need if constant.shape[0] == node.n_rows else np.zeros(len(need), dtype=np.int64)]
            for constant, node, need in zip(constants, nodes, needs, strict=True)
        ]
    )


def at_rows(rows: Rows, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Translate positions in `rows` to row numbers of the underlying matrix or node."""
    return rows.start + rows.step * places if isinstance(rows, range) else rows[places]
