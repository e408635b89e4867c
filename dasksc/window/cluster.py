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
import socket
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import distributed
from distributed.diagnostics.plugin import WorkerPlugin

from dasksc.window import metrics
from dasksc.window.local import Timed
from dasksc.window.reporting import runs_here

__all__ = ["ClusterRunner"]

logger = logging.getLogger(__name__)

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

    def __reduce__(self) -> tuple[type[Carrier], tuple[Callable[[Any], Any]]]:
        return Carrier, (self._task,)

    def setup(self, worker: object) -> None:
        """Show at the worker's ``/metrics`` what its fetches do."""
        metrics.export()

    def run(self, argument: Any) -> Timed:
        """Run one fetch."""
        with self._lock:
            self._n_running += 1
        try:
            start = perf_counter()
            result = self._task(argument)
            return perf_counter() - start, result
        finally:
            with self._lock:
                self._n_running -= 1

    async def teardown(self, worker: object) -> None:
        """Wait for the fetches that are running; Dask calls this when the window closes."""
        while self._n_running:
            await asyncio.sleep(0.005)


# Carriers of the windows whose cluster lives in this process: nothing is pickled.
_carriers: dict[str, Carrier] = {}


class Stray:
    """The result of a fetch whose window was closed before it began: of no use to anyone."""


def run_fetch(token: str, argument: Any) -> Timed:
    """Run one fetch on a worker."""
    carrier = _carriers.get(token)
    if carrier is None:
        carrier = distributed.get_worker().plugins.get(token)
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
        self._token = uuid.uuid4().hex
        self._name = f"{name}-{self._token[:8]}"
        self._in_process = str(client.scheduler.address).startswith("inproc://")
        self._futures: dict[int, Any] = {}  # of distributed's
        self._arriving: set[int] = set()
        self._closed = False
        self._direct: asyncio.Task[bool] | None = None
        self.transfer_s = 0.0
        if self._in_process:
            _carriers[self._token] = Carrier(task)
        else:
            _advise(client)
            _send(client, self._token, Carrier(task))

    @property
    def needs_executors(self) -> bool:
        """Whether the scheduler lives in this process."""
        return self._in_process or self._local_scheduler() is not None

    def submit(self, k: int) -> concurrent.futures.Future[Timed]:
        """Send fetch `k`."""
        future = self._client.submit(
            run_fetch,
            self._token,
            k if self._argument is None else self._argument(k),
            key=(self._name, k),
            pure=False,
            # Earlier fetches first, however quickly one follows another.
            fifo_timeout="0 ms",
        )
        self._futures[k] = future
        return asyncio.run_coroutine_threadsafe(self._bring(k, future), _loop(self._client))

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

    async def _bring(self, k: int, future: Any) -> Timed:
        try:
            await future.exception()  # waits; whether it failed or was cancelled is told by gather
            if self._closed:
                return 0.0, None
            self._arriving.add(k)
            start = perf_counter()
            timed: Timed = await self._client.gather(future, direct=await self._reachable())
            self.transfer_s += perf_counter() - start
            if isinstance(timed[1], Stray) and not self._closed:
                raise RuntimeError(f"a worker has lost the task of {self._name}")
            return timed
        finally:
            self._arriving.discard(k)
            self._futures.pop(k, None)
            future.release()

    async def _close(
        self,
        pending: Sequence[concurrent.futures.Future[Timed]],
        carrier: Carrier | None,
        *,
        exiting: bool,
    ) -> None:
        self._closed = True
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
        await self._take_task_back(carrier)

    async def _take_task_back(self, carrier: Carrier | None) -> None:
        if carrier is not None:
            await carrier.teardown(None)
        elif self._client.status == "running":  # else nobody to tell; to reconnect takes half a minute to fail
            try:
                await self._client.unregister_worker_plugin(self._token)
            except (OSError, ValueError) as error:
                logger.debug("The task was gone already: %s", error)

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


def _send(client: Any, token: str, carrier: Carrier) -> None:
    """Give the task to every worker; once more if a worker leaves just then, which fails the call."""
    try:
        client.register_plugin(carrier, name=token)
    except OSError as error:
        logger.info("Sending the task again, as a worker has left: %s", error)
        client.register_plugin(carrier, name=token)


def _loop(client: Any) -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = client.loop.asyncio_loop
    return loop


# What was found out about a Client's workers, so that it is looked into, and said, once.
_reachable: weakref.WeakKeyDictionary[distributed.Client, dict[str, bool]] = weakref.WeakKeyDictionary()
_advised: weakref.WeakSet[distributed.Client] = weakref.WeakSet()


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


def _advise(client: Any) -> None:
    """Say, once per Client, that threads beat worker processes on the same machine."""
    if client in _advised:
        return
    _advised.add(client)
    workers = client.scheduler_info()["workers"]
    if not workers or not all(_is_here(str(worker.get("host"))) for worker in workers.values()):
        return
    here = _where()
    places = client.run(_where, on_error="ignore").values()
    if places and all(host == here[0] and pid != here[1] for host, pid in places):
        logger.warning(
            "The Dask workers at %s are other processes on this very machine: every result is copied "
            "through a socket. scheduler='threads', or LocalCluster(processes=False), is faster.",
            client.scheduler.address,
        )


def _where() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


def _is_here(host: str) -> bool:
    names = ("localhost", "::1", socket.gethostname(), distributed.utils.get_ip())
    return host in names or host.startswith("127.")
