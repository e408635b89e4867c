"""Byte ranges of an uncompressed h5ad file for the fetches of a plan, and a loop that only reads these ranges."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from dasksc.storage.arrays import cut, merge

PAGE = 4096
# Ranges per task of a thread: submitting a task for each range would take as long as reading a short range.
_RANGES = 16
# NumPy requests huge pages for arrays of at least this size.
_HUGE_BYTES = 2**22
# Fetches submitted ahead of the current fetch.
_AHEAD = 2


def page_ranges(path: Path, plan: Any) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the number of rows of each fetch, and starts and stops of the page-aligned byte ranges that hold them."""
    with h5py.File(path) as file:
        indptr = file["X/indptr"][:]
        arrays = [_Extents(file[f"X/{name}"]) for name in ("indices", "data")]
    for k in range(plan.n_fetches):
        rows = np.unique(plan.fetch(k).rows)
        starts, stops = merge(rows, rows + 1, gap=0, chunk=1)
        starts, stops = merge(indptr[starts], indptr[stops], gap=0, chunk=1)
        places = [array.places(starts, stops) for array in arrays]
        begins, ends = (np.concatenate(one) for one in zip(*places, strict=True))
        order = np.argsort(begins, kind="stable")
        # Merging ensures that a page shared by two ranges is read once.
        yield (len(rows), *merge(begins[order] // PAGE * PAGE, -(-ends[order] // PAGE) * PAGE, gap=0, chunk=1))


class _Extents:
    """File offsets of the elements of a one-dimensional HDF5 dataset."""

    def __init__(self, stored: Any) -> None:
        self._itemsize = stored.dtype.itemsize
        if stored.chunks is None:
            self._chunk, self._offsets = len(stored), np.array([stored.id.get_offset()])
            return
        self._chunk = stored.chunks[0]
        self._offsets = np.zeros(stored.id.get_num_chunks(), dtype=np.int64)
        stored.id.chunk_iter(self._note)

    def _note(self, chunk: Any) -> None:
        self._offsets[chunk.chunk_offset[0] // self._chunk] = chunk.byte_offset

    def places(
        self, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        chunks, starts, stops = cut(starts, stops, chunk=self._chunk)
        base = self._offsets[chunks] - chunks * self._chunk * self._itemsize
        return base + starts * self._itemsize, base + stops * self._itemsize


def pread_loop(path: Path, plan: Any, *, depth: int) -> Callable[[], Iterator[Any]]:
    """Return a function that starts an epoch of direct reads, which discards the bytes.

    Parameters
    ----------
    path
        Path of an uncompressed h5ad file.
    plan
        Plan whose fetches are read.
    depth
        Number of threads, each of which reads one range at a time.

    Returns
    -------
    callable
        Function that returns an iterator over arrays of shape (rows, 0), one for each fetch.
    """
    fetches = list(page_ranges(path, plan))
    longest = max(int((stops - starts).max()) for _, starts, stops in fetches)
    size = path.stat().st_size
    thread = threading.local()

    def read(descriptor: int, ranges: NDArray[np.int64]) -> None:
        if not hasattr(thread, "buffer"):
            # A disk request has a limited number of memory segments; a large aligned buffer in huge pages needs few.
            block = np.empty(max(longest, _HUGE_BYTES) + PAGE, dtype=np.uint8)
            thread.buffer = block[-block.ctypes.data % PAGE :].data
        for start, stop in ranges.tolist():
            n = os.preadv(descriptor, [thread.buffer[: stop - start]], start)
            assert n == min(stop, size) - start, (n, start, stop)

    def epoch() -> Iterator[Any]:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        pending: deque[tuple[int, list[Future[None]]]] = deque()
        try:
            with ThreadPoolExecutor(depth) as pool:
                for n_rows, starts, stops in fetches:
                    ranges = np.column_stack((starts, stops))
                    parts = [ranges[first : first + _RANGES] for first in range(0, len(ranges), _RANGES)]
                    pending.append((n_rows, [pool.submit(read, descriptor, part) for part in parts]))
                    if len(pending) > _AHEAD:
                        yield _done(*pending.popleft())
                while pending:
                    yield _done(*pending.popleft())
        finally:
            os.close(descriptor)

    return epoch


def _done(n_rows: int, reads: list[Future[None]]) -> NDArray[np.float32]:
    for one in reads:
        one.result()
    return np.empty((n_rows, 0), dtype=np.float32)
