"""Memory on a Dask worker: a fetch begins when there is room for what it reads and returns.

Results are taken from a worker as soon as they are there, but not while the network or the rank is busy.
Dask would write them to disk, to read them again at once, then pause the worker, then end it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from dasksc.storage.files import let_go_of_pages

__all__ = ["Headroom"]

T = TypeVar("T")

_MAPPED_SHARE = 0.5  # of a worker's memory limit; at 0.6 Dask would spill
_SHARE = 0.7  # of it that may be taken where Dask has no word on it
_WORKING = 3  # what a fetch takes while it runs, in sizes of the largest result: what is read, and its compact copy
_POLL_S = 0.005
_PATIENCE_S = 10.0  # with a rank that takes nothing


class Headroom:
    """What one worker's fetches may take of its memory limit.

    Parameters
    ----------
    worker
        The worker. Without a memory limit there is always room.
    """

    def __init__(self, worker: Any) -> None:
        manager = worker.memory_manager
        shares = (manager.memory_spill_fraction, manager.memory_pause_fraction)
        # Where it neither spills nor pauses, its nanny may end it all the same.
        share = min((share for share in shares if share), default=_SHARE)
        self._limit = int(manager.memory_limit * share) if manager.memory_limit else None
        self._mapped_limit = int(_MAPPED_SHARE * (manager.memory_limit or 0))
        self._process_bytes: Callable[[], int] = worker.monitor.get_process_memory
        self._lock = threading.Lock()
        self._n_running = 0
        self._largest = 0
        self._unsent: list[weakref.ref[Any]] = []

    @classmethod
    def of(cls, worker: Any) -> Headroom:
        """Return that of `worker`, whichever window asks."""
        with _making:
            if worker not in _of_workers:
                _of_workers[worker] = cls(worker)
            return _of_workers[worker]

    def run(self, fetch: Callable[[], T]) -> T:
        """Run `fetch` when there is room for it; a result with ``nbytes`` counts until nothing refers to it."""
        if self._limit is None:
            return fetch()
        self._begin()
        result = None
        try:
            result = fetch()
            return result
        finally:
            self._end(result)

    def _begin(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            with self._lock:
                if self._has_room() or time.monotonic() > deadline:
                    self._n_running += 1
                    return
            time.sleep(_POLL_S)

    def _end(self, result: Any) -> None:
        n_bytes = getattr(result, "nbytes", None)
        with self._lock:
            self._n_running -= 1
            if n_bytes is not None:
                self._largest = max(self._largest, int(n_bytes))
                with contextlib.suppress(TypeError):  # of numpy's scalars there are no references
                    self._unsent.append(weakref.ref(result))
        if self._process_bytes() > self._mapped_limit:
            let_go_of_pages()

    def _has_room(self) -> bool:
        """Whether one more fits; one at a time always does, and only one until a size is known."""
        self._unsent = [reference for reference in self._unsent if reference() is not None]
        if not self._n_running and not self._unsent:
            return True
        if not self._largest or self._limit is None:
            return False
        most = self._limit - _WORKING * self._largest * (self._n_running + 1)
        if self._process_bytes() <= most:
            return True
        let_go_of_pages()
        return self._process_bytes() <= most


_of_workers: weakref.WeakKeyDictionary[Any, Headroom] = weakref.WeakKeyDictionary()
_making = threading.Lock()
