"""Compiled kernels kept on disk, with many processes starting at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.core

# Compiles one kernel for several types, in an order of its own, and checks what it computes.
PROGRAM = """
import sys
import numpy as np
from dasksc.kernels.draw import segment_sums
from dasksc.kernels.permute import shuffle

types = ["float32", "float64", "int64", "uint8"]
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
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), **environment}
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


def test_processes_that_start_at_once_share_a_cache_and_all_compute_right(tmp_path):
    first = [outcome(process) for process in [run(tmp_path, turn) for turn in range(4)]]
    orders = [order for order, _ in first]
    assert sorted(orders[0]) == list(range(7))
    assert orders == orders[:1] * 4
    order, n_hits = outcome(run(tmp_path, 0))
    assert order == orders[0]
    assert n_hits == 4
    assert not list(tmp_path.rglob("*.tmp"))


def test_kernels_with_bounds_checks_are_not_taken_for_those_without(tmp_path):
    outcome(run(tmp_path, 0, NUMBA_BOUNDSCHECK="0"))
    _, n_hits = outcome(run(tmp_path, 0, NUMBA_BOUNDSCHECK="1"))
    assert n_hits == 0


def test_a_damaged_file_in_the_cache_is_compiled_again(tmp_path):
    outcome(run(tmp_path, 0))
    for path in tmp_path.rglob("*.nbc"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    _, n_hits = outcome(run(tmp_path, 0))
    assert n_hits == 0
    _, n_hits = outcome(run(tmp_path, 0))
    assert n_hits == 4


def test_a_folder_that_cannot_be_written_costs_the_cache_and_nothing_else(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a file where a folder should be")
    process = run(blocked, 0)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert sorted(map(int, out.split()[:7])) == list(range(7))
