"""Epochs in control groups with less memory than the atlas, and the memory per row of large atlases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.cgroups import Cgroup, NoCgroupError, memory_cgroup
from tests.support.programs import PROGRAMS, ROOT

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("out of core")]

MIB = 2**20
N_OBS = 30_000  # 350 MB


@pytest.fixture(scope="module")
def atlas(atlas_of: Callable[..., Path]) -> Path:
    return atlas_of(N_OBS, 20_000)


@pytest.fixture
def cgroup() -> Iterator[Callable[[int], Cgroup]]:
    with ExitStack() as stack:

        def make(n_bytes: int) -> Cgroup:
            try:
                return stack.enter_context(memory_cgroup(n_bytes))
            except NoCgroupError as error:
                pytest.skip(str(error))

        yield make


def forget(path: Path) -> None:
    """Drop a file from the page cache, since pages read by other processes are not charged to a control group."""
    os.sync()
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def epoch(path: Path, group: Cgroup | None = None) -> dict[str, Any]:
    """Read an epoch in a separate process."""
    forget(path)
    done = subprocess.run(
        [sys.executable, PROGRAMS / "limited_epoch.py", path],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=None if group is None else group.enter,
        timeout=600,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_epoch_in_a_small_group_reads_what_it_needs_and_yields_the_same(
    atlas: Path, cgroup: Callable[[int], Cgroup]
) -> None:
    expected = epoch(atlas)
    assert expected["is_mapped"]
    assert expected["n_rows"] == N_OBS
    # This suffices for the process and its fetches, but not for the mapped file as well.
    small = cgroup(int(expected["anon"]) + 350 * MIB)
    limited = epoch(atlas, small)
    assert small.n_killed() == 0
    assert not limited["is_mapped"]
    assert limited["digest"] == expected["digest"]
    # A page on the boundary of two blocks is read twice.
    assert limited["read"] <= 1.2 * atlas.stat().st_size
