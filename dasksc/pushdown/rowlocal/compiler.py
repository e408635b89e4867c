"""Compiler from the graph of a row-local Dask array to nodes."""

from __future__ import annotations

import operator
from typing import Any

import dask.array as da
import numpy as np
from dask.task_spec import Alias, DataNode, GraphNode, Task, TaskRef

from dasksc._compat.dask import (
    Blockwise,
    block_locations,
    blockwise_inputs,
    chunk,
    concatenation_functions,
    getters,
    new_axes,
    output_indices,
    shuffle_functions,
    shuffled_index,
)
from dasksc.pushdown.csr_functions import without_copies
from dasksc.pushdown.dask_leaf import MatrixRows
from dasksc.pushdown.rowlocal.graph import Graph, Key, NotRowLocalError, flat, keys_in, layer_of
from dasksc.pushdown.rowlocal.nodes import Apply, Concat, Node, Read, Rows, Take, chosen_rows
from dasksc.pushdown.trust import calls, trust_in

__all__ = ["Compiler"]


GETITEMS = (chunk.getitem, operator.getitem, *getters())
CONCATENATE = concatenation_functions()
shuffle_getitem, concatenate_arrays = shuffle_functions()


def _layer(key: Any) -> str:
    """Return the words with which error messages refer to the layer of a key."""
    return f"the Dask graph layer {layer_of(key)!r}"


