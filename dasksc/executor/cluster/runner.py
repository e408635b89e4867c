"""Fetches on the workers of a distributed cluster.

Each fetch is one task and one future. As soon as it has finished, its result is brought here (by the
Client's own event loop, while the consumer is busy) and the future is released, so that a worker holds
a result no longer than it takes to send it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import pickle
import socket
import threading
import uuid
import weakref
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Any, TypeVar

import cloudpickle
import distributed
from dask.utils import parse_timedelta
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin

from dasksc import config
from dasksc.errors import FetchError, StorageError
from dasksc.executor import metrics
from dasksc.executor.cluster import file_visibility as sight
from dasksc.executor.cluster import transport as transport  # registers how results travel, here and on the workers
from dasksc.executor.cluster.heartbeats import Heartbeats
from dasksc.executor.local import Timed
from dasksc.executor.memory_admission import Headroom
from dasksc.executor.reporting import runs_here
from dasksc.executor.schedulers import address_of
from dasksc.storage.buffers import Recycling

__all__ = ["ClusterRunner"]

T = TypeVar("T")

logger = logging.getLogger("dasksc.window.cluster")

_PROBE_S = 5.0  # between questions whether the scheduler is there, at most
_STUCK_S = 3.0  # a fetch may take; then it is looked whether its worker still works
_SURE_S = 1.0  # between the looks that tell that a worker has fallen silent
_CONNECT_S = 3.0  # to a worker on a network that lets us through; a firewall drops silently
_CLOSE_S = 30.0  # for results on their way when the window closes


class Carrier(WorkerPlugin):
    """Carries a window's task to every worker, also to one that joins later.

    A future that holds the task would do the same, but tasks that depend on a future are sent to the
    workers that hold it, and a scattered one is lost with its worker.
    """

    def __init__(self, task: Callable[[Any], Any]) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._n_running = 0

    def setup(self, worker: object) -> None:
        """Show at the worker's ``/metrics`` what its fetches do."""
        metrics.export()

    def run(self, argument: Any) -> Timed:
        """Run one fetch."""
        with self._lock:
            self._n_running += 1
        try:
            start = perf_counter()
            result = self._fetch(argument)
            return perf_counter() - start, result
        finally:
            with self._lock:
                self._n_running -= 1

    def _fetch(self, argument: Any) -> Any:
        return self._task(argument)

    async def teardown(self, worker: object) -> None:
        """Wait for the fetches that are running; Dask calls this when the window closes."""
        while self._n_running:
            await asyncio.sleep(0.005)


class Envelope:
    """A task on its way, which arrives as a `RemoteCarrier`."""

    def __init__(self, pickled: bytes, files: tuple[sight.Fingerprint, ...]) -> None:
        self._pickled = pickled
        self._files = files

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteCarrier, (self._pickled, self._files)


class RemoteCarrier(Carrier):
    """Carries a task in another process, where a result is made into what travels."""

    def __init__(self, pickled: bytes, files: tuple[sight.Fingerprint, ...]) -> None:
        super().__init__(cloudpickle.loads(pickled))
        self._pickled = pickled
        self._files = files
        self._asked = False
        self._closed = False
        self._largest: int | None = None  # of the results, in bytes
        self._recycling = Recycling()

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteCarrier, (self._pickled, self._files)

    def _fetch(self, argument: Any) -> Any:
        if not self._asked:  # a worker that has joined since the window began
            said = sight.complaint(self._files)
            if said is not None:
                raise StorageError(f"The Dask worker at {distributed.get_worker().address} {said}.")
            self._asked = True
        has_begun = False

        def fetch() -> Any:
            nonlocal has_begun
            has_begun = True
            return self._compact(argument)

        room = Headroom.of(distributed.get_worker())
        result = room.run(fetch, size=self._largest, is_wanted=lambda: not self._closed)
        if not has_begun:  # None is what it returns then, but a task may return that, too
            return Stray()
        n_bytes = _n_bytes(result)
        if n_bytes is not None:
            self._largest = max(self._largest or 0, n_bytes)
        return result

    async def teardown(self, worker: object) -> None:
        """Have fetches that wait for room end, too; see `Carrier.teardown`."""
        self._closed = True
        await super().teardown(worker)

    def _compact(self, argument: Any) -> Any:
        result = self._task(argument)
        # In the task, on a thread of its own: the event loop that sends it has others to serve, and what is
        # mapped would weigh nothing in the worker's accounts.
        compact = getattr(result, "compact", None)
        return result if compact is None else compact()


