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

from dasksc._compat.distributed import memory_shares, process_memory
from dasksc.storage.files import let_go_of_pages

__all__ = ["Headroom"]

T = TypeVar("T")

_MAPPED_SHARE = 0.5  # of a worker's memory limit; at 0.6 Dask would spill
_SHARE = 0.7  # of it that may be taken where Dask has no word on it
_WORKING = 3  # what a fetch takes while it runs, in sizes of the largest result: what is read, and its compact copy
_POLL_S = 0.005
_PATIENCE_S = 10.0  # with a rank that takes nothing
_LET_GO_S = 0.1


class Headroom:
    """What one worker's fetches may take of its memory limit.

    Parameters
    ----------
    worker
        The worker. Without a memory limit there is always room.
    """

    def __init__(self, worker: Any) -> None:
        limit, spill, pause, target = memory_shares(worker)
        shares = (spill, pause)
        # Where it neither spills nor pauses, its nanny may end it all the same.
        share = min((share for share in shares if share), default=_SHARE)
        self._has_limit = limit > 0
        self._limit = int(limit * share)
        # Dask spills, too, what it knows by itself to be held.
        self._unsent_limit = int(limit * min(target or share, share))
        self._mapped_limit = int(limit * _MAPPED_SHARE)
        self._process_bytes = process_memory(worker)
        self._lock = threading.Lock()
        self._n_running = 0
        self._reserved = 0
        self._unsent: list[tuple[weakref.ref[Any], int]] = []
        self._last_begun = self._last_let_go = 0.0

    @classmethod
    def of(cls, worker: Any) -> Headroom:
        """Return that of `worker`, whichever window asks."""
        with _making:
            if worker not in _of_workers:
                _of_workers[worker] = cls(worker)
            return _of_workers[worker]

    def run(self, fetch: Callable[[], T], *, size: int | None, is_wanted: Callable[[], bool]) -> T | None:
        """Run `fetch` when there is room for it, and as long as `is_wanted`; None if it is not any more.

        `size` is the largest result of its kind so far, None before the first. The result, if it has ``nbytes``,
        counts until nothing refers to it.
        """
        if not self._has_limit:
            return fetch()
        reserved = _WORKING * (size or 0)
        while not self._begins(reserved, is_known=size is not None):
            if not is_wanted():
                return None
            time.sleep(_POLL_S)
        result = None
        try:
            result = fetch()
            return result
        finally:
            self._end(result, reserved)

    def _begins(self, reserved: int, *, is_known: bool) -> bool:
        with self._lock:
            now = time.monotonic()
            # A rank that takes nothing holds up those that share its workers, but not for ever: one each time.
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
                with contextlib.suppress(TypeError):  # of numpy's scalars there are no references
                    self._unsent.append((weakref.ref(result), int(n_bytes)))
        if self._process_bytes() > self._mapped_limit:
            let_go_of_pages()

    def _has_room(self, reserved: int, *, is_known: bool) -> bool:
        """Whether one more fits; one at a time always does, and only one until a size is known."""
        self._unsent = [one for one in self._unsent if one[0]() is not None]
        if not self._n_running and not self._unsent:
            return True
        wanted = self._reserved + reserved
        if not is_known or sum(n_bytes for _, n_bytes in self._unsent) + wanted / _WORKING > self._unsent_limit:
            return False
        most = self._limit - wanted
        if self._process_bytes() <= most:
            return True
        # Not at every look: others are reading through the pages.
        now = time.monotonic()
        if now - self._last_let_go < _LET_GO_S:
            return False
        self._last_let_go = now
        let_go_of_pages()
        return self._process_bytes() <= most


_of_workers: weakref.WeakKeyDictionary[Any, Headroom] = weakref.WeakKeyDictionary()
_making = threading.Lock()
