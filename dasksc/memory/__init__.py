"""Memory that this process may use, and a model of the memory that an epoch takes.

A control group counts the page cache as memory of its processes. A process that maps a file larger than the limit
therefore reads it from disk again and again. The model determines how files are read and how many fetches are in
flight. It is a pure function of costs, sizes and limits. It does not affect which rows a fetch holds or their order, so
every machine yields the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import psutil

from dasksc.storage import FetchCost

# Resident file-backed pages of the interpreter and the libraries while an epoch is read.
CODE_BYTES = 160 * 2**20
# Control groups of version 1 report this value, or one slightly larger, if there is no limit.
_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Limit on the memory, including page cache, that several processes may use together, in bytes."""

    n_bytes: int
    held: int  # now, and not to be reclaimed by the kernel
    source: str  # of the limit, for messages


def memory_limit(root: Path = Path("/")) -> Limit:
    """Return the most restrictive limit of the machine, and of this process's control groups and their ancestors."""
    machine = psutil.virtual_memory()
    limits = [
        Limit(n_bytes=machine.total, held=machine.total - machine.available, source="the memory of the machine"),
        *_groups(root),
    ]
    return min(limits, key=lambda limit: limit.n_bytes - limit.held)


def own_bytes(root: Path = Path("/")) -> int:
    """Return the anonymous memory of this process, including shared memory, in bytes."""
    fields = _fields(root / "proc/self/status")
    if "RssAnon" in fields:
        return 1024 * (fields["RssAnon"] + fields.get("RssShmem", 0))
    return int(psutil.Process().memory_info().rss)  # Systems other than Linux.