def _parcel(inside: bytes) -> WorkerPlugin:
    """Return what holds a pickled task on every worker that can import dasksc; to others it does no harm."""

    # Made in a function it travels as a whole: workers with other work to do may have no dasksc, and a plugin that
    # they cannot read would keep them from starting.
    class Parcel(WorkerPlugin):
        """Opened where it arrives."""

        def __init__(self) -> None:
            self.inside = inside
            self.carrier: Any = None

        def __getstate__(self) -> dict[str, Any]:
            return {"inside": self.inside, "carrier": None}

        def setup(self, worker: Any) -> None:
            """Unpack the task."""
            try:
                self.carrier = pickle.loads(self.inside)
            except ImportError:
                return  # whoever sends a fetch here is told
            self.carrier.setup(worker)

        async def teardown(self, worker: Any) -> None:
            """Wait for the fetches that are running."""
            if self.carrier is not None:
                await self.carrier.teardown(worker)

    return Parcel()


class Janitor(SchedulerPlugin):
    """Takes the tasks of a Client back from the workers when it goes, be it that its process was killed."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._tidying: list[asyncio.Future[Any]] = []

    def remove_client(self, scheduler: Any, client: str) -> None:
        """Take back what the Client left."""
        if client != self._client_id:
            return
        prefix = _token_prefix(client)
        for name in [name for name in scheduler.worker_plugins if name.startswith(prefix)]:
            self._tidying.append(asyncio.ensure_future(scheduler.unregister_worker_plugin(comm=None, name=name)))
        scheduler.remove_plugin(name=prefix)


def _token_prefix(client_id: str) -> str:
    return f"dasksc-{client_id}-"


# Clients whose scheduler has a janitor.
_tidied: weakref.WeakSet[distributed.Client] = weakref.WeakSet()


def _n_bytes(result: Any) -> int | None:
    """Return what a result takes; None if it does not tell, so that only one such fetch runs at a time."""
    # What a task returns that leaves its result in a file, such as a conversion's, waits for no room.
    if result is None or isinstance(result, int):
        return 0
    n_bytes = getattr(result, "nbytes", None)
    return None if n_bytes is None else int(n_bytes)


# Carriers of the windows whose cluster lives in this process: nothing is pickled.
_carriers: dict[str, Carrier] = {}


class Stray:
    """The result of a fetch whose window was closed before it began: of no use to anyone."""


def run_fetch(token: str, argument: Any) -> Timed:
    """Run one fetch on a worker."""
    carrier = _carriers.get(token)
    if carrier is None:
        carrier = getattr(distributed.get_worker().plugins.get(token), "carrier", None)
    return (0.0, Stray()) if carrier is None else carrier.run(argument)


class ClusterRunner:
    """Runs fetches through a Client."""

    def __init__(
        self,
        name: str,
        task: Callable[[Any], Any],
        argument: Callable[[int], Any] | None,
        *,
        client: Any,
    ) -> None:
        self._client = client
        self._argument = argument
        # Windows may share a name, and a result of an earlier one must never be taken for this one's.
        number = uuid.uuid4().hex
        self._token = _token_prefix(client.id) + number
        self._name = f"{name}-{number[:8]}"
        self._in_process = str(client.scheduler.address).startswith("inproc://")
        self._futures: dict[int, Any] = {}  # of distributed's
        self._arriving: set[int] = set()
        self._closed = False
        self._said_alone = False
        self._heartbeats = Heartbeats()
        self._looked_at = 0.0
        self._others: list[str] = []  # than workers that have fallen silent, if any have
        self._said_silent: set[str] = set()
        self._n_again = 0  # fetches sent again
        self._direct: asyncio.Task[bool] | None = None
        self._watching: asyncio.Task[str] | None = None
        self.transfer_s = 0.0
        if self._in_process:
            _carriers[self._token] = Carrier(task)
        else:
            pickled, files = sight.pickle_with_files(task)
            try:
                client.sync(self._unless_lost, lambda: self._introduce(Envelope(pickled, files), files))
            except ConnectionError as error:
                raise FetchError(str(error)) from error

    @property
    def needs_executors(self) -> bool:
        """Whether the scheduler lives in this process."""
        return self._in_process or self._local_scheduler() is not None

    def submit(self, k: int) -> concurrent.futures.Future[Timed]:
        """Send fetch `k`."""
        argument = k if self._argument is None else self._argument(k)
        self._futures[k] = self._send(argument, key=(self._name, k))
        return asyncio.run_coroutine_threadsafe(self._bring(k, argument), _loop(self._client))

    def _send(self, argument: Any, *, key: tuple[Any, ...]) -> Any:
        return self._client.submit(
            run_fetch,
            self._token,
            argument,
            key=key,
            pure=False,
            # Earlier fetches first, however quickly one follows another.
            fifo_timeout="0 ms",
            workers=self._others or None,
            allow_other_workers=bool(self._others),
        )

    def close(self, pending: Sequence[concurrent.futures.Future[Timed]], *, wait_s: float, exiting: bool) -> None:
        """Release every future and take the task back from the workers."""
        carrier = _carriers.pop(self._token, None)
        loop = _loop(self._client)
        if self._client.status == "closed" or not loop.is_running():
            return
        closing = asyncio.run_coroutine_threadsafe(self._close(pending, carrier, exiting=exiting), loop)
        if wait_s > 0 and not runs_here(loop):
            try:
                closing.result(min(wait_s, _CLOSE_S))
            except concurrent.futures.CancelledError:
                logger.debug("The Client was closed at the same time.")
            except TimeoutError:
                address = self._client.scheduler.address
                logger.warning("A fetch of a closed window still runs on the cluster of %s.", address)

    async def _introduce(self, envelope: Envelope, files: tuple[sight.Fingerprint, ...]) -> None:
        """Give the task to every worker, having asked those that are new whether they see its files."""
        client = self._client
        await _ask_workers(client, files)
        if client not in _tidied:
            try:
                await client.register_plugin(Janitor(client.id), name=_token_prefix(client.id))
            except Exception as error:  # a scheduler that unpickles nothing
                logger.info("If this process is killed, its tasks stay on the workers: %s", error)
            _tidied.add(client)
        inside = pickle.dumps(envelope)
        try:
            await client.register_plugin(_parcel(inside), name=self._token)
        except OSError as error:
            # A worker that leaves just then fails the call.
            logger.info("Sending the task again, as a worker has left: %s", error)
            await client.register_plugin(_parcel(inside), name=self._token)

    async def _unless_lost(self, begin: Callable[[], Awaitable[T]]) -> T:
        """Wait for what `begin` begins, but not longer than the scheduler is there."""
        if self._in_process:
            return await begin()
        if self._watching is None:
            self._watching = asyncio.ensure_future(_lost(self._client))
        doing = asyncio.ensure_future(begin())
        await asyncio.wait({doing, self._watching}, return_when=asyncio.FIRST_COMPLETED)
        if self._watching.done() and not self._closed:
            doing.cancel()
            raise ConnectionError(self._watching.result())
        try:
            return await doing
        except (FutureCancelledError, CommClosedError) as error:
            # The Client cancels what it waited for; a question under way to the scheduler breaks off.
            if self._closed:
                raise
            if isinstance(error, FutureCancelledError) and self._client.status == "running":
                raise ConnectionError(
                    f"The Dask scheduler at {address_of(self._client)} has dropped its tasks: client.restart() was "
                    "called, or it was out of reach for a moment. Make the data set anew, and load_state_dict."
                ) from error
            raise ConnectionError(_gone(self._client)) from error

    async def _bring(self, k: int, argument: Any) -> Timed:
        try:
            return await self._unless_lost(lambda: self._brought(k, argument))
        finally:
            future = self._futures.pop(k, None)
            if future is not None:
                if future.cancelled():
                    # client.restart() forgets futures without a word to the scheduler, and what was on its way to it
                    # meanwhile is there: a second future of the key can be released.
                    future = distributed.Future(future.key, self._client)
                future.release()

    async def _brought(self, k: int, argument: Any) -> Timed:
        timed: Timed | None = None
        while timed is None:
            future = await self._finished(k, argument)
            try:
                if self._closed:
                    return 0.0, None
                self._arriving.add(k)
                start = perf_counter()
                timed = await self._gathered(k, argument, future)
                self.transfer_s += perf_counter() - start
            finally:
                self._arriving.discard(k)
        if isinstance(timed[1], Stray) and not self._closed:
            raise RuntimeError(f"a worker has lost the task of {self._name}")
        return timed

    async def _gathered(self, k: int, argument: Any, future: Any) -> Timed | None:
        """Bring the result of fetch `k`; None if it was sent again, as the worker that holds it has fallen silent."""
        direct = await self._reachable()
        gathers: set[asyncio.Future[Timed]] = set()

        def begin() -> None:
            gather = asyncio.ensure_future(self._client.gather(future, direct=direct))
            # One from a silent worker is left alone, see _close; that it fails in the end is no matter.
            gather.add_done_callback(lambda gather: gather.cancelled() or gather.exception())
            gathers.add(gather)

        begin()
        try:
            while True:
                done, _ = await asyncio.wait(gathers, timeout=_STUCK_S, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return await done.pop()
                if k != min(self._futures) and not self._others and not self._closed:
                    continue
                _, silent = await self._look()
                if not silent:
                    continue
                holders = (await self._client.scheduler.who_has(keys=[future.key])).get(future.key, ())
                address = next((address for address in holders if address in silent), None)
                if self._closed and address is not None:
                    return 0.0, None
                if address is not None and self._is_given_up(k, address, silent[address]):
                    self._send_again(k, argument, future)
                    return None
                if address is None and len(gathers) == 1:
                    begin()  # the Client may have merged the first with one from the worker that is silent
        except asyncio.CancelledError:
            for gather in gathers:
                gather.cancel()
            raise

    async def _finished(self, k: int, argument: Any) -> Any:
        """Wait until fetch `k` has ended; whether it failed or was cancelled is told by gather.

        A worker that pauses at its memory limit keeps what was sent to it, for ever if need be, and so does one whose
        process is frozen; Dask moves only what is slow to others. The fetch that is waited for is sent again, and if a
        worker has fallen silent, those after it are, too.
        """
        if self._others and perf_counter() - self._looked_at > _STUCK_S:
            await self._look()  # else nothing would be sent to a worker that goes on or joins
        while True:
            future = self._futures[k]
            ended = asyncio.ensure_future(future.exception())
            done, _ = await asyncio.wait({ended}, timeout=_STUCK_S)
            if done or self._closed:
                await ended
                return future
            ended.cancel()
            if k != min(self._futures) and not self._others:
                continue
            workers, silent = await self._look()
            is_alone = not any(worker["status"] == "running" for worker in workers.values())
            if is_alone and not self._said_alone and not self._closed:
                self._said_alone = True
                logger.warning(
                    "Fetch %d waits: the Dask cluster of %s has %s. It goes on when one %s.",
                    k,
                    self._client.scheduler.address,
                    f"{len(workers)} paused at their memory limit" if workers else "no workers",
                    "has memory again, or joins" if workers else "joins",
                )
            paused = [address for address, worker in workers.items() if worker["status"] == "paused"]
            address = await self._whereabouts(future, [*silent, *paused])
            if address is None or future.done() or self._closed:
                continue
            if address not in silent:
                logger.info("Sending fetch %d again, as its worker has paused at its memory limit.", k)
            elif not self._is_given_up(k, address, silent[address]):
                continue
            self._send_again(k, argument, future)

    def _send_again(self, k: int, argument: Any, future: Any) -> None:
        self._n_again += 1
        self._futures[k] = self._send(argument, key=(self._name, k, self._n_again))
        future.release()

    async def _look(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Ask which workers there are, and for how long some have been silent."""
        for is_sure in (False, True):
            self._looked_at = asked_at = perf_counter()
            workers = (await self._client.scheduler.identity(n_workers=-1))["workers"]
            silent = self._heartbeats.silent(workers, asked_at=asked_at)
            if is_sure or not silent:
                break
            await asyncio.sleep(_SURE_S)  # where this process or the scheduler has slept, heartbeats lie unread
        running = [address for address, worker in workers.items() if worker["status"] == "running"]
        self._others = [address for address in running if address not in silent] if silent else []
        return workers, silent

    async def _whereabouts(self, future: Any, addresses: list[str]) -> str | None:
        """Return which of these workers a fetch waits on, if any."""
        if not addresses:
            return None
        try:
            processing = await self._client.scheduler.processing(workers=addresses)
        except KeyError:  # one has left just then
            return None
        return next((address for address, keys in processing.items() if future.key in keys), None)

    def _is_given_up(self, k: int, address: str, silence_s: float) -> bool:
        """Whether others can do what a worker that has fallen silent holds; says, once, that it has."""
        if address not in self._said_silent:
            self._said_silent.add(address)
            logger.warning(
                "Fetch %d waits: the Dask worker at %s has not been heard from for %.0f s. %s",
                k,
                address,
                silence_s,
                "Its fetches are sent to others. If its process hangs, end it."
                if self._others
                else "No other runs: it goes on when that one answers, or another joins. If its process hangs, end it.",
            )
        return bool(self._others)

    async def _close(
        self,
        pending: Sequence[concurrent.futures.Future[Timed]],
        carrier: Carrier | None,
        *,
        exiting: bool,
    ) -> None:
        self._closed = True
        lost = self._watching is not None and self._watching.done()
        if self._watching is not None:
            self._watching.cancel()
        if exiting and self.needs_executors:
            # A scheduler that is about to lose its executors must have nothing of ours left to do.
            # Without the task, what has not begun ends at once.
            await self._take_task_back(carrier)
            await _ended(pending)
            await self._forgotten()
            return
        # Cancelling a gather would cancel any other that the Client has merged it with, so
        # what is arriving arrives; the rest is woken by losing its future.
        for k, future in list(self._futures.items()):
            if k not in self._arriving:
                future.release()
        await _ended(pending)
        if not lost:
            await self._take_task_back(carrier)

    async def _take_task_back(self, carrier: Carrier | None) -> None:
        if carrier is not None:
            await carrier.teardown(None)
        elif self._client.status == "running":  # else nobody to tell; to reconnect takes half a minute to fail
            taking = asyncio.ensure_future(self._client.unregister_worker_plugin(self._token))
            try:
                while not (await asyncio.wait({taking}, timeout=_STUCK_S))[0]:
                    if (await self._look())[1]:
                        return  # a worker that has fallen silent is told, but not waited for
                await taking
            except (OSError, ValueError) as error:
                logger.debug("The task was gone already: %s", error)
            finally:
                taking.cancel()

    async def _forgotten(self) -> None:
        scheduler = self._local_scheduler()
        while scheduler is not None and any(
            isinstance(key, tuple) and key[0] == self._name for key in list(scheduler.tasks)
        ):
            await asyncio.sleep(0.005)

    def _local_scheduler(self) -> Any:
        scheduler = getattr(self._client.cluster, "scheduler", None)
        return scheduler if isinstance(scheduler, distributed.Scheduler) else None

    async def _reachable(self) -> bool:
        if self._in_process:
            return True
        if self._direct is None:
            self._direct = asyncio.ensure_future(_workers_are_reachable(self._client))
        return await asyncio.shield(self._direct)


