"""Compiler from the tasks of a Dask array to nodes, which proves that every row comes from single stored rows.

Requested rows of ``da.log1p(X * s)`` depend only on the same rows of X and of s. A node maps its rows to the same rows
of its inputs. Nodes of the same `kind` have the same computation, so rows of several can be computed together.

If every function treats rows independently (`dasksc.pushdown.functions`), the tasks show which rows each value depends
on. The indices of Dask's blockwise layers, or the block numbers in keys, show which inputs have the rows of the result.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import scipy.sparse as sp
from dask.array import chunk
from dask.array.core import concatenate_shaped, getter, getter_inline, getter_nofancy
from dask.blockwise import Blockwise
from dask.core import toposort
from dask.optimization import cull
from dask.task_spec import Alias, DataNode, GraphNode, Task, TaskRef
from numpy.typing import NDArray

from dasksc._compat.dask import concatenate_arrays, shuffled_rows
from dasksc.pushdown.dask_arrays import MatrixRows
from dasksc.pushdown.functions import is_elementwise, row_local, unknown_function
from dasksc.storage import Matrix

Key = Any
Rows = range | NDArray[np.int64]

_GETITEMS = (chunk.getitem, operator.getitem, getter, getter_inline, getter_nofancy, shuffled_rows)
# Planning and steps recurse through the nodes, and Python limits recursion.
_MAX_DEPTH = 200
# Classes whose values are compared by repr, which distinguishes 0.0 from -0.0; values of others, by identity.
_COMPARABLE = (str, bytes, bool, int, float, complex, slice, type(None), np.generic, np.dtype)


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


class NotRowLocalError(Exception):
    """Internal error: an array cannot be computed row by row, for the reason in the message."""


def layer_of(key: Key) -> str:
    """Return the name of the layer of a key."""
    return str(key[0] if isinstance(key, tuple) else key)


def _refused(key: Key, reason: str) -> NotRowLocalError:
    return NotRowLocalError(f"the Dask graph layer {layer_of(key)!r} {reason}")


class Compiler:
    """Compiler of the tasks of an array; raises `NotRowLocalError` if the array is not row-local."""

    def __init__(self, array: da.Array, tasks: Mapping[Key, GraphNode]) -> None:
        self.has_elementwise = False
        self._array = array
        self._tasks = tasks
        # Keys that are computed from a stored matrix.
        self._nodes: dict[Key, Node] = {}
        self._kinds: dict[Hashable, int] = {}
        self._columns: dict[bytes, Any] = {}

    def blocks(self) -> list[tuple[Node, ...]]:
        """Return the nodes of every row chunk, one per column chunk."""
        name, (n_row_chunks, n_column_chunks) = self._array.name, self._array.numblocks
        keys = [[(name, i, j) for j in range(n_column_chunks)] for i in range(n_row_chunks)]
        needed, dependencies = cull(self._tasks, keys)
        for key in toposort(needed, dependencies=dependencies):
            node = self._compiled(key, needed[key])
            if node is not None:
                self._nodes[key] = node
                if node.depth > _MAX_DEPTH:
                    raise NotRowLocalError("its graph has too many steps. Combine them in one function with map_blocks")
        for key in itertools.chain.from_iterable(keys):
            if key not in self._nodes:
                raise _refused(
                    key, "does not come from an array that dasksc opened. Apply it to the result of dasksc.open"
                )
            if self._nodes[key].n_rows != self._array.chunks[0][key[1]]:
                raise _refused(key, "adds or leaves out rows. Select rows with adata[rows] or indices=")
        return [tuple(self._nodes[key] for key in row) for row in keys]

    def _compiled(self, key: Key, task: GraphNode) -> Node | None:
        """Return the node of a key whose dependencies are compiled; None if it does not depend on a stored matrix."""
        if isinstance(task, Alias):
            return self._nodes.get(task.target)
        if isinstance(task, DataNode):
            return self._read(task.value.matrix, range(len(task.value))) if isinstance(task.value, MatrixRows) else None
        if not isinstance(task, Task) or not task.dependencies & self._nodes.keys():
            return None
        if task.func in (concatenate_arrays, concatenate_shaped):
            return self._joined(key, task)
        if task.func in _GETITEMS and isinstance(task.args[0], TaskRef | Alias):
            return self._taken(key, task)
        if (unknown := unknown_function(task)) is not None:
            name = getattr(unknown, "__qualname__", unknown)
            raise _refused(
                key,
                f"applies {name!r}, and dasksc cannot know whether it treats each row independently. If it does, "
                "declare it with dasksc.row_local(function)",
            )
        layer = self._array.dask.layers.get(layer_of(key))
        if isinstance(layer, Blockwise) and layer.io_deps:
            raise _refused(key, "gives its function block_info or block_id. Use a function of the values alone")
        aligned = _by_indices(task, layer) if isinstance(layer, Blockwise) else _by_numbers(key, task)
        if aligned is not None and not isinstance(task.func, row_local):
            whole = [self._tasks[one] for one, rows in aligned.items() if rows is None]
            if any(_may_have_rows(value, len(key) - 1) for value in (*_flat(task), *whole)):
                raise _refused(
                    key, "has an argument with a row for each row of a chunk. Use dask.array.from_array(rows)"
                )
        return self._applied(key, task, aligned)

    def _literal(self, key: Key, value: Any) -> Any:
        """Return the value of a graph node or of a reference to one; return any other `value` unchanged."""
        if isinstance(value, TaskRef | Alias):
            value = self._tasks[_target(value)]
        if isinstance(value, GraphNode) and value.dependencies:
            raise _refused(key, "selects rows by numbers that are not computed yet. Use X[rows.compute()]")
        return value({}) if isinstance(value, GraphNode) else value

    def _kind(self, *signature: Hashable) -> int:
        return self._kinds.setdefault(signature, len(self._kinds))

    def _read(self, matrix: Any, rows: Rows, columns: Any = None) -> Node:
        if columns is not None:  # one array for all row chunks
            columns = self._columns.setdefault(columns.tobytes(), columns)
        kind = self._kind("read", id(matrix), id(columns))
        return Read(n_rows=len(rows), kind=kind, depth=0, matrix=matrix, rows=rows, columns=columns)

    def _take(self, child: Node, rows: Rows, rest: tuple[Any, ...] = ()) -> Node:
        kind = self._kind("take", child.kind, *_signature(rest))
        return Take(n_rows=len(rows), kind=kind, depth=child.depth + 1, child=child, rows=rows, rest=rest)

    def _taken(self, key: Key, task: Task) -> Node:
        """Compile a task that indexes a chunk."""
        index = self._literal(key, task.args[1])
        if task.func is shuffled_rows:  # a shuffle hides its index from Dask's optimization, in a pair
            index = index[1]
        first, *rest = index if isinstance(index, tuple) and index else (index,)
        if all(isinstance(one, slice) and one == slice(None) for one in rest):
            rest = []
        child = self._nodes.get(_target(task.args[0]))
        places = None if child is None else _selected(range(child.n_rows), first)
        if child is None or places is None:
            raise _refused(key, f"indexes rows with {first!r}. Use a slice, a mask or valid row numbers")
        if not isinstance(child, Read) or len(rest) > 1:
            return self._take(child, places, tuple(rest))
        rows = child.rows[first] if isinstance(first, slice) else at_rows(child.rows, np.asarray(places))
        every = range(child.matrix.shape[1])
        columns = _selected(every if child.columns is None else child.columns, *rest) if rest else child.columns
        if rest and columns is None:
            return self._take(child, places, tuple(rest))
        is_all = columns is None or np.array_equal(columns, every)
        return self._read(child.matrix, rows, None if is_all else np.asarray(columns, dtype=np.int64))

    def _joined(self, key: Key, task: Task) -> Node:
        """Compile a task that joins chunks along the rows or along the columns."""
        pieces, second, *_ = task.args
        sources = [_target(piece) for piece in (pieces.args if isinstance(pieces, Task) else pieces)]
        if task.func is concatenate_arrays:
            n_rows = len(sources) if task.args[2] == 0 else 1
        else:
            n_rows = next(iter(self._literal(key, second)), 0)
        if n_rows == 1:
            return self._applied(key, task, {one: one in sources for one in task.dependencies})
        children = tuple(self._nodes[one] for one in sources if one in self._nodes)
        if not len(children) == len(sources) == n_rows:
            raise _refused(key, "joins stored rows with other values, or a grid of chunks. Join arrays of files only")
        bounds = np.cumsum([0, *(child.n_rows for child in children)]).astype(np.int64)
        depth = 1 + max(child.depth for child in children)
        kind = self._kind("concat", frozenset(child.kind for child in children))
        whole = Concat(n_rows=int(bounds[-1]), kind=kind, depth=depth, children=children, bounds=bounds)
        if task.func is concatenate_shaped:
            return whole
        return self._take(whole, np.argsort(self._literal(key, second)[1]).astype(np.int64))

    def _applied(self, key: Key, task: Task, aligned: Mapping[Key, bool | None] | None) -> Node:
        """Compile any other task; `aligned` holds True for the inputs whose rows are the rows of the result."""
        named = list(dict.fromkeys(item.key for item in _flat(task) if isinstance(item, TaskRef)))
        is_named = set(named) == task.dependencies
        references = named if is_named else list(task.dependencies)
        inputs = {one: self._nodes[one] for one in references if one in self._nodes}
        lengths = {node.n_rows for node in inputs.values()}
        if aligned is None or not all(aligned[one] for one in inputs) or len(lengths) != 1:
            raise _refused(
                key,
                "combines rows with other rows, as a mean over cells, X.T or rechunking do. Compute such a value "
                "first, with .compute(), and use the result",
            )
        constants = {one: bool(aligned[one]) for one in references if one not in inputs}
        self.has_elementwise |= is_elementwise(task.func)
        # Tasks of nodes of one kind differ only in the names of their inputs and of aligned constants.
        roles = {one: node.kind for one, node in inputs.items()} | {
            one: "rows" if is_aligned else one for one, is_aligned in constants.items()
        }
        kind = self._kind("apply", *(_signature(task, roles) if is_named else (key,)))
        depth = 1 + max(node.depth for node in inputs.values())
        return Apply(n_rows=lengths.pop(), kind=kind, depth=depth, task=task, inputs=inputs, constants=constants)


def _may_have_rows(value: Any, n_axes: int) -> bool:
    """Return True if NumPy may align the rows of an argument that is not an array of Dask with those of the result."""
    value = value.value if isinstance(value, DataNode) else value
    if isinstance(value, np.ndarray) or sp.issparse(value):
        return bool(value.ndim >= n_axes and value.shape[0] != 1)
    return isinstance(value, GraphNode)  # not computed yet


def _by_numbers(key: Key, task: Task) -> dict[Key, bool | None] | None:
    """Return True for every input of a task if all have the row block number of the result, otherwise None."""
    # A key is the name of an array and block numbers, one per axis. NumPy would align an input with fewer axes than the
    # result with its columns.
    aligned = all(
        isinstance(one, tuple) and isinstance(key, tuple) and one[1:2] == key[1:2] != () and len(one) >= len(key)
        for one in task.dependencies
    )
    return dict.fromkeys(task.dependencies, True) if aligned else None


def _by_indices(task: Task, layer: Any) -> dict[Key, bool | None] | None:
    """Return True for the inputs of a blockwise task whose rows are the rows of the result; None if it has none."""
    # An input without indices, such as a delayed value, maps to None: every task receives all of it.
    axes = layer.output_indices
    if not axes or axes[0] in layer.new_axes:
        return None
    by_name: dict[Key, bool] = {}
    for name, indices in layer.indices:
        if indices is not None:
            places = [place for place, index in enumerate(indices) if index == axes[0]]
            # NumPy aligns an input with fewer axes than the result with its columns.
            fits = len(indices) >= len(axes) or isinstance(task.func, row_local)
            if (places and (places != [0] or not fits)) or by_name.setdefault(name, bool(places)) != bool(places):
                return None
    return {one: by_name.get(layer_of(one)) for one in task.dependencies}


def at_rows(rows: Rows, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Translate positions in `rows` to row numbers of the underlying matrix or node."""
    return rows.start + rows.step * places if isinstance(rows, range) else rows[places]


