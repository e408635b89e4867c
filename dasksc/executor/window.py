"""The bounded, ordered window of fetches in flight.

A `Window` runs ``task(k)`` for each fetch number k, each as one Dask task, a few ahead of the
consumer, and hands the results over in order. Results are held only until they are consumed: at most
`depth` fetches are in flight or finished and not consumed, and at most `max_bytes` bytes.

However the consumer stops (exhaustion, ``break``, an error, Ctrl-C, the end of the interpreter), the
window leaves no thread, task, future or key behind.

What it runs on is behind one seam, the `Runner`: threads of this process or the asking thread itself
(`dasksc.executor.local`), or the workers of a distributed cluster (`dasksc.executor.cluster.runner`, imported
only where a Client is used).
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Integral
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from dask.sizeof import sizeof

from dasksc.errors import FetchError, InputError
from dasksc.executor.local import OnDemandRunner, ThreadRunner, Timed
from dasksc.executor.progress import FetchFigures
from dasksc.executor.schedulers import (
    Scheduler,
    default_threads,
    resolve_scheduler,
)

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["Window", "WindowStats"]

T = TypeVar("T")

EXIT_WAIT_S = 10.0  # for running fetches, at the end of the interpreter


class Promise(Protocol):
    """A fetch that was asked for: the part of `concurrent.futures.Future` that the window uses."""

    def result(self) -> Timed:
        """Wait for the fetch; return how long it took, in seconds, and its result."""

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""


class Runner(Protocol):
    """Something that runs fetches."""

    @property
    def needs_executors(self) -> bool:
        """Whether it can close only while the executors of this process (of the standard library) work."""

    @property
    def transfer_s(self) -> float:
        """Seconds from the ends of fetches to their results being here, summed."""

    def submit(self, k: int) -> Any:
        """Ask for fetch `k`; returns a `Promise`."""

    def close(self, pending: Sequence[Any], *, wait_s: float, exiting: bool) -> None:
        """Cancel the `pending` promises, let go of everything, and wait until nothing of it runs any more.

        Waits at most `wait_s` seconds. `exiting` says that the interpreter is about to. Called once, and once more
        where Ctrl-C cut that short.
        """


@dataclass(slots=True, kw_only=True)
class WindowStats:
    """What a window has done so far.

    Parameters
    ----------
    n_submitted
        Fetches asked for.
    n_done
        Results consumed.
    wait_s
        Seconds the consumer spent waiting for results.
    fetch_s, read_s, decode_s
        Seconds that the consumed fetches took, and of them what reading and decoding did, summed.
    n_bytes
        Size of the consumed results: their ``nbytes``, or else what `dask.sizeof` makes of them.
    """

    n_submitted: int = 0
    n_done: int = 0
    wait_s: float = 0.0
    fetch_s: float = 0.0
    read_s: float = 0.0
    decode_s: float = 0.0
    n_bytes: int = 0


class _Flight:
    """The fetches in flight. Apart from the window, so that the window can be collected while it lives."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.promises: deque[tuple[int, Promise]] = deque()
        self.closed = False
        self._pending: list[Promise] = []
        self._is_cut_short = False
        self.exiting = False
        self.lock = threading.RLock()
        self._pid = os.getpid()
        # Handlers run last in, first out, so this one finds a Client still open.
        atexit.register(self.close, wait_s=EXIT_WAIT_S, exiting=True)
        if runner.needs_executors:
            _to_close_early.add(self)

    @property
    def foreign(self) -> bool:
        """Whether this is a copy in a forked child, whose threads and connections stayed in the parent."""
        return self._pid != os.getpid()

    def close(self, *, wait_s: float, exiting: bool = False) -> None:
        """Let go of everything, once, in the process that made it.

        Ctrl-C may cut that short anywhere. Then the next call does it all again: the window's finaliser at the latest.
        """
        if self.foreign:
            return
        try:
            with self.lock:
                if self.closed and not self._is_cut_short:
                    return
                self.closed, self._is_cut_short = True, False
                self.exiting = exiting
                self._pending += [promise for _, promise in self.promises]
                self.promises.clear()
            self.runner.close(self._pending, wait_s=wait_s, exiting=exiting)
            self._pending.clear()
        except BaseException:
            self._is_cut_short = True
            raise
        atexit.unregister(self.close)
        _to_close_early.discard(self)


