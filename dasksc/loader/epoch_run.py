"""Reading of one epoch, or of its remainder, in one process."""

from __future__ import annotations

import functools
import os
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from dask.utils import key_split
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from dasksc import config
from dasksc.batches.batch import Batch, BatchMaker, device_of, on_device
from dasksc.batches.prefetch import run_ahead
from dasksc.displays import first_of
from dasksc.errors import FetchError
from dasksc.executor.progress import EpochStats, epoch_progress
from dasksc.executor.reporting import reporting
from dasksc.executor.schedulers import FetchScheduler, resolve_scheduler
from dasksc.executor.tasks import AssembledFetches, FetchedMatrices, FetchMatrices, fetch_name, part_of
from dasksc.executor.window import Window
from dasksc.loader.position import EpochPosition
from dasksc.loader.projection import MemoryProjection
from dasksc.loader.source import Hooks, IndexedSource, MatrixSource
from dasksc.memory.model import ReadingMode
from dasksc.multiindexable import take_rows
from dasksc.plan.deal import ConsumedSegment
from dasksc.plan.epoch_plan import EpochPlan
from dasksc.plan.fetches import FetchPlan
from dasksc.transforms.composed import Transforms

__all__ = ["EpochRun", "DeviceTransfer"]

# Maximum total size, in bytes, of the batches that one job gathers. A larger batch is gathered alone.
_TOGETHER_BYTES = 2**23

# Maximum number of row numbers in the note of an error about a batch.
_N_ROWS_SHOWN = 16


class _GatheredBatches(NamedTuple):
    batches: list[Any]
    gather_s: float
    error: Exception | None = None