def _target(reference: Any) -> Key:
    return reference.target if isinstance(reference, Alias) else reference.key


def _selected(values: Rows, index: Any) -> Rows | None:
    """Return the values that a slice, mask or list of positions selects; None for any other index."""
    if isinstance(index, slice):
        return values[index]
    if not isinstance(index, list | np.ndarray):
        return None
    try:
        selected = (np.arange(len(values)) if isinstance(values, range) else values)[index]
    except IndexError:
        return None
    return selected if selected.ndim == 1 else None


def _flat(value: Any) -> Iterator[Any]:
    """Yield the functions, values and references in a task as a flat, unambiguous sequence."""
    if isinstance(value, Task):
        yield from _flat((value.func, value.args, value.kwargs))
    elif isinstance(value, Alias):
        yield TaskRef(value.target)
    elif isinstance(value, DataNode):
        yield from _flat(value.value)
    elif isinstance(value, functools.partial):
        yield from _flat(("partial", value.func, value.args, value.keywords))
    elif isinstance(value, Mapping):
        yield from _flat(("mapping", *value.items()))
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} of {len(value)}"
        for one in value:
            yield from _flat(one)
    else:
        yield value


def _signature(value: Any, roles: Mapping[Key, Hashable] | None = None) -> Iterator[Hashable]:
    """Yield what tasks with the same functions, values and references have in common; `roles` stand for references."""
    numbers: dict[Key, int] = {}
    for item in _flat(value):
        if isinstance(item, TaskRef):
            yield numbers.setdefault(item.key, len(numbers)), (roles or {}).get(item.key, item.key)
        else:
            yield (type(item), repr(item)) if isinstance(item, _COMPARABLE) else id(item)
