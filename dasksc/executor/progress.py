"""Progress of an epoch (counts, times, a log line at its end), and progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, TypeVar

from dasksc.errors import InputError
from dasksc.executor.reporting import diagnosis
from dasksc.kernels.compiled import compiling, seconds_compiling
from dasksc.plan.epoch_plan import EpochPlan

T = TypeVar("T")
EPOCH_TITLE = "epoch {epoch}, rank {rank} of {world_size}"


@dataclass(slots=True, kw_only=True)
class FetchFigures:
    """Current figures of the fetch tasks of an epoch; `dasksc.scDataset.stats` describes them."""

    n_fetching: int = 0
    n_ready: int = 0
    n_fetched: int = 0
    in_flight_bytes: int = 0
    limit_bytes: int | None = None
    fetch_s: float = 0.0
    read_s: float = 0.0
    decode_s: float = 0.0
    transfer_s: float = 0.0


class EpochStats:
    """Running figures of one pass over a data set: `n_left` batches of `plan`, after `n_done` earlier ones."""

    def __init__(
        self, plan: EpochPlan | None = None, *, n_done: int = 0, n_left: int = 0, has_last: bool = True
    ) -> None:
        self.plan = plan  # None before the first epoch
        self._n_done = n_done
        self.n_left = n_left  # when the pass begins
        self._has_last = has_last  # of several DataLoader workers, only one yields the rank's last batch
        self.n_batches = 0
        self.n_rows = 0
        self._waited_s = 0.0
        self._compiled_before_s = seconds_compiling()
        self._compiled_s = 0.0
        self.gather_s = 0.0  # summed over threads
        self.fetches: Callable[[], FetchFigures] = FetchFigures
        self._start = perf_counter()
        self._wait_start: float | None = None
        self._latest = self._start

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield `batches`, adding up the time the consumer waits for them."""
        iterator = iter(batches)
        while True:
            self._wait_start = wait_start = perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                self._wait_start = None
                return
            self._wait_start = None
            self._latest = perf_counter()
            self._waited_s += self._latest - wait_start
            self._compiled_s = seconds_compiling() - self._compiled_before_s
            self.n_batches += 1
            if (plan := self.plan) is not None:
                # Only the last batch of a rank may be short.
                is_last = self._has_last and self.n_batches == self.n_left
                self.n_rows += plan.n_rank_rows - (plan.n_batches - 1) * plan.batch_size if is_last else plan.batch_size
            yield batch

    def now(self) -> dict[str, float]:
        """Return ``clock_s``, the seconds since the epoch began, and ``waited_s``, the part of them spent waiting."""
        now, wait_start = perf_counter(), self._wait_start
        return {
            "clock_s": now - self._start,
            "waited_s": self._waited_s + (0.0 if wait_start is None else now - wait_start),
        }

    def report(self) -> dict[str, Any]:
        """Return the figures by name; see `dasksc.scDataset.stats`."""
        plan = self.plan
        compile_s = min(self._compiled_s, self._waited_s)  # in no other figure
        wait_s, elapsed_s = self._waited_s - compile_s, self._latest - self._start - compile_s
        return {
            **{name: getattr(plan, name, None) for name in ("epoch", "rank", "world_size")},
            "n_batches": self.n_batches,
            "n_batches_before": self._n_done,
            "n_batches_left": self.n_left - self.n_batches,
            "n_rows": self.n_rows,
            "n_control_rows": 0 if plan is None else self.n_rows * plan.sampler.n_controls,
            "n_rank_batches": 0 if plan is None else plan.n_batches,
            **{name: getattr(plan, name, 0) for name in ("n_rank_padded", "n_rank_dropped", "n_padded", "n_dropped")},
            "n_rank_fetches": 0 if plan is None else plan.n_fetches,
            "compile_s": compile_s,
            "wait_s": wait_s,
            "elapsed_s": elapsed_s,
            "wait_share": wait_s / elapsed_s if elapsed_s > 0 else 0.0,
            "rows_per_s": self.n_rows / elapsed_s if elapsed_s > 0 else 0.0,
            "gather_s": self.gather_s,
            **asdict(self.fetches()),
        }


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the combined figures of the DataLoader workers of a rank; see `dasksc.scDataset.stats`."""
    result = dict(reports[0])
    summed = "n_batches n_batches_before n_batches_left n_rows n_control_rows n_fetching n_ready n_fetched"
    summed += " in_flight_bytes limit_bytes fetch_s read_s decode_s transfer_s gather_s"
    for name in summed.split():
        # A DataLoader worker that failed before its first fetch reports no limit.
        result[name] = sum(report[name] or 0 for report in reports)
    for name in ("compile_s", "wait_s", "elapsed_s", "wait_share"):
        result[name] = max(report[name] for report in reports)
    result["rows_per_s"] = result["n_rows"] / result["elapsed_s"] if result["elapsed_s"] > 0 else 0.0
    return result


def epoch_line(report: Mapping[str, Any], title: str = EPOCH_TITLE) -> str:
    """Return the log line of an epoch that has ended; fields of `title` are names of figures in `report`."""
    before = f" after {report['n_batches_before']:,} earlier ones" if report["n_batches_before"] else ""
    return (
        f"{title.format_map(report)}: {report['n_rows']:,} rows in "
        f"{report['n_batches']:,} batches{before}, {report['n_rank_padded']} padded, {report['n_rank_dropped']} "
        f"dropped ({report['n_padded']} and {report['n_dropped']} over all ranks); {report['elapsed_s']:.1f} s; "
        f"{diagnosis(report)}"
    )


def _tqdm() -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise InputError("progress=True needs tqdm: pip install tqdm") from error
    return tqdm


@contextmanager
def epoch_progress(stats: EpochStats, *, shown: bool) -> Iterator[Callable[[], Any]]:
    """Show the progress of an epoch, if `shown`; yield the function to call after each batch."""
    if not shown:
        yield lambda: None
        return

    class RateBar(_tqdm()):  # type: ignore[misc]
        def update(self, n: float | None = 1) -> Any:
            figures = stats.report()
            self.set_postfix_str(
                f"{figures['rows_per_s']:,.0f} cells/s, waited {figures['wait_share']:.0%}", refresh=False
            )
            return super().update(n)

    plan = stats.plan
    label = "" if plan is None else f"epoch {plan.epoch}" + (f" rank {plan.rank}" if plan.world_size > 1 else "")
    with (
        RateBar(total=stats.n_left, desc=label, unit="batch") as bar,
        compiling(lambda: bar.set_postfix_str("compiling kernels, once")),
    ):
        yield bar.update


@contextmanager
def progress_bar(*, total: int, shown: bool) -> Iterator[Callable[[float, str], None]]:
    """Show a progress bar; yield a callback that takes a number of finished cells and the name of the step."""
    if not shown:
        yield lambda n, what: None
        return
    with _tqdm()(total=total, unit="cell", unit_scale=True) as bar:

        def advance(n: float, what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update(n)

        yield advance
