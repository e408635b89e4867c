"""Memory admission on a Dask worker: a fetch starts once the worker has room for its input and result.

Results leave a worker as soon as they are complete, unless the network or the rank is busy. Without admission, results
that cannot leave would fill the memory: Dask would spill them to disk, read them back, pause the worker, and finally
terminate it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from dasksc._compat.distributed import memory_thresholds, process_memory
from dasksc.storage.files import release_pages

__all__ = ["MemoryAdmission"]

T = TypeVar("T")

_MAPPED_SHARE = 0.5  # Share of a worker's memory limit above which mapped pages are released; Dask spills at 0.6.
_SHARE = 0.7  # Usable share of the limit if Dask configures neither spilling nor pausing.
_WORKING = 3  # Memory of a running fetch (input, result and its compact copy), in units of the largest result.
_POLL_S = 0.005
# Time after which a fetch starts even without room, so that a busy rank that leaves its results on the worker does not
# block other ranks.
_PATIENCE_S = 10.0
_RELEASE_S = 0.1


class MemoryAdmission:
    """Memory available to the fetches of one Dask worker.

    Parameters
    ----------
    worker
        The Dask worker. Without a memory limit, every fetch is admitted.
    """

    def __init__(self, worker: Any) -> None:
        limit, spill, pause, target = memory_thresholds(worker)
        shares = (spill, pause)
        # Even if the worker neither spills nor pauses, its nanny may terminate it.
        share = min((share for share in shares if share), default=_SHARE)
        self._has_limit = limit > 0
        self._limit = int(limit * share)
        # Dask also spills once the size of the results that it tracks exceeds `target`.
        self._unsent_limit = int(limit * min(target or share, share))
        self._mapped_limit = int(limit * _MAPPED_SHARE)
        self._process_bytes = process_memory(worker)
        self._lock = threading.Lock()
        self._n_running = 0
        self._reserved = 0
        self._unsent: list[tuple[weakref.ref[Any], int]] = []
        self._last_begun = self._last_release = 0.0

    @classmethod
    def of(cls, worker: Any) -> MemoryAdmission:
        """Return the instance of `worker`, shared by all windows."""
        with _admissions_lock:
            if worker not in _admissions:
                _admissions[worker] = cls(worker)
            return _admissions[worker]

    def run(self, fetch: Callable[[], T], *, size: int | None, is_wanted: Callable[[], bool]) -> T | None:
        """Run `fetch` as soon as there is room for it; return None if `is_wanted` returns False before that.

        `size` is the size of the largest result so far, in bytes; None before the first. A result with ``nbytes`` is
        counted as long as it is referenced.
        """
        if not self._has_limit:
            return fetch()
        reserved = _WORKING * (size or 0)
        while not self._try_begin(reserved, is_known=size is not None):
            if not is_wanted():
                return None
            time.sleep(_POLL_S)
        result = None
        try:
            result = fetch()
            return result
        finally:
            self._end(result, reserved)

    def _try_begin(self, reserved: int, *, is_known: bool) -> bool:
        with self._lock:
            now = time.monotonic()
            # If a rank takes no results, fetches of other ranks on the same workers must not wait forever. A fetch
            # therefore starts once `_PATIENCE_S` seconds have passed since the last one began.
            if not self._has_room(reserved, is_known=is_known) and now - self._last_begun < _PATIENCE_S:
                return False
            self._last_begun = now
            self._n_running += 1
            self._reserved += reserved
            return True

    def _end(self, result: Any, reserved: int) -> None:
        n_bytes = getattr(result, "nbytes", None)
        with self._lock:
            self._n_running -= 1
            self._reserved -= reserved
            if n_bytes is not None:
                with contextlib.suppress(TypeError):  # NumPy scalars cannot be weakly referenced.
                    self._unsent.append((weakref.ref(result), int(n_bytes)))
        if self._process_bytes() > self._mapped_limit:
            release_pages()

    def _has_room(self, reserved: int, *, is_known: bool) -> bool:
        """Return True if one more fetch fits.

        A fetch always fits if none is running and no result is held. Until a size is known, only one runs at a time.
        """
        self._unsent = [one for one in self._unsent if one[0]() is not None]
        if not self._n_running and not self._unsent:
            return True
        wanted = self._reserved + reserved
        if not is_known or sum(n_bytes for _, n_bytes in self._unsent) + wanted / _WORKING > self._unsent_limit:
            return False
        most = self._limit - wanted
        if self._process_bytes() <= most:
            return True
        # Releasing pages at every check would slow down the running fetches, which still read from them.
        now = time.monotonic()
        if now - self._last_release < _RELEASE_S:
            return False
        self._last_release = now
        release_pages()
        return self._process_bytes() <= most


_admissions: weakref.WeakKeyDictionary[Any, MemoryAdmission] = weakref.WeakKeyDictionary()
_admissions_lock = threading.Lock()
