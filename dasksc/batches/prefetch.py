"""Preparation of batches ahead of the training loop, on a few threads.

Passing a batch through `concurrent.futures` takes too long: with training steps of 0.2 ms, the training loop would have
to wait for batches. A job here is synchronized by two locks alone, and one wake-up of a thread serves several jobs.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

from dasksc.executor.window import join_all

T = TypeVar("T")


class _Job(Generic[T]):
    """Job that runs at most once, and its future result."""

    __slots__ = ("_claim", "_done", "_error", "_run", "_value")

    def __init__(self, run: Callable[[], T]) -> None:
        self._run: Callable[[], T] | None = run
        self._claim = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None
        self._value: T | None = None

    def run(self) -> None:
        """Run the job unless another thread has claimed it."""
        run = self._run
        if run is None or not self._claim.acquire(blocking=False):
            return
        done = self._done
        try:
            self._value = run()
        except BaseException as error:
            self._error = error
        finally:
            self._run = None
            # The traceback of an error holds this frame.
            del self, run
            done.release()

    def cancel(self) -> None:
        """Cancel the job unless it has begun."""
        if self._claim.acquire(blocking=False):
            self._run = None

    def result(self) -> T:
        """Wait for the job, and return its result or raise its error. Call this method only once."""
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
    """Run `jobs` on a few threads, at most `n_ahead` ahead of the consumer, and yield their results in order.

    The next job is taken ahead only if `is_ready()`, since taking it may block. Without threads, each job runs when its
    result is requested.
    """
    # The consumer itself submits the jobs, when it takes results, so the threads wait only for jobs, never for one
    # another. Closing the iterator ends the threads. They also end when the interpreter begins to exit; the consumer
    # then runs the remaining jobs itself.
    if n_threads == 0:
        for run in jobs:
            yield run()
        return
    pending: deque[_Job[T]] = deque()
    failure: Exception | None = None
    more = True
    # Several jobs are submitted at a time, so that one wake-up of a thread serves all of them. With more jobs at a
    # time, the loop would wait less for batches, but its own steps would wait longer for the GIL.
    low = min(n_ahead - 1, max(n_threads, n_ahead // 2))
    pool = _ThreadPool(n_threads)

    def fill() -> None:
        nonlocal more, failure
        while more and len(pending) < n_ahead and (not pending or is_ready()):
            try:
                job = _Job(next(jobs))
            except StopIteration:
                more = False
            except Exception as error:
                # The error is raised after the results of the preceding jobs.
                if not pending:
                    raise
                more, failure = False, error
            else:
                pending.append(job)
                pool.jobs.put(job)

    with pool:
        try:
            while True:
                if len(pending) <= low:
                    fill()
                if not pending:
                    if failure is not None:
                        raise failure
                    return
                job = pending.popleft()
                if pool.closed:
                    job.run()
                result = job.result()
                del job
                if 0 < len(pending) <= low:
                    fill()
                yield result
        finally:
            for job in pending:
                job.cancel()


class _ThreadPool:
    """Threads that run jobs until they are no longer needed or the interpreter begins to exit."""

    instances: ClassVar[weakref.WeakSet[_ThreadPool]] = weakref.WeakSet()
    exiting: ClassVar[bool] = False

    def __init__(self, n_threads: int) -> None:
        self.closed = _ThreadPool.exiting  # True if the threads might not run jobs submitted from now on
        # Threads reference only the queue. They must not keep the pool alive: if Ctrl-C prevents it from being closed,
        # its garbage collection ends the threads.
        self.jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_run_all, args=(self.jobs,), name=f"dasksc-gather-{i}") for i in range(n_threads)
        ]

    def close(self) -> None:
        """End the threads once they have run the queued jobs."""
        # The flag is set before the stop signal is queued. Once it is set, the consumer runs its jobs itself, since the
        # threads run none that are queued after the signal.
        self.closed = True
        self.jobs.put(None)

    def __enter__(self) -> _ThreadPool:
        _ThreadPool.instances.add(self)
        try:
            for thread in [] if self.closed else self._threads:
                thread.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        join_all(self._threads)

    def __del__(self) -> None:
        self.jobs.put(None)


def _run_all(jobs: queue.SimpleQueue[_Job[Any] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        # Hold no batch while waiting for the next job.
        del job
    # Pass the stop signal on to the next thread. `close` queues the signal once, not once per thread, because the
    # number of running threads is unknown if Ctrl-C interrupted the start of one.
    jobs.put(None)


def _close_all() -> None:
    _ThreadPool.exiting = True
    for pool in list(_ThreadPool.instances):
        pool.close()


# The interpreter joins threads before it calls the handlers of `atexit`. Functions registered with
# `threading._register_atexit` run earlier; the executors of the standard library use it, too.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
