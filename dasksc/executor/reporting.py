"""What a rank tells the loader page of its scheduler's dashboard: about once a second, and at the end of an epoch.

The figures are taken and sent by the Client's own event loop: an epoch never waits for them. The
page (`dasksc.dashboard`) is asked for first, and a scheduler that has none is asked again now and then.
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
from dasksc._compat.unsupported import UnsupportedVersionError, say_once

__all__ = ["ASKED_FOR", "OPERATION", "reporting", "runs_here"]

logger = logging.getLogger("dasksc.window.reporting")

# In the scheduler's metadata, where a page is; and the operation that it adds to the scheduler's.
ASKED_FOR = "dasksc-loader-page"
OPERATION = "dasksc_report"
# Between two questions for a page that was not there.
_PATIENCE_S = 5.0
# To wait for the last report, so that it is not lost when the process ends.
_LAST_WORD_S = 1.0


@contextlib.contextmanager
def reporting(client: Any, figures: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Tell the page of a Client's scheduler `figures()` while the ``with`` block runs, and once more at its end.

    Parameters
    ----------
    client
        The Client; None tells nobody.
    figures
        Called by the Client's event loop. Names and plain values, ``key`` among them, which tells loaders apart.
    """
    interval_s = config.get_seconds("report-interval")
    if client is None or interval_s is None:
        yield
        return
    try:
        loop = event_loop(client)
    except UnsupportedVersionError as error:
        say_once(error, without="the loader page shows nothing")
        yield
        return
    reporter = _Reporter(client, figures, interval_s)
    running = asyncio.run_coroutine_threadsafe(reporter.run(), loop)
    running.add_done_callback(_log_failure)
    try:
        yield
    finally:
        reporter.final = figures()
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(reporter.ended.set)
            if loop.is_running() and not runs_here(loop):
                concurrent.futures.wait([running], _LAST_WORD_S)


@dataclass(slots=True)
class _Known:
    """What is known of a Client's scheduler: whether it has a page, and, on the loop's clock, since when.

    `told_at` is when each loader was last reported.
    """

    has_page: bool = False
    asked_at: float = -math.inf
    told_at: dict[str, float] = field(default_factory=dict)


_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


class _Reporter:
    def __init__(self, client: Any, figures: Callable[[], dict[str, Any]], interval_s: float) -> None:
        self._client = client
        self._known = _known.setdefault(client, _Known())
        self._figures = figures
        self._interval_s = interval_s
        self.ended = asyncio.Event()
        self.final: dict[str, Any] = {}

    async def run(self) -> None:
        """Report until the end has been reported, or the Client closes."""
        known, clock = self._known, asyncio.get_running_loop().time
        key = self._figures()["key"]
        while self._client.status not in ("closing", "closed"):
            wait_s = known.told_at.get(key, -math.inf) + self._interval_s - clock()
            if wait_s > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.ended.wait(), wait_s)
            is_last = self.ended.is_set()
            known.told_at[key] = clock()
            try:
                if not known.has_page and clock() - known.asked_at >= _PATIENCE_S:
                    known.asked_at = clock()
                    known.has_page = await metadata(self._client, ASKED_FOR, default=False)
                if known.has_page:
                    known.has_page = await self._report(is_last)
            except OSError as error:  # no connection: the epoch itself says so, if it needs one
                known.has_page = False
                logger.debug("The loader page was not told: %s", error)
            if is_last:
                return

    async def _report(self, is_last: bool) -> bool:
        figures = self.final if is_last else self._figures()
        return bool(await report(self._client, OPERATION, figures=figures | {"has_ended": is_last}))


def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the calling thread is the one that runs `loop`, and must not wait for it."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _log_failure(running: concurrent.futures.Future[None]) -> None:
    if not running.cancelled() and running.exception() is not None:
        logger.debug("The loader page is no longer told.", exc_info=running.exception())
