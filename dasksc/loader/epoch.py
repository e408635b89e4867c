"""One epoch, or the rest of it, in one process: plan rows, submit fetches, gather batches, transform and yield them."""

from __future__ import annotations

import functools
import os
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from dask.utils import key_split
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from dasksc import config
from dasksc.batches.placement import Placement
from dasksc.batches.prefetch import run_ahead
from dasksc.displays import first_of
from dasksc.errors import CorruptDataError, FetchError
from dasksc.executor.progress import EpochStats, epoch_progress
from dasksc.executor.reporting import reporting
from dasksc.executor.schedulers import resolve_scheduler
from dasksc.executor.tasks import FetchedMatrices, FetchMatrices, assembled, fetch_name
from dasksc.executor.window import Window
from dasksc.loader.position import EpochPosition
from dasksc.loader.projection import MemoryProjection, ReadingMode
from dasksc.loader.source import IndexedSource, MatrixSource
from dasksc.loader.spec import LoaderSpec
from dasksc.multiindexable import take_rows
from dasksc.plan.deal import ConsumedSegment, FetchPlan
from dasksc.plan.epoch_plan import EpochPlan

# Maximum number of row numbers in the note of an error about a batch.
_N_ROWS_SHOWN = 16


class _Gathered(NamedTuple):
    batches: list[Any]  # results of `Placement.place`
    gather_s: float
    error: Exception | None = None


