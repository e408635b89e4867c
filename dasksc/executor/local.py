"""Fetches in this process: on a few threads, or in the thread that asks.

Each fetch is run by a Dask scheduler call of its own, `dask.local.get_sync`, inside a thread of an
executor that belongs to this module. Dask's threaded scheduler cannot be shared instead: its default
pool deadlocks in a forked child of a parent that has used it, and off the main thread it makes one
pool per calling thread.
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
from dasksc._compat.unsupported import UnsupportedVersionError, say_once
from dasksc.platforms import after_fork

__all__ = ["OnDemandRunner", "ThreadRunner"]

logger = logging.getLogger("dasksc.window.local")

Timed = tuple[float, Any]  # seconds the fetch took, what it returned

_IDLE_S = 5.0  # after which a thread without work ends; a new one starts in less than a millisecond


class Diagnostics:
    """The Dask callbacks that were active when the window was made, shown one computation.

    A callback such as `dask.diagnostics.Profiler` keeps the state of one computation, so that with a
    computation per fetch and several fetches at a time each would wipe out the others'. The window
    is therefore announced as one computation of as many tasks as it has fetches, which also makes
    `dask.diagnostics.ProgressBar` show the progress of the epoch. Calls are serialised.
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
        """Return the callbacks to give to the scheduler call that runs one fetch."""
        return callbacks_of_one_task(self._before, self._after) if self._open else []

    def failed(self, key: Any) -> None:
        """Record that a fetch will not finish."""
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

    def _call(self, place: int, *args: Any) -> None:
        """Call each callback's function for this occasion: start, start_state, pretask, posttask, finish."""
        for callback in list(self._callbacks):
            function = callback[place]
            if function is None:
                continue
            try:
                function(*args)
            except Exception:
                # A profiler that another computation has reset meanwhile must not end a training run.
                logger.warning("The Dask callback %r failed; this epoch goes on without it.", function, exc_info=True)
                self._callbacks.remove(callback)


def _active_callbacks() -> list[tuple[Callable[..., Any] | None, ...]]:
    try:
        return active_callbacks()
    except UnsupportedVersionError as error:
        say_once(error, without="Dask's profilers and progress bars see no fetches")
        return []


class _LocalRunner:
    """What both runners do with one fetch."""

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


class _OnDemand:
    """A fetch that is run by whoever asks for its result."""

    def __init__(self, fetch: Callable[[], Timed]) -> None:
        self._fetch = fetch

    def result(self) -> Timed:
        return self._fetch()

    def done(self) -> bool:
        return False


class OnDemandRunner(_LocalRunner):
    """Runs each fetch when its result is asked for, in the asking thread."""

    def submit(self, k: int) -> _OnDemand:
        """Promise fetch `k`."""
        return _OnDemand(lambda: self._fetch(k))

    def close(self, pending: Sequence[_OnDemand], *, wait_s: float, exiting: bool) -> None:
        """Tell the callbacks that nothing follows."""
        self._diagnostics.finish()


class ThreadRunner(_LocalRunner):
    """Runs fetches on the threads of this process, shared by all windows."""

    def __init__(self, name: str, ks: Sequence[int], run: Callable[[int], Any], *, n_threads: int) -> None:
        super().__init__(name, ks, run)
        self._threads = _Threads.join_in(self, n_threads)

    def submit(self, k: int) -> Future[Timed]:
        """Start fetch `k` as soon as a thread is free."""
        return self._threads.submit(self._fetch, k)

    def close(self, pending: Sequence[Future[Timed]], *, wait_s: float, exiting: bool) -> None:
        """Drop what has not started, wait for what has, and end the threads if no window needs them."""
        deadline = perf_counter() + (0.0 if self._threads.is_current() else wait_s)
        for future in pending:
            future.cancel()
        try:
            # The waits of the standard library refuse infinity.
            wait(pending, min(max(0.0, deadline - perf_counter()), threading.TIMEOUT_MAX))
        finally:
            self._threads.leave(self, deadline=deadline)
            self._diagnostics.finish()


class _Threads:
    """An executor whose threads live only while some window uses it.

    `concurrent.futures.ThreadPoolExecutor` would do but for the end of the interpreter, which waits
    for all its threads, and all that is queued, before any handler can cancel it. These threads are
    daemons; windows that are still open then are closed by a handler that waits a while only. Threads
    with nothing to do end too: a window that Ctrl-C left open may be held by the traceback for long.
    """

    _current: _Threads | None = None
    # Reentrant, since a window may be collected, and leave, while its thread is in here.
    _registry = threading.RLock()
    _numbers = itertools.count()

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._limit = 0
        # One that Ctrl-C kept from leaving must not keep the threads up.
        self._members: weakref.WeakSet[ThreadRunner] = weakref.WeakSet()
        self._queue: queue.SimpleQueue[tuple[Future[Timed], Callable[[], Timed]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._n_unfinished = 0
        self._stopped = False

    @classmethod
    def join_in(cls, member: ThreadRunner, n_threads: int) -> _Threads:
        """Return this process's executor, of at least `n_threads`, and keep it up until `member` leaves."""
        with cls._registry:
            while True:
                threads = cls._current
                if threads is None or threads._stopped or threads._pid != os.getpid():
                    threads = cls._current = _Threads()
                threads._members.add(member)
                threads._limit = max(threads._limit, n_threads)
                if not threads._stopped:
                    return threads

    def leave(self, member: ThreadRunner, *, deadline: float) -> None:
        """End the threads if `member` was the last; wait until they have ended or the deadline has passed."""
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
        """Whether the calling thread is one of these."""
        return threading.current_thread() in self._threads

    def submit(self, function: Callable[[int], Timed], k: int) -> Future[Timed]:
        """Queue ``function(k)``, with the caller's context variables."""
        future: Future[Timed] = Future()
        context = contextvars.copy_context()
        with self._lock:
            if self._stopped:  # the interpreter is going down
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
            # Hold no result, and no exception's frames, while waiting for the next.
            del item, future, fetch
            with self._lock:
                self._n_unfinished -= 1
        # To the next thread: of one whose start Ctrl-C cut short, nobody knows.
        self._queue.put(None)


def _after_fork() -> None:
    # A lock that another thread of the parent held at the fork would never be released here.
    _Threads._registry = threading.RLock()
    _Threads._current = None


after_fork(_after_fork)
