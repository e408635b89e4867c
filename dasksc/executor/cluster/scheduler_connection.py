"""Connection to the scheduler of a distributed cluster, and detection of its loss."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from dask.utils import parse_timedelta

from dasksc import config
from dasksc._compat.distributed import CommClosedError, FutureCancelledError, scheduler_identity
from dasksc.executor.schedulers import address_of

__all__ = ["SchedulerConnection"]

T = TypeVar("T")

_PROBE_S = 5.0  # Maximum time between two probes of the scheduler.


class SchedulerConnection:
    """Connection of a window to its scheduler, which is probed every few seconds.

    Parameters
    ----------
    client
        Client of the scheduler.
    in_process
        True if the scheduler runs in this process and so cannot be lost.
    """

    def __init__(self, client: Any, *, in_process: bool) -> None:
        self._client = client
        self._in_process = in_process
        self._closed = False
        self._watching: asyncio.Task[str] | None = None

    async def unless_lost(self, begin: Callable[[], Awaitable[T]]) -> T:
        """Await ``begin()``; raise `ConnectionError` as soon as the scheduler is lost."""
        if self._in_process:
            return await begin()
        if self._watching is None:
            self._watching = asyncio.ensure_future(_wait_until_lost(self._client))
        doing = asyncio.ensure_future(begin())
        await asyncio.wait({doing, self._watching}, return_when=asyncio.FIRST_COMPLETED)
        if self._watching.done() and not self._closed:
            doing.cancel()
            raise ConnectionError(self._watching.result())
        try:
            return await doing
        except (FutureCancelledError, CommClosedError) as error:
            # When the connection is lost, the Client cancels its futures, and pending requests fail.
            if self._closed:
                raise
            if isinstance(error, FutureCancelledError) and self._client.status == "running":
                raise ConnectionError(
                    f"The Dask scheduler at {address_of(self._client)} has dropped the tasks: client.restart() was "
                    "called, or the connection was lost for a moment. Create the data set again, and resume it with "
                    "load_state_dict."
                ) from error
            raise ConnectionError(_connection_lost(self._client)) from error

    def close(self) -> bool:
        """Stop probing; return True if the scheduler was lost."""
        self._closed = True
        lost = self._watching is not None and self._watching.done()
        if self._watching is not None:
            self._watching.cancel()
        return lost


async def _wait_until_lost(client: Any) -> str:
    """Wait until the scheduler is unreachable, and return an error message.

    The wait ends within ``dasksc.scheduler-timeout`` of the scheduler's last answer.
    """
    timeout_s = parse_timedelta(config.get("scheduler-timeout"))
    probe_s = min(_PROBE_S, timeout_s / 4)
    scheduler = client.scheduler
    if client.status == "connecting":  # The Client is reconnecting to a scheduler that has restarted.
        await _wait_for_status_change(client, "connecting", timeout_s)
    while client.status == "running":
        try:
            await asyncio.wait_for(scheduler_identity(scheduler, n_workers=0), timeout_s - probe_s)
        except (OSError, TimeoutError) as error:
            silence = f"The scheduler has not answered for {timeout_s:g} s ({type(error).__name__})."
            return f"{_connection_lost(client)} {silence}"
        await _wait_for_status_change(client, "running", probe_s)
    return _connection_lost(client)


async def _wait_for_status_change(client: Any, status: str, timeout_s: float) -> None:
    for _ in range(20):
        if client.status == status:
            await asyncio.sleep(timeout_s / 20)


def _connection_lost(client: Any) -> str:
    return (
        f"The connection to the Dask scheduler at {address_of(client)} was lost. Connect a new Client, create the "
        "data set with it, and resume with load_state_dict."
    )
