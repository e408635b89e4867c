"""Runners of fetches in this process, on a few threads or in the calling thread.

Each fetch is a separate call of the Dask scheduler `dask.local.get_sync`, in a thread of an executor
owned by this module. Dask's threaded scheduler is not used: its default pool deadlocks in a forked child
of a parent that has used it, and outside the main thread it creates one pool per calling thread.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from time import perf_counter
from typing import Any

from dask.task_spec import Task

from dasksc._compat.dask import (
    FINISH,
    POSTTASK,
    PRETASK,
    START,
    START_STATE,
    active_callbacks,
    callbacks_of_one_task,
    get_sync,
    scheduler_state,
)
from dasksc._compat.unsupported import UnsupportedVersionError, warn_once
from dasksc.platforms import after_fork

__all__ = ["OnDemandRunner", "ThreadRunner"]

logger = logging.getLogger("dasksc.window.local")

Timed = tuple[float, Any]  # Duration of the fetch in seconds, and its result.

_IDLE_S = 5.0  # Idle time after which a thread ends; starting a new one takes less than a millisecond.


class Diagnostics:
    """Dask callbacks that were active when a window was created. They see the window as one computation.

    A callback such as `dask.diagnostics.Profiler` keeps the state of one computation. If each fetch were a computation
    of its own, concurrent fetches would overwrite each other's state. The window is therefore announced as one
    computation with as many tasks as it has fetches, so `dask.diagnostics.ProgressBar` shows the progress of the epoch.
    Only one callback runs at a time.
    """

    def __init__(self, name: str, ks: Sequence[int], run: Callable[[int], Any]) -> None:
        self._callbacks = _active_callbacks()
        self._lock = threading.RLock()
        self._open = bool(self._callbacks)
        if not self._open:
            return
        self._graph: dict[Any, Any] = {(name, k): Task((name, k), run, k) for k in ks}
        self._state = scheduler_state(self._graph)
        self._call(START, self._graph)
        self._call(START_STATE, self._graph, self._state)

    def of_one_fetch(self) -> list[tuple[Any, ...]]:
        """Return the callbacks for the scheduler call of one fetch."""
        return callbacks_of_one_task(self._before, self._after) if self._open else []

    def failed(self, key: Any) -> None:
        """Record that a fetch failed."""
        with self._lock:
            if self._open:
                self._state["running"].discard(key)

    def finish(self) -> None:
        """Announce the end of the computation, once."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            errored = len(self._state["finished"]) < len(self._graph)
            self._call(FINISH, self._graph, self._state, errored)

    def _before(self, key: Any, _graph: Any, _state: Any) -> None:
        with self._lock:
            if self._open:
                self._state["ready"].pop(key, None)
                self._state["running"].add(key)
                self._call(PRETASK, key, self._graph, self._state)

    def _after(self, key: Any, result: Any, _graph: Any, _state: Any, worker_id: Any) -> None:
        with self._lock:
            if self._open:
                self._state["running"].discard(key)
                self._state["finished"].add(key)
                self._call(POSTTASK, key, result, self._graph, self._state, worker_id)
                self._state["released"].add(key)

    def _call(self, hook: int, *args: Any) -> None:
        """Call hook number `hook` (start, start_state, pretask, posttask or finish) of every callback."""
        for callback in list(self._callbacks):
            function = callback[hook]
            if function is None:
                continue
            try:
                function(*args)
            except Exception:
                # Another computation may have reset a profiler; that must not end a training run.
                logger.warning("The Dask callback %r failed; this epoch continues without it.", function, exc_info=True)
                self._callbacks.remove(callback)


def _active_callbacks() -> list[tuple[Callable[..., Any] | None, ...]]:
    try:
        return active_callbacks()
    except UnsupportedVersionError as error:
        warn_once(error, without="Dask's profilers and progress bars see no fetches")
        return []


class _LocalRunner:
    """Base class of the runners in this process."""

    needs_executors = False
    transfer_s = 0.0

    def __init__(self, name: str, ks: Sequence[int], run: Callable[[int], Any]) -> None:
        self._name = name
        self._run = run
        self._diagnostics = Diagnostics(name, ks, run)

    def _fetch(self, k: int) -> Timed:
        start = perf_counter()
        key = (self._name, k)
        try:
            result = get_sync(
                {key: Task(key, self._run, k)},
                key,
                callbacks=self._diagnostics.of_one_fetch(),
                get_id=threading.get_ident,
            )
        except BaseException:
            self._diagnostics.failed(key)
            raise
        return perf_counter() - start, result


class _OnDemandFetch:
    """Fetch that runs when its result is requested, in the requesting thread."""

    def __init__(self, fetch: Callable[[], Timed]) -> None:
        self._fetch = fetch

    def result(self) -> Timed:
        return self._fetch()

    def done(self) -> bool:
        return False


