"""Totals of the fetch tasks of this process, exported to Prometheus if it is installed.

Dask's workers and schedulers serve the registry of ``prometheus_client`` at ``/metrics`` if the
package is installed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dasksc.platforms import after_fork
from dasksc.storage.read_timing import ThreadTimes

__all__ = ["Totals", "count", "export", "totals"]


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums over the fetch tasks of this process.

    Parameters
    ----------
    n_fetches
        Number of tasks.
    n_rows, n_bytes
        Number of rows fetched, and the memory that they held, in bytes, excluding memory-mapped files.
    read_s, decode_s, other_s
        Elapsed time spent on reading, on decoding, and on everything else, summed over tasks, in seconds.
    """

    n_fetches: int = 0
    n_rows: int = 0
    n_bytes: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    other_s: float = 0.0


totals = Totals()
_lock = threading.Lock()


def count(*, n_rows: int, n_bytes: int, fetch_s: float, spent: ThreadTimes) -> None:
    """Add one fetch task to the totals."""
    with _lock:
        totals.n_fetches += 1
        totals.n_rows += n_rows
        totals.n_bytes += n_bytes
        totals.read_s += spent.read_s
        totals.decode_s += spent.decode_s
        totals.other_s += max(0.0, fetch_s - spent.read_s - spent.decode_s)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


after_fork(_after_fork)


class _TotalsCollector:
    """Collector that exports the totals to ``prometheus_client``."""

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        yield CounterMetricFamily("dasksc_fetches", "Fetch tasks completed by this process", totals.n_fetches)
        yield CounterMetricFamily("dasksc_fetched_rows", "Rows fetched by this process", totals.n_rows)
        yield CounterMetricFamily("dasksc_fetched_bytes", "Memory of the fetched rows in bytes", totals.n_bytes)
        seconds = CounterMetricFamily(
            "dasksc_fetch_seconds", "Elapsed seconds of fetch tasks, summed over threads", labels=["part"]
        )
        for part in ("read", "decode", "other"):
            seconds.add_metric([part], getattr(totals, f"{part}_s"))
        yield seconds


_collectors: dict[str, Any] = {}


def export(name: str = "fetches", collector: Any = None) -> None:
    """Register `collector` (default: the collector of the totals) for this process's ``/metrics``, once per name.

    Do nothing if Dask has not imported ``prometheus_client``.
    """
    library = sys.modules.get("prometheus_client")
    with _lock:
        if library is None or name in _collectors:
            return
        _collectors[name] = collector = _TotalsCollector() if collector is None else collector
    library.REGISTRY.register(collector)