async def _ended(promises: Sequence[concurrent.futures.Future[Timed]]) -> None:
    await asyncio.gather(*map(asyncio.wrap_future, promises), return_exceptions=True)


async def _lost(client: Any) -> str:
    """Wait until the scheduler is out of reach, and say so; within ``dasksc.scheduler-timeout`` of its last answer."""
    timeout_s = parse_timedelta(config.get("scheduler-timeout"))
    probe_s = min(_PROBE_S, timeout_s / 4)
    scheduler = client.scheduler
    if client.status == "connecting":  # again, to one that has restarted
        await _status_other_than(client, "connecting", timeout_s)
    while client.status == "running":
        try:
            await asyncio.wait_for(scheduler.identity(n_workers=0), timeout_s - probe_s)
        except (OSError, TimeoutError) as error:
            return f"{_gone(client)} It has not answered for {timeout_s:g} s ({type(error).__name__})."
        await _status_other_than(client, "running", probe_s)
    return _gone(client)


async def _status_other_than(client: Any, status: str, timeout_s: float) -> None:
    for _ in range(20):
        if client.status == status:
            await asyncio.sleep(timeout_s / 20)


def _gone(client: Any) -> str:
    return (
        f"The connection to the Dask scheduler at {address_of(client)} was lost. Go on with a new one: make a Client, "
        "the data set with it, and load_state_dict."
    )


