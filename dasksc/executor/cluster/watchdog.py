"""Workers that have paused at their memory limit, or have fallen silent, and what is said of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from dasksc._compat.distributed import processing, workers_of
from dasksc.executor.cluster.heartbeats import Heartbeats

__all__ = ["STUCK_S", "Watchdog"]

logger = logging.getLogger("dasksc.window.cluster")

STUCK_S = 3.0  # a fetch may take; then it is looked whether its worker still works
_SURE_S = 1.0  # between the looks that tell that a worker has fallen silent


class Watchdog:
    """Looks after the workers of a Client while a window waits for them.

    Parameters
    ----------
    client
        Whose workers.

    Attributes
    ----------
    looked_at
        When it was last looked, in seconds of `perf_counter`.
    others
        Addresses of the workers that run and have not fallen silent, if any have.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._heartbeats = Heartbeats()
        self.looked_at = 0.0
        self.others: list[str] = []
        self._said_alone = False
        self._said_silent: set[str] = set()

    async def look(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Ask which workers there are, and for how long some have been silent."""
        for is_sure in (False, True):
            self.looked_at = asked_at = perf_counter()
            workers = await workers_of(self._client)
            silent = self._heartbeats.silent(workers, asked_at=asked_at)
            if is_sure or not silent:
                break
            await asyncio.sleep(_SURE_S)  # where this process or the scheduler has slept, heartbeats lie unread
        running = [address for address, worker in workers.items() if worker["status"] == "running"]
        self.others = [address for address in running if address not in silent] if silent else []
        return workers, silent

    async def whereabouts(self, future: Any, addresses: list[str]) -> str | None:
        """Return which of these workers a fetch waits on, if any."""
        if not addresses:
            return None
        try:
            keys_of = await processing(self._client, addresses)
        except KeyError:  # one has left just then
            return None
        return next((address for address, keys in keys_of.items() if future.key in keys), None)

    def is_given_up(self, k: int, address: str, silence_s: float) -> bool:
        """Whether others can do what a worker that has fallen silent holds; says, once, that it has."""
        if address not in self._said_silent:
            self._said_silent.add(address)
            logger.warning(
                "Fetch %d waits: the Dask worker at %s has not been heard from for %.0f s. %s",
                k,
                address,
                silence_s,
                "Its fetches are sent to others. If its process hangs, end it."
                if self.others
                else "No other runs: it goes on when that one answers, or another joins. If its process hangs, end it.",
            )
        return bool(self.others)

    def say_alone(self, k: int, workers: Mapping[str, Any]) -> None:
        """Say, once, that no worker runs on which fetch `k` could."""
        if self._said_alone:
            return
        self._said_alone = True
        logger.warning(
            "Fetch %d waits: the Dask cluster of %s has %s. It goes on when one %s.",
            k,
            self._client.scheduler.address,
            f"{len(workers)} paused at their memory limit" if workers else "no workers",
            "has memory again, or joins" if workers else "joins",
        )