# When the main thread ends, the executors of the standard library end before any handler of `atexit`
# runs, and with them a Dask scheduler in this process. What depends on one is closed before that,
# by the way that the executors use themselves; where Python has lost it, Dask logs an error or two.
_to_close_early: set[_Flight] = set()


def _close_early() -> None:
    for flight in list(_to_close_early):
        flight.close(wait_s=EXIT_WAIT_S, exiting=True)


getattr(threading, "_register_atexit", atexit.register)(_close_early)


class Window(Generic[T]):
    """Results of ``task(k)`` for each k, in order, computed a few ahead.

    Iterating yields ``(k, result)``. Fetching starts when the window is made and goes on whenever a
    result is taken. One thread at a time may iterate; any thread may `close`. Not for use after a
    fork: a child makes a window of its own.

    Parameters
    ----------
    task
        What a fetch does. Must pickle (by cloudpickle) for a Client whose workers are other processes;
        it is sent to each worker once, not with each fetch.
    ks
        The fetch numbers, in order.
    name
        Prefix of the Dask keys, as the dashboard shows them: ``"dasksc-fetch-pbmc-e3-r1"``.
    depth
        Fetches in flight, or finished and not consumed, at most; or a function that says how many for now, which is
        called whenever a result is taken, as the workers of a cluster come and go. ``"synchronous"`` never runs ahead.
    scheduler
        As for `resolve_scheduler`.
    argument
        What `task` gets instead of k. Called in this process, so that with a Client a fetch carries
        its rows only, and the plan stays here.
    max_bytes
        Bytes in flight, or finished and not consumed, at most; a fetch that has not finished counts
        as the largest seen so far. One fetch is always let through, and only one until a size is known.
    describe
        What to call fetch k in an error: file, fetch number, rows.
    n_threads
        Threads for fetches in this process, all windows together; default `default_threads`.
    expected_bytes
        What a result will probably weigh, by which fetches are let through until the first is there.

    Raises
    ------
    InputError
        If `depth`, `max_bytes` or `n_threads` is not positive, or the scheduler cannot be used.
    FetchError
        From iteration, when the failed fetch's turn comes; ``__cause__`` is the original error.
    """

    def __init__(
        self,
        task: Callable[[Any], T],
        ks: Sequence[int],
        *,
        name: str,
        depth: int | Callable[[], int],
        scheduler: Scheduler | Client | str | None = None,
        argument: Callable[[int], Any] | None = None,
        max_bytes: int | None = None,
        describe: Callable[[int], str] | None = None,
        n_threads: int | None = None,
        expected_bytes: int | None = None,
    ) -> None:
        depth_of: Callable[[], int] = depth if callable(depth) else lambda: depth
        for label, value in (("depth", depth_of()), ("max_bytes", max_bytes), ("n_threads", n_threads)):
            if value is not None and value < 1:
                raise InputError(f"{label}={value} must be at least 1")
        self.stats = WindowStats()
        self._scheduler = resolve_scheduler(scheduler)
        self._describe = describe
        self._depth = depth_of
        self._max_bytes = max_bytes
        self._largest = expected_bytes
        self._ks = iter(ks)
        self._next_k = next(self._ks, None)

        runner: Runner
        if self._scheduler.client is not None:
            from dasksc.executor.cluster.runner import ClusterRunner

            runner = ClusterRunner(name, task, argument, client=self._scheduler.client)
        else:
            run = task if argument is None else _Composed(task, argument)
            if self._scheduler.kind == "threads":
                runner = ThreadRunner(name, ks, run, n_threads=n_threads or default_threads())
            else:
                runner = OnDemandRunner(name, ks, run)
                self._depth = lambda: 0
        self._flight = _Flight(runner)
        # A collected window must not wait: the collector may run in any thread, one of its own too.
        self._finalizer = weakref.finalize(self, self._flight.close, wait_s=0.0)
        self._finalizer.atexit = False
        try:
            self._fill(self._depth())
        except BaseException:
            self.close()
            raise

    @property
    def scheduler(self) -> Scheduler:
        """Where the fetches run."""
        return self._scheduler

    @property
    def n_in_flight(self) -> int:
        """Fetches asked for and not consumed."""
        return len(self._flight.promises)

    def figures(self) -> FetchFigures:
        """Return how the fetches are going; any thread may ask."""
        promises = [promise for _, promise in list(self._flight.promises)]
        try:
            n_fetching, n_bytes = self._weigh(promises)
        except Exception:  # of a failed fetch, which is told at its turn
            n_fetching, n_bytes = sum(not promise.done() for promise in promises), 0
        return FetchFigures(
            n_fetching=n_fetching,
            n_ready=len(promises) - n_fetching,
            n_fetched=self.stats.n_done,
            in_flight_bytes=n_bytes + n_fetching * (self._largest or 0),
            limit_bytes=self._max_bytes,
            fetch_s=self.stats.fetch_s,
            read_s=self.stats.read_s,
            decode_s=self.stats.decode_s,
            transfer_s=self._flight.runner.transfer_s,
        )

    def next_is_done(self) -> bool:
        """Whether the next result, or the end, can be had without waiting."""
        promises = self._flight.promises
        try:
            return promises[0][1].done()
        except IndexError:
            return self._flight.closed or self._next_k is None

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return self

    def __next__(self) -> tuple[int, T]:
        flight = self._flight
        if flight.foreign:
            raise FetchError("This window was made before a fork. Make a new one in the child.")
        start = perf_counter()
        try:
            self._fill(max(1, self._depth()))
            k, result = self._take()
            self._fill(self._depth())
            return k, result
        except BaseException:
            self.close()
            raise
        finally:
            self.stats.wait_s += perf_counter() - start

    def _take(self) -> tuple[int, T]:
        flight = self._flight
        try:
            k, promise = flight.promises[0]
        except IndexError:
            raise self._end() from None
        try:
            fetch_s, result = promise.result()
        except Exception as error:
            if flight.closed:
                raise self._end() from None
            raise self._fetch_error(k, error) from error
        finally:
            del promise  # it holds the error, whose traceback holds this frame
        with flight.lock:
            if flight.closed:
                raise self._end()
            flight.promises.popleft()
        n_bytes = _n_bytes(result)
        self._largest = max(n_bytes, self._largest or 0)
        self.stats.n_done += 1
        self.stats.fetch_s += fetch_s
        spent = getattr(result, "spent", None)
        if spent is not None:
            self.stats.read_s += spent.read_s
            self.stats.decode_s += spent.decode_s
        self.stats.n_bytes += n_bytes
        return k, result

    def _end(self) -> Exception:
        if self._flight.exiting:  # not the end of the epoch, for a thread that outlives the main thread
            return FetchError("The interpreter is exiting, and the fetches have been cancelled.")
        return StopIteration()

    def close(self) -> None:
        """Cancel what is in flight and wait until nothing runs any more. Idempotent."""
        self._flight.close(wait_s=math.inf)
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _fill(self, depth: int) -> None:
        flight = self._flight
        while True:
            # The lock keeps a concurrent close from missing the promise.
            with flight.lock:
                k = self._next_k
                if flight.closed or k is None or len(flight.promises) >= depth or not self._fits():
                    return
                try:
                    promise = flight.runner.submit(k)
                    self._next_k = next(self._ks, None)
                except Exception as error:
                    # Told at its turn, like any other failure; the results before it are good.
                    promise = Future()
                    promise.set_exception(error)
                    self._next_k = None
                flight.promises.append((k, promise))
                self.stats.n_submitted += 1

    def _fits(self) -> bool:
        promises = self._flight.promises
        if self._max_bytes is None or not promises:
            return True
        try:
            n_running, held_bytes = self._weigh([promise for _, promise in promises])
        except Exception:
            return False  # nothing after a failed fetch will be wanted
        return self._largest is not None and held_bytes + (n_running + 1) * self._largest <= self._max_bytes

    def _weigh(self, promises: Sequence[Promise]) -> tuple[int, int]:
        """Return how many fetches have not finished, and the bytes of those that have."""
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
        where = "" if self._scheduler.client is None else f" on the {self._scheduler}"
        return FetchError(f"{what} failed{where}: {type(error).__name__}: {error}")


class _Composed(Generic[T]):
    """``task(argument(k))``."""

    def __init__(self, task: Callable[[Any], T], argument: Callable[[int], Any]) -> None:
        self._task = task
        self._argument = argument

    def __call__(self, k: int) -> T:
        return self._task(self._argument(k))


def _n_bytes(result: object) -> int:
    n_bytes = getattr(result, "nbytes", None)
    return int(n_bytes if isinstance(n_bytes, Integral) else sizeof(result))