def _loop(client: Any) -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = client.loop.asyncio_loop
    return loop


# What was found out about a Client's workers, so that it is looked into, and said, once.
_reachable: weakref.WeakKeyDictionary[distributed.Client, dict[str, bool]] = weakref.WeakKeyDictionary()
_advised: set[str] = set()


async def _workers_are_reachable(client: Any) -> bool:
    """Whether this process can connect to the workers, so that results can bypass the scheduler."""
    known = _reachable.setdefault(client, {})
    identity = await client.scheduler.identity()
    unknown = [address for address in identity["workers"] if address not in known]

    async def probe(address: str) -> None:
        try:
            # Through the Client's own pool, so that a gather finds the connection open.
            await asyncio.wait_for(client.rpc(address).identity(), _CONNECT_S)
        except (OSError, TimeoutError) as error:
            known[address] = False
            logger.warning(
                "The Dask worker at %s cannot be reached from here (%s: %s), so results pass through the "
                "scheduler, which is slower. Open the workers' ports to this machine.",
                address,
                type(error).__name__,
                error,
            )
        else:
            known[address] = True

    await asyncio.gather(*(probe(address) for address in unknown))
    return all(known.get(address, True) for address in identity["workers"])


# What workers have answered, by Client: they are asked once.
_asked: weakref.WeakKeyDictionary[distributed.Client, set[tuple[str, tuple[sight.Fingerprint, ...]]]] = (
    weakref.WeakKeyDictionary()
)