class Epoch:
    """Batches of the fetches `numbers` of a plan, apart from the `n_done` first ones, for the loop of one process."""

    def __init__(
        self,
        spec: LoaderSpec,
        source: MatrixSource | IndexedSource,
        plan: EpochPlan,
        numbers: range,
        n_done: int,
        *,
        memory: MemoryProjection,
        key: str,
    ) -> None:
        self._spec, self._source, self._plan, self._memory = spec, source, plan, memory
        self._key = key  # distinguishes data sets with the same name on the loader page
        self._n_done = n_done
        self._numbers = numbers[n_done // plan.fetch_factor :]
        self._n_skipped = n_done % plan.fetch_factor
        # All fetches of a rank except its last one are full.
        has_last = plan.n_fetches - 1 in numbers
        n_lacking = plan.n_fetches * plan.fetch_factor - plan.n_batches if has_last else 0
        n_left = len(numbers) * plan.fetch_factor - n_lacking - n_done
        self.stats = EpochStats(plan, n_done=n_done, n_left=n_left, has_last=has_last)
        self._name = fetch_name(source.name, plan)
        self._fetches: dict[int, FetchPlan] = {}
        self._planning = threading.Lock()
        self._n_parts = 1  # tasks of a fetch

    @property
    def is_whole(self) -> bool:
        """True if all batches have been yielded."""
        return self.stats.n_batches == self.stats.n_left

    def position(self) -> EpochPosition:
        """Return the position of the process in the epoch, after the batches yielded so far."""
        plan, n_batches = self._plan, self._n_done + self.stats.n_batches
        sizes = {"world_size": plan.world_size, "batch_size": plan.batch_size, "fetch_factor": plan.fetch_factor}
        # A DataLoader worker that has yielded nothing yet resumes with the sizes of the others.
        has_begun = n_batches or get_worker_info() is not None
        segments = (ConsumedSegment(**sizes, n_batches=n_batches),) if has_begun else ()
        return EpochPosition(plan.epoch, (*plan.consumed, *segments))

    def _rows(self, i: int) -> NDArray[np.int64]:
        """Return the rows of task `i`; they are computed where the task runs, not in the loop."""
        n_parts = self._n_parts
        k, part = divmod(i, n_parts)
        with self._planning:
            if k not in self._fetches:
                self._fetches[k] = self._plan.fetch(k)
        rows = self._fetches[k].rows
        # A part is contiguous, so that parts share few chunks.
        return rows[len(rows) * part // n_parts : len(rows) * (part + 1) // n_parts]

    def _submit(self, task: Callable[[Any], Any], mode: ReadingMode | None = None) -> Window[Any]:
        """Start fetching, a few tasks ahead. `mode` is None for a collection that is indexed, in this process."""
        memory, scheduler = self._memory, self._memory.scheduler()
        depth: int | Callable[[], int]
        if mode is None:
            depth = self._spec.prefetch or 2 * memory.n_threads_here
            scheduler = scheduler if scheduler.client is None else resolve_scheduler("threads")
        else:
            depth = mode.depth if scheduler.client is None else memory.depth_on(scheduler)
        window: Window[Any] = Window(
            task,
            (k * self._n_parts + part for k in self._numbers for part in range(self._n_parts)),
            name=self._name,
            scheduler=scheduler,
            depth=depth,
            max_bytes=memory.share,
            argument=self._rows,
            describe=self._described,
            n_threads=memory.n_threads_here,
            expected_bytes=None if mode is None else memory.part_bytes(mode),
        )
        self.stats.fetches = window.figures
        return window

    def _described(self, i: int) -> str:
        k, plan = i // self._n_parts, self._plan
        what = f"fetch {k} of {plan.n_fetches} (epoch {plan.epoch}, rank {plan.rank}"
        if k in self._fetches:  # otherwise planning itself failed
            rows = self._rows(i)
            what += f", {len(rows)} rows from {rows[0]} to {rows[-1]}"
        return f"{what}) of {', '.join(self._source.labels)}"

    def _of_matrices(self, source: MatrixSource) -> Iterator[Any]:
        """Yield batches that a few threads gather from fetched matrices and transform, ahead of the loop."""
        plan, stats, memory = self._plan, self.stats, self._memory
        mode = memory.reading_mode() if memory.is_interprocess else memory.mode_of_epoch()
        task = FetchMatrices(source.matrices, frozenset() if memory.is_interprocess else mode.unmapped)
        transforms, last = self._spec.transforms, None
        if transforms is not None:
            transforms = transforms.at_epoch(plan.epoch)
            if self._spec.expand == "device":
                transforms, last = transforms.parted()
        n_ahead = memory.n_batches_ahead
        n_together = min(memory.n_together, plan.fetch_factor)
        n_left_in_fetch = 0
        placement, maker = self._placement(memory.block_bytes, last), replace(source.maker, expanded=memory.expanded)

        def gather(fetched: FetchedMatrices, fetch: FetchPlan, numbers: range) -> _Gathered:
            start = perf_counter()
            made: list[Any] = []
            for i in numbers:
                try:
                    block = placement.memory()
                    batch: Any = maker.make(fetched, fetch.rows, fetch.batch(i), block)
                    groups, controls = fetch.batch_groups(i), fetch.batch_controls(i)
                    if groups is not None:
                        batch["sets"] = block.tensor(groups)
                    if controls is not None:
                        batch["control"] = maker.make(fetched, fetch.rows, controls, block)
                    if transforms is not None:
                        batch = transforms.apply(batch, plan.batch_number(fetch.number * plan.fetch_factor + i))
                    made.append(placement.place(batch, block))
                except Exception as error:
                    self._add_note(error, fetch, i)
                    return _Gathered(made, perf_counter() - start, error)
            if numbers.stop == fetch.n_batches:
                try:
                    fetched.require_unchanged()
                except CorruptDataError as error:
                    return _Gathered([], perf_counter() - start, error)
            return _Gathered(made, perf_counter() - start)

        def jobs() -> Iterator[Callable[[], _Gathered]]:
            nonlocal n_left_in_fetch
            start = self._n_skipped
            for k, fetched in assembled(window, mode.n_parts):
                fetch = self._fetches.pop(k)
                for first in range(start, fetch.n_batches, n_together):
                    numbers = range(first, min(first + n_together, fetch.n_batches))
                    n_left_in_fetch = fetch.n_batches - numbers.stop
                    yield functools.partial(gather, fetched, fetch, numbers)
                start = 0
                del fetched

        _ = source.recycling
        self._n_parts = mode.n_parts
        worker = get_worker_info()
        identity = {  # on the loader page
            "key": self._key,
            "name": source.name,
            "tasks": key_split(self._name),
            "n_fetches": len(self._numbers) * mode.n_parts,
            "worker": None if worker is None else worker.id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        window = self._submit(task, mode)
        # Leaving either context closes the window. The inner one closes it before `reporting` sends the last report;
        # the outer one closes it if Ctrl-C interrupts the setup of `reporting`.
        with window, reporting(window.scheduler.client, lambda: identity | stats.report() | stats.now()), window:
            n_threads = min(config.get("gather-threads"), memory.n_threads_here + 1)
            for batches, gather_s, error in run_ahead(
                jobs(),
                is_ready=lambda: n_left_in_fetch > 0 or window.are_done(mode.n_parts),
                n_ahead=-(-n_ahead // n_together),
                n_threads=0 if window.scheduler.kind == "synchronous" else n_threads,
            ):
                stats.gather_s += gather_s
                batches.reverse()
                while batches:
                    yield placement.ready(*batches.pop())
                if error is not None:
                    try:
                        raise error
                    finally:
                        del error  # whose traceback refers to this frame, and to the batch

    def _of_indexed(self, source: IndexedSource) -> Iterator[Any]:
        """Yield batches of a collection that is indexed, or read through hooks, which are called one at a time."""
        spec = self._spec
        take = spec.batch_callback or take_rows
        placement, start = self._placement(0), self._n_skipped
        with self._submit(functools.partial(source.read, spec)) as window:
            for k, data in window:
                fetch = self._fetches.pop(k)
                for i in range(start, fetch.n_batches):
                    try:
                        with source.lock:
                            begun = perf_counter()
                            batch = take(data, fetch.batch(i))
                            if spec.batch_transform is not None:
                                batch = spec.batch_transform(batch)
                            self.stats.gather_s += perf_counter() - begun
                    except Exception as error:
                        self._add_note(error, fetch, i)
                        raise
                    yield placement.ready(*placement.place(batch, placement.memory()))
                start = 0
                del data

    def _add_note(self, error: Exception, fetch: FetchPlan, i: int) -> None:
        plan, rows = self._plan, fetch.rows[fetch.batch(i)].tolist()
        error.add_note(
            f"in batch {fetch.number * plan.fetch_factor + i} of {plan.n_batches} (epoch {plan.epoch}, rank "
            f"{plan.rank} of {plan.world_size}), rows {first_of(rows, _N_ROWS_SHOWN)}"
        )

    def _placement(self, block_bytes: int, last: Callable[[Any], Any] | None = None) -> Placement:
        spec = self._spec
        return Placement(
            spec.device,
            is_pinned=spec.is_pinned,
            is_staged=spec.transforms is not None or isinstance(self._source, IndexedSource),
            expands=bool(self._memory.expanded),
            block_bytes=block_bytes,
            last=last,
        )

    def batches(self, *, shown: bool, after_first: Callable[[], None] | None) -> Generator[Any, None, None]:
        """Yield the batches, with a progress bar if `shown`; call `after_first` when the first one has been used."""
        pid, source = os.getpid(), self._source
        made: Any = self._of_matrices(source) if isinstance(source, MatrixSource) else self._of_indexed(source)
        try:
            with epoch_progress(self.stats, shown=shown) as advance:
                for batch in self.stats.timed(made):
                    advance()
                    yield batch
                    if os.getpid() != pid:
                        raise FetchError(
                            "This iteration was started before a fork. Start a new one in the child process."
                        )
                    if after_first is not None and self.stats.n_batches == 1:
                        after_first()
        finally:
            if os.getpid() == pid:
                made.close()
                figures = self.stats.fetches()
                self.stats.fetches = lambda: figures  # no longer those of the window, which may be released
            else:
                _left_to_parents.append(made)  # closing it would wait for threads of the parent


# Iterations that this process inherited from its parent by a fork.
_left_to_parents: list[Any] = []
