"""Arrays as the matrices see them: something that brings runs of rows within reach."""

from __future__ import annotations

from typing import Any, Protocol

import h5py
import numpy as np
import zarr
from numpy.typing import NDArray

from dasksc.storage.row_pointers import Reached

__all__ = [
    "BrokenRunError",
    "MemoryArray",
    "StoredArray",
    "UnknownLayoutError",
    "chunk_length",
    "logical_dtype",
    "memory_dtype",
    "row_bytes",
]


# What metadata are made of, and the nodes of a file: one of another kind than is expected lacks what that has.
_READ = (
    type(None), bool, int, float, str, bytes, list, tuple, dict, np.generic, np.ndarray,
    h5py.HLObject, h5py.Empty, zarr.Group, zarr.Array,
)  # fmt: skip


def is_of_content(error: BaseException) -> bool:
    """Return whether a library raised an error because of what it read.

    Not for want of memory or a module, nor by a mistake in its own code. A missing attribute is the fault of what was
    read if that is plain data, such as a number where metadata should have a dict.
    """
    if isinstance(error, AttributeError):
        return isinstance(error.obj, _READ)
    return not isinstance(error, MemoryError | ImportError | NameError | AssertionError)


class BrokenRunError(Exception):
    """A run that cannot be read. The matrix, which knows rows, turns it into a `CorruptDataError`.

    Parameters
    ----------
    label
        The array.
    start, stop
        The run along the first axis that could not be read.
    reason
        What is wrong.
    """

    def __init__(self, label: str, start: int, stop: int, reason: str) -> None:
        super().__init__(label, start, stop, reason)
        self.label = label
        self.start = start
        self.stop = stop
        self.reason = reason


class UnknownLayoutError(Exception):
    """An array that only its own library can read; the message says why, as a clause."""


class StoredArray(Protocol):
    """An array of one or two dimensions, on disk or in memory. Pickles."""

    @property
    def label(self) -> str:
        """What to call it in errors: ``"/data/atlas.h5ad:/X/indices"``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """One or two lengths."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements as stored, native byte order."""

    def held_share(self, run: float) -> float:
        """Return how much anonymous memory a fetch of runs of this mean length holds for each of their bytes."""

    @property
    def working_bytes(self) -> int:
        """Anonymous memory that a fetch needs beside, while it runs."""

    def reach(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Reached:
        """Bring the runs ``[starts[i], stops[i])`` along the first axis within reach.

        Runs come by ascending start and may touch, overlap, repeat and be empty. Each is
        contiguous in the result, row-major if the array has two dimensions.

        Raises
        ------
        BrokenRunError
            If a run cannot be read.
        CorruptDataError
            If the file is no longer the one that was opened.
        """


def memory_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which elements are held in memory: numba has no float16."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype.newbyteorder("=")


def logical_dtype(stored: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type that values of a stored type have outside of storage.

    A floating type, whatever is stored: arithmetic in integers and booleans wraps or fails, and SciPy has no float16.
    It holds each value of up to 32 bits exactly, and integers of 64 bits up to 2**53.
    """
    if stored.kind == "f":
        return memory_dtype(stored)
    return np.dtype(np.float32 if stored.itemsize <= 2 else np.float64)


class MemoryArray:
    """A numpy array, read where it lies.

    Parameters
    ----------
    array
        One or two dimensions; copied if its rows are not contiguous or its type needs converting.
    label
        What to call it in errors.
    """

    working_bytes = 0

    def __init__(self, array: NDArray[Any], label: str) -> None:
        self.label = label
        self.dtype = array.dtype.newbyteorder("=")
        self._array = np.ascontiguousarray(array, dtype=memory_dtype(array.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """One or two lengths."""
        return self._array.shape

    def held_share(self, run: float) -> float:
        """Return 0: nothing is copied."""
        return 0.0

    def reach(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Reached:
        """Address runs inside the array; nothing is copied."""
        stride = row_bytes(self)
        return Reached.inside(
            (self._array,),
            dtype=self._array.dtype,
            which=0,
            offsets=starts * stride,
            sizes=(stops - starts) * stride,
            held_bytes=0,
        )


def chunk_length(array: StoredArray) -> int:
    """Return how much of the first axis must be decoded as one; 0 where anything can be read by itself."""
    return int(getattr(array, "chunk_length", 0))


def row_bytes(array: StoredArray) -> int:
    """Return the bytes in memory of one step along the first axis."""
    n_items = 1
    for length in array.shape[1:]:
        n_items *= length
    return n_items * memory_dtype(array.dtype).itemsize
