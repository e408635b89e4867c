"""Compiled kernels kept on disk, with many processes starting at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.core, pytest.mark.xdist_group("kernels_compiled")]

# Compiles one kernel for several types, in an order of its own, and checks what it computes.
PROGRAM = """
import sys
import numpy as np
from dasksc.kernels.draw import segment_sums
from dasksc.kernels.permute import shuffle

types = ["float32", "int64"]
turn = int(sys.argv[1]) % len(types)
none = np.empty(0, dtype=np.int64)
for name in types[turn:] + types[:turn]:
    weights = np.arange(10, dtype=name)
    sums = np.zeros(3)
    assert segment_sums(10, 4, weights, np.empty(0), none, sums) == -1
    assert sums.tolist() == [6.0, 22.0, 17.0], (name, sums)
order = np.empty(7, dtype=np.int64)
shuffle(np.uint64(3), order)
print(*order, sum(segment_sums.stats.cache_hits.values()))
"""


def run(cache, turn: int, **environment: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "NUMBA_BOUNDSCHECK": "0", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(turn)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process: subprocess.Popen[str]) -> tuple[list[int], int]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    *order, n_hits = map(int, out.split())
    return order, n_hits


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A cache that three processes filled at once, and what each computed."""
    cache = tmp_path_factory.mktemp("shared")
    return cache, [outcome(process)[0] for process in [run(cache, turn) for turn in range(3)]]


def test_processes_that_start_at_once_share_a_cache_and_all_compute_right(shared):
    cache, orders = shared
    assert sorted(orders[0]) == list(range(7))
    assert orders == orders[:1] * 3
    assert outcome(run(cache, 0)) == (orders[0], 2)
    assert not list(cache.rglob("*.tmp"))


def test_kernels_with_bounds_checks_are_not_taken_for_those_without(shared, tmp_path):
    shutil.copytree(shared[0], tmp_path, dirs_exist_ok=True)
    _, n_hits = outcome(run(tmp_path, 0, NUMBA_BOUNDSCHECK="1"))
    assert n_hits == 0


def test_a_damaged_file_in_the_cache_is_compiled_again(shared, tmp_path):
    shutil.copytree(shared[0], tmp_path, dirs_exist_ok=True)
    for path in tmp_path.rglob("*.nbc"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    _, n_hits = outcome(run(tmp_path, 0))
    assert n_hits == 0
    _, n_hits = outcome(run(tmp_path, 0))
    assert n_hits == 2


def test_a_folder_that_cannot_be_written_costs_the_cache_and_nothing_else(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a file where a folder should be")
    process = run(blocked, 0)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert sorted(map(int, out.split()[:7])) == list(range(7))