def share_of(limit: Limit, *, n_processes: int, own: int, reused: int = 0) -> int:
    """Return the memory that an epoch may take in one of `n_processes` similar processes, in bytes, pages included."""
    # Similar processes are assumed to hold equal amounts. Memory held beyond that belongs to other programs, such as a
    # launcher.
    others = max(0, limit.held - n_processes * own)
    return max(0, (limit.n_bytes - others) // n_processes - (own - reused) - CODE_BYTES)


def recommended_bytes(n_bytes: int) -> int:
    """Return the memory to request for a job that uses `n_bytes`: 20% more, rounded up to a multiple of 0.5 GiB."""
    return -(-int(1.2 * n_bytes) // 2**29) * 2**29


def _groups(root: Path) -> list[Limit]:
    """Return the limit of each limited control group of this process, including ancestors."""
    try:
        mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
        memberships = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:  # Not Linux.
        return []
    limits = []
    for mount in mounts:
        separator = mount.index("-")
        kind, options = mount[separator + 1], mount[separator + 3].split(",")
        if kind != "cgroup2" and not (kind == "cgroup" and "memory" in options):
            continue
        controller = "" if kind == "cgroup2" else "memory"
        group = next((path for _, named, path in memberships if controller in named.split(",")), None)
        if group is None:
            continue
        # In a container, the root of the mount may be a group further down in the hierarchy.
        mounted, at = mount[3], root / mount[4].lstrip("/")
        inside = PurePosixPath(group)
        folder = at / inside.relative_to(mounted) if inside.is_relative_to(mounted) else at
        folder = folder if folder.is_dir() else at
        while folder == at or at in folder.parents:
            limits += _of_group(folder)
            folder = folder.parent
    return limits


def _of_group(folder: Path) -> list[Limit]:
    named = []
    for name in ("memory.limit_in_bytes", "memory.max", "memory.high"):
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _UNLIMITED:
            named.append((int(text), str(folder / name)))
    if not named:
        return []
    stat = _fields(folder / "memory.stat")
    # Totals that include subgroups: "total_rss" in version 1, "anon" in version 2. Shared memory cannot
    # be reclaimed either.
    anonymous = stat.get("total_rss", stat.get("anon", 0))
    held = anonymous + stat.get("total_shmem", stat.get("shmem", 0)) + stat.get("slab_unreclaimable", 0)
    n_bytes, source = min(named)
    return [Limit(n_bytes=n_bytes, held=held, source=source)]


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers in a file whose lines consist of a name and a number, by name."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = (line.replace(":", " ").split() for line in lines)
    return {one[0]: int(one[1]) for one in words if len(one) > 1 and one[1].isdigit()}


# Safety factor for fetches whose rows have more stored values than average, as weights may favor them.
LONGER_ROWS = 1.1
# Bytes per row in a plan: the row number and the position.
PLAN_ROW_BYTES = 16
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
NOMINAL_THREADS = 2
_MAX_FETCH_FACTOR = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Upper bound of the memory that iterating takes, in bytes: anonymous memory, and pages in the page cache."""

    anonymous: int
    pages: int

    @property
    def total(self) -> int:
        """Sum of anonymous memory and page cache, in bytes."""
        return self.anonymous + self.pages


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingMode:
    """Reading mode of an epoch."""

    unmapped: frozenset[str]  # labels of matrices whose files are read into memory, though they could be mapped
    depth: int  # tasks in flight in addition to the fetch being yielded
    n_parts: int  # tasks of a fetch
    demand: Demand
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Memory model of one rank's iteration over `n_obs` rows."""

    n_obs: int
    # Cost of a fetched row in each matrix, by label, if every file that can be mapped is mapped, or none
    mapped: Mapping[str, FetchCost]
    read: Mapping[str, FetchCost]
    batch_size: int
    fetch_factor: int
    batch_bytes: float
    n_batches: int  # held at once: gathered ahead, just yielded, and still in use
    run_rows: float = 1.0  # mean length of the runs of rows in a fetch, whose first and last pages count in full
    is_interprocess: bool = False  # other processes fetch the rows and send them
    forced: frozenset[str] = frozenset()  # matrices whose files are always mapped

    @property
    def mappable(self) -> frozenset[str]:
        """Labels of the matrices that are at least partly in files that can be memory-mapped."""
        return frozenset(label for label, cost in self.read.items() if cost.held > self.mapped[label].held)

    def n_parts(self, unmapped: Collection[str]) -> int:
        """Return the number of tasks per fetch; 1 if a fetch holds little memory, as with mapped files."""
        fetch_bytes = self.batch_size * self.fetch_factor * self.held_row_bytes(unmapped)
        return min(_MAX_PARTS, max(1, math.ceil(fetch_bytes / _PART_BYTES)))

    def depth(self, unmapped: Collection[str], *, prefetch: int | None, n_threads: int) -> int:
        """Return the number of parts to keep in flight beyond the fetch being yielded, disregarding memory."""
        n_parts = self.n_parts(unmapped)
        # Results are returned in order, so a thread that finishes early needs a second part to work on.
        return n_parts - 1 + 2 * n_threads if prefetch is None else prefetch * n_parts

    def demand(self, *, depth: int, n_threads: int, unmapped: Collection[str]) -> Demand:
        """Return the memory of iterating with `depth` parts in flight, besides the fetch being yielded."""
        costs, rows, n_parts = self.read.values(), self.batch_size * self.fetch_factor, self.n_parts(unmapped)
        held = LONGER_ROWS * self.held_row_bytes(unmapped) + PLAN_ROW_BYTES
        working = LONGER_ROWS * max(cost.working for cost in costs)
        fetches = (1 + depth / n_parts) * rows * held
        reading = min(depth, n_threads) * (rows * working / n_parts + max(cost.fixed for cost in costs))
        kept = sum(cost.kept for cost in costs)
        anonymous = int(_PROCESS_BYTES + kept + fetches + reading + self.n_batches * self.batch_bytes)
        pages = 0.0
        if not self.is_interprocess:
            n_reading = min(depth, n_threads) / n_parts
            for label in self.mappable:
                row = self.read[label].held - self.mapped[label].held
                # Pages of a file that is not mapped are needed only during the read; mapped pages are needed until the
                # fetch is released.
                mapped_row = (1 + depth / n_parts) * (row + 2 * _PAGE_BYTES / self.run_rows)
                of_row = n_reading * row if label in unmapped else mapped_row
                # Several fetches of a small file need the same pages.
                pages += min(LONGER_ROWS * rows * of_row, self._file_bytes(label) + 2 * _PAGE_BYTES)
        return Demand(anonymous=anonymous, pages=int(pages))

    def reading_mode(
        self, *, prefetch: int | None, n_threads: int, limit: int, available: int, n_sharing: int = 1
    ) -> ReadingMode:
        """Return the reading mode of an epoch for a `limit` of anonymous and of all `available` memory, in bytes."""
        # If all files fit in the page cache, which `n_sharing` processes share, they are memory-mapped, so that later
        # epochs find them there. Otherwise, the largest files are read into anonymous memory: every epoch must read
        # them from disk in any case, and the kernel would evict mapped pages between loading and use. If no mode fits,
        # all files are mapped after all, because mapped pages can be evicted and read again.

        def mode(unmapped: frozenset[str], depth: int, *, may_evict: bool = False) -> ReadingMode:
            n_here = 0 if self.is_interprocess else n_threads
            demand = self.demand(depth=depth, n_threads=n_here, unmapped=unmapped)
            cached = sum(map(self._file_bytes, self.mappable - unmapped - self.forced)) / n_sharing / _CACHED_SHARE
            needed = demand.total / _PAGES_SHARE if may_evict else demand.anonymous + max(demand.pages, cached)
            fits = demand.anonymous <= limit and needed <= available
            n_parts = self.n_parts(unmapped)
            return ReadingMode(unmapped=unmapped, depth=depth, n_parts=n_parts, demand=demand, fits=fits)

        def depths(unmapped: frozenset[str]) -> range:
            full = self.depth(unmapped, prefetch=prefetch, n_threads=n_threads)
            return range(full, 0 if prefetch is None else full - 1, -1)

        nothing: frozenset[str] = frozenset()
        everything = self.mappable - self.forced
        anonymous = mode(everything, depths(everything)[0]).demand.anonymous
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
        largest = set(self.mappable - self.forced)
        for label in sorted(largest, key=lambda label: (self._file_bytes(label), label)):
            room -= self._file_bytes(label)
            if room < 0:
                break
            largest.discard(label)
        return frozenset(largest)

    def _file_bytes(self, label: str) -> float:
        """Return the size of the part of a matrix's files that can be memory-mapped, in bytes."""
        return self.n_obs * (self.read[label].held - self.mapped[label].held)

    def fitting_fetch_factor(self, limit: int, *, prefetch: int | None) -> int:
        """Return the largest number of batches per fetch for which iterating fits in `limit`; at least 1."""
        # No file is assumed to be mapped, so the result does not depend on the machine.

        def fits(factor: int) -> bool:
            one = replace(self, mapped=self.read, fetch_factor=factor, is_interprocess=True)
            depth = one.depth((), prefetch=prefetch, n_threads=NOMINAL_THREADS)
            return one.demand(depth=depth, n_threads=NOMINAL_THREADS, unmapped=()).anonymous <= limit

        # The search is linear, because the demand is not monotonic: a larger fetch may be split into more parts, which
        # can lower the demand.
        return next((factor for factor in range(_MAX_FETCH_FACTOR, 1, -1) if fits(factor)), 1)

    def held_row_bytes(self, unmapped: Collection[str]) -> float:
        """Return the anonymous memory that a fetched row holds, in bytes."""
        costs = [self.read[label] if label in unmapped else cost for label, cost in self.mapped.items()]
        return sum(max(cost.row, cost.held) if self.is_interprocess else cost.held for cost in costs)
