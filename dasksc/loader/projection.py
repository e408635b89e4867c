"""Projection of the memory of an epoch in this process, and choice of the reading mode.

A control group counts the page cache as memory of its processes. A process that maps a file larger than the limit
therefore reads it from disk again and again. The projection determines how files are read and how many fetches are in
flight. It does not affect which rows a fetch holds or their order, so every machine yields the same batches.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dask.utils import format_bytes
from torch.utils.data import get_worker_info

from dasksc import checks, config
from dasksc import memory as process_memory
from dasksc.displays import first_of
from dasksc.errors import InputError
from dasksc.executor.schedulers import FetchScheduler, default_threads
from dasksc.loader.position import RankSession
from dasksc.loader.source import LONGER_ROWS, PLAN_ROW_BYTES, IndexedSource, MatrixSource
from dasksc.loader.spec import LoaderSpec
from dasksc.plan.samplers import Sampler
from dasksc.plan.strategies import SamplingStrategy, Streaming
from dasksc.storage import buffers

logger = logging.getLogger("dasksc.loader")

# Maximum size of the batches that are gathered ahead, in this process and on a device, unless there are two.
_AHEAD_BYTES, _DEVICE_AHEAD_BYTES = 2**24, 2**28
# Maximum total size, in bytes, of the batches that one job gathers. A larger batch is gathered alone.
_TOGETHER_BYTES = 2**23
# Number of batches that exist besides those ahead: being made, just yielded, and still in use.
_N_HELD = 3
# Size of a fetch in storage order, and minimum number of chunks in it, because chunks at its ends are decoded twice.
_ORDERED_BYTES, _ORDERED_CHUNKS = 2**25, 8
# Size above which a fetch is split into several tasks.
_PART_BYTES = 2**25
_MAX_PARTS = 64
# Memory of threads, of tasks, and of the caches of threads and the allocator.
_PROCESS_BYTES = 2**24
_PAGE_BYTES = 2**12
# Share of the page cache (the available memory minus the anonymous memory) that mapped files may fill if it is to hold
# all of them, and share of the available memory that may be in use if it is not.
_CACHED_SHARE, _PAGES_SHARE = 0.9, 0.5
# Number of threads assumed when the size of a fetch is chosen, so that it does not depend on the machine.
_NOMINAL_THREADS = 2
_MAX_FETCH_FACTOR = 4096


@dataclass(frozen=True, slots=True)
class ReadingMode:
    """Reading mode of an epoch, and upper bounds of the memory that iterating takes, in bytes."""

    unmapped: frozenset[str]  # labels of matrices whose files are read into memory, though they could be mapped
    depth: int  # tasks in flight in addition to the fetch being yielded
    n_parts: int  # tasks of a fetch
    anonymous: int
    pages: int  # in the page cache
    fits: bool


class MemoryProjection:
    """Memory of fetches and batches of a source, compared with the memory that this process may use."""

    def __init__(
        self,
        spec: LoaderSpec,
        source: MatrixSource | IndexedSource,
        ranks: RankSession,
        scheduler: Callable[[], FetchScheduler],
        *,
        strategy: SamplingStrategy,
        sampler: Sampler,
    ) -> None:
        self._source = source
        self._ranks = ranks
        self.scheduler = scheduler
        self._batch_size = batch_size = spec.batch_size * (1 + sampler.n_controls)
        # Mean number of neighboring rows that a fetch reads together
        block_size = getattr(strategy, "block_size", 1)  # of a strategy of the user, perhaps something else
        block_size = block_size if checks.is_whole(block_size) and block_size > 0 else 1
        self._run_rows = float(getattr(sampler, "run_rows", block_size))
        if isinstance(strategy, Streaming) and (strategy.indices is None or isinstance(strategy.indices, slice)):
            self._run_rows = math.inf
        self.prefetch = spec.prefetch
        self.expanded = frozenset[str]()
        if isinstance(source, MatrixSource):
            self._n_obs = source.n_obs
            self._mapped, self._read, self._forced = source.costs
            self.expanded = source.expanded(spec)
            row_bytes, expanded_row_bytes = source.batch_row_bytes(self.expanded)
            # Size of the memory in which a batch is gathered, and of its dense parts that are made on the device;
            # torch allocates pinned memory in powers of two.
            n_bytes = math.ceil(batch_size * row_bytes)
            self.block_bytes = 1 << (n_bytes - 1).bit_length() if spec.is_pinned else n_bytes
            expanded_bytes = batch_size * expanded_row_bytes
            self._placed_bytes = self.block_bytes + expanded_bytes
            self._is_on_device = spec.is_on_device
            self.batch_bytes = self.block_bytes if spec.is_on_device else self._placed_bytes  # in this process
        self.limit: int = spec.memory_limit
        fetch_factor = spec.fetch_factor
        if fetch_factor is None:
            if isinstance(source, IndexedSource):
                raise InputError("fetch_factor=None needs an AnnData or a Dask array; give a number for other inputs")
            fetch_factor = self.fitting_fetch_factor()
        self.fetch_factor = checks.whole_number("fetch_factor", fetch_factor)
        if isinstance(source, MatrixSource):
            needed = self._least_bytes(self.fetch_factor)
            if needed > self.limit:
                fetch = "fetch_factor (None chooses the largest that fits), " if self.fetch_factor > 1 else ""
                raise InputError(
                    f"batches of {batch_size} rows, fetched {self.fetch_factor} at a time with "
                    f"prefetch={self.prefetch}, need {format_bytes(needed)} of memory, but memory_limit is "
                    f"{format_bytes(self.limit)}. Lower {fetch}batch_size or prefetch, or raise memory_limit to at "
                    f"least '{-(-needed // 2**20)}MiB'"
                )

    @property
    def ordered_fetch_factor(self) -> int:
        """Fetch factor of a pass in storage order, where small fetches suffice."""
        if not isinstance(self._source, MatrixSource):
            return self.fetch_factor
        chunk_rows = max(cost.chunk_rows for cost in self._read.values())
        rows = max(_ORDERED_BYTES / max(1.0, self._sent_row_bytes), _ORDERED_CHUNKS * chunk_rows)
        factor = max(1, min(self.fetch_factor, math.ceil(rows / self._batch_size)))
        # A fetch may be divided into fewer parts than a larger one, and then need more memory.
        return factor if self._least_bytes(factor) <= self.limit else self.fetch_factor

    @property
    def is_interprocess(self) -> bool:
        """True if fetches run in other processes, which send the rows to this one."""
        return not self.scheduler().in_process

    @property
    def n_batches_ahead(self) -> int:
        """Number of batches to gather ahead, limited so that they stay in the CPU caches until they are used."""
        most = min(_AHEAD_BYTES / self.batch_bytes, _DEVICE_AHEAD_BYTES / self._placed_bytes)
        return max(2, min(int(config.get("batches-ahead")), int(most)))

    @property
    def n_together(self) -> int:
        """Number of batches that one job gathers, since passing a small one between threads costs as much as that."""
        return max(1, min(int(_TOGETHER_BYTES / self.batch_bytes), self.n_batches_ahead // 2, self.fetch_factor))

    @property
    def n_placed(self) -> int:
        """Maximum number of placed batches: whole jobs ahead, the rest of the current one, and two in use."""
        return self.n_batches_ahead + 2 * self.n_together + 1

    @property
    def n_device_bytes(self) -> int:
        """Memory of batches on the device, in bytes: those placed ahead, the last one yielded, and those in use."""
        return self.n_placed * self._placed_bytes if self._is_on_device else 0

    @property
    def n_threads(self) -> int:
        """Number of fetching threads of the rank, limited by memory; on a Dask cluster, its share of their threads."""
        world = self._ranks.detect()
        n_of_cluster = self.scheduler().n_threads
        if n_of_cluster is not None:
            return max(1, n_of_cluster // world.world_size)
        most = default_threads(local_world_size=world.local_world_size)
        if isinstance(self._source, IndexedSource) or self.prefetch is None:
            return most
        row_bytes = self.held_row_bytes(())
        depth = self.depth(self.n_parts(self.fetch_factor, row_bytes), n_threads=most)
        for n in range(most, _NOMINAL_THREADS, -1):
            if self._anonymous(self.fetch_factor, row_bytes, depth, n) <= self.limit:
                return n
        return min(most, _NOMINAL_THREADS)

    @property
    def n_threads_here(self) -> int:
        """Number of fetching threads in this process, which may be a DataLoader worker."""
        worker = get_worker_info()
        n_threads = default_threads(
            local_world_size=self._ranks.current_world().local_world_size,
            n_workers=1 if worker is None else worker.num_workers,
        )
        return min(n_threads, self.n_threads) if isinstance(self._source, MatrixSource) else n_threads

    @property
    def share(self) -> int:
        """Memory that this process may use, in bytes. The DataLoader workers of a rank divide the limit of the rank."""
        worker = get_worker_info()
        return self.limit if worker is None else self.limit // worker.num_workers

    @property
    def job_bytes(self) -> int:
        """Memory of a process that reads at full speed, in bytes: fetches, page cache, code, memory already in use."""
        n_parts = self.n_parts(self.fetch_factor, self.held_row_bytes(self.mappable))
        demand = self.demand(self.mappable, self.depth(n_parts, self.n_threads), self.n_threads)
        # The demand already includes the buffers kept for reuse, so they are not counted again.
        held = max(0, process_memory.own_bytes() - buffers.kept_bytes())
        return held + process_memory.CODE_BYTES + sum(demand)

    def depth_on(self, scheduler: FetchScheduler) -> Callable[[], int]:
        """Return a function that returns the depth on a cluster, where the number of workers changes."""
        n_ranks = self._ranks.fix_world().world_size
        depth = functools.cache(lambda n_threads: self.reading_mode(n_threads).depth)  # called for every result
        # The next result of a Client that has been closed is an error.
        return lambda: 1 if scheduler.is_closed else int(depth(max(1, (scheduler.n_threads or 0) // n_ranks)))

    def reading_mode(self, n_threads: int | None = None) -> ReadingMode:
        """Return the current reading mode for `n_threads` threads."""
        limit = process_memory.memory_limit()
        worker = get_worker_info()
        n_processes = self._ranks.detect().local_world_size * (1 if worker is None else worker.num_workers)
        available = process_memory.share_of(
            limit, n_processes=n_processes, own=process_memory.own_bytes(), reused=buffers.kept_bytes()
        )
        return self.mode_within(
            n_threads=self.n_threads if n_threads is None else n_threads,
            limit=self.share,
            available=available,
            n_sharing=n_processes,
        )

    def mode_of_epoch(self) -> ReadingMode:
        """Return the reading mode of an epoch that begins, and log it if files are not mapped or memory is short."""
        mode, worker = self.reading_mode(), get_worker_info()
        if mode.unmapped:
            labels = first_of(sorted(mode.unmapped))
            logger.info("the page cache cannot hold these files, so they are read rather than mapped: %s", labels)
        if not mode.fits and (worker is None or worker.id == 0):
            limit = process_memory.memory_limit()
            is_over = mode.anonymous > self.share
            logger.warning(
                "%s needs %s of memory for each process that reads it, but %s allows only %s for all processes "
                "together: reading is slow, and the operating system may kill a process. Request %s per rank, use "
                "fewer DataLoader workers, or lower fetch_factor, which is %d",
                self._source.name,
                format_bytes(self.job_bytes),
                "memory_limit" if is_over else limit.source,
                format_bytes(self.limit if is_over else limit.n_bytes),
                format_bytes(process_memory.recommended_bytes(self.job_bytes)),
                self.fetch_factor,
            )
        return mode

    def part_bytes(self, mode: ReadingMode) -> int:
        """Return the memory that a part of a fetch takes in this process, in bytes."""
        row_bytes = self.held_row_bytes(mode.unmapped)
        return int(self._batch_size * self.fetch_factor / mode.n_parts * row_bytes)

    @property
    def mappable(self) -> frozenset[str]:
        """Labels of the matrices that are at least partly in files that can be memory-mapped."""
        return frozenset(label for label, cost in self._read.items() if cost.held > self._mapped[label].held)

    @property
    def _sent_row_bytes(self) -> float:
        """Memory of a fetched row that another process sends, in bytes, if no file is mapped."""
        return sum(max(cost.row, cost.held) for cost in self._read.values())

    def held_row_bytes(self, unmapped: Collection[str]) -> float:
        """Return the anonymous memory that a fetched row holds, in bytes."""
        costs = (self._read[label] if label in unmapped else cost for label, cost in self._mapped.items())
        is_sent = self.is_interprocess
        return sum(max(cost.row, cost.held) if is_sent else cost.held for cost in costs)

    def n_parts(self, fetch_factor: int, row_bytes: float) -> int:
        """Return the number of tasks per fetch; 1 if a fetch holds little memory, as with mapped files."""
        return min(_MAX_PARTS, max(1, math.ceil(self._batch_size * fetch_factor * row_bytes / _PART_BYTES)))

    def depth(self, n_parts: int, n_threads: int) -> int:
        """Return the number of parts to keep in flight beyond the fetch being yielded, disregarding memory."""
        # Results are returned in order, so a thread that finishes early needs a second part to work on.
        return n_parts - 1 + 2 * n_threads if self.prefetch is None else self.prefetch * n_parts

    def _anonymous(self, fetch_factor: int, row_bytes: float, depth: int, n_threads: int) -> int:
        """Return the anonymous memory of iterating with `depth` parts in flight, besides the fetch being yielded."""
        costs, n_parts = self._read.values(), self.n_parts(fetch_factor, row_bytes)
        rows = self._batch_size * fetch_factor
        held = LONGER_ROWS * row_bytes + PLAN_ROW_BYTES
        working = LONGER_ROWS * max(cost.working for cost in costs)
        fetches = (1 + depth / n_parts) * rows * held
        reading = min(depth, n_threads) * (rows * working / n_parts + max(cost.fixed for cost in costs))
        batches = (_N_HELD + self.n_batches_ahead) * self.batch_bytes
        return int(_PROCESS_BYTES + sum(cost.kept for cost in costs) + fetches + reading + batches)

    def demand(self, unmapped: Collection[str], depth: int, n_threads: int) -> tuple[int, int]:
        """Return upper bounds of the anonymous memory and the page cache that iterating takes, in bytes."""
        row_bytes, rows = self.held_row_bytes(unmapped), self._batch_size * self.fetch_factor
        if self.is_interprocess:
            return self._anonymous(self.fetch_factor, row_bytes, depth, 0), 0
        n_parts, pages = self.n_parts(self.fetch_factor, row_bytes), 0.0
        for label in self.mappable:
            row = self._read[label].held - self._mapped[label].held
            # Pages of a file that is not mapped are needed only during the read; mapped pages are needed until the
            # fetch is released. The first and last pages of each run of rows count in full.
            mapped_row = (1 + depth / n_parts) * (row + 2 * _PAGE_BYTES / self._run_rows)
            of_row = min(depth, n_threads) / n_parts * row if label in unmapped else mapped_row
            # Several fetches of a small file need the same pages.
            pages += min(LONGER_ROWS * rows * of_row, self._file_bytes(label) + 2 * _PAGE_BYTES)
        return self._anonymous(self.fetch_factor, row_bytes, depth, n_threads), int(pages)

    def _least_bytes(self, fetch_factor: int) -> int:
        """Return the minimum anonymous memory of iteration with fetches of `fetch_factor` batches."""
        row_bytes = self.held_row_bytes(())
        depth = self.prefetch * self.n_parts(fetch_factor, row_bytes) if self.prefetch else 1
        return self._anonymous(fetch_factor, row_bytes, depth, 0 if self.is_interprocess else self.n_threads)

    def fitting_fetch_factor(self) -> int:
        """Return the largest number of batches per fetch for which iterating fits in the limit; at least 1."""
        # No file is assumed to be mapped, so the result does not depend on the machine.
        row_bytes = self._sent_row_bytes

        def fits(factor: int) -> bool:
            depth = self.depth(self.n_parts(factor, row_bytes), _NOMINAL_THREADS)
            return self._anonymous(factor, row_bytes, depth, _NOMINAL_THREADS) <= self.limit

        # The search is linear, because the demand is not monotonic: a larger fetch may be split into more parts, which
        # can lower the demand.
        return next((factor for factor in range(_MAX_FETCH_FACTOR, 1, -1) if fits(factor)), 1)

    def mode_within(self, *, n_threads: int, limit: int, available: int, n_sharing: int = 1) -> ReadingMode:
        """Return the reading mode of an epoch for a `limit` of anonymous and of all `available` memory, in bytes."""
        # If all files fit in the page cache, which `n_sharing` processes share, they are memory-mapped, so that later
        # epochs find them there. Otherwise, the largest files are read into anonymous memory: every epoch must read
        # them from disk in any case, and the kernel would evict mapped pages between loading and use. If no mode fits,
        # all files are mapped after all, because mapped pages can be evicted and read again.

        def mode(unmapped: frozenset[str], depth: int, *, may_evict: bool = False) -> ReadingMode:
            anonymous, pages = self.demand(unmapped, depth, n_threads)
            cached = sum(map(self._file_bytes, self.mappable - unmapped - self._forced)) / n_sharing / _CACHED_SHARE
            needed = (anonymous + pages) / _PAGES_SHARE if may_evict else anonymous + max(pages, cached)
            fits = anonymous <= limit and needed <= available
            n_parts = self.n_parts(self.fetch_factor, self.held_row_bytes(unmapped))
            return ReadingMode(unmapped, depth, n_parts, anonymous, pages, fits)

        def depths(unmapped: frozenset[str]) -> range:
            full = self.depth(self.n_parts(self.fetch_factor, self.held_row_bytes(unmapped)), n_threads)
            return range(full, 0 if self.prefetch is None else full - 1, -1)

        nothing, everything = frozenset[str](), self.mappable - self._forced
        anonymous = mode(everything, depths(everything)[0]).anonymous
        some = self._largest_beyond(available, anonymous, n_sharing)
        tried = [mode(one, depths(one)[0]) for one in (nothing, some)]
        tried += [mode(everything, n) for n in depths(everything)]
        # Pages that do not fit are merely read again, whereas the kernel kills a process whose anonymous memory exceeds
        # the limit.
        tried += [mode(nothing, n, may_evict=True) for n in depths(nothing)]
        return next((one for one in tried if one.fits), tried[-1])

    def _largest_beyond(self, available: int, anonymous: int, n_sharing: int) -> frozenset[str]:
        """Return the labels of the largest files, without which the others fit in the page cache."""
        room = (available - anonymous) * _CACHED_SHARE * n_sharing
        largest = set(self.mappable - self._forced)
        for label in sorted(largest, key=lambda label: (self._file_bytes(label), label)):
            room -= self._file_bytes(label)
            if room < 0:
                break
            largest.discard(label)
        return frozenset(largest)

    def _file_bytes(self, label: str) -> float:
        """Return the size of the part of a matrix's files that can be memory-mapped, in bytes."""
        return self._n_obs * (self._read[label].held - self._mapped[label].held)