class OnDemandRunner(_LocalRunner):
    """Runner of fetches in the thread that requests their results."""

    def submit(self, k: int) -> _OnDemandFetch:
        """Return a promise of fetch `k`."""
        return _OnDemandFetch(lambda: self._fetch(k))

    def close(self, pending: Sequence[_OnDemandFetch], *, wait_s: float, exiting: bool) -> None:
        """Announce the end of the computation to the callbacks."""
        self._diagnostics.finish()


class ThreadRunner(_LocalRunner):
    """Runner of fetches on threads of this process that all windows share."""

    def __init__(self, name: str, ks: Sequence[int], run: Callable[[int], Any], *, n_threads: int) -> None:
        super().__init__(name, ks, run)
        self._pool = _SharedThreadPool.enter(self, n_threads)

    def submit(self, k: int) -> Future[Timed]:
        """Queue fetch `k` for the next free thread."""
        return self._pool.submit(self._fetch, k)

    def close(self, pending: Sequence[Future[Timed]], *, wait_s: float, exiting: bool) -> None:
        """Cancel queued fetches, wait for running ones, and end the threads if no other window uses them."""
        deadline = perf_counter() + (0.0 if self._pool.is_current() else wait_s)
        for future in pending:
            future.cancel()
        try:
            # The standard library rejects infinite timeouts.
            wait(pending, min(max(0.0, deadline - perf_counter()), threading.TIMEOUT_MAX))
        finally:
            self._pool.leave(self, deadline=deadline)
            self._diagnostics.finish()


class _SharedThreadPool:
    """Thread pool whose threads live only while a window uses it.

    When the interpreter exits, a `concurrent.futures.ThreadPoolExecutor` waits for all threads and all queued work
    before any handler can cancel them. The threads of this pool are daemons. At exit, a handler closes the windows that
    are still open and waits only for a limited time. Idle threads also end by themselves: if Ctrl-C prevents a window
    from closing and a traceback keeps the window alive, nothing else would end them.
    """

    _current: _SharedThreadPool | None = None
    # Reentrant: a thread that holds the lock may run garbage collection, which may finalize a window and make it leave
    # the pool.
    _registry = threading.RLock()
    _numbers = itertools.count()

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._limit = 0
        # The references are weak, so that a runner that could not leave the pool because of Ctrl-C does not keep the
        # threads alive.
        self._members: weakref.WeakSet[ThreadRunner] = weakref.WeakSet()
        self._queue: queue.SimpleQueue[tuple[Future[Timed], Callable[[], Timed]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._n_unfinished = 0
        self._stopped = False

    @classmethod
    def enter(cls, member: ThreadRunner, n_threads: int) -> _SharedThreadPool:
        """Return this process's pool, for at least `n_threads` threads, and keep it alive until `member` leaves."""
        with cls._registry:
            while True:
                pool = cls._current
                if pool is None or pool._stopped or pool._pid != os.getpid():
                    pool = cls._current = _SharedThreadPool()
                pool._members.add(member)
                pool._limit = max(pool._limit, n_threads)
                if not pool._stopped:
                    return pool

    def leave(self, member: ThreadRunner, *, deadline: float) -> None:
        """End the threads if `member` was the last one; wait for them until the deadline."""
        with self._registry:
            self._members.discard(member)
            if self._members:
                return
            self._stopped = True
            self._queue.put(None)
        for thread in list(self._threads):
            if (left_s := deadline - perf_counter()) > 0:
                thread.join(min(left_s, threading.TIMEOUT_MAX))

    def is_current(self) -> bool:
        """Return True if the calling thread belongs to this pool."""
        return threading.current_thread() in self._threads

    def submit(self, function: Callable[[int], Timed], k: int) -> Future[Timed]:
        """Queue the call ``function(k)``, which a thread runs with the caller's context variables."""
        future: Future[Timed] = Future()
        context = contextvars.copy_context()
        with self._lock:
            if self._stopped:  # The interpreter is exiting.
                future.cancel()
                return future
            self._n_unfinished += 1
            if len(self._threads) < min(self._limit, self._n_unfinished):
                name = f"dasksc-fetch-{next(self._numbers)}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
            self._queue.put((future, functools.partial(context.run, function, k)))
        return future

    def _serve(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if not self._queue.empty():
                        continue
                    if (this := threading.current_thread()) in self._threads:
                        self._threads.remove(this)
                    return
            if item is None:
                break
            future, fetch = item
            if future.set_running_or_notify_cancel():
                try:
                    result = fetch()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            # Drop references to the result and to the frames of an exception before waiting for the next
            # item.
            del item, future, fetch
            with self._lock:
                self._n_unfinished -= 1
        # Pass the stop signal on to the next thread. A thread whose start was interrupted by Ctrl-C may be missing from
        # the list, so the threads are not counted.
        self._queue.put(None)


def _after_fork() -> None:
    # A lock that another thread of the parent held during the fork would never be released in the child.
    _SharedThreadPool._registry = threading.RLock()
    _SharedThreadPool._current = None


after_fork(_after_fork)
