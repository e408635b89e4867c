"""Batches are made ahead of the training loop, on a few threads.

`concurrent.futures` would do, but for what it costs to hand over one batch: with steps of a fifth of a millisecond
that is what the loop waits for. A promise here is two locks, and threads are woken for several of them at a time.
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

_JOIN_S = 60.0  # a job that is closed in its middle may take; its thread ends by itself


class _Promise(Generic[T]):
    """What a job will return: run once, or dropped."""

    __slots__ = ("_claim", "_done", "_error", "_job", "_value")

    def __init__(self, job: Callable[[], T]) -> None:
        self._job: Callable[[], T] | None = job
        self._claim = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None
        self._value: T | None = None

    def keep(self) -> None:
        """Run the job, unless somebody else does."""
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
        """Have nobody run the job who has not begun."""
        if self._claim.acquire(blocking=False):
            self._job = None

    def result(self) -> T:
        """Wait, and return what the job returned, or raise what it raised. Once."""
        self._done.acquire()
        error, value = self._error, self._value
        self._error = self._value = None
        if error is not None:
            try:
                raise error
            finally:
                # Its traceback holds this frame.
                del error, self
        return value  # type: ignore[return-value]


def run_ahead(
    jobs: Iterator[Callable[[], T]], *, is_ready: Callable[[], bool], n_ahead: int, n_threads: int
) -> Iterator[T]:
    """Run `jobs` on a few threads, some ahead of the consumer, and yield their results in order.

    The consumer itself hands out the jobs, when it takes results: no thread ever waits for another, and closing
    the iterator ends the threads. When the interpreter is about to exit it ends them, and what is asked for later
    is run by the consumer.

    Parameters
    ----------
    jobs
        What to run. Taking the next one may block.
    is_ready
        Whether taking the next job would not block.
    n_ahead
        Results that are finished or under way at most, beyond the one being consumed.
    n_threads
        Threads; 0 runs each job in the consumer when it is asked for.
    """
    if n_threads == 0:
        for job in jobs:
            yield job()
        return
    pending: deque[_Promise[T]] = deque()
    failure: Exception | None = None
    more = True
    # Threads are woken for several jobs where there are several. For longer runs of jobs the loop would wait less for
    # batches, and more for the interpreter in its own steps.
    low = min(n_ahead - 1, max(n_threads, n_ahead // 2))
    crew = _Crew(n_threads)

    def fill() -> None:
        nonlocal more, failure
        while more and len(pending) < n_ahead and (not pending or is_ready()):
            try:
                promise = _Promise(next(jobs))
            except StopIteration:
                more = False
            except Exception as error:
                # Its turn comes after what was asked for before it.
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


class _Crew:
    """Threads that keep promises, until they are no longer needed or the interpreter is about to exit.

    Attributes
    ----------
    dismissed
        Whether promises given from now on may be kept by none of them.
    """

    everyone: ClassVar[weakref.WeakSet[_Crew]] = weakref.WeakSet()
    exiting: ClassVar[bool] = False

    def __init__(self, n_threads: int) -> None:
        self.dismissed = _Crew.exiting
        # By the queue alone: a crew that Ctrl-C has lost must not be kept by its threads, which end with it.
        self._promises: queue.SimpleQueue[_Promise[Any] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_keep_all, args=(self._promises,), name=f"dasksc-gather-{i}")
            for i in range(n_threads)
        ]

    def give(self, promise: _Promise[Any]) -> None:
        """Have a thread keep `promise`, soon."""
        self._promises.put(promise)

    def dismiss(self) -> None:
        """Let the threads end when they have kept what they were given."""
        # In this order: what a thread was not given in time finds the crew dismissed when its turn comes.
        self.dismissed = True
        self._promises.put(None)

    def __enter__(self) -> _Crew:
        _Crew.everyone.add(self)
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
            # One that Ctrl-C cut short while it started cannot be waited for; and whoever collects an iterator may
            # hold a lock that a job waits for.
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def __del__(self) -> None:
        self._promises.put(None)


def _keep_all(promises: queue.SimpleQueue[_Promise[Any] | None]) -> None:
    while (promise := promises.get()) is not None:
        promise.keep()
        # Hold no batch while waiting for the next.
        del promise
    # To the next thread: of one whose start Ctrl-C cut short, nobody knows.
    promises.put(None)


def _dismiss_all() -> None:
    _Crew.exiting = True
    for crew in list(_Crew.everyone):
        crew.dismiss()


# The interpreter waits for threads before it calls the handlers of `atexit`; this is how executors end theirs.
getattr(threading, "_register_atexit", atexit.register)(_dismiss_all)
