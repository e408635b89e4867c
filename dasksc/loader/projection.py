"""Projection of the memory of an epoch in this process, and choice of the reading mode."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Callable

from dask.utils import format_bytes
from torch.utils.data import get_worker_info

from dasksc import checks, config
from dasksc.errors import InputError
from dasksc.executor.schedulers import FetchScheduler, default_threads
from dasksc.loader.rank_session import RankSession
from dasksc.loader.source import IndexedSource, MatrixSource
from dasksc.memory import limits as process_memory
from dasksc.memory.model import NOMINAL_THREADS, Demand, MemoryModel, ReadingMode
from dasksc.storage import buffers

__all__ = ["MemoryProjection"]

logger = logging.getLogger("dasksc.dataset")

_AHEAD_BYTES = 2**24
# Size of a fetch in storage order, and minimum number of chunks in it. Chunks at the ends of a fetch are decoded twice,
# which is costly if the fetch has few chunks.
_ORDERED_BYTES, _ORDERED_CHUNKS = 2**25, 8


class MemoryProjection:
    """Memory of fetches and batches of a source, compared with the memory that this process may use.

    Parameters
    ----------
    source
        Data to read.
    session
        Session with the number of ranks, in total and on this machine.
    scheduler
        Function that returns the scheduler of fetches.
    batch_size, fetch_factor
        Rows of a batch and batches of a fetch. A factor of None chooses the largest that fits `limit`.
    run_rows
        Mean number of neighboring rows that a fetch reads together.
    prefetch
        Number of fetches in flight in addition to the one being yielded; None: as many as fit.
    limit
        Anonymous memory that the rank may use, in bytes.

    Raises
    ------
    InputError
        If fetches of this size do not fit `limit`.
    """

    def __init__(
        self,
        source: MatrixSource | IndexedSource,
        session: RankSession,
        scheduler: Callable[[], FetchScheduler],
        *,
        batch_size: int,
        fetch_factor: int | None,
        run_rows: float,
        prefetch: int | None,
        limit: int,
    ) -> None:
        self._source = source
        self.session = session
        self._scheduler = scheduler
        self._batch_size = batch_size
        self._run_rows = run_rows
        self._prefetch = prefetch
        self.limit = limit
        if fetch_factor is None:
            if isinstance(source, IndexedSource):
                raise InputError(
                    "fetch_factor=None needs an AnnData or a Dask array, whose rows have a known size; give a number "
                    "for other collections"
                )
            fetch_factor = self._model(1).fitting_fetch_factor(limit, prefetch=prefetch)
        self.fetch_factor = checks.whole_number("fetch_factor", fetch_factor)
        self._refuse_too_large()

    def in_storage_order(self, session: RankSession) -> MemoryProjection:
        """Return the projection of a pass in storage order, with the ranks of `session`.

        If a fetch of `fetch_factor` batches is large, the pass uses smaller fetches. Large fetches serve to mix distant
        rows, which is unnecessary in storage order. Smaller fetches save memory, because several fetches are in memory
        at a time.
        """
        one = copy.copy(self)
        one.session = session
        if isinstance(self._source, MatrixSource):
            costs = self._source.costs["read"].values()
            row_bytes = max(1.0, sum(max(cost.row, cost.held) for cost in costs))
            rows = max(_ORDERED_BYTES / row_bytes, _ORDERED_CHUNKS * max(cost.chunk_rows for cost in costs))
            one.fetch_factor = max(1, min(self.fetch_factor, math.ceil(rows / self._batch_size)))
            one._run_rows = one._batch_size * one.fetch_factor
        return one

    @property
    def is_interprocess(self) -> bool:
        """True if fetches run in other processes, which send the rows to this one."""
        return not self._scheduler().in_process

    @property
    def batch_bytes(self) -> float:
        """Size of a batch, in bytes."""
        return self._batch_size * self._matrices.batch_row_bytes

    @property
    def n_batches_ahead(self) -> int:
        """Number of batches to gather ahead, limited so that they stay in the CPU caches until they are used."""
        return max(2, min(int(config.get("batches-ahead")), int(_AHEAD_BYTES / self.batch_bytes)))

    @property
    def n_threads(self) -> int:
        """Number of fetching threads in a process that is not a DataLoader worker, limited by memory.

        On a Dask cluster, the number is this rank's current share of the threads of the Dask workers.
        """
        world = self.session.detect()
        n_of_cluster = self._scheduler().n_threads
        if n_of_cluster is not None:
            return max(1, n_of_cluster // world.world_size)
        n_threads = default_threads(local_world_size=world.local_world_size)
        if isinstance(self._source, MatrixSource) and self._prefetch is not None:
            model = self._model(self.fetch_factor)
            depth = model.depth((), prefetch=self._prefetch, n_threads=n_threads)
            while (
                n_threads > NOMINAL_THREADS
                and model.demand(depth=depth, n_threads=n_threads, unmapped=()).anonymous > self.limit
            ):
                n_threads -= 1
        return n_threads

    @property
    def n_threads_here(self) -> int:
        """Number of fetching threads in this process, which may be a DataLoader worker."""
        worker = get_worker_info()
        n_threads = default_threads(
            local_world_size=self.session.current_world().local_world_size,
            n_workers=1 if worker is None else worker.num_workers,
        )
        return min(n_threads, self.n_threads) if isinstance(self._source, MatrixSource) else n_threads

    @property
    def n_parts(self) -> int:
        """Number of tasks of a fetch."""
        return self.reading_mode().n_parts if isinstance(self._source, MatrixSource) else 1

    @property
    def share(self) -> int:
        """Memory that this process may use, in bytes. The DataLoader workers of a rank divide the limit of the rank."""
        worker = get_worker_info()
        return self.limit if worker is None else self.limit // worker.num_workers

    @property
    def job_bytes(self) -> int:
        """Memory of a process that reads at full speed, in bytes: fetches, page cache, code, memory already in use."""
        demand = self._model(self.fetch_factor).everything(prefetch=self._prefetch, n_threads=self.n_threads)
        # The demand already includes the buffers kept for reuse, so they are not counted again.
        held = max(0, process_memory.own_bytes() - buffers.kept_bytes())
        return held + process_memory.CODE_BYTES + demand.total

    def depth(self, n_threads: int | None = None) -> int:
        """Return the number of fetch tasks in flight, not counting the fetch being yielded, for `n_threads` threads."""
        if isinstance(self._source, MatrixSource):
            return self.reading_mode(n_threads).depth
        return self._prefetch if self._prefetch is not None else 2 * (n_threads or self.n_threads)

    def depth_on(self, scheduler: FetchScheduler) -> Callable[[], int]:
        """Return a function that returns the depth on a cluster, where the number of workers changes."""
        world = self.session.fix_world()
        depths: dict[int, int] = {}

        def depth() -> int:
            # The function is called for every result, so depths are cached by the number of threads.
            n_threads = max(1, (scheduler.n_threads or 0) // world.world_size)
            if n_threads not in depths:
                depths[n_threads] = self.depth(n_threads)
            return depths[n_threads]

        return depth

    def reading_mode(self, n_threads: int | None = None, n_parts: int | None = None) -> ReadingMode:
        """Return the current reading mode and depth for `n_threads` threads and `n_parts` tasks per fetch."""
        if n_threads is None:
            n_threads = self.n_threads
        model = dataclasses.replace(self._model(self.fetch_factor), fixed_n_parts=n_parts)
        limit = process_memory.memory_limit()
        worker = get_worker_info()
        n_processes = self.session.detect().local_world_size * (1 if worker is None else worker.num_workers)
        available = process_memory.share_of(
            limit, n_processes=n_processes, own=process_memory.own_bytes(), reused=buffers.kept_bytes()
        )
        # Buffers of the previous epoch are reused, so their address space counts as free.
        address_bytes = math.inf if limit.address_bytes is None else limit.address_bytes + buffers.kept_bytes()
        mappable_bytes = sum(model.read[label].row for label in model.mappable) * self._source.n_obs
        return model.reading_mode(
            prefetch=self._prefetch,
            n_threads=n_threads,
            limit=int(min(self.share, address_bytes)),
            available=available,
            n_sharing=n_processes,
            may_map=2 * mappable_bytes < address_bytes,
        )

    def least_demand(self, fetch_factor: int) -> Demand:
        """Return the minimum memory of iteration with fetches of `fetch_factor` batches."""
        model = self._model(fetch_factor)
        depth = self._prefetch * model.n_parts(()) if self._prefetch else 1
        return model.demand(depth=depth, n_threads=0 if self.is_interprocess else self.n_threads, unmapped=())

    def part_bytes(self, n_parts: int, unmapped: frozenset[str] | tuple[()] = ()) -> int:
        """Return the memory that one of `n_parts` parts of a fetch takes in this process, in bytes."""
        n_rows = self._batch_size * self.fetch_factor
        return int(n_rows / n_parts * self._model(self.fetch_factor).held_row_bytes(unmapped))

    def warn_of_workers(self) -> None:
        """Log a warning if the DataLoader workers of a rank exceed its memory limit even with minimal prefetching."""
        worker = get_worker_info()
        if worker is None or worker.id > 0 or isinstance(self._source, IndexedSource):
            return
        needed = self.reading_mode().demand
        if needed.anonymous > self.share:
            logger.warning(
                "%d DataLoader workers need %s of memory and %s of page cache each. Together, they exceed memory_limit "
                "(%s). Use fewer workers (with num_workers=0, threads prefetch), or lower fetch_factor, which is %d",
                worker.num_workers,
                format_bytes(needed.anonymous),
                format_bytes(needed.pages),
                format_bytes(self.limit),
                self.fetch_factor,
            )

    @property
    def _matrices(self) -> MatrixSource:
        assert isinstance(self._source, MatrixSource)
        return self._source

    def _model(self, fetch_factor: int) -> MemoryModel:
        return MemoryModel(
            **self._matrices.costs,
            n_obs=self._source.n_obs,
            batch_size=self._batch_size,
            fetch_factor=fetch_factor,
            batch_bytes=self.batch_bytes,
            n_batches=3 + self.n_batches_ahead,
            run_rows=self._run_rows,
            is_interprocess=self.is_interprocess,
        )

    def _refuse_too_large(self) -> None:
        """Raise an error for sizes whose projection exceeds the limit; the message suggests sizes that fit."""
        if isinstance(self._source, IndexedSource):
            return
        given, least = self.least_demand(self.fetch_factor).anonymous, self.least_demand(1).anonymous
        if given <= self.limit:
            return
        if least > self.limit:
            raise InputError(
                f"batches of {self._batch_size} rows need {format_bytes(least)} of memory even with fetch_factor=1, "
                f"but memory_limit is {format_bytes(self.limit)}. Raise memory_limit to at least {_rounded_up(least)!r}"
            )
        factor = self.fetch_factor
        while factor > 1 and self.least_demand(factor).anonymous > self.limit:
            factor //= 2
        n = self._prefetch or 1
        fetches = f"{n} fetch{'es' * (n != 1)} of {self._batch_size} x {self.fetch_factor} rows in flight"
        raise InputError(
            f"{fetches} and the gathered batches take {format_bytes(given)} of memory, but memory_limit "
            f"is {format_bytes(self.limit)}. Lower fetch_factor, batch_size or prefetch, or raise memory_limit to at "
            f"least {_rounded_up(given)!r}; fetch_factor={factor} fits the limit"
        )


def _rounded_up(n_bytes: int) -> str:
    return f"{-(-n_bytes // 2**20)}MiB"
