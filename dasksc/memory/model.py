"""How much memory an epoch takes, and what follows from that: how files are read, and how much is in flight.

Pure: costs, sizes and limits go in. Which rows a fetch holds, and in which order, is not decided here, so that every
machine yields the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dasksc.storage import FetchCost

__all__ = ["LONGER_ROWS", "NOMINAL_THREADS", "PLAN_ROW_BYTES", "Demand", "MemoryModel", "Way"]

# Fetches hold rows of all lengths, whose mean is near that of all rows; yet weights may favour long ones.
LONGER_ROWS = 1.1
# Number of a row and its position in a plan.
PLAN_ROW_BYTES = 16
# A fetch that holds more than this is read in several tasks.
_PART_BYTES = 2**25
_MAX_PARTS = 64
# Threads, what they and the allocator keep at hand, tasks.
_PROCESS_BYTES = 2**24
_PAGE_BYTES = 2**12
# What of the memory that is left a mapped file may fill to stay in the page cache.
_CACHED_SHARE = 0.9
# The kernel drops pages before their turn where the page cache holds little more than is needed of it.
_PAGES_SHARE = 0.5
# Threads for which the size of a fetch is found, whatever the machine.
NOMINAL_THREADS = 2
_MAX_FETCH_FACTOR = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Memory that iterating takes at most, in bytes.

    Parameters
    ----------
    anonymous
        Memory of the process itself.
    pages
        Pages of files in the page cache that are needed at the same time; a control group counts them, too.
    """

    anonymous: int
    pages: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.anonymous + self.pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How an epoch is read.

    Parameters
    ----------
    unmapped
        Names of the matrices whose files are read into memory, though they could be mapped.
    depth
        Parts of fetches in flight beyond the fetch being yielded.
    n_parts
        Tasks of a fetch.
    demand
        What that takes.
    fits
        Whether it fits what the process may use.
    """

    unmapped: frozenset[str]
    depth: int
    n_parts: int
    demand: Demand
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """The memory of one rank's iteration.

    Parameters
    ----------
    n_obs
        Rows of each matrix.
    mapped, read
        Cost of a fetched row of each matrix, by name: if files that may be mapped are, and if none is.
    batch_size, fetch_factor
        Rows of a batch, batches of a fetch.
    batch_bytes
        Size of a batch of tensors.
    n_batches
        Batches held at once: gathered ahead, handed over and in use.
    run_rows
        Rows that lie side by side, on average; where they begin and end, whole pages are needed.
    travels
        Whether other processes fetch, and send what they read.
    forced
        Names of the matrices whose files are mapped in any case.
    parted
        Tasks of a fetch, where that is settled; None: as many as suit what is held.
    """

    n_obs: int
    mapped: Mapping[str, FetchCost]
    read: Mapping[str, FetchCost]
    batch_size: int
    fetch_factor: int
    batch_bytes: float
    n_batches: int
    run_rows: float = 1.0
    travels: bool = False
    forced: frozenset[str] = frozenset()
    parted: int | None = None

    @property
    def mappable(self) -> frozenset[str]:
        """Names of the matrices of which something can be mapped."""
        return frozenset(name for name, cost in self.read.items() if cost.held > self.mapped[name].held)

    def n_parts(self, unmapped: Collection[str]) -> int:
        """Return the tasks of a fetch: one where little is held, as of mapped files."""
        return self.parted or _n_parts(self.batch_size * self.fetch_factor * self.held_row_bytes(unmapped))

    def depth(self, unmapped: Collection[str], *, prefetch: int | None, n_threads: int) -> int:
        """Return how many parts of fetches to have in flight beyond the fetch being yielded, if memory allows."""
        n_parts = self.n_parts(unmapped)
        # Results are handed over in order: a thread that is done early needs another one to go on with.
        return n_parts - 1 + 2 * n_threads if prefetch is None else prefetch * n_parts

    def demand(self, *, depth: int, n_threads: int, unmapped: Collection[str]) -> Demand:
        """Return what iterating takes.

        Parameters
        ----------
        depth
            Parts of fetches in flight beyond the fetch being yielded.
        n_threads
            Threads of this process that fetch.
        unmapped
            Names of the matrices that are read though they could be mapped.
        """
        rows, n_parts = self.batch_size * self.fetch_factor, self.n_parts(unmapped)
        n_fetches = 1 + depth / n_parts
        anonymous = self._anonymous(
            rows,
            self.held_row_bytes(unmapped),
            n_parts=n_parts,
            depth=depth,
            n_threads=n_threads,
            batches=self._batches_bytes,
        )
        pages = 0.0
        if not self.travels:
            n_reading = min(depth, n_threads) / n_parts
            for name in self.mappable:
                row = self.read[name].held - self.mapped[name].held
                # A file that is read passes through the page cache, and what is mapped stays there.
                pages += (n_reading * row) if name in unmapped else n_fetches * (row + 2 * _PAGE_BYTES / self.run_rows)
        return Demand(anonymous=anonymous, pages=int(LONGER_ROWS * rows * pages))

    def way(
        self,
        *,
        prefetch: int | None,
        n_threads: int,
        limit: int,
        available: int,
        n_sharing: int = 1,
        may_map: bool = True,
    ) -> Way:
        """Return how to read an epoch.

        Files are mapped that stay in the page cache as a whole, so that later epochs find them there; the largest are
        read first. What does not stay is read from the disk in every epoch, which is quicker into memory of the process
        than through maps: the kernel drops mapped pages before their turn. As much is in flight as fits, at most what
        `depth` returns. Where nothing fits, as little as possible is, mapped.

        Parameters
        ----------
        prefetch
            Fetches in flight that were asked for, which are not lowered; None: as many as the threads can use.
        n_threads
            Threads that fetch, here or where fetches travel from.
        limit
            Anonymous memory that was promised, in bytes.
        available
            Memory that the process may use, pages included, in bytes.
        n_sharing
            Processes that share the page cache and read the same files.
        may_map
            Whether the process has address space for maps.
        """
        n_here = 0 if self.travels else n_threads
        by_size = sorted(self.mappable - self.forced, key=self._file_bytes)
        # Read are the largest matrices first.
        orders = [
            frozenset(by_size[len(by_size) - n :]) for n in range(0 if may_map else len(by_size), len(by_size) + 1)
        ]
        full = [self.depth(unmapped, prefetch=prefetch, n_threads=n_threads) for unmapped in orders]
        tried = list(zip(full, orders, strict=True))
        if prefetch is None:
            tried += [(n, orders[-1]) for n in range(full[-1] - 1, 0, -1)]
        for n, unmapped in tried:
            demand = self.demand(depth=n, n_threads=n_here, unmapped=unmapped)
            mapped = sum(map(self._file_bytes, self.mappable - unmapped - self.forced)) / n_sharing
            needed = demand.anonymous + max(demand.pages, mapped / _CACHED_SHARE)
            if demand.anonymous <= limit and needed <= available:
                return Way(unmapped=unmapped, depth=n, n_parts=self.n_parts(unmapped), demand=demand, fits=True)
        # Pages that do not fit are read again and again; for memory that does not, the process is ended.
        depths = range(full[0], 0, -1) if prefetch is None else [full[0]]
        demands = [(n, self.demand(depth=n, n_threads=n_here, unmapped=orders[0])) for n in depths]
        n, demand = next((one for one in demands if self._is_bearable(one[1], limit, available)), demands[-1])
        fits = self._is_bearable(demand, limit, available)
        return Way(unmapped=orders[0], depth=n, n_parts=self.n_parts(orders[0]), demand=demand, fits=fits)

    @staticmethod
    def _is_bearable(demand: Demand, limit: int, available: int) -> bool:
        """Return whether files may be mapped that are larger than the page cache: pages in flight stay there."""
        return demand.anonymous <= limit and demand.total <= _PAGES_SHARE * available

    def everything(self, *, prefetch: int | None, n_threads: int) -> Demand:
        """Return what iterating takes at full speed where no file is mapped: what a job should have."""
        depth = self.depth(self.mappable, prefetch=prefetch, n_threads=n_threads)
        return self.demand(depth=depth, n_threads=0 if self.travels else n_threads, unmapped=self.mappable)

    def _file_bytes(self, name: str) -> float:
        """Return how large the files of a matrix are, as far as they can be mapped."""
        return self.n_obs * (self.read[name].held - self.mapped[name].held)

    def fitting_fetch_factor(self, limit: int, *, prefetch: int | None) -> int:
        """Return the most batches of a fetch for which everything fits `limit`.

        As if nothing were mapped, and with a number of threads that does not depend on the machine.
        """
        row_bytes = sum(max(cost.row, cost.held) for cost in self.read.values())
        n_threads = NOMINAL_THREADS

        def fits(factor: int) -> bool:
            rows = self.batch_size * factor
            n_parts = _n_parts(rows * row_bytes)
            depth = prefetch * n_parts if prefetch else n_parts - 1 + 2 * n_threads
            batches = self._batches_bytes
            return (
                self._anonymous(rows, row_bytes, n_parts=n_parts, depth=depth, n_threads=n_threads, batches=batches)
                <= limit
            )

        # The largest that fits. One more part makes a fetch need less again, so halving intervals could miss it.
        return next((factor for factor in range(_MAX_FETCH_FACTOR, 1, -1) if fits(factor)), 1)

    @property
    def _batches_bytes(self) -> float:
        return self.n_batches * self.batch_bytes

    def held_row_bytes(self, unmapped: Collection[str]) -> float:
        """Return the anonymous memory of a fetched row, in bytes."""
        costs = [self.read[name] if name in unmapped else cost for name, cost in self.mapped.items()]
        return sum(max(cost.row, cost.held) if self.travels else cost.held for cost in costs)

    def _anonymous(
        self, rows: int, row_bytes: float, *, n_parts: int, depth: int, n_threads: int, batches: float
    ) -> int:
        """Return anonymous memory if a fetched row holds `row_bytes`."""
        costs = self.read.values()
        held = LONGER_ROWS * row_bytes + PLAN_ROW_BYTES
        working = LONGER_ROWS * max(cost.working for cost in costs)
        fetches = (1 + depth / n_parts) * rows * held
        reading = min(depth, n_threads) * (rows * working / n_parts + max(cost.fixed for cost in costs))
        kept = sum(cost.kept for cost in costs)
        return int(_PROCESS_BYTES + kept + fetches + reading + batches)


def _n_parts(fetch_bytes: float) -> int:
    return min(_MAX_PARTS, max(1, math.ceil(fetch_bytes / _PART_BYTES)))
