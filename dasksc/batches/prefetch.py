"""Preparation of batches ahead of the training loop, on a few threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["run_ahead"]

T = TypeVar("T")

_THREADS = "dasksc-gather"


def run_ahead(
    jobs: Iterator[Callable[[], T]], *, is_ready: Callable[[], bool], n_ahead: int, n_threads: int
) -> Iterator[T]:
    """Run `jobs` on a few threads, at most `n_ahead` ahead of the consumer, and yield their results in order."""
    # The next job is taken ahead only if `is_ready()`, since taking it may block. The consumer itself submits the jobs,
    # when it takes results, so the threads wait only for jobs, never for one another.
    if n_threads == 0:
        for run in jobs:
            yield run()
        return
    pending: deque[Future[T]] = deque()
    failure: Exception | None = None
    more = True
    # Several jobs are submitted at a time. With more of them, the loop would wait less for batches, but its own steps
    # would wait longer for the GIL.
    low = min(n_ahead - 1, max(n_threads, n_ahead // 2))
    pool = ThreadPoolExecutor(n_threads, thread_name_prefix=_THREADS)

    def fill() -> None:
        nonlocal more, failure
        while more and len(pending) < n_ahead and (not pending or is_ready()):
            try:
                job = next(jobs)
            except StopIteration:
                more = False
            except Exception as error:
                # The error is raised after the results of the preceding jobs.
                if not pending:
                    raise
                more, failure = False, error
            else:
                try:
                    pending.append(pool.submit(job))
                except RuntimeError:  # the interpreter exits, so threads accept no more jobs
                    pending.append(Future())
                    pending[-1].set_result(job())

    try:
        while True:
            if len(pending) <= low:
                fill()
            if not pending:
                if failure is not None:
                    raise failure
                return
            result = pending.popleft().result()
            if 0 < len(pending) <= low:
                fill()
            yield result
    finally:
        # Garbage collection may close the iterator in one of its own threads, which cannot wait for itself.
        is_own = threading.current_thread().name.startswith(_THREADS)
        pool.shutdown(wait=not is_own, cancel_futures=True)
