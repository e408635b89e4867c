"""Fetches that were sent to workers, each of which is sent again if its worker does not go on."""

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
    """The fetches of a window that have been sent to workers, until they are released.

    Parameters
    ----------
    client
        Through which they are sent.
    token
        What their task is called on the workers.
    name
        What their keys begin with.
    watchdog
        What tells which workers do not go on.
    connections
        By which results come here.

    Attributes
    ----------
    closed
        Whether the window has been closed: nothing is sent again.
    """

    def __init__(
        self, client: Any, *, token: str, name: str, watchdog: Watchdog, connections: WorkerConnections
    ) -> None:
        self._client = client
        self._token = token
        self._name = name
        self._watchdog = watchdog
        self._connections = connections
        self._futures: dict[int, Any] = {}  # of distributed's
        self._n_again = 0  # fetches sent again
        self.closed = False

    def send(self, k: int, argument: Any) -> None:
        """Send fetch `k`."""
        self._futures[k] = self._submitted(argument, key=(self._name, k))

    def _submitted(self, argument: Any, *, key: tuple[Any, ...]) -> Any:
        return self._client.submit(
            run_fetch,
            self._token,
            argument,
            key=key,
            pure=False,
            # Earlier fetches first, however quickly one follows another.
            fifo_timeout="0 ms",
            workers=self._watchdog.others or None,
            allow_other_workers=bool(self._watchdog.others),
        )

    def release(self, k: int) -> None:
        """Let the scheduler forget fetch `k`."""
        future = self._futures.pop(k, None)
        if future is not None:
            if future.cancelled():
                # client.restart() forgets futures without a word to the scheduler, and what was on its way to it
                # meanwhile is there: a second future of the key can be released.
                future = distributed.Future(future.key, self._client)
            future.release()

    def release_all_but(self, kept: Container[int]) -> None:
        """Let the scheduler forget all fetches but these."""
        for k, future in list(self._futures.items()):
            if k not in kept:
                future.release()

    async def finished(self, k: int, argument: Any) -> Any:
        """Wait until fetch `k` has ended; whether it failed or was cancelled is told by gather.

        A worker that pauses at its memory limit keeps what was sent to it, for ever if need be, and so does one whose
        process is frozen; Dask moves only what is slow to others. The fetch that is waited for is sent again, and if a
        worker has fallen silent, those after it are, too.
        """
        if self._watchdog.others and perf_counter() - self._watchdog.looked_at > STUCK_S:
            await self._watchdog.look()  # else nothing would be sent to a worker that goes on or joins
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
            workers, silent = await self._watchdog.look()
            is_alone = not any(worker["status"] == "running" for worker in workers.values())
            if is_alone and not self.closed:
                self._watchdog.say_alone(k, workers)
            paused = [address for address, worker in workers.items() if worker["status"] == "paused"]
            address = await self._watchdog.whereabouts(future, [*silent, *paused])
            if address is None or future.done() or self.closed:
                continue
            if address not in silent:
                logger.info("Sending fetch %d again, as its worker has paused at its memory limit.", k)
            elif not self._watchdog.is_given_up(k, address, silent[address]):
                continue
            self._send_again(k, argument, future)

    async def gathered(self, k: int, argument: Any, future: Any) -> Timed | None:
        """Bring the result of fetch `k`; None if it was sent again, as the worker that holds it has fallen silent."""
        direct = await self._connections.are_direct()
        gathers: set[asyncio.Future[Timed]] = set()

        def begin() -> None:
            gather = asyncio.ensure_future(self._client.gather(future, direct=direct))
            # One from a silent worker is left alone, see ClusterRunner._close; that it fails in the end is no matter.
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
                _, silent = await self._watchdog.look()
                if not silent:
                    continue
                addresses = await holders(self._client, future.key)
                address = next((address for address in addresses if address in silent), None)
                if self.closed and address is not None:
                    return 0.0, None
                if address is not None and self._watchdog.is_given_up(k, address, silent[address]):
                    self._send_again(k, argument, future)
                    return None
                if address is None and len(gathers) == 1:
                    begin()  # the Client may have merged the first with one from the worker that is silent
        except asyncio.CancelledError:
            for gather in gathers:
                gather.cancel()
            raise

    def _send_again(self, k: int, argument: Any, future: Any) -> None:
        self._n_again += 1
        self._futures[k] = self._submitted(argument, key=(self._name, k, self._n_again))
        future.release()
