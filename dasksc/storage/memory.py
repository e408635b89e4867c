"""Memory for fetches and batches, used again when nobody holds it any more.

Fresh memory has to be cleared page by page before it can be written, which costs as much as filling it.
While an epoch is read (`recycled`), an array from `empty` lies in memory that comes back here when the
last thing that shares it dies: views, tensors, their aliases, autograd. So what is kept is never written
again. For pageable memory only: a copy to a GPU may still be reading a pinned buffer after Python has
dropped it, which torch's own allocator of pinned memory knows about.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["empty", "recycled"]

# The allocator has smaller pieces at hand anyway.
_SMALL_BYTES = 2**16
# Kept unused at most: this much, or twice the largest piece so far (a fetch has values and column numbers).
_IDLE_BYTES = 2**26


class _Pool:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_users = 0
        self._idle: dict[int, list[NDArray[np.uint8]]] = {}
        self._idle_bytes = 0
        self._largest = 0
        # Finalisers run in any thread, even in the middle of a call here: all they do is append.
        self._returned: deque[NDArray[np.uint8]] = deque()

    def enter(self) -> None:
        with self._lock:
            self._n_users += 1

    def leave(self) -> None:
        with self._lock:
            self._n_users -= 1
            if self._n_users == 0:
                self._forget()

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        """Return `n_bytes` of memory as an array that everything made from it keeps alive."""
        step = 1 << max(n_bytes.bit_length() - 4, 0)
        capacity = -(-n_bytes // step) * step
        with self._lock:
            if self._n_users == 0:
                return np.empty(n_bytes, dtype=np.uint8)
            self._largest = max(self._largest, capacity)
            self._drain()
            buffer = self._pop(capacity) if capacity in self._idle else np.empty(capacity, dtype=np.uint8)
        # Views of an array are views of its base, unless that is no array.
        root = np.frombuffer(buffer.data, dtype=np.uint8)
        weakref.finalize(root, self._returned.append, buffer).atexit = False
        return root[:n_bytes]

    def _drain(self) -> None:
        """Take back what nobody holds any more, as far as there is room; the rest is freed."""
        limit = max(_IDLE_BYTES, 2 * self._largest)
        while self._returned:
            buffer = self._returned.popleft()
            self._idle.setdefault(len(buffer), []).append(buffer)
            self._idle_bytes += len(buffer)
        while self._idle_bytes > limit:
            # Dicts keep their order: sizes that went out of use long ago come first.
            self._pop(next(iter(self._idle)))

    def _pop(self, capacity: int) -> NDArray[np.uint8]:
        kept = self._idle[capacity]
        self._idle_bytes -= capacity
        buffer = kept.pop()
        if not kept:
            del self._idle[capacity]
        return buffer

    def _forget(self) -> None:
        self._returned.clear()
        self._idle.clear()
        self._idle_bytes = self._largest = 0


_pool = _Pool()


def _after_fork() -> None:
    # Its lock may have been held by another thread.
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def recycled() -> Iterator[None]:
    """Use memory again while this is open; when the last has closed, what is unused is given back."""
    pool = _pool
    pool.enter()
    try:
        yield
    finally:
        pool.leave()


def empty(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an uninitialised array, as `numpy.empty` does.

    Parameters
    ----------
    shape, dtype
        As for `numpy.empty`.
    """
    dtype = np.dtype(dtype)
    n_bytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * dtype.itemsize
    if n_bytes < _SMALL_BYTES:
        return np.empty(shape, dtype=dtype)
    return _pool.take(n_bytes).view(dtype).reshape(shape)