class Compiler:
    """Compiler from the graph of an array to nodes; raises `NotRowLocalError` if the array is not row-local."""

    def __init__(self, array: da.Array, *, strict: bool) -> None:
        self._array = array
        self._strict = strict
        self._graph = Graph(array)
        self._nodes: dict[Key, Node] = {}

    def blocks(self) -> list[list[Node]]:
        """Return the nodes of every row chunk, one per column chunk."""
        n_row_chunks, n_column_chunks = self._array.numblocks
        blocks = []
        for i in range(n_row_chunks):
            nodes = [self._node((self._array.name, i, j)) for j in range(n_column_chunks)]
            for node in nodes:
                if node.n_rows != self._array.chunks[0][i]:
                    raise NotRowLocalError(
                        f"row chunk {i} has {self._array.chunks[0][i]} rows and is computed from {node.n_rows} stored "
                        "rows, but each row must come from one stored row. Select rows with adata[rows] or indices=, "
                        "or write the array to a file"
                    )
            blocks.append(nodes)
        return blocks

    def _node(self, key: Key) -> Node:
        if key not in self._nodes:
            if not self._graph.reaches(key):
                raise NotRowLocalError(
                    f"{_layer(key)} does not come from an array that dasksc opened. Open the file with "
                    "dasksc.open and apply the operations to its X, layers or obsm"
                )
            self._nodes[key] = self._compiled(key, self._graph.node(key))
        return self._nodes[key]

    def _compiled(self, key: Key, node: GraphNode) -> Node:
        if isinstance(node, Alias):
            return self._node(node.target)
        if isinstance(node, DataNode) and isinstance(node.value, MatrixRows):
            return Read(node.value.matrix, range(node.value.shape[0]))
        if not isinstance(node, Task):
            raise NotRowLocalError(
                f"{_layer(key)} has a task of type {type(node).__name__}, where a function call or an alias "
                "is expected. Build the array with dask.array, for example with map_blocks"
            )
        if _is_one_of(node.func, GETITEMS) and node.args and isinstance(node.args[0], TaskRef):
            source, index = _checked(key, node.args[:2], TaskRef, object)  # further arguments do not select rows
            return self._taken(key, source.key, self._literal(key, index))
        if node.func is shuffle_getitem:
            source, index = _checked(key, node.args, (TaskRef, Alias), object)
            return self._taken(key, keys_in([source])[0], shuffled_index(self._literal(key, index)))
        if node.func is concatenate_arrays:
            blocks, sorter, axis = _checked(key, node.args, (Task, list, tuple), object, object)
            if axis == 0:
                keys = keys_in(blocks)
                if len(keys) != len(blocks.args if isinstance(blocks, Task) else blocks):
                    raise NotRowLocalError(
                        f"{_layer(key)} concatenates values that are not chunks of an array. Use "
                        "dask.array.concatenate on Dask arrays only"
                    )
                whole = self._concatenated([self._node(block) for block in keys])
                order = np.argsort(shuffled_index(self._literal(key, sorter)))
                return Take(whole, order.astype(np.int64))
        if _is_one_of(node.func, CONCATENATE):
            pieces, shape = _checked(key, node.args, (Task, list, tuple), (list, tuple))
            keys = keys_in(pieces)
            if not shape:
                raise NotRowLocalError(
                    f"{_layer(key)} concatenates chunks in a grid of unknown shape, where a grid of rows "
                    "and columns is expected. Build the array with dask.array.concatenate or dask.array.block"
                )
            if len(keys) == shape[0] > 1:
                return self._concatenated([self._node(piece) for piece in keys])
        return self._applied(key, node)

    def _literal(self, key: Key, value: Any) -> Any:
        """Return the value of a graph node or of a reference to one; return any other `value` unchanged."""
        if isinstance(value, TaskRef):
            value = self._graph.node(value.key)
        if isinstance(value, GraphNode):
            if value.dependencies:
                raise NotRowLocalError(
                    f"{_layer(key)} selects rows by numbers that are not computed yet. Compute them first: "
                    "X[rows.compute()]"
                )
            if isinstance(value, DataNode):
                return value.value
            try:
                return value({})
            except Exception as error:  # a function in the graph may raise any exception
                raise NotRowLocalError(
                    f"{_layer(key)} selects rows by numbers whose computation raised {error!r}. Compute the "
                    "numbers first, and index with the NumPy array"
                ) from error
        return value

    def _taken(self, key: Key, source: Key, index: Any) -> Node:
        child = self._node(source)
        first, *rest = index if isinstance(index, tuple) and index else (index,)
        rows: Rows | None = None
        if isinstance(first, slice):
            rows = _selected(range(child.n_rows), first)
        elif isinstance(first, list | np.ndarray):
            rows = _selected(np.arange(child.n_rows, dtype=np.int64), first)
        if rows is None or (not isinstance(rows, range) and rows.ndim != 1):
            raise NotRowLocalError(
                f"{_layer(key)} indexes rows with {first!r}, where a slice, a mask or valid row numbers are "
                "expected. Use X[10:20] or X[np.array([...])]"
            )
        whole = not rest or (isinstance(rest[0], slice) and rest[0] == slice(None))
        is_known_type = isinstance(rest[0], slice | list | np.ndarray) if rest else True
        if not isinstance(child, Read) or len(rest) > 1 or not is_known_type:
            return Take(child, rows, tuple(rest))
        rows = child.rows[first] if isinstance(first, slice) else chosen_rows(child.rows, np.asarray(rows))
        if whole:
            return Read(child.matrix, rows, child.columns)
        every = np.arange(child.matrix.shape[1], dtype=np.int64)
        columns = _selected(every if child.columns is None else child.columns, rest[0])
        if columns is None:
            raise NotRowLocalError(
                f"{_layer(key)} indexes columns with {rest[0]!r}, where a slice, a mask or valid column "
                "numbers are expected. Use X[:, 10:20] or genes= of the data set"
            )
        return Read(child.matrix, rows, None if np.array_equal(columns, every) else columns)

    def _concatenated(self, children: list[Node]) -> Node:
        bounds = np.cumsum([0, *(child.n_rows for child in children)]).astype(np.int64)
        return Concat(tuple(children), bounds)

    def _applied(self, key: Key, task: Task) -> Node:
        is_believed = self._check_functions(key, task)
        aligned = self._alignment(key, task)
        named = [item.key for item in flat(task) if isinstance(item, TaskRef)]
        dependencies = dict.fromkeys(named if set(named) == task.dependencies else task.dependencies)
        inputs = {dep: self._node(dep) for dep in dependencies if self._graph.reaches(dep)}
        constants = {dep: aligned[dep] for dep in dependencies if dep not in inputs}
        lengths = {node.n_rows for node in inputs.values()}
        if not all(aligned[dep] for dep in inputs) or len(lengths) != 1:
            raise NotRowLocalError(
                f"{_layer(key)} combines rows with other rows, as a mean over cells or a sort does, but each "
                "row must come from one stored row. Compute such a value first, with .compute(), and use the result"
            )
        if type(task) is Task and (function := without_copies(task.func)) is not task.func:
            task = Task(task.key, function, *task.args, **task.kwargs)
        return Apply(task, inputs, constants, self._graph, lengths.pop(), is_believed)

    def _alignment(self, key: Key, task: Task) -> dict[Key, bool]:
        """Return a flag for each input of a task: True if its rows are the rows of the result."""
        layer = self._graph.layers.get(layer_of(key))
        if isinstance(layer, Blockwise):
            return self._blockwise_alignment(key, task, layer)
        # For other layers, only block numbers are known: input and output must have the same row block number.
        aligned = {}
        for dep in task.dependencies:
            same = isinstance(dep, tuple) and isinstance(key, tuple) and dep[1:2] == key[1:2] != ()
            if not same or not self._graph.reaches(dep):
                raise NotRowLocalError(
                    f"{_layer(key)} combines several row chunks, as rechunking or a reduction over cells "
                    "does, but each row must come from one stored row. Leave out rechunk, and compute reductions "
                    "first, with .compute()"
                )
            aligned[dep] = True
        return aligned

    def _blockwise_alignment(self, key: Key, task: Task, layer: Blockwise) -> dict[Key, bool]:
        if block_locations(layer):
            raise NotRowLocalError(
                f"{_layer(key)} passes block_info or block_id to its function, so a row depends on its "
                "chunk. Use a function of the values alone"
            )
        axes = output_indices(layer)
        if not axes or axes[0] in new_axes(layer):
            raise NotRowLocalError(
                f"{_layer(key)} does not return one row for each input row: it reduces rows, or adds "
                "an axis before them. Keep rows as the first axis, and compute reductions over cells first, with "
                ".compute()"
            )
        row = axes[0]
        by_name: dict[Key, bool] = {}
        for name, indices in blockwise_inputs(layer):
            name = name.key if isinstance(name, TaskRef) else name
            if not _is_hashable(name):
                raise NotRowLocalError(
                    f"{_layer(key)} has an argument of type {type(name).__name__} among its blocks, where a "
                    "Dask array is expected. Use dask.array.from_array, or bind the argument: "
                    "X.map_blocks(functools.partial(function, other=...))"
                )
            places = [place for place, index in enumerate(indices or ()) if index == row]
            if places not in ([], [0]) or by_name.setdefault(name, bool(places)) != bool(places):
                raise NotRowLocalError(
                    f"{_layer(key)} uses the rows of an array as columns, as X.T or X @ X.T does. "
                    "Keep cells as the first axis of every array"
                )
        return {dep: by_name.get(dep, by_name.get(layer_of(dep), False)) for dep in task.dependencies}

    def _check_functions(self, key: Key, task: Task) -> bool:
        """Raise `NotRowLocalError` for a task with an untrusted function."""
        # Return True if the task calls a function that is merely believed to treat every row independently.
        is_believed = False
        for function, keywords in calls(task):
            trust = trust_in(function, keywords)
            if trust is None or (trust == "believed" and self._strict):
                name = getattr(function, "__qualname__", function)
                unknown = (
                    "dasksc cannot know whether it treats"
                    if trust is None
                    else "with dasksc.array-code='strict', dasksc does not assume that it treats"
                )
                raise NotRowLocalError(
                    f"{_layer(key)} applies {name!r}, and {unknown} each row independently. If it does, "
                    "declare it with dasksc.row_local(function)"
                )
            is_believed |= trust == "believed"
        return is_believed


def _checked(key: Key, arguments: tuple[Any, ...], *kinds: Any) -> tuple[Any, ...]:
    """Return `arguments` if they match `kinds` in number and type; otherwise raise `NotRowLocalError`."""
    if len(arguments) != len(kinds) or not all(map(isinstance, arguments, kinds)):
        raise NotRowLocalError(
            f"{_layer(key)} passes unexpected arguments to an internal function of Dask. Build the array "
            "with the public functions of dask.array"
        )
    return arguments


def _is_one_of(function: Any, functions: tuple[Any, ...]) -> bool:
    return any(function is one for one in functions)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _selected(values: Any, index: Any) -> Any:
    """Return the values that an index selects, or None if the index is invalid for them."""
    try:
        return values[index]
    except (IndexError, TypeError, ValueError):
        return None
