"""Checks before reading: elements larger than memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import h5py
import numpy as np
import zarr

from dasksc.atlas.elements import is_group, is_lazy_matrix
from dasksc.atlas.legacy import old_raw
from dasksc.atlas.options import OpenOptions
from dasksc.errors import CorruptDataError, StorageError
from dasksc.memory.limits import memory_limit
from dasksc.storage import RemoteLocation
from dasksc.storage.safety.hdf5_links import check_item

__all__ = ["check_before_reading", "check_table", "lengths_of", "items_of_table", "items_read_whole"]

# Number of bytes by which a chunk may be larger than its array: a chunk is decoded at its full shape, even if the array
# is smaller. Total sizes up to this number are not compared with memory.
_ROOM_BYTES = 2**30


def items_read_whole(root: Any, obs: Sequence[str] | None, options: OpenOptions) -> dict[str, list[Any]]:
    """Return the elements that opening reads as a whole, by group, excluding lazy matrices and unrequested columns."""
    whole = {name: [root[name]] for name in ("var", "uns", "varm", "varp") if name in root}
    whole["obs"] = items_of_table(root["obs"], obs, options)
    for name in ("X", "layers", "obsm", "obsp"):
        if name in root:
            stored = root[name]
            inside = [stored] if name == "X" or not is_group(stored) else [stored[key] for key in stored]
            whole[name] = [item for item in inside if not is_lazy_matrix(item)]
    raw = root["raw"] if "raw" in root and is_group(root["raw"]) else old_raw(root)
    whole["raw"] = [raw[name] for name in ("X", "var", "varm") if name in raw]
    whole["raw"] = [item for item in whole["raw"] if not is_lazy_matrix(item)]
    return whole


def items_of_table(stored: Any, columns: Sequence[str] | None, options: OpenOptions) -> list[Any]:
    """Return the parts of a table to read: `columns` (None: all) and, if names are read, the index."""
    # If the table is read as a whole, the list holds only the table itself.
    is_whole = columns is None and options.has_names
    if is_whole or not is_group(stored) or stored.attrs.get("encoding-version") == "0.1.0":
        return [stored]
    index_key = stored.attrs.get("_index")
    wanted = set(stored if columns is None else columns) - {index_key} | ({index_key} if options.has_names else set())
    return [stored[name] for name in stored if name in wanted]


def check_before_reading(path: str | RemoteLocation, groups: Mapping[str, Sequence[Any]]) -> None:
    """Refuse elements that link outside the folder of `path`, or whose total size exceeds memory."""
    arrays = {name: [array for item in items for array in _arrays_in(item, path)] for name, items in groups.items()}
    sizes = {name: sum(map(_nbytes, held)) for name, held in arrays.items()}
    n_bytes, largest = sum(sizes.values()), max(sizes, key=sizes.__getitem__)
    memory = memory_limit().n_bytes if n_bytes > _ROOM_BYTES else n_bytes
    if n_bytes > memory:
        raise StorageError(
            f"{path} has {n_bytes} bytes in the elements to read ({sizes[largest]} of them in {largest}), but this "
            f"process may use only {memory} bytes of memory. Read only the obs columns you need: obs=[...]. If you "
            "expected less data in this file, it is probably corrupt."
        )


def check_table(stored: Any, path: str | RemoteLocation) -> None:
    """Raise an error for a table with columns of different lengths, before memory for the longest is allocated."""
    lengths = lengths_of(stored)
    if len(set(lengths.values())) > 1:
        longest, shortest = max(lengths, key=lengths.__getitem__), min(lengths, key=lengths.__getitem__)
        raise CorruptDataError(
            f"{path}:{stored.name} has columns of different lengths: {longest!r} has {lengths[longest]} values, "
            f"{shortest!r} {lengths[shortest]}. The file is corrupt; write it again from its source."
        )


def lengths_of(stored: Any) -> dict[str, int]:
    """Return the length of every column of a stored table."""
    lengths: dict[str, int] = {}
    for name in stored:
        item = stored[name]
        if isinstance(item, h5py.Group | zarr.Group):  # categorical and nullable columns
            item = next((item[part] for part in ("codes", "values") if part in item), None)
        if item is not None and len(item.shape) >= 1:
            lengths[name] = item.shape[0]
    return lengths


def _arrays_in(stored: Any, path: str | RemoteLocation) -> Iterator[Any]:
    """Yield the arrays of a stored element, including those that permitted HDF5 links lead to."""
    if isinstance(stored, h5py.Group | h5py.Dataset) and not isinstance(path, RemoteLocation):
        check_item(stored, path, folder=os.path.dirname(path))
    if not is_group(stored):
        if stored.chunks and math.prod(stored.chunks) * _item_bytes(stored) > _nbytes(stored) + _ROOM_BYTES:
            raise CorruptDataError(
                f"{path}:{stored.name} has shape {stored.shape} and is stored in chunks of {stored.chunks}, which are "
                "far too large for its shape. The file is corrupt; write it again from its source."
            )
        yield stored
        return
    for name in stored:
        yield from _arrays_in(stored[name], path)


def _nbytes(array: Any) -> int:
    return math.prod(array.shape or ()) * _item_bytes(array)  # a null dataset of HDF5 has no shape


def _item_bytes(array: Any) -> int:
    return int(np.dtype(getattr(array.dtype, "numpy_dtype", array.dtype)).itemsize)
