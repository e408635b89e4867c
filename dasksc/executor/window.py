"""Bounded, ordered window of fetches in flight.

A `Window` runs ``task(k)`` for each fetch number k, as one Dask task, a few fetches ahead of the consumer. It returns
the results in order, and holds them only until they are consumed. At most `depth` fetches and `max_bytes` bytes are in
flight, including finished fetches that are not yet consumed.

No matter how the consumer stops (exhaustion, ``break``, an error, Ctrl-C), the window leaves no thread, task, future or
key behind. Fetches run on threads of this process or in the calling thread, or on the workers of a Dask cluster
(`dasksc.executor.cluster`, imported only if a Client is used). In this process, each fetch is a call of `dask.get` with
a graph of one task, so Dask's callbacks see it. Dask's threaded scheduler is not used: its pool deadlocks in a forked
child of a process that has used it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from numbers import Integral
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import dask
from dask.callbacks import Callback
from dask.sizeof import sizeof
from dask.task_spec import Task

from dasksc.errors import FetchError
from dasksc.executor.progress import FetchFigures
from dasksc.executor.schedulers import FetchScheduler, default_threads, resolve_scheduler

if TYPE_CHECKING:
    from distributed import Client

    from dasksc.executor.cluster import ClusterRunner

T = TypeVar("T")
_Timed = tuple[float, Any]  # Duration of the fetch in seconds, and its result.
_THREADS = "dasksc-fetch"  # Prefix of the names of fetching threads
# Maximum wait, on closing, for the current job of a thread; if the job takes longer, the thread ends after it.
_JOIN_S = 60.0


class LocalRunner:
    """Runner of fetches on threads that end with the window or, without threads, where their results are requested."""

    transfer_s = 0.0

    def __init__(self, name: str, run: Callable[[int], Any], *, n_threads: int) -> None:
        self._name = name
        self._run = run
        self._executor = ThreadPoolExecutor(n_threads, _THREADS) if n_threads else None
        # `dask.get` would take the callbacks from a global variable, which it empties while it runs.
        self._callbacks = list(Callback.active)
        # Callbacks such as `dask.diagnostics.Profiler` keep the state of a single computation.
        self._one_at_a_time = threading.Lock() if self._callbacks else contextlib.nullcontext()

    def _fetch(self, k: int) -> _Timed:
        key = (self._name, k)
        graph = {key: Task(key, self._run, k)}
        with self._one_at_a_time:
            start = perf_counter()
            result = dask.get(graph, key, callbacks=self._callbacks, get_id=threading.get_ident)
            return perf_counter() - start, result

    def submit(self, k: int) -> Any:
        """Return a promise of fetch `k`."""
        if self._executor is None:
            return SimpleNamespace(result=functools.partial(self._fetch, k), done=lambda: False)
        return self._executor.submit(self._fetch, k)

    def close(self, *, is_waiting: bool) -> None:
        """Cancel queued fetches, and wait for running ones."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            if is_waiting:
                join_all(self._executor._threads)


def join_all(threads: Collection[threading.Thread]) -> None:
    """Wait until threads have ended, at most a minute for each, unless they may wait for this thread."""
    # Garbage collection may close an iteration in any thread, also in one of its own, or in the event loop of
    # zarr-python, for which fetches wait. The wait is bounded, as such a thread may also hold a lock.
    here = threading.current_thread()
    is_loop = here is not threading.main_thread() and asyncio._get_running_loop() is not None
    if not is_loop and here not in threads:
        for thread in threads:
            if thread.is_alive():  # a thread whose start was interrupted by Ctrl-C cannot be joined
                thread.join(_JOIN_S)


