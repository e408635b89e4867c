"""What is private or unstable in Dask.

Task specifications are public (``dask.task_spec``, since 2025.1) but for the conversion of old graphs. Names that
import ``dask.array`` are imported when they are asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dask.callbacks import Callback

from dasksc._compat.unsupported import UnsupportedVersionError, attribute, late_names, needed, optional

with needed("dask"):
    from dask._task_spec import convert_legacy_graph
    from dask.core import toposort
    from dask.local import get_sync
    from dask.utils import ensure_dict

if TYPE_CHECKING:
    from dask.array import chunk
    from dask.blockwise import Blockwise

__all__ = [
    "ELEMENTWISE_NAMES",
    "FINISH",
    "MATRIX_KEY_PREFIX",
    "POSTTASK",
    "PRETASK",
    "START",
    "START_STATE",
    "Blockwise",
    "active_callbacks",
    "block_locations",
    "blockwise_inputs",
    "blockwise_task",
    "callbacks_of_one_task",
    "chunk",
    "concatenation_functions",
    "convert_legacy_graph",
    "ensure_dict",
    "get_sync",
    "getters",
    "meta_of",
    "new_axes",
    "output_indices",
    "scheduler_state",
    "shuffle_functions",
    "shuffled_index",
    "toposort",
    "with_blockwise_task",
]

# `Blockwise`, whose fields are read below, and the functions of chunks (``dask.array.chunk``), which are documented
# nowhere. Raises where missing.
__getattr__ = late_names(
    "dask", __name__, {"Blockwise": ("dask.blockwise", "Blockwise"), "chunk": ("dask.array", "chunk")}
)

# Functions of chunks, by module and name, that treat every value alone. Where they have others, they are believed only
# once they were tried.
ELEMENTWISE_NAMES = frozenset([("dask._task_spec", "_identity_cast"), ("dask.array.core", "_concatenate2")])

# What `da.from_array` puts before the name of an array to make the key of what it reads from. Where it puts something
# else, what was opened is not found behind an array, and tests fail.
MATRIX_KEY_PREFIX = "original-"

_BY_WHOLE_CHUNKS = "array code that selects or shuffles rows is computed by whole chunks"


def getters() -> tuple[Any, ...]:
    """Return the functions by which Dask indexes chunks (``dask.array.core.getter*``); speed only."""
    names = ("getter", "getter_inline", "getter_nofancy")
    return tuple(optional("dask", "dask.array.core", name, without=_BY_WHOLE_CHUNKS) for name in names)


def shuffle_functions() -> tuple[Any, Any]:
    """Return what takes rows of a chunk, and what puts them together, in a shuffle (2024.9); speed only.

    They are called with (chunk, index) and (chunks, sorter, axis), where `shuffled_index` understands index and sorter.
    """
    names = ("_getitem", "concatenate_arrays")
    take, join = (optional("dask", "dask.array._shuffle", name, without=_BY_WHOLE_CHUNKS) for name in names)
    return take, join


def shuffled_index(value: Any) -> Any:
    """Return the index in a task of a shuffle, which Dask puts into a pair so that fusing leaves it alone.

    Raises
    ------
    UnsupportedVersionError
        If it is no pair.
    """
    if not isinstance(value, tuple) or len(value) != 2:
        raise UnsupportedVersionError("dask", "pair around the index of a shuffle")
    return value[1]


def concatenation_functions() -> tuple[Any, ...]:
    """Return the function that puts chunks together, called with (chunks, shape) (``dask.array.core``); speed only."""
    return (optional("dask", "dask.array.core", "concatenate_shaped", without=_BY_WHOLE_CHUNKS),)


def meta_of(array: Any) -> Any:
    """Return what blocks of an array are like (``_meta``); raises where missing.

    The public ``da.utils.meta_from_array`` returns the array itself where they are no arrays.
    """
    return attribute(array, "_meta", library="dask")


def blockwise_task(layer: Blockwise) -> Any:
    """Return the task that a blockwise layer does with every block (2024.9); raises where missing."""
    return attribute(layer, "task", library="dask")


def with_blockwise_task(layer: Blockwise, task: Any) -> Blockwise:
    """Return a layer that does another task, without the graph that the first has made of its own and kept."""
    changed = copy.copy(layer)
    changed.task = task
    vars(changed).pop("_cached_dict", None)
    return changed


def output_indices(layer: Blockwise) -> Sequence[Any]:
    """Return the names of the axes of a blockwise layer's blocks; raises where missing."""
    indices: Sequence[Any] = attribute(layer, "output_indices", library="dask")
    return indices


def new_axes(layer: Blockwise) -> Iterable[Any]:
    """Return those axes of a blockwise layer that its inputs do not have; raises where missing."""
    axes: Iterable[Any] = attribute(layer, "new_axes", library="dask")
    return axes


def blockwise_inputs(layer: Blockwise) -> Iterable[tuple[Any, Sequence[Any] | None]]:
    """Return the inputs of a blockwise layer with the names of their axes, None for a value; raises where missing."""
    inputs: Iterable[tuple[Any, Sequence[Any] | None]] = attribute(layer, "indices", library="dask")
    return inputs


def block_locations(layer: Blockwise) -> Any:
    """Return what tells a blockwise layer's function where its block lies, empty if nothing; raises where missing."""
    return attribute(layer, "io_deps", library="dask")


# Where the functions of a callback are in the tuple that `Callback` registers.
START, START_STATE, PRETASK, POSTTASK, FINISH = range(5)


def active_callbacks() -> list[tuple[Callable[..., Any] | None, ...]]:
    """Return the callbacks that are registered now (``Callback.active``); raises where missing."""
    return list(attribute(Callback, "active", library="dask"))


def callbacks_of_one_task(
    before: Callable[..., Any], after: Callable[..., Any]
) -> list[tuple[Callable[..., Any] | None, ...]]:
    """Return what `get_sync` takes to call functions before and after every task."""
    return [(None, None, before, after, None)]


def scheduler_state(keys: Iterable[Any]) -> dict[str, Any]:
    """Return the state of a local scheduler (``dask.local``) before the first of independent tasks, for callbacks."""
    keys = list(keys)
    return {
        "dependencies": {key: set() for key in keys},
        "dependents": {key: set() for key in keys},
        "waiting": {},
        "waiting_data": {},
        "cache": {},
        "ready": dict.fromkeys(keys),
        "running": set(),
        "finished": set(),
        "released": set(),
    }
