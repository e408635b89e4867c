"""Classification of row chunks by their computation.

Row chunks of one kind share a trial (`dasksc.pushdown.rowlocal.trial`), and a function is called once for several of
them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dask.task_spec import TaskRef

from dasksc.pushdown.rowlocal.graph import Key, flat
from dasksc.pushdown.rowlocal.nodes import Apply, Node, Read, Take

__all__ = ["kinds_of_chunks"]


def kinds_of_chunks(blocks: list[list[Node]]) -> list[int]:
    """Assign the same kind number to row chunks that undergo the same computation."""
    # Each row chunk is compared with the three latest kinds only, so some row chunks with the same computation may get
    # different numbers.
    kinds: list[int] = []
    samples: list[list[Node]] = []
    for block in blocks:
        # A row chunk that differs from its neighbors is usually the first or the last of an array.
        for kind in range(len(samples) - 1, max(-1, len(samples) - 4), -1):
            if len(block) == len(samples[kind]) and all(map(_alike, block, samples[kind])):
                kinds.append(kind)
                break
        else:
            kinds.append(len(samples))
            samples.append(block)
    return kinds


def _alike(one: Node, other: Node) -> bool:
    """Return True if two nodes apply the same operations, possibly to different rows."""
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
    """Return a flag per reference in a task, in order: True if it refers to an input."""
    # Return None if `flat` does not find all references of the task.
    keys = [item.key for item in flat(node.task) if isinstance(item, TaskRef)]
    return [key in node.inputs for key in keys] if set(keys) == node.task.dependencies else None


def _same(one: Any, other: Any) -> bool:
    """Return True if two tasks contain the same functions and values, and references in the same places."""
    ones, others = list(flat(one)), list(flat(other))
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


# Classes whose values are compared by repr, which distinguishes 0.0 from -0.0. Values of other classes are compared by
# identity.
_COMPARABLE = (str, bytes, bool, int, float, complex, slice, type(None), np.generic, np.dtype)
