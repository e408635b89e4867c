"""Detection of Dask workers that have paused at their memory limit or fallen silent, and warnings about them."""

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

STUCK_S = 3.0  # Time a fetch may take before its worker is checked.
_SURE_S = 1.0  # Time between the two checks that determine whether a worker is silent.


class Watchdog:
    """Monitor of a Client's workers while a window waits for them.

    Parameters
    ----------
    client
        Client of the cluster.

    Attributes
    ----------
    checked_at
        Time of the last check, in seconds of `perf_counter`.
    others
        If any worker is silent, the addresses of the running workers that are not silent; otherwise empty.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._heartbeats = Heartbeats()
        self.checked_at = 0.0
        self.others: list[str] = []
        self._has_warned_no_worker = False
        self._warned_silent: set[str] = set()

    async def poll(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Return the workers by address, and the silence of each silent worker in seconds."""
        for is_sure in (False, True):
            self.checked_at = requested_at = perf_counter()
            workers = await workers_of(self._client)
            silent = self._heartbeats.silent(workers, requested_at=requested_at)
            if is_sure or not silent:
                break
            # After this process or the scheduler was suspended, heartbeats may be unprocessed.
            await asyncio.sleep(_SURE_S)
        running = [address for address, worker in workers.items() if worker["status"] == "running"]
        self.others = [address for address in running if address not in silent] if silent else []
        return workers, silent

    async def assigned_worker(self, future: Any, addresses: list[str]) -> str | None:
        """Return the address of the worker to which a fetch is assigned; None if it is not among `addresses`."""
        if not addresses:
            return None
        try:
            keys_of = await processing(self._client, addresses)
        except KeyError:  # A worker has just left.
            return None
        return next((address for address, keys in keys_of.items() if future.key in keys), None)

    def can_reassign(self, k: int, address: str, silence_s: float) -> bool:
        """Return True if other workers can take over from a silent one; log a warning once per silent worker."""
        if address not in self._warned_silent:
            self._warned_silent.add(address)
            logger.warning(
                "Fetch %d waits: the Dask worker at %s has sent no heartbeat for %.0f s. %s",
                k,
                address,
                silence_s,
                "Its fetches are sent to other workers. If the process of this worker hangs, end it."
                if self.others
                else "No other worker is running: reading continues when this one answers or another joins. If the "
                "process of the silent worker hangs, end it.",
            )
        return bool(self.others)

    def warn_no_worker(self, k: int, workers: Mapping[str, Any]) -> None:
        """Log a warning, once, that no running worker can execute fetch `k`."""
        if self._has_warned_no_worker:
            return
        self._has_warned_no_worker = True
        logger.warning(
            "Fetch %d waits: the Dask cluster at %s has %s. Reading continues when a worker %s.",
            k,
            self._client.scheduler.address,
            f"no running workers ({len(workers)} paused at the memory limit)" if workers else "no workers",
            "has free memory again, or when another one joins" if workers else "joins",
        )