@dataclass(frozen=True)
class DeviceTransfer:
    """Transfer of batches to a device or to pinned memory."""

    device: torch.device | str | int | None = None
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if self.device is not None:
            device_of(self.device)

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the device, or in pinned memory."""
        if self.pin_memory:
            batch = _call_each(batch, "pin_memory")
        if self.device is not None:
            batch = _call_each(batch, "to", self.device, non_blocking=self.pin_memory)
        return batch


class EpochRun:
    """Reading of the batches of an epoch in one process: one plan, one window of fetches, one set of statistics.

    Parameters
    ----------
    source
        Data to read.
    plan
        Plan of the epoch for this rank.
    fetches
        Indices, in `plan`, of the fetches that this process reads.
    n_done
        Number of batches of `fetches` that were yielded earlier.
    scheduler
        Scheduler that runs the fetches.
    projection
        Projection of the memory of the fetches.
    hooks, transform, placement
        Functions applied to fetched rows and to each batch, and the destination of batches.
    key
        Key that distinguishes data sets with the same name on the loader page of the Dask dashboard.
    """

    def __init__(
        self,
        source: MatrixSource | IndexedSource,
        plan: EpochPlan,
        fetches: range,
        n_done: int,
        *,
        scheduler: FetchScheduler,
        projection: MemoryProjection,
        hooks: Hooks,
        transform: Transforms | None,
        placement: DeviceTransfer,
        key: str,
    ) -> None:
        self._source = source
        self._plan = plan
        self._n_done = n_done
        self._ks = fetches[n_done // plan.fetch_factor :]
        self._n_skipped = n_done % plan.fetch_factor
        self._n_threads = projection.n_threads_here
        self._scheduler = scheduler
        self._projection = projection
        self._hooks = hooks
        self._transform = transform
        self._placement = placement
        self._key = key
        self.n_batches = _n_batches(plan, fetches) - n_done
        has_last = plan.n_fetches - 1 in fetches
        self.stats = EpochStats(plan, n_done=n_done, n_left=self.n_batches, has_last=has_last)

    @property
    def is_whole(self) -> bool:
        """True if all batches have been yielded."""
        return self.stats.n_batches == self.n_batches

    @property
    def position(self) -> EpochPosition:
        """Position of the process in the epoch, after the batches yielded so far."""
        plan = self._plan
        read = ConsumedSegment(
            world_size=plan.world_size,
            batch_size=plan.batch_size,
            fetch_factor=plan.fetch_factor,
            n_batches=self._n_done + self.stats.n_batches,
        )
        return EpochPosition(plan.epoch, (*plan.consumed, read))

    def batches(
        self,
        *,
        moved: Callable[[EpochRun], None],
        after_first: Callable[[], None] | None,
        shown: bool,
    ) -> Generator[Any, None, None]:
        """Yield the batches.

        Parameters
        ----------
        moved
            Function called with this object before each batch is yielded.
        after_first
            Function called after the first batch has been used.
        shown
            If True, show a progress bar.
        """
        stats = self.stats
        made = self._gathered() if isinstance(self._source, MatrixSource) else self._indexed()
        pid = os.getpid()
        try:
            with epoch_progress(stats, n_batches=self.n_batches, shown=shown) as advance:
                for batch in stats.timed(made):
                    advance()
                    moved(self)
                    yield batch
                    if os.getpid() != pid:
                        raise FetchError(
                            "This iteration was started before a fork. Start a new one in the child process."
                        )
                    if stats.n_batches == 1 and after_first is not None:
                        after_first()
        finally:
            if os.getpid() == pid:
                made.close()
                stats.freeze()
            else:
                _left_to_parents.append(made)  # closing it would wait for threads of the parent

    # --- Fetching -------------------------------------------------------------------------------------

    def _window(
        self, task: Callable[[Any], Any], mode: ReadingMode | None = None
    ) -> tuple[Window[Any], dict[int, FetchPlan]]:
        """Start fetching, and return the window of fetches in flight and a dict of their plans by fetch number.

        `mode` is None for a collection that is indexed, which always happens in this process.
        """
        plans: dict[int, FetchPlan] = {}
        planning = threading.Lock()
        n_parts = 1 if mode is None else mode.n_parts

        def rows_of(i: int) -> NDArray[np.int64]:
            k, part = divmod(i, n_parts)
            with planning:
                if k not in plans:
                    plans[k] = self._plan.fetch(k)
            return part_of(plans[k].rows, part, n_parts)

        projection, scheduler = self._projection, self._scheduler
        depth: int | Callable[[], int]
        if mode is None:
            depth = projection.prefetch or 2 * self._n_threads
            scheduler = scheduler if scheduler.client is None else resolve_scheduler("threads")
        else:
            depth = mode.depth if scheduler.client is None else projection.depth_on(scheduler)
        window: Window[Any] = Window(
            task,
            (k * n_parts + part for k in self._ks for part in range(n_parts)),
            name=fetch_name(self._source.name, self._plan),
            scheduler=scheduler,
            depth=depth,
            max_bytes=projection.share,
            argument=rows_of,
            describe=self._describe(plans, n_parts),
            n_threads=self._n_threads,
            expected_bytes=None if mode is None else projection.part_bytes(mode),
        )
        self.stats.fetches = window.figures
        return window, plans

    def _describe(self, plans: dict[int, FetchPlan], n_parts: int) -> Callable[[int], str]:
        plan = self._plan

        def describe(i: int) -> str:
            k, part = divmod(i, n_parts)
            what = f"fetch {k} of {plan.n_fetches} (epoch {plan.epoch}, rank {plan.rank}"
            if k in plans:  # otherwise planning itself failed
                rows = part_of(plans[k].rows, part, n_parts)
                what += f", {len(rows)} rows from {rows[0]} to {rows[-1]}"
            return f"{what}) of {', '.join(self._source.labels)}"

        return describe

    # --- Batches --------------------------------------------------------------------------------------

    def _gathered(self) -> Generator[Any, None, None]:
        """Yield batches gathered directly from fetched matrices."""
        source = cast(MatrixSource, self._source)
        plan, stats, projection = self._plan, self.stats, self._projection
        mode = projection.reading_mode() if projection.is_interprocess else projection.mode_of_epoch()
        task = FetchMatrices(source.matrices, frozenset() if projection.is_interprocess else mode.unmapped)
        n_ahead = projection.n_batches_ahead
        # Passing a batch between threads costs as much as gathering a small one, so small batches are made in groups.
        n_together = max(1, min(int(_TOGETHER_BYTES / projection.batch_bytes), n_ahead // 2, plan.fetch_factor))
        left_in_fetch = 0
        transform = None if self._transform is None else self._transform.at_epoch(plan.epoch)

        def make(fetched: FetchedMatrices, fetch: FetchPlan, numbers: range) -> _GatheredBatches:
            start = perf_counter()
            made: list[Any] = []
            for i in numbers:
                try:
                    batch = _batch_of(source.maker, fetched, fetch, i)
                    if transform is not None:
                        batch = transform.apply(batch, plan.batch_number(fetch.number * plan.fetch_factor + i))
                    made.append(batch)
                except Exception as error:
                    _add_batch_note(error, fetch, i, plan)
                    return _GatheredBatches(made, perf_counter() - start, error)
            return _GatheredBatches(made, perf_counter() - start)

        def jobs() -> Iterator[Callable[[], _GatheredBatches]]:
            nonlocal left_in_fetch
            for k, fetched in fetches:
                fetch = plans.pop(k)
                for first in range(self._n_skipped if k == self._ks[0] else 0, fetch.n_batches, n_together):
                    numbers = range(first, min(first + n_together, fetch.n_batches))
                    left_in_fetch = fetch.n_batches - numbers.stop
                    yield functools.partial(make, fetched, fetch, numbers)
                del fetched

        _ = source.recycling
        loader = self._loader_properties(mode.n_parts)
        window, plans = self._window(task, mode)
        # Leaving either context closes the window. The inner one closes it before `reporting` sends the last report;
        # the outer one closes it if Ctrl-C interrupts the setup of `reporting`.
        with window, reporting(window.scheduler.client, lambda: loader | stats.report() | stats.now()), window:
            fetches = AssembledFetches(window, mode.n_parts)
            synchronous = window.scheduler.kind == "synchronous"
            for made, gather_s, error in run_ahead(
                jobs(),
                is_ready=lambda: left_in_fetch > 0 or fetches.is_ready(),
                n_ahead=-(-n_ahead // n_together),
                n_threads=0 if synchronous else min(config.get("gather-threads"), self._n_threads + 1),
            ):
                stats.gather_s += gather_s
                made.reverse()
                while made:
                    yield self._placement(made.pop())
                if error is not None:
                    raise error

    def _indexed(self) -> Generator[Any, None, None]:
        """Yield batches of a collection that is indexed, or read through hooks."""
        source = cast(IndexedSource, self._source)
        take = self._hooks.batch_callback or take_rows
        window, plans = self._window(functools.partial(source.read, self._hooks))
        with window:
            for k, data in window:
                fetch = plans.pop(k)
                for i in range(self._n_skipped if k == self._ks[0] else 0, fetch.n_batches):
                    with source.lock, self.stats.gathering(), _errors_with_batch(fetch, i, self._plan):
                        batch = take(data, fetch.batch(i))
                        if self._hooks.batch_transform is not None:
                            batch = self._hooks.batch_transform(batch)
                    yield self._placement(batch)
                del data

    def _loader_properties(self, n_parts: int) -> dict[str, str | int | None]:
        """Return the properties that identify this loader on the loader page."""
        worker = get_worker_info()
        return {
            "key": self._key,
            "name": self._source.name,
            "tasks": key_split(fetch_name(self._source.name, self._plan)),
            "n_fetches": len(self._ks) * n_parts,
            "worker": None if worker is None else worker.id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }


# Iterations that this process inherited from its parent by a fork.
_left_to_parents: list[Any] = []


def _batch_of(maker: BatchMaker, fetched: FetchedMatrices, fetch: FetchPlan, i: int) -> torch.Tensor | Batch:
    """Gather batch `i` of a fetch, with sets and controls if the strategy has them."""
    batch = maker.make(fetched, fetch.rows, fetch.batch(i))
    groups, controls = fetch.batch_groups(i), fetch.batch_controls(i)
    if groups is not None:
        cast(Batch, batch)["sets"] = torch.from_numpy(groups)
    if controls is not None:
        cast(Batch, batch)["control"] = maker.make(fetched, fetch.rows, controls)
    return batch


def _n_batches(plan: EpochPlan, ks: range) -> int:
    """Return the number of batches of the fetches `ks`; all fetches of a rank except its last one are full."""
    if not ks:
        return 0
    last = plan.n_fetches - 1
    return len(ks) * plan.fetch_factor - (plan.n_fetches * plan.fetch_factor - plan.n_batches) * (last in ks)


@contextmanager
def _errors_with_batch(fetch: FetchPlan, i: int, plan: EpochPlan) -> Iterator[None]:
    """Add a note about the batch to errors raised in this context."""
    try:
        yield
    except Exception as error:
        _add_batch_note(error, fetch, i, plan)
        raise


def _add_batch_note(error: Exception, fetch: FetchPlan, i: int, plan: EpochPlan) -> None:
    batch = fetch.number * plan.fetch_factor + i
    rows = fetch.rows[fetch.batch(i)].tolist()
    error.add_note(
        f"in batch {batch} of {plan.n_batches} (epoch {plan.epoch}, rank {plan.rank} of {plan.world_size}), "
        f"rows {first_of(rows, _N_ROWS_SHOWN)}"
    )


def _call_each(batch: Any, method: str, *args: Any, **options: Any) -> Any:
    """Call a method on each object in a batch if the object has that method; leave other objects unchanged."""
    if isinstance(batch, torch.Tensor) and method == "to":
        return on_device(batch, *args, **options)
    if hasattr(batch, method):
        return getattr(batch, method)(*args, **options)
    if isinstance(batch, dict):
        return {key: _call_each(value, method, *args, **options) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_call_each(value, method, *args, **options) for value in batch)
    return batch
