"""Limits on the memory of a process, read from synthetic system files."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from dasksc import memory as process_memory
from dasksc.memory import CODE_BYTES, Limit, memory_limit, own_bytes, share_of

pytestmark = pytest.mark.core

GIB = 2**30
ODD = "9 8 0:1 / /mnt/\udcff rw - ext4 /dev/sda rw\n"  # its name is not UTF-8
NO_LIMIT = 9223372036854771712  # "no limit" in version 1 of control groups


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    memory = SimpleNamespace(total=64 * GIB, available=48 * GIB)
    monkeypatch.setattr(process_memory.psutil, "virtual_memory", lambda: memory)
    return memory


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, errors="surrogateescape")


def version_1(root: Path, groups: dict[str, int], *, own: str, mount_root: str = "/") -> None:
    write(root / "proc/self/cgroup", f"5:cpu:/elsewhere\n4:memory:{own}\n0::/\n")
    write(root / "proc/self/mountinfo", f"35 31 0:32 {mount_root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")
    for group, limit in groups.items():
        folder = root / "sys/fs/cgroup/memory" / group
        write(folder / "memory.limit_in_bytes", f"{limit}\n")
        write(folder / "memory.stat", "cache 100\nrss 1\ntotal_rss 3000\ntotal_shmem 7\ntotal_cache 900\n")


def version_2(root: Path, groups: dict[str, dict[str, str]], *, own: str) -> None:
    write(root / "proc/self/cgroup", f"0::{own}\n")
    write(root / "proc/self/mountinfo", f"{ODD}35 31 0:32 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n")
    for group, limits in groups.items():
        for name, limit in limits.items():
            write(root / "sys/fs/cgroup" / group / name, f"{limit}\n")
        write(root / "sys/fs/cgroup" / group / "memory.stat", "anon 5000\nfile 900\nshmem 11\nslab_unreclaimable 2\n")


@pytest.mark.usefixtures("machine")
def test_without_control_groups_the_machine_sets_the_limit(tmp_path: Path) -> None:
    limit = memory_limit(tmp_path)
    assert (limit.n_bytes, limit.held, limit.source) == (64 * GIB, 16 * GIB, "the memory of the machine")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("narrowest", ["", "slurm", "slurm/job_7", "slurm/job_7/step_0"])
def test_in_version_1_every_ancestor_counts(tmp_path: Path, narrowest: str) -> None:
    groups = dict.fromkeys(["", "slurm", "slurm/job_7", "slurm/job_7/step_0"], NO_LIMIT)
    version_1(tmp_path, groups | {"slurm": 8 * GIB} | {narrowest: 2 * GIB}, own="/slurm/job_7/step_0")
    limit = memory_limit(tmp_path)
    assert limit.n_bytes == 2 * GIB
    assert limit.held == 3007
    assert limit.source.endswith(os.path.join("memory", narrowest, "memory.limit_in_bytes"))


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("own", "groups"), [("abc", {}), ("abcdef", {"../abcdef": GIB})])
def test_in_a_container_the_mount_shows_the_group_as_its_root(tmp_path: Path, own: str, groups: dict[str, int]) -> None:
    # A group whose name begins like that of the mount is no part of it.
    version_1(tmp_path, {"": 4 * GIB} | groups, own=f"/docker/{own}", mount_root="/docker/abc")
    assert memory_limit(tmp_path).n_bytes == 4 * GIB


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("name", "other"), [("memory.max", "memory.high"), ("memory.high", "memory.max")])
def test_in_version_2_the_lower_of_both_limits_of_every_ancestor_counts(tmp_path: Path, name: str, other: str) -> None:
    groups = {"kubepods": {name: str(3 * GIB), other: "max"}, "kubepods/pod": {name: "max", other: str(5 * GIB)}}
    version_2(tmp_path, groups, own="/kubepods/pod")
    limit = memory_limit(tmp_path)
    assert (limit.n_bytes, limit.held) == (3 * GIB, 5013)
    assert limit.source.endswith(f"kubepods/{name}")


def test_the_limit_that_leaves_least_memory_counts(tmp_path: Path, machine: SimpleNamespace) -> None:
    machine.total, machine.available = 8 * GIB, GIB
    version_1(tmp_path, {"": 2 * GIB}, own="/")
    assert memory_limit(tmp_path).source == "the memory of the machine"


def test_ranks_share_what_other_programs_leave() -> None:
    limit = Limit(n_bytes=8 * GIB, held=4 * GIB, source="a test")
    alone = share_of(limit, n_processes=1, own=4 * GIB)
    assert alone == 4 * GIB - CODE_BYTES
    # Two ranks that hold 2 GiB each can use 2 GiB more each; a launcher that holds 1 GiB reduces the shares.
    assert share_of(limit, n_processes=2, own=2 * GIB) == 2 * GIB - CODE_BYTES
    assert share_of(limit, n_processes=2, own=3 * GIB // 2) == (8 - 1) * GIB // 2 - 3 * GIB // 2 - CODE_BYTES
    # Reused buffers do not reduce the share, and the share is never negative.
    assert share_of(limit, n_processes=1, own=4 * GIB, reused=GIB) == 5 * GIB - CODE_BYTES
    assert share_of(limit, n_processes=64, own=GIB) == 0


def test_this_process_has_limits_and_memory() -> None:
    limit = memory_limit()
    assert 0 <= limit.held < limit.n_bytes
    before = own_bytes()
    held = bytearray(os.urandom(2**20) * 64)
    assert own_bytes() - before >= 0.9 * len(held)


def test_a_system_without_proc_is_asked_through_psutil(tmp_path: Path) -> None:
    assert own_bytes(tmp_path) > 2**20
