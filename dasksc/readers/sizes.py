"""A check before reading: elements larger than memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import h5py
import numpy as np

from dasksc.errors import CorruptDataError, StorageError
from dasksc.memory import memory_limit
from dasksc.readers.arrays import is_group
from dasksc.storage import RemoteLocation
from dasksc.storage.safety.hdf5_links import check_item

# Number of bytes by which a chunk may be larger than its array: a chunk is decoded at its full shape, even if the array
# is smaller. Total sizes up to this number are not compared with the memory.
_ROOM_BYTES = 2**30


class ReadSizes:
    """Declared sizes of the elements that are read from a file or store, compared with the memory of the process."""

    def __init__(self, path: str | RemoteLocation) -> None:
        self._path = path
        self._sizes: dict[str, int] = {}

    def check(self, name: str, items: Sequence[Any]) -> None:
        """Refuse an element that links outside the folder, or that exceeds memory with those checked before."""
        self._sizes[name] = sum(_nbytes(array) for item in items for array in _arrays_in(item, self._path))
        n_bytes, largest = sum(self._sizes.values()), max(self._sizes, key=self._sizes.__getitem__)
        if n_bytes > _ROOM_BYTES and n_bytes > (memory := memory_limit().n_bytes):
            raise StorageError(
                f"{self._path} has {n_bytes} bytes in the elements to read ({self._sizes[largest]} of them in "
                f"{largest}), but this process may use only {memory} bytes of memory. Read only the obs columns you "
                "need: obs=[...]. If you expected less data in this file, it is probably corrupt."
            )


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
