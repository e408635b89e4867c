"""How an epoch is going: counts, times, and a bar to watch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol, TypeVar

from dasksc.errors import InputError
from dasksc.plan import EpochPlan

__all__ = ["Bar", "EpochStats", "progress_bar"]

T = TypeVar("T")


class EpochStats:
    """What one pass over a data set has done so far.

    Parameters
    ----------
    plan
        Of the epoch; None before any has begun.
    n_done
        Batches of the plan that were yielded before.
    """

    def __init__(self, plan: EpochPlan | None = None, n_done: int = 0) -> None:
        self.plan = plan
        self._n_done = n_done
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
            self.n_rows += self._rows_of(self._n_done + self.n_batches - 1)
            yield batch

    def _rows_of(self, batch: int) -> int:
        if self.plan is None:
            return 0
        # All of a rank's batches are full but the last, which only one of several DataLoader workers yields.
        return min(self.plan.batch_size, max(0, self.plan.n_rank_rows - batch * self.plan.batch_size))

    @property
    def wait_share(self) -> float:
        """Share of the time since the epoch began that the consumer spent waiting for batches."""
        elapsed = self._latest - self._start
        return self.wait_s / elapsed if elapsed > 0 else 0.0

    def report(self) -> dict[str, Any]:
        """Return the figures by name; see `dasksc.scDataset.stats`."""
        elapsed = self._latest - self._start
        return {
            "epoch": None if self.plan is None else self.plan.epoch,
            "n_batches": self.n_batches,
            "n_rows": self.n_rows,
            "n_padded": 0 if self.plan is None else self.plan.n_padded,
            "n_dropped": 0 if self.plan is None else self.plan.n_dropped,
            "wait_s": self.wait_s,
            "elapsed_s": elapsed,
            "wait_share": self.wait_share,
            "rows_per_s": self.n_rows / elapsed if elapsed > 0 else 0.0,
        }


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
