"""Memory that this process may use, page cache included, and that it holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

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


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()


def _groups(root: Path) -> list[Limit]:
    """Return the limit of each limited control group of this process, including ancestors."""
    try:
        mounts = [line.split() for line in _lines(root / "proc/self/mountinfo")]
        memberships = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup")]
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
