"""Stored arrays: their protocol, runs of their rows, and arrays in memory or read by slices.

A run is a half-open interval [start, stop) along the first axis of an array.
"""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeAlias

import h5py
import numpy as np
import zarr
from numpy.typing import NDArray

from dasksc.storage import buffers

# Types of metadata values, and of the groups and arrays of HDF5 files and Zarr stores. A library that gets an object of
# one of these types where it expects another type raises an AttributeError whose `obj` is that object.
_PLAIN_DATA = (
    type(None), bool, int, float, str, bytes, list, tuple, dict, np.generic, np.ndarray,
    h5py.HLObject, h5py.Empty, zarr.Group, zarr.Array,
)  # fmt: skip
# Maximum size of a slice. A slice covers neighboring runs and the gaps between them; the runs are copied from it.
_SLICE_BYTES = 8 * 2**20

ReadSlice: TypeAlias = Callable[[int, int, NDArray[Any]], None]
"""Function of `start`, `stop` and an array, which it fills with the elements ``[start, stop)`` along the first axis."""


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


class StoredArray:
    """Array of one or two dimensions, on disk or in memory. Instances can be pickled."""

    label: str  # Name of the array in error messages, such as ``"/data/atlas.h5ad:/X/indices"``
    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # Data type of the elements as stored, in native byte order
    chunk_length = 0  # Length of a chunk, the unit of decoding, along the first axis; 0 if rows can be read one by one
    decoded_length = 0  # The same, but 0 if parts of chunks can be decoded alone

    def held_share(self, run: float) -> float:
        """Return the anonymous memory that a fetch holds, as a fraction of its runs of mean length `run`."""
        return 1.0

    @property
    def working_bytes(self) -> int:
        """Additional anonymous memory that a fetch needs while it reads, in bytes."""
        return 0

    @abstractmethod
    def locate(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> RowPointers:
        """Return the addresses of the runs ``[starts[i], stops[i])`` of rows, or raise `BrokenRunError`."""
        # Runs are in ascending order of start, and may touch, overlap, repeat and be empty. Each is contiguous.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPointers:
    """Addresses of runs of an array, each contiguous in memory."""

    # Use `RowPointers.inside`, which checks the bounds of every address; the kernels do not check them.

    at: NDArray[np.uint64]  # Address of the first element of each run, shape (n_runs,), uint64
    dtype: np.dtype[Any]  # Data type of the elements in memory, in native byte order
    held_bytes: int  # Anonymous memory that these runs keep alive, in bytes
    owners: tuple[Any, ...]  # Objects that keep the memory at `at` alive

    @classmethod
    def inside(
        cls,
        buffers: Sequence[NDArray[Any]],
        *,
        dtype: np.dtype[Any],
        which: NDArray[np.int64] | int,
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        held_bytes: int,
    ) -> RowPointers:
        """Return the addresses of runs inside `buffers`."""
        begins = np.array([buffer.ctypes.data for buffer in buffers], dtype=np.uint64)
        lengths = np.array([buffer.nbytes for buffer in buffers], dtype=np.int64)
        if ((sizes > 0) & ((offsets < 0) | (offsets + sizes > lengths[which]))).any():
            raise ValueError("a run lies outside its buffer")
        return cls(
            at=begins[which] + offsets.astype(np.uint64),
            dtype=dtype,
            held_bytes=held_bytes,
            owners=tuple(buffers),
        )

    @classmethod
    def in_block(cls, block: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> RowPointers:
        """Return the addresses of the runs ``[starts[i], stops[i])`` of rows of a contiguous block."""
        stride = math.prod(block.shape[1:]) * block.itemsize
        offsets, sizes = starts * stride, (stops - starts) * stride
        return cls.inside((block,), dtype=block.dtype, which=0, offsets=offsets, sizes=sizes, held_bytes=block.nbytes)

    @classmethod
    def joined(cls, parts: Sequence[RowPointers]) -> RowPointers:
        """Concatenate the runs of several objects with the same data type."""
        return cls(
            at=np.concatenate([part.at for part in parts]),
            dtype=parts[0].dtype,
            held_bytes=sum(part.held_bytes for part in parts),
            owners=tuple(owner for part in parts for owner in part.owners),
        )

    def ordered(self, order: NDArray[np.int64]) -> RowPointers:
        """Return the same runs in another order."""
        return replace(self, at=self.at[order])

    @property
    def like(self) -> NDArray[Any]:
        """Empty array that shows the data type of the elements to the kernels."""
        return np.empty(0, dtype=self.dtype)


def memory_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the data type of elements in memory: native `dtype`, but float32 for float16, which numba lacks."""
    dtype = dtype.newbyteorder("=")
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def logical_dtype(stored: np.dtype[Any]) -> np.dtype[Any]:
    """Return the data type for computation on values of a stored type."""
    # It is floating-point, since arithmetic in integers and booleans overflows or fails, and never float16, which SciPy
    # does not support. It represents values of up to 32 bits exactly. Gathering a row raises an error if it has a
    # 64-bit integer that float64 rounds.
    if stored.kind == "f":
        return memory_dtype(stored)
    return np.dtype(np.float32 if stored.itemsize <= 2 else np.float64)


class MemoryArray(StoredArray):
    """NumPy array as a stored array, copied only if its rows are not contiguous or its type must be converted."""

    def __init__(self, array: NDArray[Any], label: str) -> None:
        self.label = label
        self.dtype = array.dtype.newbyteorder("=")
        self._array = np.ascontiguousarray(array, dtype=memory_dtype(array.dtype))
        self.shape = array.shape

    def held_share(self, run: float) -> float:
        return 0.0

    def locate(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> RowPointers:
        return replace(RowPointers.in_block(self._array, starts, stops), held_bytes=0)


def row_bytes(array: StoredArray) -> int:
    """Return the size in memory of a row, or of an element of a one-dimensional array, in bytes."""
    return math.prod(array.shape[1:]) * memory_dtype(array.dtype).itemsize


def merge(
    starts: NDArray[np.int64], stops: NDArray[np.int64], *, gap: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merge runs at most `gap` apart into disjoint runs that cover them."""
    filled = stops > starts
    starts = starts[filled]
    stops = np.maximum.accumulate(stops[filled])
    if len(starts) == 0:
        return starts, stops
    apart = starts[1:] - stops[:-1] > gap
    first = np.concatenate(([True], apart))
    last = np.concatenate((apart, [True]))
    return starts[first], stops[last]


def places_in(
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    run_starts: NDArray[np.int64],
    run_stops: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the offset of each run in the concatenation of the covering runs."""
    lengths = run_stops - run_starts
    before = np.cumsum(lengths) - lengths
    filled = stops > starts
    offsets = np.zeros(len(starts), dtype=np.int64)
    covering = np.searchsorted(run_starts, starts[filled], side="right") - 1
    offsets[filled] = before[covering] + starts[filled] - run_starts[covering]
    return offsets


def cut(
    starts: NDArray[np.int64], stops: NDArray[np.int64], *, chunk: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut runs at chunk boundaries."""
    first = starts // chunk
    n_pieces = (stops - 1) // chunk - first + 1
    run = np.repeat(np.arange(len(starts)), n_pieces)
    before = np.cumsum(n_pieces) - n_pieces
    chunks = first[run] + np.arange(len(run)) - before[run]
    return chunks, np.maximum(starts[run], chunks * chunk), np.minimum(stops[run], (chunks + 1) * chunk)


class SlicedArray(StoredArray):
    """Array that a library reads by slices."""

    def __init__(self, *, label: str, shape: tuple[int, ...], dtype: np.dtype[Any], chunk: int, gap_bytes: int) -> None:
        self.label = label
        self.shape = shape
        self.dtype = dtype
        self.chunk_length = self.decoded_length = chunk if chunk > 1 else 0
        self._chunk = chunk
        self._gap_bytes = gap_bytes

    @property
    def working_bytes(self) -> int:
        """Memory for a slice, and for the chunks that the library decodes, in bytes."""
        stride = row_bytes(self)
        # Chunks are decoded in several steps, filters may widen them, and the slice is assembled from them.
        return 2 * min(_SLICE_BYTES + stride * self._chunk, stride * self.shape[0]) + 6 * stride * self._chunk

    def reader(self) -> ReadSlice:
        """Check that the array has not changed since it was opened, and return the function that reads slices."""
        raise NotImplementedError

    def locate(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> RowPointers:
        """Read the runs into one block of memory, with one slice for neighboring runs."""
        read = self.reader()
        run_starts, run_stops = merge(starts, stops)
        ats = np.append(0, np.cumsum(run_stops - run_starts))
        block = buffers.empty((int(ats[-1]), *self.shape[1:]), memory_dtype(self.dtype))
        for first, after in self._slices(run_starts.tolist(), run_stops.tolist()):
            start, stop = int(run_starts[first]), int(run_stops[after - 1])
            part = block[ats[first] : ats[after]]
            into = part if after == first + 1 else np.empty((stop - start, *self.shape[1:]), part.dtype)
            try:
                with reading():  # includes decoding, which the library does not separate
                    read(start, stop, into)
            # Codecs may raise any exception, such as RuntimeError (Blosc) or zlib.error (gzip).
            except Exception as error:
                if not caused_by_data(error):
                    raise
                raise BrokenRunError(self.label, start, stop, str(error)) from error
            if into is not part:
                runs = zip(run_starts[first:after] - start, run_stops[first:after] - start, strict=True)
                np.concatenate([into[begin:end] for begin, end in runs], out=part)
        at = places_in(starts, stops, run_starts, run_stops)
        return RowPointers.in_block(block, at, at + stops - starts)

    def _slices(self, starts: list[int], stops: list[int]) -> Iterator[tuple[int, int]]:
        """Yield the first run, and the one after the last, of each group of runs read by one slice."""
        stride = max(row_bytes(self), 1)
        gap, longest = self._gap_bytes // stride, max(_SLICE_BYTES // stride, self._chunk)
        first = 0
        for i in range(1, len(starts)):
            start, before = starts[i], stops[i - 1]
            is_near = start - before <= gap or start // self._chunk == (before - 1) // self._chunk
            if not is_near or stops[i] - starts[first] > longest:
                yield first, i
                first = i
        if starts:
            yield first, len(starts)


@dataclass(slots=True)
class ThreadTimes:
    """Time spent in a thread."""

    read_s: float = 0.0  # Seconds spent on requesting, awaiting and copying bytes
    decode_s: float = 0.0  # Seconds spent in codecs. For memory-mapped files this includes waiting for pages.


class _TimesOfThread(threading.local):
    def __init__(self) -> None:
        self.spent = ThreadTimes()


_of_thread = _TimesOfThread()


def thread_times() -> ThreadTimes:
    """Return the current counter of this thread, to which loops over chunks add their times."""
    return _of_thread.spent


@contextmanager
def clock() -> Iterator[ThreadTimes]:
    """Measure the calling thread inside a ``with`` block."""
    outer, _of_thread.spent = _of_thread.spent, ThreadTimes()
    try:
        yield _of_thread.spent
    finally:
        _of_thread.spent = outer


@contextmanager
def reading() -> Iterator[None]:
    """Count a ``with`` block as reading."""
    begun = perf_counter()
    try:
        yield
    finally:
        _of_thread.spent.read_s += perf_counter() - begun
