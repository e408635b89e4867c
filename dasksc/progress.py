"""How an epoch is going: counts, times, a line at its end, and a bar to watch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol, TypeVar

from dasksc.errors import InputError
from dasksc.plan import EpochPlan

__all__ = ["Bar", "EpochStats", "line_of", "merged", "progress_bar"]

T = TypeVar("T")


class EpochStats:
    """What one pass over a data set has done so far.

    Parameters
    ----------
    plan
        Of the epoch; None before any has begun.
    n_done
        Batches of the plan that were yielded before.
    n_left
        Batches that will come.
    has_last
        Whether the last of them is the rank's last, which may be short: only one DataLoader worker has that.
    """

    def __init__(
        self, plan: EpochPlan | None = None, *, n_done: int = 0, n_left: int = 0, has_last: bool = True
    ) -> None:
        self.plan = plan
        self._n_done = n_done
        self._n_left = n_left
        self._has_last = has_last
        self.n_batches = 0
        self.n_rows = 0
        self.wait_s = 0.0
        self._start = perf_counter()
        self._latest = self._start

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Pass `batches` on, adding up the time the consumer waits for them."""
        iterator = iter(batches)
        while True:
            asked = perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._latest = perf_counter()
            self.wait_s += self._latest - asked
            self.n_batches += 1
            self.n_rows += self._rows_of_latest()
            yield batch

    def _rows_of_latest(self) -> int:
        if self.plan is None:
            return 0
        # All of a rank's batches are full but the last.
        if self._has_last and self.n_batches == self._n_left:
            return self.plan.n_rank_rows - (self.plan.n_batches - 1) * self.plan.batch_size
        return self.plan.batch_size

    @property
    def wait_share(self) -> float:
        """Share of the time since the epoch began that the consumer spent waiting for batches."""
        elapsed = self._latest - self._start
        return self.wait_s / elapsed if elapsed > 0 else 0.0

    def report(self) -> dict[str, Any]:
        """Return the figures by name; see `dasksc.scDataset.stats`."""
        elapsed = self._latest - self._start
        plan = self.plan
        return {
            "epoch": None if plan is None else plan.epoch,
            "rank": None if plan is None else plan.rank,
            "world_size": None if plan is None else plan.world_size,
            "n_batches": self.n_batches,
            "n_batches_before": self._n_done,
            "n_rows": self.n_rows,
            "n_rank_batches": 0 if plan is None else plan.n_batches,
            "n_rank_padded": 0 if plan is None else plan.n_rank_padded,
            "n_rank_dropped": 0 if plan is None else plan.n_rank_dropped,
            "n_padded": 0 if plan is None else plan.n_padded,
            "n_dropped": 0 if plan is None else plan.n_dropped,
            "wait_s": self.wait_s,
            "elapsed_s": elapsed,
            "wait_share": self.wait_share,
            "rows_per_s": self.n_rows / elapsed if elapsed > 0 else 0.0,
        }


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the DataLoader workers of a rank did together; times are those of the slowest."""
    result = dict(reports[0])
    for name in ("n_batches", "n_batches_before", "n_rows"):
        result[name] = sum(report[name] for report in reports)
    for name in ("wait_s", "elapsed_s", "wait_share"):
        result[name] = max(report[name] for report in reports)
    result["rows_per_s"] = result["n_rows"] / result["elapsed_s"] if result["elapsed_s"] > 0 else 0.0
    return result


def line_of(report: Mapping[str, Any]) -> str:
    """Return what the log says of an epoch that has ended."""
    before = f" after the {report['n_batches_before']:,} of before" if report["n_batches_before"] else ""
    return (
        f"epoch {report['epoch']}, rank {report['rank']} of {report['world_size']}: {report['n_rows']:,} rows in "
        f"{report['n_batches']:,} batches{before}, {report['n_rank_padded']} padded, {report['n_rank_dropped']} "
        f"dropped ({report['n_padded']} and {report['n_dropped']} over all ranks); {report['elapsed_s']:.1f} s, "
        f"waited {report['wait_share']:.0%} of it"
    )


class Bar(Protocol):
    """What is told of each batch."""

    def update(self) -> Any:
        """Count a batch."""


class _NoBar:
    def update(self) -> None:
        """Count nothing."""


@contextmanager
def progress_bar(stats: EpochStats, *, n_batches: int, shown: bool) -> Iterator[Bar]:
    """Show how far an epoch is, cells a second and the share of time that training waited.

    Parameters
    ----------
    stats
        Of the epoch.
    n_batches
        Batches that will come.
    shown
        Whether to show anything.
    """
    if not shown:
        yield _NoBar()
        return
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise InputError("progress=True needs tqdm: pip install tqdm") from error

    class Shown(tqdm):
        def update(self, n: float | None = 1) -> Any:
            figures = stats.report()
            self.set_postfix_str(
                f"{figures['rows_per_s']:,.0f} cells/s, waited {figures['wait_share']:.0%}", refresh=False
            )
            return super().update(n)

    plan = stats.plan
    label = "" if plan is None else f"epoch {plan.epoch}" + (f" rank {plan.rank}" if plan.world_size > 1 else "")
    with Shown(total=n_batches, desc=label, unit="batch") as bar:
        yield bar
