"""Merged graph of a Dask array, and inspection of its tasks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import dask.array as da
from dask.task_spec import Alias, DataNode, GraphNode, Task, TaskRef

from dasksc._compat.dask import convert_legacy_graph, ensure_dict
from dasksc.pushdown.dask_leaf import MatrixRows

__all__ = ["Graph", "Key", "NotRowLocalError", "flat", "keys_in", "layer_of"]

Key = Any


class NotRowLocalError(Exception):
    """Internal error: an array cannot be computed row by row, for the reason in the message."""


class ValueCache(Protocol):
    """Cache of values during a fetch."""

    def kept(self, key: Key, compute: Callable[[], Any], *alive: Any) -> Any:
        """Return a cached value, computed at the first call."""
        # `alive` are the objects whose ids are in the key. They are kept alive, so that no id is reused.


class Graph:
    """Tasks of a Dask array, with all layers merged."""

    def __init__(self, array: da.Array) -> None:
        self.layers = array.dask.layers
        self.nodes: dict[Key, GraphNode] = convert_legacy_graph(ensure_dict(array.dask))
        self._reaches: dict[Key, bool] = {}
        self._constants: dict[Key, Any] = {}

    def node(self, key: Key) -> GraphNode:
        """Return the task of a key."""
        if key not in self.nodes:
            raise NotRowLocalError(
                f"its graph has no task {key!r}, to which another task refers. Build the array with the public "
                "functions of dask.array"
            )
        return self.nodes[key]

    def reaches(self, key: Key) -> bool:
        """Return True if a key is computed from a stored matrix."""
        # A loop instead of recursion, since graphs may be deeper than Python's stack.
        todo = [key]
        while todo:
            current = todo[-1]
            node = self.node(current)
            unknown = [dep for dep in node.dependencies if dep not in self._reaches]
            if current in self._reaches or not unknown:
                ours = isinstance(node, DataNode) and isinstance(node.value, MatrixRows)
                self._reaches[current] = ours or any(self._reaches[dep] for dep in node.dependencies)
                todo.pop()
            else:
                todo.extend(unknown)
        return self._reaches[key]

    def constant(self, key: Key, run: ValueCache | None) -> Any:
        """Compute a key that does not depend on a stored matrix."""
        # The value is cached until `run` ends; if `run` is None, as long as the graph exists.
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


def flat(value: Any) -> Iterator[Any]:
    """Yield the functions, values and references in a task as a flat, unambiguous sequence."""
    if isinstance(value, Task):
        yield value.func
        yield from flat((value.args, value.kwargs))
    elif isinstance(value, Alias):
        yield TaskRef(value.target)
    elif isinstance(value, DataNode):
        yield from flat(value.value)
    elif isinstance(value, functools.partial):
        yield from flat(("partial", value.func, value.args, value.keywords))
    elif isinstance(value, Mapping):
        yield f"mapping of {len(value)}"
        for key, one in value.items():
            yield key
            yield from flat(one)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} of {len(value)}"
        for one in value:
            yield from flat(one)
    else:
        yield value


def keys_in(value: Any) -> list[Key]:
    """Return the keys in a list of references, in any of Dask's representations of such a list."""
    parts = value.args if isinstance(value, Task) else value
    return [part.target if isinstance(part, Alias) else part.key for part in parts if isinstance(part, TaskRef | Alias)]


def layer_of(key: Key) -> str:
    """Return the name of the layer of a key."""
    return str(key[0] if isinstance(key, tuple) else key)
