"""What a rank tells the loader page of its scheduler's dashboard, about once a second.

The figures are taken and sent by the Client's own event loop: an epoch never waits for them. The
page (`dasksc.dashboard`) is asked for first, and a scheduler that has none is asked again now and then.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from dasksc import config

__all__ = ["ASKED_FOR", "OPERATION", "reporting", "runs_here"]

logger = logging.getLogger(__name__)

# In the scheduler's metadata, where a page is; and the operation that it adds to the scheduler's.
ASKED_FOR = "dasksc-loader-page"
OPERATION = "dasksc_report"
# Reports between two questions for a page that is not there.
_PATIENCE = 5
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
    loop: asyncio.AbstractEventLoop = client.loop.asyncio_loop
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


class _Reporter:
    def __init__(self, client: Any, figures: Callable[[], dict[str, Any]], interval_s: float) -> None:
        self._client = client
        self._figures = figures
        self._interval_s = interval_s
        self.ended = asyncio.Event()
        self.final: dict[str, Any] = {}

    async def run(self) -> None:
        """Report until the end has been reported, or the Client closes."""
        has_page, n_asked = False, 0
        while self._client.status not in ("closing", "closed"):
            is_last = self.ended.is_set()
            try:
                if not has_page and (n_asked % _PATIENCE == 0 or is_last):
                    has_page = await self._client.scheduler.get_metadata(keys=[ASKED_FOR], default=False)
                n_asked += 1
                if has_page:
                    has_page = await self._report(is_last)
            except OSError as error:  # no connection: the epoch itself says so, if it needs one
                has_page = False
                logger.debug("The loader page was not told: %s", error)
            if is_last:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), self._interval_s)

    async def _report(self, is_last: bool) -> bool:
        figures = self.final if is_last else self._figures()
        tell = getattr(self._client.scheduler, OPERATION)
        return bool(await tell(client=self._client.id, figures=figures | {"has_ended": is_last}))


def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the calling thread is the one that runs `loop`, and must not wait for it."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _log_failure(running: concurrent.futures.Future[None]) -> None:
    if not running.cancelled() and running.exception() is not None:
        logger.debug("The loader page is no longer told.", exc_info=running.exception())
