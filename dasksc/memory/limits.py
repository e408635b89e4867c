"""Memory that this process may use: the limits of its control groups, of the process and of the machine.

A control group counts the page cache as memory of its processes. A process that maps a file larger than the limit
therefore reads it from disk again and again. `dasksc.memory.model` uses the limits to choose how files are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["CODE_BYTES", "Limit", "memory_limit", "own_bytes", "share_of", "recommended_bytes"]

# Resident file-backed pages of the interpreter and the libraries while an epoch is read.
CODE_BYTES = 160 * 2**20
# Control groups of version 1 report this value, or one slightly larger, if there is no limit.
_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The most restrictive limit on the memory of this process.

    Parameters
    ----------
    n_bytes
        Memory that all processes under the limit may use together, including their page cache, in bytes.
    held
        Memory that these processes hold now and that the kernel cannot reclaim, in bytes.
    source
        Description of the origin of the limit, for messages.
    address_bytes
        Address space that this process may still map, in bytes; None if unlimited.
    """

    n_bytes: int
    held: int
    source: str
    address_bytes: int | None = None


def memory_limit(root: Path = Path("/")) -> Limit:
    """Return the most restrictive limit on the memory of this process.

    Reads the control groups (versions 1 and 2) of the process and all their ancestors, ``RLIMIT_AS``, and the memory
    of the machine. This takes about a millisecond.

    Parameters
    ----------
    root
        Folder that replaces ``/`` in ``/proc`` and in the paths that files in ``/proc`` contain.
    """
    total, available = _machine(root)
    limits = [(total, total - available, "the memory of the machine"), *_groups(root)]
    address_bytes = _address_bytes(root)
    n_bytes, held, source = min(limits, key=lambda limit: limit[0] - limit[1])
    return Limit(n_bytes=n_bytes, held=held, source=source, address_bytes=address_bytes)


def own_bytes(root: Path = Path("/")) -> int:
    """Return the anonymous memory of this process, including shared memory, in bytes."""
    fields = _fields(root / "proc/self/status")
    if "RssAnon" in fields:
        return 1024 * (fields["RssAnon"] + fields.get("RssShmem", 0))
    import psutil  # Systems other than Linux.

    return int(psutil.Process().memory_info().rss)


def share_of(limit: Limit, *, n_processes: int, own: int, reused: int = 0) -> int:
    """Return the memory that an epoch may take in this process, including mapped pages of files, in bytes.

    Parameters
    ----------
    limit
        Limit as returned by `memory_limit`.
    n_processes
        Number of similar processes under the limit: ranks on the node times DataLoader workers per rank.
    own
        Anonymous memory of this process, as returned by `own_bytes`, in bytes.
    reused
        Part of `own` that the epoch reuses, namely the buffers of the previous epoch, in bytes.
    """
    # Similar processes are assumed to hold equal amounts. Memory held beyond that belongs to other programs, such as a
    # launcher.
    others = max(0, limit.held - n_processes * own)
    return max(0, (limit.n_bytes - others) // n_processes - (own - reused) - CODE_BYTES)


def recommended_bytes(n_bytes: int) -> int:
    """Return the memory to request for a job that uses `n_bytes`: 20% more, rounded up to a multiple of 0.5 GiB."""
    return -(-int(1.2 * n_bytes) // 2**29) * 2**29


def _machine(root: Path) -> tuple[int, int]:
    """Return the total and the available memory of the machine, in bytes."""
    fields = _fields(root / "proc/meminfo")
    if "MemAvailable" in fields:
        return 1024 * fields["MemTotal"], 1024 * fields["MemAvailable"]
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _groups(root: Path) -> list[tuple[int, int, str]]:
    """Return the limit, the memory held and the file of the limit, for each limited control group of this process."""
    try:
        mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
        memberships = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:  # Not Linux.
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
        # In a container, the root of the mount may be a group further down in the hierarchy.
        mounted, at = mount[3], root / mount[4].lstrip("/")
        inside = PurePosixPath(group)
        folder = at / inside.relative_to(mounted) if inside.is_relative_to(mounted) else at
        folder = folder if folder.is_dir() else at
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
    # Totals that include subgroups: "total_rss" in version 1, "anon" in version 2. Shared memory cannot
    # be reclaimed either.
    anonymous = stat.get("total_rss", stat.get("anon", 0))
    held = anonymous + stat.get("total_shmem", stat.get("shmem", 0)) + stat.get("slab_unreclaimable", 0)
    n_bytes, source = min(named)
    return [(n_bytes, held, source)]


def _address_bytes(root: Path) -> int | None:
    try:
        import resource
    except ImportError:  # Windows.
        return None

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    return max(0, soft - 1024 * _fields(root / "proc/self/status").get("VmSize", 0))


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers in a file whose lines consist of a name and a number, by name."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = (line.replace(":", " ").split() for line in lines)
    return {one[0]: int(one[1]) for one in words if len(one) > 1 and one[1].isdigit()}
