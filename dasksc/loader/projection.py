"""Projection of the memory of an epoch in this process, and choice of the reading mode."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import cast

from dask.utils import format_bytes
from torch.utils.data import get_worker_info

from dasksc import checks, config
from dasksc import memory as process_memory
from dasksc.displays import first_of
from dasksc.errors import InputError
from dasksc.executor.schedulers import FetchScheduler, default_threads
from dasksc.loader.position import RankSession
from dasksc.loader.source import IndexedSource, MatrixSource
from dasksc.loader.spec import LoaderSpec
from dasksc.memory import NOMINAL_THREADS, Demand, MemoryModel, ReadingMode
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
        self._run_rows = float(getattr(sampler, "run_rows", getattr(strategy, "block_size", 1)))
        if isinstance(strategy, Streaming) and (strategy.indices is None or isinstance(strategy.indices, slice)):
            self._run_rows = math.inf
        self.prefetch = spec.prefetch
        self.expanded = frozenset[str]()
        if isinstance(source, MatrixSource):
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
            fetch_factor = self._model(1).fitting_fetch_factor(self.limit, prefetch=self.prefetch)
        self.fetch_factor = checks.whole_number("fetch_factor", fetch_factor)
        if isinstance(source, MatrixSource):
            needed = self._least_demand(self.fetch_factor).anonymous
            if needed > self.limit:
                raise InputError(
                    f"batches of {batch_size} rows, fetched {self.fetch_factor} at a time with "
                    f"prefetch={self.prefetch}, need {format_bytes(needed)} of memory, but memory_limit is "
                    f"{format_bytes(self.limit)}. Lower fetch_factor (None chooses the largest that fits), batch_size "
                    f"or prefetch, or raise memory_limit to at least '{-(-needed // 2**20)}MiB'"
                )

    @property
    def ordered_fetch_factor(self) -> int:
        """Fetch factor of a pass in storage order, where small fetches suffice."""
        if not isinstance(self._source, MatrixSource):
            return self.fetch_factor
        costs = self._source.costs["read"].values()
        row_bytes = max(1.0, sum(max(cost.row, cost.held) for cost in costs))
        rows = max(_ORDERED_BYTES / row_bytes, _ORDERED_CHUNKS * max(cost.chunk_rows for cost in costs))
        factor = max(1, min(self.fetch_factor, math.ceil(rows / self._batch_size)))
        # A fetch may be divided into fewer parts than a larger one, and then need more memory.
        return factor if self._least_demand(factor).anonymous <= self.limit else self.fetch_factor

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
        model = self._model(self.fetch_factor)
        depth = model.depth((), prefetch=self.prefetch, n_threads=most)
        demands = ((n, model.demand(depth=depth, n_threads=n, unmapped=())) for n in range(most, NOMINAL_THREADS, -1))
        fitting = (n for n, demand in demands if demand.anonymous <= self.limit)
        return next(fitting, min(most, NOMINAL_THREADS))

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
        model, n_threads = self._model(self.fetch_factor), self.n_threads
        depth = model.depth(model.mappable, prefetch=self.prefetch, n_threads=n_threads)
        n_here = 0 if self.is_interprocess else n_threads
        demand = model.demand(depth=depth, n_threads=n_here, unmapped=model.mappable)
        # The demand already includes the buffers kept for reuse, so they are not counted again.
        held = max(0, process_memory.own_bytes() - buffers.kept_bytes())
        return held + process_memory.CODE_BYTES + demand.total

    def depth_on(self, scheduler: FetchScheduler) -> Callable[[], int]:
        """Return a function that returns the depth on a cluster, where the number of workers changes."""
        n_ranks = self._ranks.fix_world().world_size
        depth = functools.cache(lambda n_threads: self.reading_mode(n_threads).depth)  # called for every result
        return lambda: int(depth(max(1, (scheduler.n_threads or 0) // n_ranks)))

    def reading_mode(self, n_threads: int | None = None) -> ReadingMode:
        """Return the current reading mode for `n_threads` threads."""
        limit = process_memory.memory_limit()
        worker = get_worker_info()
        n_processes = self._ranks.detect().local_world_size * (1 if worker is None else worker.num_workers)
        available = process_memory.share_of(
            limit, n_processes=n_processes, own=process_memory.own_bytes(), reused=buffers.kept_bytes()
        )
        return self._model(self.fetch_factor).reading_mode(
            prefetch=self.prefetch,
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
            is_over = mode.demand.anonymous > self.share
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

    def _least_demand(self, fetch_factor: int) -> Demand:
        """Return the minimum memory of iteration with fetches of `fetch_factor` batches."""
        model = self._model(fetch_factor)
        depth = self.prefetch * model.n_parts(()) if self.prefetch else 1
        return model.demand(depth=depth, n_threads=0 if self.is_interprocess else self.n_threads, unmapped=())

    def part_bytes(self, mode: ReadingMode) -> int:
        """Return the memory that a part of a fetch takes in this process, in bytes."""
        row_bytes = self._model(self.fetch_factor).held_row_bytes(mode.unmapped)
        return int(self._batch_size * self.fetch_factor / mode.n_parts * row_bytes)

    def _model(self, fetch_factor: int) -> MemoryModel:
        source = cast(MatrixSource, self._source)
        return MemoryModel(
            **source.costs,
            n_obs=source.n_obs,
            batch_size=self._batch_size,
            fetch_factor=fetch_factor,
            batch_bytes=self.batch_bytes,
            n_batches=_N_HELD + self.n_batches_ahead,
            run_rows=self._run_rows,
            is_interprocess=self.is_interprocess,
        )
