"""Export of the ranks' reports at the scheduler's ``/metrics``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from dasksc.executor.fetch_totals import export

__all__ = ["show"]

# Name and description of each gauge, and the figure that it exports.
_GAUGES = (
    ("epoch", "Number of the epoch being read", "epoch"),
    ("rows_per_second", "Cells per second, mean over the epoch", "rows_per_s"),
    ("wait_share", "Fraction of the epoch for which training waited for batches", "wait_share"),
    ("batches", "Batches yielded in this epoch", "n_batches"),
    ("batches_left", "Batches remaining in this epoch", "n_batches_left"),
    ("in_flight_bytes", "Memory of the fetches in flight (ready or in progress) in bytes", "in_flight_bytes"),
    ("limit_bytes", "Memory limit of the fetches in flight in bytes", "limit_bytes"),
)
_FETCHES = {"fetching": "n_fetching", "ready": "n_ready", "taken": "n_fetched"}
_PARTS = {part: f"{part}_s" for part in ("fetch", "read", "decode", "transfer", "gather")}
_LABELS = ["dataset", "rank", "worker", "host", "pid", "loader"]


class _Page(Protocol):
    """Page that receives the reports of ranks; each of its `loaders` has the figures of the last report."""

    @property
    def loaders(self) -> Iterable[Any]: ...


_pages: weakref.WeakSet[_Page] = weakref.WeakSet()


def show(page: _Page) -> None:
    """Export the reports of `page` and the totals of the fetches in this process to Prometheus, if installed."""
    _pages.add(page)
    export("loaders", _LoaderCollector())
    export()


class _LoaderCollector:
    def collect(self) -> Iterator[Any]:
        """Yield the metric families."""
        from prometheus_client.core import GaugeMetricFamily

        reports = [loader.figures for page in list(_pages) for loader in page.loaders]
        for name, text, figure in _GAUGES:
            family = GaugeMetricFamily(f"dasksc_loader_{name}", text, labels=_LABELS)
            for report in reports:
                if report[figure] is not None:
                    family.add_metric(_labels(report), report[figure])
            yield family
        fetches = GaugeMetricFamily("dasksc_loader_fetches", "Fetch tasks of this epoch", labels=[*_LABELS, "state"])
        seconds = GaugeMetricFamily(
            "dasksc_loader_seconds",
            "Elapsed seconds in this epoch, by part of the work",
            labels=[*_LABELS, "part"],
        )
        for report in reports:
            for state, figure in _FETCHES.items():
                fetches.add_metric([*_labels(report), state], report[figure])
            for part, figure in _PARTS.items():
                seconds.add_metric([*_labels(report), part], report[figure])
        yield fetches
        yield seconds


def _labels(report: Any) -> list[str]:
    worker = report["worker"]
    return [
        report["name"],
        str(report["rank"]),
        "" if worker is None else str(worker),
        report["host"],
        str(report["pid"]),
        report["key"],
    ]
