"""Stored arrays: the protocol that matrices use to locate runs of rows in memory."""

from __future__ import annotations

from typing import Any, Protocol

import h5py
import numpy as np
import zarr
from numpy.typing import NDArray

from dasksc.storage.row_pointers import RowPointers

# Types of metadata values, and of the groups and arrays of HDF5 files and Zarr stores. A library that gets an object of
# one of these types where it expects another type raises an AttributeError whose `obj` is that object.
_PLAIN_DATA = (
    type(None), bool, int, float, str, bytes, list, tuple, dict, np.generic, np.ndarray,
    h5py.HLObject, h5py.Empty, zarr.Group, zarr.Array,
)  # fmt: skip


def caused_by_data(error: BaseException) -> bool:
    """Return True if a library raised an error because of the data that it read, not for a lack of memory or a bug."""
    if isinstance(error, AttributeError):
        return isinstance(error.obj, _PLAIN_DATA)
    return not isinstance(error, MemoryError | ImportError | NameError | AssertionError)


class BrokenRunError(Exception):
    """Internal error for a run that cannot be read; the matrix converts it to a `StorageError` that names the rows."""

    def __init__(self, label: str, start: int, stop: int, reason: str) -> None:
        super().__init__(label, start, stop, reason)
        self.label = label
        self.start = start
        self.stop = stop
        self.reason = reason


class UnknownLayoutError(Exception):
    """Internal error for an array that only h5py or zarr-python can read; the message is a clause with the reason."""


class StoredArray(Protocol):
    """Array of one or two dimensions, on disk or in memory. Instances can be pickled."""

    @property
    def label(self) -> str:
        """Name of the array in error messages, such as ``"/data/atlas.h5ad:/X/indices"``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array, with one or two dimensions."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type of the elements as stored, in native byte order."""

    def held_share(self, run: float) -> float:
        """Return the anonymous memory that a fetch holds, as a fraction of its runs of mean length `run`."""

    @property
    def working_bytes(self) -> int:
        """Additional anonymous memory that a fetch needs while it reads, in bytes."""

    def locate(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> RowPointers:
        """Return the addresses of the runs ``[starts[i], stops[i])`` of rows, or raise `BrokenRunError`."""
        # Runs are in ascending order of start, and may touch, overlap, repeat and be empty. Each is contiguous.


def memory_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the data type of elements in memory: native `dtype`, but float32 for float16, which numba lacks."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype.newbyteorder("=")


def logical_dtype(stored: np.dtype[Any]) -> np.dtype[Any]:
    """Return the data type for computation on values of a stored type."""
    # It is floating-point, since arithmetic in integers and booleans overflows or fails, and never float16, which SciPy
    # does not support. It represents values of up to 32 bits exactly. Gathering a row raises an error if it has a
    # 64-bit integer that float64 rounds.
    if stored.kind == "f":
        return memory_dtype(stored)
    return np.dtype(np.float32 if stored.itemsize <= 2 else np.float64)


class MemoryArray:
    """NumPy array as a stored array, copied only if its rows are not contiguous or its type must be converted."""

    working_bytes = 0

    def __init__(self, array: NDArray[Any], label: str) -> None:
        self.label = label
        self.dtype = array.dtype.newbyteorder("=")
        self._array = np.ascontiguousarray(array, dtype=memory_dtype(array.dtype))
        self.shape: tuple[int, ...] = array.shape

    def held_share(self, run: float) -> float:
        return 0.0

    def locate(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> RowPointers:
        stride = row_bytes(self)
        return RowPointers.inside(
            (self._array,),
            dtype=self._array.dtype,
            which=0,
            offsets=starts * stride,
            sizes=(stops - starts) * stride,
            held_bytes=0,
        )


def chunk_length(array: StoredArray) -> int:
    """Return the length of a chunk, the unit of decoding, along the first axis; 0 if rows can be read one by one."""
    return int(getattr(array, "chunk_length", 0))


def decoded_length(array: StoredArray) -> int:
    """Return the same as `chunk_length`, but 0 if parts of chunks can be decoded alone."""
    return int(getattr(array, "decoded_length", chunk_length(array)))


def row_bytes(array: StoredArray) -> int:
    """Return the size in memory of a row, or of an element of a one-dimensional array, in bytes."""
    n_items = 1
    for length in array.shape[1:]:
        n_items *= length
    return n_items * memory_dtype(array.dtype).itemsize
