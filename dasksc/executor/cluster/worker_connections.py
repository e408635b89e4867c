"""Detection of workers of a distributed cluster that this process cannot connect to."""

from __future__ import annotations

import asyncio
import logging
import weakref
from typing import Any

import distributed

from dasksc._compat.distributed import worker_identity, workers_of

__all__ = ["WorkerConnections"]

logger = logging.getLogger("dasksc.window.cluster")

_CONNECT_S = 3.0  # Timeout of a connection to a worker; a firewall may drop packets without an error.


class WorkerConnections:
    """Direct connections of a window to the workers, through which results bypass the scheduler.

    Parameters
    ----------
    client
        Client of the cluster.
    in_process
        True if the workers run in this process.
    """

    def __init__(self, client: Any, *, in_process: bool) -> None:
        self._client = client
        self._in_process = in_process
        self._direct: asyncio.Task[bool] | None = None

    async def are_direct(self) -> bool:
        """Return True if this process can connect to all workers. The connections are tested only once."""
        if self._in_process:
            return True
        if self._direct is None:
            self._direct = asyncio.ensure_future(_workers_are_reachable(self._client))
        return await asyncio.shield(self._direct)


# For each Client, a dict from worker address to True if the worker is reachable. Each worker is tested once, and a
# warning is logged if it is unreachable.
_reachable: weakref.WeakKeyDictionary[distributed.Client, dict[str, bool]] = weakref.WeakKeyDictionary()


async def _workers_are_reachable(client: Any) -> bool:
    """Return True if this process can connect to all workers, so that results can bypass the scheduler."""
    reachability = _reachable.setdefault(client, {})
    workers = await workers_of(client)
    unknown = [address for address in workers if address not in reachability]

    async def probe(address: str) -> None:
        try:
            await asyncio.wait_for(worker_identity(client, address), _CONNECT_S)
        except (OSError, TimeoutError) as error:
            reachability[address] = False
            logger.warning(
                "The Dask worker at %s cannot be reached from here (%s: %s), so results pass through the "
                "scheduler, which is slower. Open the workers' ports to this machine.",
                address,
                type(error).__name__,
                error,
            )
        else:
            reachability[address] = True

    await asyncio.gather(*(probe(address) for address in unknown))
    return all(reachability.get(address, True) for address in workers)
