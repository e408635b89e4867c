"""Reports of a rank to the loader page of its scheduler's dashboard, and diagnosis of an epoch.

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
from collections.abc import Callable, Iterator, Mapping
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


# The loader counts as a bottleneck if training spends at least this fraction of the time waiting.
_HEALTHY = 0.05

# Name and remedy of the bottleneck, by part of the work.
_BOTTLENECKS = {
    "read": ("reading", "raise block_size or fetch_factor"),
    "decode": ("decoding", "raise block_size, or use more cores"),
    "other": ("chunk lookup and array code", "raise block_size or fetch_factor"),
    "transfer": ("transfers from Dask workers", 'use scheduler="threads", or workers on the machines of the ranks'),
    "gather": ("making batches", 'use layout="csr", select fewer genes=, or raise dasksc.gather-threads'),
    "memory": ("memory", "raise memory_limit or lower fetch_factor"),
}


def diagnosis(figures: Mapping[str, Any]) -> str:
    """Return a sentence that says whether training waits for data, and names the bottleneck and a remedy."""
    wait_share = figures["wait_share"]
    if not figures["n_batches"]:
        return "starting: no batch has been read yet"
    # The dashboard's loader page shows tenths of a percent, so a share that rounds to 0.0% counts as no waiting.
    if not round(1000 * wait_share):
        return "healthy: the trainer never waited"
    if not round(100 * wait_share):
        return "healthy: the trainer waited less than 1% of the time"
    if wait_share < _HEALTHY:
        return f"healthy: the trainer waited {wait_share:.0%} of the time"
    if figures["n_fetched"] <= 1 or figures["n_rank_fetches"] == 1:
        # Nothing is read ahead of the first fetch, so training always waits for it.
        if figures["n_batches_left"] > 0 or figures["n_fetching"] > 0:
            return f"starting: {wait_share:.0%} waiting for the first fetch"
        return f"the epoch is too short to read ahead: {wait_share:.0%} waiting for its only fetch"
    bottleneck, remedy = _BOTTLENECKS[_bottleneck(figures)]
    return f"limited by {bottleneck}: {wait_share:.0%} waiting; {remedy}"


def _bottleneck(figures: Mapping[str, Any]) -> str:
    n_in_flight = figures["n_fetching"] + figures["n_ready"]
    if n_in_flight and not figures["n_fetching"]:
        return "gather"
    limit_bytes, in_flight_bytes = figures["limit_bytes"], figures["in_flight_bytes"]
    if n_in_flight and limit_bytes and in_flight_bytes * (n_in_flight + 1) > limit_bytes * n_in_flight:
        return "memory"
    other_s = max(0.0, figures["fetch_s"] - figures["read_s"] - figures["decode_s"])
    seconds = {step: figures[f"{step}_s"] for step in ("read", "decode", "transfer", "gather")} | {"other": other_s}
    return max(seconds, key=lambda step: seconds[step])
