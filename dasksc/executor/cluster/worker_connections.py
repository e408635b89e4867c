"""Whether the workers of a distributed cluster can be reached from here."""

from __future__ import annotations

import asyncio
import logging
import weakref
from typing import Any

import distributed

from dasksc._compat.distributed import answer_of_worker, workers_of

__all__ = ["WorkerConnections"]

logger = logging.getLogger("dasksc.window.cluster")

_CONNECT_S = 3.0  # to a worker on a network that lets us through; a firewall drops silently


class WorkerConnections:
    """The connections of a window to the workers, by which results can bypass the scheduler.

    Parameters
    ----------
    client
        Whose workers.
    in_process
        Whether they live in this process.
    """

    def __init__(self, client: Any, *, in_process: bool) -> None:
        self._client = client
        self._in_process = in_process
        self._direct: asyncio.Task[bool] | None = None

    async def are_direct(self) -> bool:
        """Return whether this process can connect to all workers; found out once."""
        if self._in_process:
            return True
        if self._direct is None:
            self._direct = asyncio.ensure_future(_workers_are_reachable(self._client))
        return await asyncio.shield(self._direct)


# What was found out about a Client's workers, so that it is looked into, and said, once.
_reachable: weakref.WeakKeyDictionary[distributed.Client, dict[str, bool]] = weakref.WeakKeyDictionary()


async def _workers_are_reachable(client: Any) -> bool:
    """Whether this process can connect to the workers, so that results can bypass the scheduler."""
    known = _reachable.setdefault(client, {})
    workers = await workers_of(client)
    unknown = [address for address in workers if address not in known]

    async def probe(address: str) -> None:
        try:
            await asyncio.wait_for(answer_of_worker(client, address), _CONNECT_S)
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
    return all(known.get(address, True) for address in workers)
