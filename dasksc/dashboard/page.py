"""Storage of the ranks' reports on the scheduler, and the page that shows them."""

from __future__ import annotations

import importlib.resources
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin

from dasksc._compat.distributed import RequestHandler, add_operation, add_to_progress_panel, announce
from dasksc._compat.unsupported import UnsupportedVersionError, warn_once
from dasksc.executor.diagnosis import diagnosis
from dasksc.executor.reporting import OPERATION, PAGE_METADATA_KEY

__all__ = ["FiguresHandler", "LoaderReports", "LoaderPage", "PageHandler", "page_of"]

_NAME = "dasksc-loader-page"
_N_KEPT = 90  # reports of each loader, for the plots
_N_LATEST = 3  # reports that make up the current figures
_SHORT_S = 0.01  # shortest interval for which a rate is computed
_N_LOADERS = 32  # loaders kept per Client; beyond that, the one with the oldest report is dropped


@dataclass(slots=True, kw_only=True)
class LoaderReports:
    """Reports of one data set of one rank.

    Parameters
    ----------
    figures
        Latest report: the figures of `dasksc.scDataset.stats`, and the identity of the loader.
    at
        Time of its arrival, by the scheduler's monotonic clock, in seconds.
    recent
        For each pair of consecutive reports, in order of arrival: cells per second, fraction of time waited, and time
        of arrival of the later report.
    """

    figures: Mapping[str, Any]
    at: float
    recent: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_N_KEPT))

    def update(self, figures: Mapping[str, Any], at: float) -> None:
        """Store the next report."""
        before = self.figures
        is_other = (figures["epoch"], figures["n_batches_before"]) != (before["epoch"], before["n_batches_before"])
        # The same epoch may be read again.
        if is_other or figures["clock_s"] < before["clock_s"] or figures["n_rows"] < before["n_rows"]:
            before = dict.fromkeys(before, 0)
        rows, clock_s, waited_s = (figures[name] - before[name] for name in ("n_rows", "clock_s", "waited_s"))
        if clock_s > _SHORT_S:
            self.recent.append((rows / clock_s, min(1.0, max(0.0, waited_s / clock_s)), at))
        self.figures, self.at = figures, at

    @property
    def wait_share(self) -> float:
        """Fraction of time that training spent waiting for data.

        While an epoch runs, the fraction is that of the latest reports; afterwards, it is that of the whole epoch.
        """
        latest = list(self.recent)[-_N_LATEST:]
        if self.figures["has_ended"] or not latest:
            return float(self.figures["wait_share"])
        return sum(wait for _, wait, _ in latest) / len(latest)

    @property
    def diagnosis(self) -> str:
        """Sentence about the bottleneck of this loader."""
        return diagnosis({**self.figures, "wait_share": self.wait_share})


class LoaderPage(SchedulerPlugin):
    """Reports of all ranks that fetch through a scheduler.

    Parameters
    ----------
    scheduler
        Scheduler to which the handler that receives the reports is added.
    """

    name = _NAME

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._loaders: dict[tuple[str, str, Any], LoaderReports] = {}
        self._panel: dict[str, tuple[int, int]] = {}
        add_operation(scheduler, OPERATION, self.report)
        announce(scheduler, PAGE_METADATA_KEY)

    @property
    def loaders(self) -> list[LoaderReports]:
        """Known loaders, sorted by name, rank and worker."""
        return sorted(self._loaders.values(), key=lambda loader: _order(loader.figures))

    def report(self, client: str, figures: Mapping[str, Any]) -> bool:
        """Store the report of a Client; return True unless the Client has disconnected."""
        if client not in self._scheduler.clients:  # The Client has disconnected.
            return False
        key = (client, figures["key"], figures["worker"])
        loader = self._loaders.get(key)
        if loader is None:
            of_client = [loader_key for loader_key in self._loaders if loader_key[0] == client]
            if len(of_client) >= _N_LOADERS:
                del self._loaders[min(of_client, key=lambda loader_key: self._loaders[loader_key].at)]
            loader = self._loaders[key] = LoaderReports(figures=dict.fromkeys(figures, 0), at=monotonic())
        loader.update(figures, monotonic())
        self._update_panel()
        return True

    def remove_client(self, scheduler: Any, client: str) -> None:
        """Drop the reports of a Client."""
        for key in [key for key in self._loaders if key[0] == client]:
            del self._loaders[key]
        self._update_panel()

    def _update_panel(self) -> None:
        """Make the progress panel of Dask's dashboard count the tasks of whole epochs.

        By default, the panel counts only the tasks that the scheduler knows: the running fetches. The scheduler forgets
        a fetch when the rank has received its result, and does not know the fetches that the rank has yet to submit.
        """
        epochs: dict[str, tuple[int, int]] = dict.fromkeys(self._panel, (0, 0))
        for figures in (loader.figures for loader in self._loaders.values()):
            if not figures["has_ended"]:
                n_finished = figures["n_fetched"] + figures["n_ready"]
                n_later = max(0, figures["n_fetches"] - n_finished - figures["n_fetching"])
                n_released, n_waiting = epochs.get(figures["tasks"], (0, 0))
                epochs[figures["tasks"]] = n_released + n_finished, n_waiting + n_later
        try:
            for prefix, (n_released, n_waiting) in epochs.items():
                had_released, had_waiting = self._panel.get(prefix, (0, 0))
                change = {"n_released": n_released - had_released, "n_waiting": n_waiting - had_waiting}
                if add_to_progress_panel(self._scheduler, prefix, **change):
                    self._panel[prefix] = n_released, n_waiting
        except UnsupportedVersionError as error:
            warn_once(error, without="the progress panel of Dask counts only the fetches in flight")
        self._panel = {prefix: counts for prefix, counts in self._panel.items() if any(counts)}

    def figures(self) -> dict[str, Any]:
        """Return the data that the page displays."""
        now = monotonic()
        return {
            "loaders": [
                {
                    **loader.figures,
                    "age_s": now - loader.at,
                    "recent": [(rate, wait, now - at) for rate, wait, at in loader.recent],
                    "wait_share_now": loader.wait_share,
                    "diagnosis": loader.diagnosis,
                }
                for loader in self.loaders
            ],
            "n_workers": len(self._scheduler.workers),
            "address": self._scheduler.address,
        }


def _order(figures: Mapping[str, Any]) -> tuple[Any, ...]:
    worker = figures["worker"]
    return figures["name"], figures["rank"], -1 if worker is None else worker, figures["key"]


def page_of(scheduler: Any) -> LoaderPage:
    """Return the page of a scheduler, created on the first call."""
    page = scheduler.plugins.get(_NAME)
    if page is None:
        page = LoaderPage(scheduler)
        scheduler.add_plugin(page, name=_NAME)
    return page  # type: ignore[no-any-return]


class FiguresHandler(RequestHandler):
    """Request handler that serves the figures."""

    def get(self) -> None:
        """Respond with JSON."""
        self.set_header("Cache-Control", "no-store")
        self.write(page_of(self.server).figures())


class PageHandler(RequestHandler):
    """Request handler that serves the page with the current figures."""

    def get(self) -> None:
        """Respond with HTML."""
        html = importlib.resources.files("dasksc.dashboard").joinpath("loader.html").read_text(encoding="utf-8")
        # Inside a script element, only "</" and "<!" could end it.
        figures = json.dumps(page_of(self.server).figures()).replace("<", "\\u003c")
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.write(html.replace("/*figures*/null", figures))
