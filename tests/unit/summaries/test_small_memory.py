"""Statistics, variable genes and predictions in a control group with less memory than the atlas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cgroups import Cgroup, NoCgroupError, memory_cgroup
from tests.support.programs import PROGRAMS, ROOT

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("out of core")]

MIB = 2**20


def found_in(path: Path, *out: Path, group: Cgroup | None = None) -> dict[str, Any]:
    os.sync()
    with path.open("rb") as file:  # pages read by other processes are not charged to a control group
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    done = subprocess.run(
        [sys.executable, PROGRAMS / "limited_statistics.py", path, *out],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=None if group is None else group.enter,
        timeout=600,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"said": done.stderr}


def test_memory_is_flat_and_fits_a_group_of_a_gibibyte(atlas_of: Callable[..., Path]) -> None:
    large, small = atlas_of(100_000, 20_000), atlas_of(30_000, 20_000)
    assert large.stat().st_size > 1024 * MIB
    try:
        with memory_cgroup(1024 * MIB) as group:
            limited = found_in(large, group=group)
            assert group.n_killed() == 0
    except NoCgroupError as error:
        pytest.skip(str(error))
    whole = found_in(large)
    assert limited["digest"] == whole["digest"]
    assert limited["sums"] == pytest.approx(whole["sums"], rel=1e-12)
    few = found_in(small)
    for found in (limited, whole, few):
        for peak, projected in zip(found["peaks"], found["projected"], strict=True):
            assert peak <= projected
        # Without the 64 bytes for each pair of gene and group, the projection would be too low.
        assert found["projected"][1] - 64 * 400 * 20_000 < found["peaks"][1]
        assert found["n_groups"] == 400
    for peak, of_few in zip(whole["peaks"], few["peaks"], strict=True):
        assert peak <= of_few + 64 * MIB


def test_predictions_are_within_the_projection_in_a_group_of_a_gibibyte(
    atlas_of: Callable[..., Path], tmp_path: Path
) -> None:
    large, small = atlas_of(100_000, 20_000), atlas_of(30_000, 20_000)
    try:
        with memory_cgroup(1024 * MIB) as group:
            limited = found_in(large, tmp_path / "limited.zarr", group=group)
            assert group.n_killed() == 0
    except NoCgroupError as error:
        pytest.skip(str(error))
    # The memory is sufficient, so there is no warning.
    assert "for each process that reads it" not in limited["said"]
    whole, few = found_in(large, tmp_path / "whole.zarr"), found_in(small, tmp_path / "few.zarr")
    assert limited["digest"] == whole["digest"]
    for found in (limited, whole, few):
        assert found["peak"] <= found["projected"]
    assert whole["peak"] <= few["peak"] + 64 * MIB