class Window(Generic[T]):
    """Ordered results ``(k, task(k))``, computed a few fetches ahead; one thread at a time may iterate."""

    _is_closed = True  # until there is a runner

    def __init__(
        self,
        task: Callable[[Any], T],  # sent once to each worker of a cluster, not with each fetch
        ks: Iterable[int],
        *,
        name: str,  # prefix of the Dask keys
        depth: int | Callable[[], int],  # fetches in flight, or a function, since workers of a cluster come and go
        scheduler: FetchScheduler | Client | str | None = None,
        argument: Callable[[int], Any] | None = None,  # of the task, computed in this process; by default k itself
        max_bytes: int | None = None,  # of the fetches in flight; an unfinished one counts as the largest result so far
        describe: Callable[[int], str] | None = None,  # for error messages
        n_threads: int | None = None,  # in this process
        expected_bytes: int | None = None,  # of a result
    ) -> None:
        self.n_submitted = 0
        self.scheduler = resolve_scheduler(scheduler)
        self._consumed = FetchFigures(limit_bytes=max_bytes)
        self._describe = describe
        self._depth: Callable[[], int] = depth if callable(depth) else lambda: depth
        self._max_bytes = max_bytes
        self._largest = expected_bytes
        self._ks = iter(ks)
        self._next_k = next(self._ks, None)
        # Fetch numbers, and promises with the methods `result` and `done` of `concurrent.futures.Future`.
        self._promises: deque[tuple[int, Any]] = deque()
        self._lock = threading.RLock()
        self._pid = os.getpid()  # a forked child has neither the threads nor the connections of the parent

        self._runner: LocalRunner | ClusterRunner
        if self.scheduler.client is not None:
            from dasksc.executor.cluster import ClusterRunner

            self._runner = ClusterRunner(name, task, argument, client=self.scheduler.client)
        else:
            run = task if argument is None else lambda k: task(argument(k))
            is_synchronous = self.scheduler.kind == "synchronous"
            self._runner = LocalRunner(name, run, n_threads=0 if is_synchronous else n_threads or default_threads())
            if is_synchronous:
                self._depth = lambda: 0
        self._is_closed = False
        try:
            self._fill(self._depth())
        except BaseException:
            self.close()
            raise

    @property
    def n_in_flight(self) -> int:
        """Number of fetches submitted but not consumed."""
        return len(self._promises)

    def figures(self) -> FetchFigures:
        """Return the current figures of the fetches. Any thread may call this."""
        promises = [promise for _, promise in list(self._promises)]
        try:
            n_fetching, n_bytes = self._weigh(promises)
        except Exception:  # A fetch failed; its error is raised at its position.
            n_fetching, n_bytes = sum(not promise.done() for promise in promises), 0
        return replace(
            self._consumed,
            n_fetching=n_fetching,
            n_ready=len(promises) - n_fetching,
            in_flight_bytes=n_bytes + n_fetching * (self._largest or 0),
            transfer_s=self._runner.transfer_s,
        )

    def are_done(self, n: int) -> bool:
        """Return True if the next `n` results, or all that remain if they are fewer, are available without waiting."""
        promises = list(self._promises)[:n]
        is_all = len(promises) == n or self._is_closed or self._next_k is None
        return is_all and all(promise.done() for _, promise in promises)

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return self

    def __next__(self) -> tuple[int, T]:
        if self._pid != os.getpid():
            raise FetchError("This iteration was started before a fork. Start a new one in the child process.")
        try:
            self._fill(max(1, self._depth()))
            try:
                k, promise = self._promises[0]
            except IndexError:
                raise StopIteration from None
            try:
                fetch_s, result = promise.result()
            except Exception as error:
                if self._is_closed:
                    raise StopIteration from None
                raise self._fetch_error(k, error) from error
            finally:
                del promise  # The promise holds the error, whose traceback holds this frame.
            with self._lock:
                if self._is_closed:
                    raise StopIteration
                self._promises.popleft()
            self._largest = max(_n_bytes(result), self._largest or 0)
            consumed, spent = self._consumed, getattr(result, "spent", None)
            consumed.n_fetched += 1
            consumed.fetch_s += fetch_s
            if spent is not None:
                consumed.read_s += spent.read_s
                consumed.decode_s += spent.decode_s
            self._fill(self._depth())
            return k, result
        except BaseException:
            self.close()
            raise

    def close(self, *, is_waiting: bool = True) -> None:
        """Cancel the fetches in flight and, if `is_waiting`, wait until no fetch runs any more. Idempotent."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._promises.clear()
        self._runner.close(is_waiting=is_waiting)

    def __del__(self) -> None:
        # Garbage collection must not wait, as it may run in any thread, even one of the window's own. An interpreter
        # that exits ends the threads, and the Clients their fetches.
        if not self._is_closed and not sys.is_finalizing():
            self.close(is_waiting=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, depth: int) -> None:
        while True:
            # The lock prevents a concurrent close from missing the new promise.
            with self._lock:
                k = self._next_k
                if self._is_closed or k is None or len(self._promises) >= depth or not self._fits():
                    return
                promise: Any
                try:
                    promise = self._runner.submit(k)
                    self._next_k = next(self._ks, None)
                except Exception as error:
                    # The error is raised at the position of this fetch, like that of any other failed fetch, because
                    # the earlier results are valid.
                    promise = Future()
                    promise.set_exception(error)
                    self._next_k = None
                self._promises.append((k, promise))
                self.n_submitted += 1

    def _fits(self) -> bool:
        promises = self._promises
        if self._max_bytes is None or not promises:
            return True
        try:
            n_running, held_bytes = self._weigh([promise for _, promise in promises])
        except Exception:
            return False  # Results after a failed fetch are never consumed.
        return self._largest is not None and held_bytes + (n_running + 1) * self._largest <= self._max_bytes

    def _weigh(self, promises: Sequence[Any]) -> tuple[int, int]:
        """Return the number of unfinished fetches and the total bytes of finished ones."""
        held_bytes = n_running = 0
        for promise in promises:
            if not promise.done():
                n_running += 1
                continue
            n_bytes = _n_bytes(promise.result()[1])
            held_bytes += n_bytes
            self._largest = max(n_bytes, self._largest or 0)
        return n_running, held_bytes

    def _fetch_error(self, k: int, error: BaseException) -> FetchError:
        what = f"fetch {k}" if self._describe is None else self._describe(k)
        where = "" if self.scheduler.client is None else f" on the {self.scheduler}"
        return FetchError(f"{what} failed{where}: {type(error).__name__}: {error}")


def _n_bytes(result: object) -> int:
    n_bytes = getattr(result, "nbytes", None)
    return int(n_bytes if isinstance(n_bytes, Integral) else sizeof(result))
