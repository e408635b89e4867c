"""Preparation of batches ahead of the training loop, on a few threads.

Passing a batch through `concurrent.futures` takes too long: with training steps of 0.2 ms, the loop would wait for it.
A promise here consists of two locks, and waking a thread once serves several promises.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

__all__ = ["run_ahead"]

T = TypeVar("T")

_JOIN_S = 60.0  # Maximum time to wait for a job that is closed halfway; its thread then ends on its own.


class _Job(Generic[T]):
    """Future result of a job that runs at most once."""

    __slots__ = ("_claim", "_done", "_error", "_job", "_value")

    def __init__(self, job: Callable[[], T]) -> None:
        self._job: Callable[[], T] | None = job
        self._claim = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None
        self._value: T | None = None

    def keep(self) -> None:
        """Run the job unless another thread has claimed it."""
        job = self._job
        if job is None or not self._claim.acquire(blocking=False):
            return
        done = self._done
        try:
            self._value = job()
        except BaseException as error:
            self._error = error
        finally:
            self._job = None
            # The traceback of an error holds this frame.
            del self, job
            done.release()

    def drop(self) -> None:
        """Cancel the job unless it has begun."""
        if self._claim.acquire(blocking=False):
            self._job = None

    def result(self) -> T:
        """Wait for the job; return its result or raise its error. May be called once."""
        self._done.acquire()
        error, value = self._error, self._value
        self._error = self._value = None
        if error is not None:
            try:
                raise error
            finally:
                # The traceback holds this frame.
                del error, self
        return value  # type: ignore[return-value]


def run_ahead(
    jobs: Iterator[Callable[[], T]], *, is_ready: Callable[[], bool], n_ahead: int, n_threads: int
) -> Iterator[T]:
    """Run `jobs` on a few threads, ahead of the consumer, and yield their results in order.

    The consumer submits jobs when it takes results, so no thread ever waits for another. Closing the iterator ends
    the threads. They also end when the interpreter begins to exit, and the consumer runs all later jobs itself.

    Parameters
    ----------
    jobs
        Jobs to run. Taking the next one may block.
    is_ready
        Function that returns True if taking the next job would not block.
    n_ahead
        Maximum number of results that are finished or being computed, beyond the one being consumed.
    n_threads
        Number of threads; 0 runs each job in the consumer when its result is requested.
    """
    if n_threads == 0:
        for job in jobs:
            yield job()
        return
    pending: deque[_Job[T]] = deque()
    failure: Exception | None = None
    more = True
    # Jobs are submitted several at a time, so that one wake-up of a thread covers several. With longer
    # runs, the loop would wait less for batches, but its own steps would wait more for the interpreter
    # lock.
    low = min(n_ahead - 1, max(n_threads, n_ahead // 2))
    crew = _ThreadPool(n_threads)

    def fill() -> None:
        nonlocal more, failure
        while more and len(pending) < n_ahead and (not pending or is_ready()):
            try:
                promise = _Job(next(jobs))
            except StopIteration:
                more = False
            except Exception as error:
                # Raised after the results of the jobs before it.
                if not pending:
                    raise
                more, failure = False, error
            else:
                pending.append(promise)
                crew.give(promise)

    with crew:
        try:
            while True:
                if len(pending) <= low:
                    fill()
                if not pending:
                    if failure is not None:
                        raise failure
                    return
                promise = pending.popleft()
                if crew.dismissed:
                    promise.keep()
                result = promise.result()
                del promise
                if 0 < len(pending) <= low:
                    fill()
                yield result
        finally:
            for promise in pending:
                promise.drop()


class _ThreadPool:
    """Threads that run jobs until they are no longer needed or the interpreter begins to exit.

    Attributes
    ----------
    dismissed
        True if promises submitted from now on may be run by none of the threads.
    """

    everyone: ClassVar[weakref.WeakSet[_ThreadPool]] = weakref.WeakSet()
    exiting: ClassVar[bool] = False

    def __init__(self, n_threads: int) -> None:
        self.dismissed = _ThreadPool.exiting
        # Threads reference only the queue. They must not keep alive a pool that Ctrl-C has left unclosed; garbage
        # collection of the pool ends them.
        self._promises: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_keep_all, args=(self._promises,), name=f"dasksc-gather-{i}")
            for i in range(n_threads)
        ]

    def give(self, promise: _Job[Any]) -> None:
        """Queue `promise` for the threads."""
        self._promises.put(promise)

    def dismiss(self) -> None:
        """End the threads once they have run the queued promises."""
        # Set before the stop signal is queued: a promise queued after the signal is run by the consumer,
        # which checks this flag.
        self.dismissed = True
        self._promises.put(None)

    def __enter__(self) -> _ThreadPool:
        _ThreadPool.everyone.add(self)
        try:
            for thread in [] if self.dismissed else self._threads:
                thread.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss()
        for thread in self._threads:
            # A thread whose start Ctrl-C interrupted cannot be joined. The wait is bounded, because the
            # code that collects an iterator may hold a lock that a job waits for.
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def __del__(self) -> None:
        self._promises.put(None)


def _keep_all(promises: queue.SimpleQueue[_Job[Any] | None]) -> None:
    while (promise := promises.get()) is not None:
        promise.keep()
        # Hold no batch while waiting for the next promise.
        del promise
    # Pass the stop signal on to the next thread. A thread whose start Ctrl-C interrupted may be unknown,
    # so the threads are not counted.
    promises.put(None)


def _dismiss_all() -> None:
    _ThreadPool.exiting = True
    for crew in list(_ThreadPool.everyone):
        crew.dismiss()


# The interpreter joins threads before it calls the handlers of `atexit`. The standard-library executors
# use the same hook.
getattr(threading, "_register_atexit", atexit.register)(_dismiss_all)
