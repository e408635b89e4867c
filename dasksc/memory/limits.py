"""What memory this process may use: the limits of its control groups, of the process and of the machine.

The page cache counts in a control group as its processes' memory does, so a file that does not fit is read again and
again from the disk by a process that maps it. `dasksc.memory.model` decides by these figures how files are read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CODE_BYTES", "Limit", "memory_limit", "own_bytes", "share_of", "to_ask_for"]

# Pages of the interpreter and of the libraries that run while an epoch is read: resident, though files back them.
CODE_BYTES = 160 * 2**20
# Control groups of version 1 say this, or nearly, where there is no limit.
_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The narrowest limit on the memory of this process.

    Parameters
    ----------
    n_bytes
        What the processes that it binds may use together, their page cache included.
    held
        What they hold now that the kernel cannot drop, in bytes.
    source
        What sets the limit, for people.
    address_bytes
        Address space that this process may still map, None if there is no limit.
    """

    n_bytes: int
    held: int
    source: str
    address_bytes: int | None = None


def memory_limit(root: Path = Path("/")) -> Limit:
    """Return the narrowest limit on the memory of this process.

    Looks at the control groups (versions 1 and 2) of the process and all their ancestors, at ``RLIMIT_AS`` and at
    the memory of the machine; takes about a millisecond.

    Parameters
    ----------
    root
        Where ``/proc`` and what it names are found.
    """
    total, available = _machine(root)
    limits = [(total, total - available, "the memory of the machine"), *_groups(root)]
    address_bytes = _address_bytes(root)
    n_bytes, held, source = min(limits, key=lambda limit: limit[0] - limit[1])
    return Limit(n_bytes=n_bytes, held=held, source=source, address_bytes=address_bytes)


def own_bytes(root: Path = Path("/")) -> int:
    """Return the anonymous memory of this process, in bytes."""
    fields = _fields(root / "proc/self/status")
    if "RssAnon" in fields:
        return 1024 * (fields["RssAnon"] + fields.get("RssShmem", 0))
    import psutil  # other systems

    return int(psutil.Process().memory_info().rss)


def share_of(limit: Limit, *, n_processes: int, own: int, reused: int = 0) -> int:
    """Return what an epoch may take in this process, in bytes: memory of its own and pages of files together.

    Parameters
    ----------
    limit
        What `memory_limit` returned.
    n_processes
        Processes like this one that share it: the ranks of the node, times the DataLoader workers of each.
    own
        What `own_bytes` returned.
    reused
        Part of `own` that the epoch uses again: buffers of the epoch before.
    """
    # Ranks hold alike. What is held beyond that belongs to other programs, a launcher for one.
    others = max(0, limit.held - n_processes * own)
    return max(0, (limit.n_bytes - others) // n_processes - (own - reused) - CODE_BYTES)


def to_ask_for(n_bytes: int) -> int:
    """Return what a job that needs `n_bytes` should ask its scheduler for, in bytes: a fifth more, in halves of GiB."""
    return -(-int(1.2 * n_bytes) // 2**29) * 2**29


def _machine(root: Path) -> tuple[int, int]:
    """Return the memory of the machine, and how much of it could be had, in bytes."""
    fields = _fields(root / "proc/meminfo")
    if "MemAvailable" in fields:
        return 1024 * fields["MemTotal"], 1024 * fields["MemAvailable"]
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _groups(root: Path) -> list[tuple[int, int, str]]:
    """Return limit, what is held, and where that is said, of every limited control group of this process."""
    try:
        mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
        memberships = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:  # not Linux
        return []
    limits = []
    for mount in mounts:
        separator = mount.index("-")
        kind, options = mount[separator + 1], mount[separator + 3].split(",")
        if kind == "cgroup2":
            controllers = ""
        elif kind == "cgroup" and "memory" in options:
            controllers = "memory"
        else:
            continue
        group = next((path for _, named, path in memberships if controllers in named.split(",")), None)
        if group is None:
            continue
        # In a container the mount shows a group further down as its root.
        shown, at = mount[3], root / mount[4].lstrip("/")
        inside = os.path.relpath(group, shown) if group.startswith(shown) else "."
        folder = at / inside if (at / inside).is_dir() else at
        while folder == at or at in folder.parents:
            limits += _of_group(folder)
            folder = folder.parent
    return limits


def _of_group(folder: Path) -> list[tuple[int, int, str]]:
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
    # Version 1 says what is below it as "total_rss", version 2 as "anon"; shared memory cannot be dropped either.
    anonymous = stat.get("total_rss", stat.get("anon", 0))
    held = anonymous + stat.get("total_shmem", stat.get("shmem", 0)) + stat.get("slab_unreclaimable", 0)
    n_bytes, source = min(named)
    return [(n_bytes, held, source)]


def _address_bytes(root: Path) -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    return max(0, soft - 1024 * _fields(root / "proc/self/status").get("VmSize", 0))


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file whose lines are a name and a number."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = (line.replace(":", " ").split() for line in lines)
    return {one[0]: int(one[1]) for one in words if len(one) > 1 and one[1].isdigit()}
