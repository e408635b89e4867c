"""Control groups with a memory limit, for tests and benchmarks of memory-limited jobs."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

_numbers = itertools.count()


class NoCgroupError(RuntimeError):
    """Error on a system where no control group can be created; the message gives the reason."""


class Cgroup:
    """Control group, version 1 or 2, at the folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def limit(self, n_bytes: int) -> None:
        """Limit the memory of the group, page cache included, and disable swap."""
        names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max", "memory.swap.max")
        # The limit with swap must never be below the limit without swap. Which of the two must be written first depends
        # on whether they grow or shrink, so both limits of version 1 (the first two names) are written twice.
        for name in (*names, *names[:2]):
            if (self.path / name).exists():
                with contextlib.suppress(OSError):
                    (self.path / name).write_text("0" if name == "memory.swap.max" else str(n_bytes))

    def enter(self) -> None:
        """Move the calling process into the group; serves as the ``preexec_fn`` of `subprocess.Popen`."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def n_killed(self) -> int:
        """Return the number of processes of the group that the kernel has killed for lack of memory."""
        for name in ("memory.oom_control", "memory.events"):
            if (self.path / name).exists():
                fields = dict(line.split() for line in (self.path / name).read_text().splitlines())
                return int(fields["oom_kill"])
        raise RuntimeError(f"{self.path} does not count what was killed")


@contextlib.contextmanager
def memory_cgroup(n_bytes: int) -> Iterator[Cgroup]:
    """Create a control group with a memory limit, or raise `NoCgroupError`; remove it once its processes have ended."""
    cgroup = Cgroup(_root() / f"dasksc-{os.getpid()}-{next(_numbers)}")
    try:
        cgroup.path.mkdir()
    except OSError as error:
        raise NoCgroupError(f"no control group can be made in {cgroup.path.parent}: {error}") from error
    try:
        cgroup.limit(n_bytes)
        if not any(
            (cgroup.path / name).exists() and (cgroup.path / name).read_text().strip() == str(n_bytes)
            for name in ("memory.limit_in_bytes", "memory.max")
        ):
            raise NoCgroupError(f"{cgroup.path} takes no memory limit")
        yield cgroup
    finally:
        deadline = time.monotonic() + 30
        while cgroup.path.exists():
            try:
                cgroup.path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def _root() -> Path:
    """Return the folder for groups with a memory limit."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in mounts:
        kind, options = mount[mount.index("-") + 1], mount[mount.index("-") + 3].split(",")
        at = Path(mount[4])
        if kind == "cgroup" and "memory" in options:
            return at
        if kind == "cgroup2" and "memory" in (at / "cgroup.subtree_control").read_text().split():
            return at
    raise NoCgroupError("no file system of control groups with a memory controller is mounted")
