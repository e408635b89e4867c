"""Turns the graph of a Dask array into nodes, where it treats every row alone."""

from __future__ import annotations

import operator
from typing import Any

import dask.array as da
import numpy as np
from dask._task_spec import Alias, DataNode, GraphNode, Task, TaskRef
from dask.array import chunk
from dask.array._shuffle import _getitem as shuffle_getitem
from dask.array._shuffle import concatenate_arrays
from dask.array.core import concatenate_shaped, getter, getter_inline, getter_nofancy
from dask.blockwise import Blockwise

from dasksc.pushdown.csr_functions import without_copies
from dasksc.pushdown.dask_leaf import MatrixRows
from dasksc.pushdown.rowlocal.graph import Graph, Key, flat, keys_in, layer_of
from dasksc.pushdown.rowlocal.nodes import Apply, Concat, Node, Read, Rows, Take, chosen_rows
from dasksc.pushdown.trust import calls, trust_in

__all__ = ["Compiler", "NotRowLocalError"]


class NotRowLocalError(Exception):
    """Why an array cannot be computed row by row; never leaves this package."""


GETITEMS = (chunk.getitem, operator.getitem, getter, getter_inline, getter_nofancy)


class Compiler:
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
                raise NotRowLocalError(f"{layer_of(key)!r} comes from no array that dasksc opened")
            self._nodes[key] = self._compiled(key, self._graph.nodes[key])
        return self._nodes[key]

    def _compiled(self, key: Key, node: GraphNode) -> Node:
        if isinstance(node, Alias):
            return self._node(node.target)
        if isinstance(node, DataNode) and isinstance(node.value, MatrixRows):
            return Read(node.value.matrix, range(node.value.shape[0]))
        if not isinstance(node, Task):
            raise NotRowLocalError(f"layer {layer_of(key)!r} holds a {type(node).__name__}")
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
            keys = keys_in(pieces)
            if len(keys) == shape[0] > 1:
                return self._concatenated([self._node(piece) for piece in keys])
        return self._applied(key, node)

    def _literal(self, key: Key, value: Any) -> Any:
        """A value in the graph: itself, or behind a reference to one."""
        if isinstance(value, TaskRef):
            value = self._graph.nodes[value.key]
        if isinstance(value, GraphNode):
            if value.dependencies:
                raise NotRowLocalError(f"layer {layer_of(key)!r} takes rows that are computed")
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
            raise NotRowLocalError(f"layer {layer_of(key)!r} indexes rows with {first!r}")
        whole = not rest or (isinstance(rest[0], slice) and rest[0] == slice(None))
        known = isinstance(rest[0], slice | list | np.ndarray) if rest else True
        if not isinstance(child, Read) or len(rest) > 1 or not known:
            return Take(child, rows, tuple(rest))
        rows = child.rows[first] if isinstance(first, slice) else chosen_rows(child.rows, np.asarray(rows))
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
        named = [item.key for item in flat(task) if isinstance(item, TaskRef)]
        dependencies = dict.fromkeys(named if set(named) == task.dependencies else task.dependencies)
        inputs = {dep: self._node(dep) for dep in dependencies if self._graph.reaches(dep)}
        constants = {dep: aligned[dep] for dep in dependencies if dep not in inputs}
        lengths = {node.n_rows for node in inputs.values()}
        if not all(aligned[dep] for dep in inputs) or len(lengths) != 1:
            raise NotRowLocalError(f"layer {layer_of(key)!r} combines rows with other rows")
        if type(task) is Task and (function := without_copies(task.func)) is not task.func:
            task = Task(task.key, function, *task.args, **task.kwargs)
        return Apply(task, inputs, constants, self._graph, lengths.pop(), is_believed)

    def _alignment(self, key: Key, task: Task) -> dict[Key, bool]:
        """Which inputs of a task have the rows of its result."""
        layer = self._graph.layers.get(layer_of(key))
        if isinstance(layer, Blockwise):
            return self._blockwise_alignment(key, task, layer)
        # Elsewhere block numbers tell: the same block of rows in, the same block of rows out.
        aligned = {}
        for dep in task.dependencies:
            same = isinstance(dep, tuple) and isinstance(key, tuple) and dep[1:2] == key[1:2] != ()
            if not same or not self._graph.reaches(dep):
                raise NotRowLocalError(f"layer {layer_of(key)!r} combines chunks of rows")
            aligned[dep] = True
        return aligned

    def _blockwise_alignment(self, key: Key, task: Task, layer: Blockwise) -> dict[Key, bool]:
        if layer.io_deps:
            raise NotRowLocalError(f"layer {layer_of(key)!r} is told where its block lies (block_info or block_id)")
        if not layer.output_indices or layer.output_indices[0] in layer.new_axes:
            raise NotRowLocalError(f"layer {layer_of(key)!r} keeps no rows")
        row = layer.output_indices[0]
        by_name: dict[Key, bool] = {}
        for name, indices in layer.indices:
            name = name.key if isinstance(name, TaskRef) else name
            places = [place for place, index in enumerate(indices or ()) if index == row]
            if places not in ([], [0]) or by_name.setdefault(name, bool(places)) != bool(places):
                raise NotRowLocalError(f"layer {layer_of(key)!r} turns rows into columns")
        return {dep: by_name.get(dep, by_name.get(layer_of(dep), False)) for dep in task.dependencies}

    def _check_functions(self, key: Key, task: Task) -> bool:
        """Refuse a task that calls what nobody vouches for; return whether it calls what is merely believed."""
        is_believed = False
        for function, keywords in calls(task):
            trust = trust_in(function, keywords)
            if trust is None or (trust == "believed" and self._strict):
                who = "only you know whether" if trust is None else "dasksc.array-code: strict does not believe that"
                raise NotRowLocalError(
                    f"layer {layer_of(key)!r} applies {getattr(function, '__qualname__', function)!r}, and {who} it "
                    "treats every row alone; if it does, say dasksc.row_local(function)"
                )
            is_believed |= trust == "believed"
        return is_believed
