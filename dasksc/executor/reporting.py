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
from dataclasses import dataclass, field
from typing import Any

from dasksc import config
from dasksc._compat.distributed import event_loop, metadata, report
from dasksc._compat.unsupported import UnsupportedVersionError, warn_once

__all__ = ["PAGE_METADATA_KEY", "OPERATION", "reporting", "runs_here"]

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
    """Report `figures()` to a Client's scheduler during the ``with`` block, and once more at its end.

    Parameters
    ----------
    client
        Client of the scheduler; None reports nothing.
    figures
        Function called by the Client's event loop. It returns plain values by name, among them ``key``, which
        identifies the loader.
    """
    interval_s = config.get_seconds("report-interval")
    if client is None or interval_s is None:
        yield
        return
    try:
        loop = event_loop(client)
    except UnsupportedVersionError as error:
        warn_once(error, without="the loader page of the Dask dashboard shows nothing")
        yield
        return
    reporter = _Reporter(client, figures, interval_s)
    running = asyncio.run_coroutine_threadsafe(reporter.run(), loop)
    running.add_done_callback(_log_failure)
    try:
        yield
    finally:
        reporter.final = figures()
        with contextlib.suppress(RuntimeError):  # The loop was closed.
            loop.call_soon_threadsafe(reporter.ended.set)
            if loop.is_running() and not runs_here(loop):
                concurrent.futures.wait([running], _FINAL_REPORT_S)


@dataclass(slots=True)
class _ReportState:
    """State of the reports to a Client's scheduler.

    `has_page` is True if the scheduler has the page, `checked_at` is the time of the last check, and `sent_at` has the
    time of the last report of each loader. Times are in seconds of the event loop's clock.
    """

    has_page: bool = False
    checked_at: float = -math.inf
    sent_at: dict[str, float] = field(default_factory=dict)


_states: weakref.WeakKeyDictionary[Any, _ReportState] = weakref.WeakKeyDictionary()


class _Reporter:
    def __init__(self, client: Any, figures: Callable[[], dict[str, Any]], interval_s: float) -> None:
        self._client = client
        self._state = _states.setdefault(client, _ReportState())
        self._figures = figures
        self._interval_s = interval_s
        self.ended = asyncio.Event()
        self.final: dict[str, Any] = {}

    async def run(self) -> None:
        """Report until the end of the epoch has been reported or the Client closes."""
        state, clock = self._state, asyncio.get_running_loop().time
        key = self._figures()["key"]
        while self._client.status not in ("closing", "closed"):
            wait_s = state.sent_at.get(key, -math.inf) + self._interval_s - clock()
            if wait_s > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.ended.wait(), wait_s)
            is_last = self.ended.is_set()
            state.sent_at[key] = clock()
            try:
                if not state.has_page and clock() - state.checked_at >= _RECHECK_S:
                    state.checked_at = clock()
                    state.has_page = await metadata(self._client, PAGE_METADATA_KEY, default=False)
                if state.has_page:
                    state.has_page = await self._report(is_last)
            except OSError as error:  # If the epoch needs the lost connection, it raises an error itself.
                state.has_page = False
                logger.debug("A report to the loader page failed: %s", error)
            except UnsupportedVersionError as error:
                warn_once(error, without="the loader page of the Dask dashboard shows nothing")
                return
            if is_last:
                return

    async def _report(self, is_last: bool) -> bool:
        figures = self.final if is_last else self._figures()
        return bool(await report(self._client, OPERATION, figures=figures | {"has_ended": is_last}))


def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Return True if the calling thread runs `loop`, and so must not wait for it."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _log_failure(running: concurrent.futures.Future[None]) -> None:
    if not running.cancelled() and running.exception() is not None:
        logger.debug("Reports to the loader page have stopped.", exc_info=running.exception())
