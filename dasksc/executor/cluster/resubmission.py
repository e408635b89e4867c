"""Submission of fetches to Dask workers, and resubmission if a worker pauses or falls silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container
from time import perf_counter
from typing import Any

import distributed

from dasksc._compat.distributed import holders
from dasksc.executor.cluster.plugin import run_fetch
from dasksc.executor.cluster.watchdog import STUCK_S, Watchdog
from dasksc.executor.cluster.worker_connections import WorkerConnections
from dasksc.executor.local import Timed

__all__ = ["SentFetches"]

logger = logging.getLogger("dasksc.window.cluster")


class SentFetches:
    """Fetches of a window from their submission until their release.

    Parameters
    ----------
    client
        Client that submits them.
    token
        Name of their task on the workers.
    name
        Prefix of their keys.
    watchdog
        Monitor that detects paused and silent workers.
    connections
        Connections through which results arrive.

    Attributes
    ----------
    closed
        True once the window is closed. Fetches are then no longer resubmitted.
    """

    def __init__(
        self, client: Any, *, token: str, name: str, watchdog: Watchdog, connections: WorkerConnections
    ) -> None:
        self._client = client
        self._token = token
        self._name = name
        self._watchdog = watchdog
        self._connections = connections
        self._futures: dict[int, Any] = {}  # Futures of distributed.
        self._n_resubmitted = 0  # Number of fetches that were resubmitted.
        self.closed = False

    def send(self, k: int, argument: Any) -> None:
        """Submit fetch `k`."""
        self._futures[k] = self._submitted(argument, key=(self._name, k))

    def _submitted(self, argument: Any, *, key: tuple[Any, ...]) -> Any:
        return self._client.submit(
            run_fetch,
            self._token,
            argument,
            key=key,
            pure=False,
            # Earlier fetches have priority, even if two are submitted in quick succession.
            fifo_timeout="0 ms",
            workers=self._watchdog.others or None,
            allow_other_workers=bool(self._watchdog.others),
        )

    def release(self, k: int) -> None:
        """Release the future of fetch `k`, so that the scheduler forgets it."""
        future = self._futures.pop(k, None)
        if future is not None:
            if future.cancelled():
                # client.restart() cancels futures without notifying the scheduler, so a task that reaches the scheduler
                # after the restart would remain there. Releasing a second future of the same key makes the scheduler
                # forget the task.
                future = distributed.Future(future.key, self._client)
            future.release()

    def release_all_but(self, kept: Container[int]) -> None:
        """Release the futures of all fetches except `kept`."""
        for k, future in list(self._futures.items()):
            if k not in kept:
                future.release()

    async def finished(self, k: int, argument: Any) -> Any:
        """Wait until fetch `k` has finished, failed or been cancelled; return its future.

        Gathering the future raises the error of a failed fetch. A worker that pauses at its memory limit, or whose
        process is frozen, may keep its fetches forever, because Dask moves fetches away from workers that are slow, but
        not from workers that have stopped. The earliest fetch in flight is therefore resubmitted if its worker has
        stopped. While any worker is silent, this applies to every fetch in flight.
        """
        if self._watchdog.others and perf_counter() - self._watchdog.checked_at > STUCK_S:
            await self._watchdog.poll()  # Updates `others`, so that workers that recover or join receive fetches.
        while True:
            future = self._futures[k]
            ended = asyncio.ensure_future(future.exception())
            done, _ = await asyncio.wait({ended}, timeout=STUCK_S)
            if done or self.closed:
                await ended
                return future
            ended.cancel()
            if k != min(self._futures) and not self._watchdog.others:
                continue
            workers, silent = await self._watchdog.poll()
            is_alone = not any(worker["status"] == "running" for worker in workers.values())
            if is_alone and not self.closed:
                self._watchdog.warn_no_worker(k, workers)
            paused = [address for address, worker in workers.items() if worker["status"] == "paused"]
            address = await self._watchdog.assigned_worker(future, [*silent, *paused])
            if address is None or future.done() or self.closed:
                continue
            if address not in silent:
                logger.info("Sending fetch %d again, because its worker paused at its memory limit.", k)
            elif not self._watchdog.can_reassign(k, address, silent[address]):
                continue
            self._resubmit(k, argument, future)

    async def gathered(self, k: int, argument: Any, future: Any) -> Timed | None:
        """Return the result of fetch `k`; None if the worker that holds it is silent and the fetch was resubmitted."""
        direct = await self._connections.are_direct()
        gathers: set[asyncio.Future[Timed]] = set()

        def begin() -> None:
            gather = asyncio.ensure_future(self._client.gather(future, direct=direct))
            # A gather from a silent worker is not cancelled; see ClusterRunner._close. Its exception is retrieved
            # here, so that asyncio does not report it.
            gather.add_done_callback(lambda gather: gather.cancelled() or gather.exception())
            gathers.add(gather)

        begin()
        try:
            while True:
                done, _ = await asyncio.wait(gathers, timeout=STUCK_S, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return await done.pop()
                if k != min(self._futures) and not self._watchdog.others and not self.closed:
                    continue
                _, silent = await self._watchdog.poll()
                if not silent:
                    continue
                addresses = await holders(self._client, future.key)
                address = next((address for address in addresses if address in silent), None)
                if self.closed and address is not None:
                    return 0.0, None
                if address is not None and self._watchdog.can_reassign(k, address, silent[address]):
                    self._resubmit(k, argument, future)
                    return None
                if address is None and len(gathers) == 1:
                    # The Client may have merged the first gather with a gather from a silent worker, which never ends.
                    begin()
        except asyncio.CancelledError:
            for gather in gathers:
                gather.cancel()
            raise

    def _resubmit(self, k: int, argument: Any, future: Any) -> None:
        self._n_resubmitted += 1
        self._futures[k] = self._submitted(argument, key=(self._name, k, self._n_resubmitted))
        future.release()
