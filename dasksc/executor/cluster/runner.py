"""Runner of fetches on the workers of a distributed cluster.

Each fetch is one task and one future. As soon as the fetch has finished, the Client's own event loop transfers its
result to this process, even while the consumer is busy. The future is then released, so that a worker holds a result
only until the transfer is complete.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import pickle
import uuid
import weakref
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import distributed

from dasksc._compat.distributed import event_loop
from dasksc.errors import FetchError
from dasksc.executor.cluster import file_visibility
from dasksc.executor.cluster.plugin import (
    CancelledFetch,
    CleanupPlugin,
    TaskPayload,
    TaskPlugin,
    portable_plugin,
    task_plugins,
    token_prefix,
)
from dasksc.executor.cluster.resubmission import SentFetches
from dasksc.executor.cluster.scheduler_connection import SchedulerConnection
from dasksc.executor.cluster.watchdog import STUCK_S, Watchdog
from dasksc.executor.cluster.worker_checks import check_workers
from dasksc.executor.cluster.worker_connections import WorkerConnections
from dasksc.executor.local import Timed
from dasksc.executor.reporting import runs_here

__all__ = ["ClusterRunner"]

logger = logging.getLogger("dasksc.window.cluster")

_CLOSE_S = 30.0  # Maximum wait for running transfers when a window closes.

# Clients whose scheduler has a `CleanupPlugin`.
_clients_with_cleanup: weakref.WeakSet[distributed.Client] = weakref.WeakSet()


class ClusterRunner:
    """Runner of fetches through a Client."""

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
        # Windows may share a name, and must not receive each other's results.
        number = uuid.uuid4().hex
        self._token = token_prefix(client.id) + number
        self._name = f"{name}-{number[:8]}"
        self._in_process = str(client.scheduler.address).startswith("inproc://")
        self._connection = SchedulerConnection(client, in_process=self._in_process)
        self._watchdog = Watchdog(client)
        self._fetches = SentFetches(
            client,
            token=self._token,
            name=self._name,
            watchdog=self._watchdog,
            connections=WorkerConnections(client, in_process=self._in_process),
        )
        self._arriving: set[int] = set()
        self.transfer_s = 0.0
        if self._in_process:
            task_plugins[self._token] = TaskPlugin(task)
        else:
            pickled, files = file_visibility.pickle_with_files(task)
            try:
                client.sync(
                    self._connection.unless_lost, lambda: self._register_task(TaskPayload(pickled, files), files)
                )
            except ConnectionError as error:
                raise FetchError(str(error)) from error

    @property
    def needs_executors(self) -> bool:
        """True if the scheduler runs in this process."""
        return self._in_process or self._local_scheduler() is not None

    def submit(self, k: int) -> concurrent.futures.Future[Timed]:
        """Send fetch `k`."""
        argument = k if self._argument is None else self._argument(k)
        self._fetches.send(k, argument)
        return asyncio.run_coroutine_threadsafe(self._receive(k, argument), event_loop(self._client))

    def close(self, pending: Sequence[concurrent.futures.Future[Timed]], *, wait_s: float, exiting: bool) -> None:
        """Release every future and remove the task from the workers."""
        task_plugin = task_plugins.pop(self._token, None)
        loop = event_loop(self._client)
        if self._client.status == "closed" or not loop.is_running():
            return
        closing = asyncio.run_coroutine_threadsafe(self._close(pending, task_plugin, exiting=exiting), loop)
        if wait_s > 0 and not runs_here(loop):
            try:
                closing.result(min(wait_s, _CLOSE_S))
            except concurrent.futures.CancelledError:
                logger.debug("The Client was closed while the fetches were being released.")
            except TimeoutError:
                address = self._client.scheduler.address
                logger.warning(
                    "A fetch still runs on the Dask cluster at %s, although its iteration has ended. Its result will "
                    "be discarded. If it does not end, restart the workers.",
                    address,
                )

    async def _register_task(self, payload: TaskPayload, files: tuple[file_visibility.Fingerprint, ...]) -> None:
        """Register the task on every worker, after checking that new workers see its files."""
        client = self._client
        await check_workers(client, files)
        if client not in _clients_with_cleanup:
            try:
                await client.register_plugin(CleanupPlugin(client.id), name=token_prefix(client.id))
            except Exception as error:  # The scheduler may be configured not to unpickle.
                logger.info(
                    "If this process is killed, its tasks stay on the workers, since the plugin that removes them "
                    "could not be registered: %s",
                    error,
                )
            _clients_with_cleanup.add(client)
        pickled = pickle.dumps(payload)
        try:
            await client.register_plugin(portable_plugin(pickled), name=self._token)
        except OSError as error:
            # The call fails if a worker leaves in the meantime.
            logger.info("Sending the task again, because a worker left: %s", error)
            await client.register_plugin(portable_plugin(pickled), name=self._token)

    async def _receive(self, k: int, argument: Any) -> Timed:
        try:
            return await self._connection.unless_lost(lambda: self._gather(k, argument))
        finally:
            self._fetches.release(k)

    async def _gather(self, k: int, argument: Any) -> Timed:
        timed: Timed | None = None
        while timed is None:
            future = await self._fetches.finished(k, argument)
            try:
                if self._fetches.closed:
                    return 0.0, None
                self._arriving.add(k)
                start = perf_counter()
                timed = await self._fetches.gathered(k, argument, future)
                self.transfer_s += perf_counter() - start
            finally:
                self._arriving.discard(k)
        if isinstance(timed[1], CancelledFetch) and not self._fetches.closed:
            raise RuntimeError(f"a worker has lost the task of {self._name}")
        return timed

    async def _close(
        self,
        pending: Sequence[concurrent.futures.Future[Timed]],
        task_plugin: TaskPlugin | None,
        *,
        exiting: bool,
    ) -> None:
        self._fetches.closed = True
        lost = self._connection.close()
        if exiting and self.needs_executors:
            # The interpreter is about to shut down the executors that the scheduler uses, so all work of this window
            # must end first. Once the task is removed, fetches that workers have not begun end immediately with a
            # result that is discarded.
            await self._unregister_task(task_plugin)
            await _wait_for_all(pending)
            await self._wait_until_forgotten()
            return
        # Cancelling a gather would also cancel others that the Client merged with it, so running transfers are
        # completed. Releasing the futures of the other fetches ends the coroutines that wait for them.
        self._fetches.release_all_but(self._arriving)
        await _wait_for_all(pending)
        if not lost:
            await self._unregister_task(task_plugin)

    async def _unregister_task(self, task_plugin: TaskPlugin | None) -> None:
        if task_plugin is not None:
            await task_plugin.teardown(None)
        # A Client in any other state is disconnected, and an attempt to reconnect fails only after half a minute.
        elif self._client.status == "running":
            removal = asyncio.ensure_future(self._client.unregister_worker_plugin(self._token))
            try:
                while not (await asyncio.wait({removal}, timeout=STUCK_S))[0]:
                    if (await self._watchdog.poll())[1]:
                        return  # A silent worker would not answer.
                await removal
            except (OSError, ValueError) as error:
                logger.debug("The task had already been removed: %s", error)
            finally:
                removal.cancel()

    async def _wait_until_forgotten(self) -> None:
        scheduler = self._local_scheduler()
        while scheduler is not None and any(
            isinstance(key, tuple) and key[0] == self._name for key in list(scheduler.tasks)
        ):
            await asyncio.sleep(0.005)

    def _local_scheduler(self) -> Any:
        scheduler = getattr(self._client.cluster, "scheduler", None)
        return scheduler if isinstance(scheduler, distributed.Scheduler) else None


async def _wait_for_all(promises: Sequence[concurrent.futures.Future[Timed]]) -> None:
    await asyncio.gather(*map(asyncio.wrap_future, promises), return_exceptions=True)
