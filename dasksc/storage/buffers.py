"""Memory for fetches and batches, used again when nobody holds it any more.

Fresh memory has to be cleared page by page before it can be written, which costs as much as filling it.
While there is a `Recycling`, an array from `empty` lies in memory that comes back here when the last
thing that shares it dies: views, tensors, their aliases, autograd. So what is kept is never written again.
For pageable memory only: a copy to a GPU may still be reading a pinned buffer after Python has dropped
it, which torch's own allocator of pinned memory knows about.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dasksc.platforms import after_fork

__all__ = ["Recycling", "empty", "kept_bytes"]

# The allocator has smaller pieces at hand anyway.
_SMALL_BYTES = 2**16


class _Pool:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_users = 0
        self._idle: dict[int, list[NDArray[np.uint8]]] = {}
        self._idle_bytes = self._used_bytes = self._peak_bytes = 0
        # Finalisers run in any thread, even in the middle of a call here: what they do is append.
        self._returned: deque[NDArray[np.uint8]] = deque()
        self._leaving: deque[None] = deque()

    def enter(self) -> None:
        with self._lock:
            self._n_users += 1

    def leave(self) -> None:
        """Let one user less count; called by finalisers, so it cannot wait for the lock."""
        self._leaving.append(None)
        if self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def take(self, n: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return memory for `n` elements as an array that everything made from it keeps alive."""
        n_bytes = n * dtype.itemsize
        step = 1 << max(n_bytes.bit_length() - 4, 0)
        capacity = -(-n_bytes // step) * step
        with self._lock:
            self._drain()
            if self._n_users == 0:
                return np.empty(n, dtype=dtype)
            buffer = self._pop(capacity) if capacity in self._idle else np.empty(capacity, dtype=np.uint8)
            self._used_bytes += capacity
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            # Used and unused together never exceed what was once in use; sizes that went out of use
            # long ago go first, since dicts keep their order.
            while self._idle_bytes + self._used_bytes > self._peak_bytes:
                self._pop(next(iter(self._idle)))
        # Views of an array are views of its base, unless that is no array. Of its own type and size, since
        # SciPy copies what is less than half of its base.
        root = np.frombuffer(buffer.data, dtype=dtype, count=n)
        weakref.finalize(root, self._returned.append, buffer).atexit = False
        return root

    def kept_bytes(self) -> int:
        """Return the size of all that is used or at hand."""
        with self._lock:
            self._drain()
            return self._used_bytes + self._idle_bytes

    def _drain(self) -> None:
        """Take back what nobody holds any more, and give it back when the last user has left."""
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


_pool = _Pool()


def _after_fork() -> None:
    # Its lock may have been held by another thread.
    global _pool
    _pool = _Pool()


after_fork(_after_fork)


class Recycling:
    """Memory is used again as long as one of these lives; with the last, what is unused is given back."""

    def __init__(self) -> None:
        _pool.enter()
        weakref.finalize(self, _pool.leave).atexit = False


def empty(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an uninitialised array, as `numpy.empty` does.

    Parameters
    ----------
    shape, dtype
        As for `numpy.empty`.
    """
    dtype = np.dtype(dtype)
    n = math.prod(shape if isinstance(shape, tuple) else (shape,))
    if n * dtype.itemsize < _SMALL_BYTES:
        return np.empty(shape, dtype=dtype)
    return _pool.take(n, dtype).reshape(shape)


def kept_bytes() -> int:
    """Return how much memory is used by arrays of `empty`, or at hand for them, in bytes."""
    return _pool.kept_bytes()