async def _ask_workers(client: Any, files: tuple[sight.Fingerprint, ...]) -> None:
    """Refuse workers that do not see the files; say, once, that threads beat processes on this machine."""
    asked = _asked.setdefault(client, set())
    workers = (await client.scheduler.identity(n_workers=-1))["workers"]
    new = [address for address in workers if (address, files) not in asked]
    if not new:
        return
    results = await client.run(_answer, files, workers=new, on_error="return")
    for address, result in results.items():
        if isinstance(result, BaseException) and "No module named 'dasksc" in str(result):
            raise FetchError(
                f"The worker at {address} of the Dask scheduler at {client.scheduler.address} cannot import dasksc "
                f"({result}). Install the same version on every worker, or give the fetches a cluster of their own."
            )
    # Others have left just then.
    answers = {address: result for address, result in results.items() if not isinstance(result, BaseException)}
    said = {address: answer[2] for address, answer in answers.items() if answer[2] is not None}
    if said:
        complaints = "; ".join(f"the worker at {address} {complaint}" for address, complaint in said.items())
        raise StorageError(
            f"{len(said)} of {len(workers)} workers of the Dask scheduler at {client.scheduler.address} cannot read "
            f"what was opened here: {complaints}. Open a path that is the same file on every machine."
        )
    asked.update((address, files) for address in answers)
    here = _where()
    if client.scheduler.address in _advised or len(answers) < len(workers):
        return
    _advised.add(client.scheduler.address)
    if all(host == here[0] and pid != here[1] for host, pid, _ in answers.values()):
        logger.warning(
            "The Dask workers at %s are other processes on this very machine: every result is copied "
            "through a socket. scheduler='threads', or LocalCluster(processes=False), is faster.",
            client.scheduler.address,
        )


def _answer(files: tuple[sight.Fingerprint, ...]) -> tuple[str, int, str | None]:
    return *_where(), sight.complaint(files)


def _where() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()
