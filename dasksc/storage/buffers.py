"""Memory pool for fetches and batches, which reuses memory after its last reference is gone.

The operating system clears new memory page by page, which costs as much as filling it. While a `Recycling` exists,
arrays from `empty` use memory that returns to a pool when the last object that shares it (such as a view, a tensor or
a tensor saved by autograd) is freed. Memory in use is therefore never overwritten.

The pool holds only pageable memory. A copy to a GPU may still read a pinned buffer after Python has freed it; only the
allocator for pinned memory in torch tracks such copies.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

# The system allocator reuses smaller blocks itself.
_SMALL_BYTES = 2**16
# Each buffer of at least this size gets its own memory mapping, with huge pages.
_MAPPED_BYTES = 2**22


class _Lease(np.ndarray[Any, Any]):
    """View of a buffer that returns it when the view is freed."""

    returned: deque[NDArray[np.uint8]]

    def __del__(self) -> None:
        self.returned.append(self.base)  # type: ignore[arg-type]


class _Pool:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_users = 0
        self._idle: dict[int, list[NDArray[np.uint8]]] = {}
        self._idle_bytes = self._used_bytes = self._peak_bytes = 0
        # Finalizers run in any thread, even during a call of these methods, so they only append to a deque.
        self._returned: deque[NDArray[np.uint8]] = deque()
        self._leaving: deque[None] = deque()

    def enter(self) -> None:
        with self._lock:
            self._n_users += 1

    def leave(self) -> None:
        """Unregister a `Recycling` handle. Finalizers call this method, so it must not wait for the lock."""
        self._leaving.append(None)
        if self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def take(self, n: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array of `n` elements whose memory stays in use while any object derived from it exists."""
        n_bytes = n * dtype.itemsize
        step = 1 << max(n_bytes.bit_length() - 4, 0)
        capacity = -(-n_bytes // step) * step
        with self._lock:
            self._drain()
            if self._n_users == 0:
                return np.empty(n, dtype=dtype)
            buffer = self._pop(capacity) if capacity in self._idle else _new_memory(capacity)
            self._used_bytes += capacity
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            # Used and idle memory together never exceed the peak of used memory. Buffers of the size that has been idle
            # longest are freed first: `_idle` is keyed by size, and dicts keep insertion order.
            while self._idle_bytes + self._used_bytes > self._peak_bytes:
                self._pop(next(iter(self._idle)))
        # NumPy collapses chains of views: the base of a view of a view is the original array. The base of this array is
        # a memoryview, so views keep the array itself alive. It has the requested type and size, since SciPy copies
        # arrays smaller than half of their base.
        lease = buffer.view(_Lease)
        lease.returned = self._returned
        return np.frombuffer(lease.data, dtype=dtype, count=n)

    def kept_bytes(self) -> int:
        """Return the size of used and idle memory, in bytes."""
        with self._lock:
            self._drain()
            return self._used_bytes + self._idle_bytes

    def _drain(self) -> None:
        """Return freed buffers to the pool, and release the pool when its last user has left."""
        while self._returned:
            buffer = self._returned.popleft()
            self._idle.setdefault(len(buffer), []).append(buffer)
            self._idle_bytes += len(buffer)
            self._used_bytes -= len(buffer)
        while self._leaving:
            self._leaving.popleft()
            self._n_users -= 1
            if self._n_users == 0:
                self._idle.clear()
                self._idle_bytes = 0
                self._peak_bytes = self._used_bytes

    def _pop(self, capacity: int) -> NDArray[np.uint8]:
        kept = self._idle[capacity]
        self._idle_bytes -= capacity
        buffer = kept.pop()
        if not kept:
            del self._idle[capacity]
        return buffer


def _new_memory(n_bytes: int) -> NDArray[np.uint8]:
    """Return memory that goes back to the operating system as soon as it is freed."""
    # The system allocator keeps large blocks in its heap once any library has freed a block of their size. Freed memory
    # between blocks that are still in use then stays in the process.
    if n_bytes < _MAPPED_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.empty(n_bytes, dtype=np.uint8)
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # kernels without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


_pool = _Pool()


def _after_fork() -> None:
    # Another thread may have held the lock at the time of the fork.
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=_after_fork)


class Recycling:
    """Handle that enables the reuse of memory while it exists; freeing the last handle releases idle memory."""

    def __init__(self) -> None:
        _pool.enter()
        weakref.finalize(self, _pool.leave).atexit = False


def empty(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an uninitialized array, as `numpy.empty` does."""
    dtype = np.dtype(dtype)
    n = math.prod(shape if isinstance(shape, tuple) else (shape,))
    if n * dtype.itemsize < _SMALL_BYTES:
        return np.empty(shape, dtype=dtype)
    return _pool.take(n, dtype).reshape(shape)


def kept_bytes() -> int:
    """Return the size of the memory that arrays from `empty` use and of the idle memory kept for them, in bytes."""
    return _pool.kept_bytes()
