"""Model of the memory that an epoch takes, which determines how files are read and how many fetches are in flight.

The model is a pure function of costs, sizes and limits. It does not affect which rows a fetch holds or their
order, so every machine yields the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dasksc.storage import FetchCost

__all__ = ["LONGER_ROWS", "NOMINAL_THREADS", "PLAN_ROW_BYTES", "Demand", "MemoryModel", "ReadingMode"]

# Safety factor for fetches whose rows have more stored values than average. The mean number of stored values per row in
# a fetch is close to that of all rows, unless weights favor rows with many values.
LONGER_ROWS = 1.1
# Bytes per row in a plan: the row number and the position.
PLAN_ROW_BYTES = 16
# Size above which a fetch is split into several tasks.
_PART_BYTES = 2**25
_MAX_PARTS = 64
# Memory of threads, of tasks, and of the caches of threads and the allocator.
_PROCESS_BYTES = 2**24
_PAGE_BYTES = 2**12
# Share of the page cache that mapped files may fill if the cache is to hold all of them. The page cache can use the
# available memory minus the anonymous memory.
_CACHED_SHARE = 0.9
# Share of the available memory that may be in use if files are larger than the page cache. If more is in use, the
# kernel evicts pages before they are used.
_PAGES_SHARE = 0.5
# Number of threads assumed when the size of a fetch is chosen, so that it does not depend on the machine.
NOMINAL_THREADS = 2
_MAX_FETCH_FACTOR = 4096
# Maximum number of reading modes to compare, so that a decision about many files takes little time.
_MAX_STEPS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Upper bound of the memory that iterating takes, in bytes.

    Parameters
    ----------
    anonymous
        Anonymous memory of the process.
    pages
        Pages of files that the page cache must hold simultaneously. A control group counts these, too.
    """

    anonymous: int
    pages: int

    @property
    def total(self) -> int:
        """Sum of anonymous memory and page cache, in bytes."""
        return self.anonymous + self.pages


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingMode:
    """Reading mode of an epoch.

    Parameters
    ----------
    unmapped
        Labels of the matrices whose files are read into memory although they could be memory-mapped.
    depth
        Number of parts of fetches in flight, not counting the fetch being yielded.
    n_parts
        Number of tasks per fetch.
    demand
        Memory that this mode takes.
    fits
        True if the demand fits into the memory that the process may use.
    """

    unmapped: frozenset[str]
    depth: int
    n_parts: int
    demand: Demand
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Memory model of one rank's iteration.

    Parameters
    ----------
    n_obs
        Number of rows.
    mapped, read
        Cost of a fetched row in each matrix, by label. `mapped` applies if every file that can be memory-mapped is
        mapped, `read` if none is. Each part of a concatenated matrix has its own entry, whose `FetchCost.row` and
        `FetchCost.held` are already multiplied by the part's share of the rows.
    batch_size, fetch_factor
        Rows per batch, and batches per fetch.
    batch_bytes
        Size of a batch of tensors, in bytes.
    n_batches
        Number of batches held at once: those gathered ahead, the one just yielded, and earlier ones that the training
        loop still uses.
    run_rows
        Mean length of the runs of contiguous rows in a fetch. The first and the last page of a run count in full, even
        if the run fills only part of them.
    is_interprocess
        True if other processes fetch the rows and send them.
    forced
        Labels of the matrices whose files are always memory-mapped.
    fixed_n_parts
        Number of tasks per fetch if it is already fixed; None to derive it from the memory that a fetch holds.
    """

    n_obs: int
    mapped: Mapping[str, FetchCost]
    read: Mapping[str, FetchCost]
    batch_size: int
    fetch_factor: int
    batch_bytes: float
    n_batches: int
    run_rows: float = 1.0
    is_interprocess: bool = False
    forced: frozenset[str] = frozenset()
    fixed_n_parts: int | None = None

    @property
    def mappable(self) -> frozenset[str]:
        """Labels of the matrices that are at least partly in files that can be memory-mapped."""
        return frozenset(label for label, cost in self.read.items() if cost.held > self.mapped[label].held)

    def n_parts(self, unmapped: Collection[str]) -> int:
        """Return the number of tasks per fetch; 1 if a fetch holds little memory, as with mapped files."""
        return self.fixed_n_parts or _n_parts(self.batch_size * self.fetch_factor * self.held_row_bytes(unmapped))

    def depth(self, unmapped: Collection[str], *, prefetch: int | None, n_threads: int) -> int:
        """Return the number of parts to keep in flight beyond the fetch being yielded, disregarding memory."""
        n_parts = self.n_parts(unmapped)
        # Results are returned in order, so a thread that finishes early needs a second part to work on.
        return n_parts - 1 + 2 * n_threads if prefetch is None else prefetch * n_parts

    def demand(self, *, depth: int, n_threads: int, unmapped: Collection[str]) -> Demand:
        """Return the memory that iterating takes.

        Parameters
        ----------
        depth
            Number of parts of fetches in flight, not counting the fetch being yielded.
        n_threads
            Number of threads of this process that fetch.
        unmapped
            Labels of the matrices that are read into memory although they could be memory-mapped.
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
        if not self.is_interprocess:
            n_reading = min(depth, n_threads) / n_parts
            for label in self.mappable:
                row = self.read[label].held - self.mapped[label].held
                # Pages of a file that is not mapped are needed only during the read; mapped pages are needed until the
                # fetch is released.
                of_row = n_reading * row if label in unmapped else n_fetches * (row + 2 * _PAGE_BYTES / self.run_rows)
                # Several fetches of a small file need the same pages.
                pages += min(LONGER_ROWS * rows * of_row, self._file_bytes(label) + 2 * _PAGE_BYTES)
        return Demand(anonymous=anonymous, pages=int(pages))

    def reading_mode(
        self,
        *,
        prefetch: int | None,
        n_threads: int,
        limit: int,
        available: int,
        n_sharing: int = 1,
        may_map: bool = True,
    ) -> ReadingMode:
        """Return the reading mode of an epoch.

        If all files fit in the page cache, they are memory-mapped, so that later epochs find them there. Otherwise, the
        largest files are not mapped: each fetch reads its rows into anonymous memory. Every epoch must read these files
        from disk in any case. Mapping them would be slower, because the kernel would evict their pages between loading
        and use. The number of parts in flight is the largest that fits, at most the result of `depth`.

        If no mode fits, all files are mapped after all (unless `may_map` is False), because mapped pages can be evicted
        and read again. Unless `prefetch` is given, the number of parts in flight is then reduced until anonymous memory
        fits in `limit` and all memory in use fits in half of `available`, or until a single part is in flight.

        Parameters
        ----------
        prefetch
            Requested number of fetches in flight, which is kept even if no mode fits; None for the number that the
            threads can use, which is reduced if memory is short.
        n_threads
            Number of threads that fetch, in this process or in the processes that send rows.
        limit
            Limit on the anonymous memory of the process, in bytes.
        available
            Memory that the process may use, including the page cache, in bytes.
        n_sharing
            Number of processes that share the page cache and read the same files.
        may_map
            True if the process has enough address space to map files.
        """
        n_here = 0 if self.is_interprocess else n_threads
        by_size = sorted(self.mappable - self.forced, key=lambda label: (self._file_bytes(label), label))
        # The largest matrices are the first to be read into memory.
        n_steps = min(len(by_size), _MAX_STEPS)
        orders = [
            frozenset(by_size[len(by_size) - len(by_size) * step // max(1, n_steps) :])
            for step in range(0 if may_map else n_steps, n_steps + 1)
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
                return ReadingMode(unmapped=unmapped, depth=n, n_parts=self.n_parts(unmapped), demand=demand, fits=True)
        # Pages that do not fit are merely read again, whereas the kernel kills a process whose anonymous memory exceeds
        # the limit.
        depths = range(full[0], 0, -1) if prefetch is None else [full[0]]
        demands = [(n, self.demand(depth=n, n_threads=n_here, unmapped=orders[0])) for n in depths]
        n, demand = next((one for one in demands if self._fits_mapped(one[1], limit, available)), demands[-1])
        fits = self._fits_mapped(demand, limit, available)
        return ReadingMode(unmapped=orders[0], depth=n, n_parts=self.n_parts(orders[0]), demand=demand, fits=fits)

    @staticmethod
    def _fits_mapped(demand: Demand, limit: int, available: int) -> bool:
        """Return True if the demand with mapped files fits into memory; the files may be larger than the page cache."""
        return demand.anonymous <= limit and demand.total <= _PAGES_SHARE * available

    def everything(self, *, prefetch: int | None, n_threads: int) -> Demand:
        """Return the memory that a job should have: enough to read at full speed without memory-mapped files."""
        depth = self.depth(self.mappable, prefetch=prefetch, n_threads=n_threads)
        return self.demand(depth=depth, n_threads=0 if self.is_interprocess else n_threads, unmapped=self.mappable)

    def _file_bytes(self, label: str) -> float:
        """Return the size of the part of a matrix's files that can be memory-mapped, in bytes."""
        return self.n_obs * (self.read[label].held - self.mapped[label].held)

    def fitting_fetch_factor(self, limit: int, *, prefetch: int | None) -> int:
        """Return the largest number of batches per fetch for which iterating fits in `limit`; at least 1.

        The result assumes that no file is mapped and that `NOMINAL_THREADS` threads fetch, so it does not depend on the
        machine.
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

        # The search is linear, because the demand is not monotonic: a larger fetch may be split into more parts, which
        # can lower the demand.
        return next((factor for factor in range(_MAX_FETCH_FACTOR, 1, -1) if fits(factor)), 1)

    @property
    def _batches_bytes(self) -> float:
        return self.n_batches * self.batch_bytes

    def held_row_bytes(self, unmapped: Collection[str]) -> float:
        """Return the anonymous memory that a fetched row holds, in bytes."""
        costs = [self.read[label] if label in unmapped else cost for label, cost in self.mapped.items()]
        return sum(max(cost.row, cost.held) if self.is_interprocess else cost.held for cost in costs)

    def _anonymous(
        self, rows: int, row_bytes: float, *, n_parts: int, depth: int, n_threads: int, batches: float
    ) -> int:
        """Return the anonymous memory of iterating, in bytes, if a fetched row holds `row_bytes`."""
        costs = self.read.values()
        held = LONGER_ROWS * row_bytes + PLAN_ROW_BYTES
        working = LONGER_ROWS * max(cost.working for cost in costs)
        fetches = (1 + depth / n_parts) * rows * held
        reading = min(depth, n_threads) * (rows * working / n_parts + max(cost.fixed for cost in costs))
        kept = sum(cost.kept for cost in costs)
        return int(_PROCESS_BYTES + kept + fetches + reading + batches)


def _n_parts(fetch_bytes: float) -> int:
    return min(_MAX_PARTS, max(1, math.ceil(fetch_bytes / _PART_BYTES)))
