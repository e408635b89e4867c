"""Private or unstable parts of Dask.

Task specifications are public (``dask.task_spec``, since 2025.1) except for the conversion of legacy graphs. Names that
require ``dask.array`` are imported on first use.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

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
    "MATRIX_KEY_PREFIX",
    "Blockwise",
    "block_locations",
    "blockwise_inputs",
    "blockwise_task",
    "chunk",
    "concatenation_functions",
    "convert_legacy_graph",
    "ensure_dict",
    "get_sync",
    "getters",
    "meta_of",
    "new_axes",
    "output_indices",
    "shuffle_functions",
    "shuffled_index",
    "toposort",
    "with_blockwise_task",
]

# Undocumented names: `Blockwise`, whose fields are read below, and the functions that Dask applies to chunks
# (``dask.array.chunk``). Accessing a missing name raises an error.
__getattr__ = late_names(
    "dask", __name__, {"Blockwise": ("dask.blockwise", "Blockwise"), "chunk": ("dask.array", "chunk")}
)

# Element-wise functions of chunks, by module and name. If a version of Dask renames one of them, dasksc no longer knows
# that the function treats rows independently, and tests the function on more rows (see `dasksc.pushdown.trust`).
ELEMENTWISE_NAMES = frozenset([("dask._task_spec", "_identity_cast"), ("dask.array.core", "_concatenate2")])

# Prefix that `da.from_array` puts before the name of an array to form the key of its source. If a version of Dask uses
# another prefix, dasksc does not find the matrix behind an array, and the test suite fails.
MATRIX_KEY_PREFIX = "original-"

_BY_WHOLE_CHUNKS = "Dask operations that select or shuffle rows are computed on whole chunks"


def getters() -> tuple[Any, ...]:
    """Return the functions with which Dask indexes chunks (``dask.array.core.getter*``); for speed only."""
    names = ("getter", "getter_inline", "getter_nofancy")
    return tuple(optional("dask", "dask.array.core", name, without=_BY_WHOLE_CHUNKS) for name in names)


def shuffle_functions() -> tuple[Any, Any]:
    """Return the functions with which a shuffle takes rows of a chunk and joins them; for speed only."""
    # Dask has them since 2024.9. Their arguments are (chunk, index) and (chunks, sorter, axis). `shuffled_index`
    # extracts `index` and `sorter`.
    names = ("_getitem", "concatenate_arrays")
    take, join = (optional("dask", "dask.array._shuffle", name, without=_BY_WHOLE_CHUNKS) for name in names)
    return take, join


def shuffled_index(value: Any) -> Any:
    """Extract the index of a shuffle task from the pair in which Dask wraps it."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise UnsupportedVersionError("dask", "shuffle task of the expected format")
    return value[1]


def concatenation_functions() -> tuple[Any, ...]:
    """Return the functions that join chunks: ``concatenate_shaped(chunks, shape)``; for speed only."""
    return (optional("dask", "dask.array.core", "concatenate_shaped", without=_BY_WHOLE_CHUNKS),)


def meta_of(array: Any) -> Any:
    """Return the meta of an array, an empty block with the type of its blocks (``_meta``); raises if missing."""
    # If the type of the blocks has no ``dtype``, the public ``da.utils.meta_from_array`` returns the Dask array
    # instead.
    return attribute(array, "_meta", library="dask")


def blockwise_task(layer: Blockwise) -> Any:
    """Return the task that a blockwise layer applies to every block (since 2024.9); raises if missing."""
    return attribute(layer, "task", library="dask")


def with_blockwise_task(layer: Blockwise, task: Any) -> Blockwise:
    """Return a copy of a blockwise layer with `task` in place of its task, and without its cached graph."""
    changed = copy.copy(layer)
    changed.task = task
    vars(changed).pop("_cached_dict", None)
    return changed


def output_indices(layer: Blockwise) -> Sequence[Any]:
    """Return the names of the output axes of a blockwise layer; raises if missing."""
    indices: Sequence[Any] = attribute(layer, "output_indices", library="dask")
    return indices


def new_axes(layer: Blockwise) -> Iterable[Any]:
    """Return the output axes of a blockwise layer that none of its inputs has; raises if missing."""
    axes: Iterable[Any] = attribute(layer, "new_axes", library="dask")
    return axes


def blockwise_inputs(layer: Blockwise) -> Iterable[tuple[Any, Sequence[Any] | None]]:
    """Return the inputs of a blockwise layer, each with its axis names (None for a literal); raises if missing."""
    inputs: Iterable[tuple[Any, Sequence[Any] | None]] = attribute(layer, "indices", library="dask")
    return inputs


def block_locations(layer: Blockwise) -> Any:
    """Return the arguments, if any, that tell a blockwise function the location of its block; raises if missing."""
    return attribute(layer, "io_deps", library="dask")
