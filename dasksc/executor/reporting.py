"""Reports of a rank to the loader page of its scheduler's dashboard.

A rank reports about once a second, and at the end of an epoch. The Client's own event loop collects and sends
the figures, so an epoch never waits for them. A rank first checks that the scheduler has the page
(`dasksc.dashboard`); if not, it repeats the check every few seconds.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from dasksc import config

logger = logging.getLogger("dasksc.window.reporting")

# Key in the scheduler's metadata that is set if the page exists, and name of the scheduler operation that
# receives reports.
PAGE_METADATA_KEY = "dasksc-loader-page"
OPERATION = "dasksc_report"
# Minimum time between two checks for a page that was missing.
_RECHECK_S = 5.0
# Maximum wait for the last report after the end of an epoch. Without the wait, a process that exits right after the
# epoch would lose the report.
_FINAL_REPORT_S = 1.0


@contextlib.contextmanager
def reporting(client: Any, figures: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Report `figures()` to a Client's scheduler during the ``with`` block, and once more at its end."""
    interval_s = config.get_seconds("report-interval")
    if client is None or interval_s is None:
        yield
        return
    loop = client.loop.asyncio_loop
    ended = asyncio.Event()
    final: dict[str, Any] = {}

    async def run() -> None:
        try:
            await _report_until(ended, client, lambda: final or figures(), interval_s)
        except Exception:  # If the epoch needs the lost connection, it raises an error itself.
            logger.debug("Reports to the loader page have stopped.", exc_info=True)

    running = asyncio.run_coroutine_threadsafe(run(), loop)
    try:
        yield
    finally:
        final |= figures()
        with contextlib.suppress(RuntimeError):  # The loop was closed.
            loop.call_soon_threadsafe(ended.set)
            if loop.is_running() and asyncio._get_running_loop() is not loop:
                concurrent.futures.wait([running], _FINAL_REPORT_S)


# Time of the last report of each loader, by Client, in seconds of the event loop's clock.
_sent_at: weakref.WeakKeyDictionary[Any, dict[str, float]] = weakref.WeakKeyDictionary()


async def _report_until(
    ended: asyncio.Event, client: Any, figures: Callable[[], dict[str, Any]], interval_s: float
) -> None:
    """Report until the end of the epoch has been reported or the Client closes."""
    clock = asyncio.get_running_loop().time
    sent_at, key = _sent_at.setdefault(client, {}), figures()["key"]
    has_page, checked_at = False, -math.inf
    while client.status not in ("closing", "closed"):
        wait_s = sent_at.get(key, -math.inf) + interval_s - clock()
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), wait_s)
        is_last = ended.is_set()
        sent_at[key] = clock()
        if not has_page and (is_last or clock() - checked_at >= _RECHECK_S):
            checked_at = clock()
            has_page = await client.get_metadata([PAGE_METADATA_KEY], default=False)
        if has_page:
            # None if the scheduler does not know the operation.
            send = getattr(client.scheduler, OPERATION)
            has_page = bool(await send(client=client.id, figures=figures() | {"has_ended": is_last}))
        if is_last:
            return
