"""Execution of fetches in this process, on threads or in the calling thread.

Each fetch is a call of `dask.get` with a graph of one task, so Dask's callbacks see it. Dask's threaded scheduler is
not used: its pool deadlocks in a forked child of a process that has used it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import dask
from dask.callbacks import Callback
from dask.task_spec import Task

Timed = tuple[float, Any]  # Duration of the fetch in seconds, and its result.


class OnDemandRunner:
    """Runner of fetches in the thread that requests their results."""

    transfer_s = 0.0

    def __init__(self, name: str, run: Callable[[int], Any]) -> None:
        self._name = name
        self._run = run
        # `dask.get` would take the callbacks from a global variable, which it empties while it runs.
        self._callbacks = list(Callback.active)
        # Callbacks such as `dask.diagnostics.Profiler` keep the state of a single computation.
        self._one_at_a_time = threading.Lock() if self._callbacks else contextlib.nullcontext()

    def _fetch(self, k: int) -> Timed:
        key = (self._name, k)
        graph = {key: Task(key, self._run, k)}
        with self._one_at_a_time:
            start = perf_counter()
            result = dask.get(graph, key, callbacks=self._callbacks, get_id=threading.get_ident)
            return perf_counter() - start, result

    def submit(self, k: int) -> Any:
        """Return a promise of fetch `k`, which runs when its result is requested."""
        return SimpleNamespace(result=functools.partial(self._fetch, k), done=lambda: False)

    def close(self, pending: Sequence[Any], *, is_waiting: bool) -> None:
        """Do nothing, since no fetch runs ahead."""


class ThreadRunner(OnDemandRunner):
    """Runner of fetches on the threads of this process."""

    def __init__(self, name: str, run: Callable[[int], Any], *, n_threads: int) -> None:
        super().__init__(name, run)
        self._threads = _Threads.enter(n_threads)

    def submit(self, k: int) -> Future[Timed]:
        """Queue fetch `k` for the next free thread."""
        return self._threads.executor.submit(self._fetch, k)

    def close(self, pending: Sequence[Future[Timed]], *, is_waiting: bool) -> None:
        """Cancel queued fetches, wait for running ones, and end the threads if no other window uses them."""
        is_waiting = is_waiting and not _is_fetching()  # A thread cannot wait for itself.
        for future in pending:
            future.cancel()
        try:
            if is_waiting:
                wait(pending)
        finally:
            self._threads.leave(is_waiting=is_waiting)


class _Threads:
    """Threads that the windows of this process share, and that end with the last window."""

    _current: _Threads | None = None
    # Reentrant, because garbage collection in a thread that holds the lock may close a window.
    _lock = threading.RLock()

    def __init__(self, n_threads: int) -> None:
        self.executor = ThreadPoolExecutor(n_threads, "dasksc-fetch", lambda: setattr(_this, "is_fetching", True))
        self._n_threads = n_threads
        self._n_windows = 0

    @classmethod
    def enter(cls, n_threads: int) -> _Threads:
        """Return threads for a window, at least `n_threads`."""
        with cls._lock:
            threads = cls._current
            # A fetch that iterates over another data set must not wait for its own thread.
            if threads is None or threads._n_threads < n_threads or _is_fetching():
                threads = _Threads(n_threads)
                if not _is_fetching():
                    cls._current = threads
            threads._n_windows += 1
            return threads

    def leave(self, *, is_waiting: bool) -> None:
        """End the threads if this was their last window."""
        with self._lock:
            self._n_windows -= 1
            if self._n_windows:
                return
            if _Threads._current is self:
                _Threads._current = None
        self.executor.shutdown(wait=is_waiting)


_this = threading.local()


def _is_fetching() -> bool:
    return getattr(_this, "is_fetching", False)


def _after_fork() -> None:
    # The threads of the parent do not exist in the child, and its lock may be held forever.
    _Threads._current, _Threads._lock = None, threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
