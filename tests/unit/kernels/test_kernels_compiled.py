"""Compiled kernels cached on disk, with many processes starting at once."""

from __future__ import annotations

import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.programs import ended, run

pytestmark = [pytest.mark.programs, pytest.mark.xdist_group("kernels_compiled")]

# Compile a small kernel for several types, in an order that depends on the process, and check its results.
PROGRAM = """
import sys
import numpy as np
from dasksc.kernels.draw import sum_up

types = ["float32", "float64", "int64"]
turn = int(sys.argv[1]) % len(types)
for name in types[turn:] + types[:turn]:
    tree = np.array([0, 0, 0, 0, 1, 2, 3, 4], dtype=name)
    sum_up(tree)
    assert tree.tolist() == [0, 10, 3, 7, 1, 2, 3, 4], (name, tree)
print(sum(sum_up.stats.cache_hits.values()))
"""


def n_hits_of(cache: Path, turn: int = 0, **environment: int) -> int:
    """Run the program, and return how many kernels it took from the cache."""
    environment = {"NUMBA_BOUNDSCHECK": 0, **environment}
    return int(run([sys.executable, "-c", PROGRAM, turn], NUMBA_CACHE_DIR=cache, **environment))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache that three processes filled at the same time, each with correct results."""
    cache = tmp_path_factory.mktemp("shared")
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(n_hits_of, [cache] * 3, range(3)))
    return cache


def test_processes_that_start_at_once_share_a_cache_and_all_compute_right(shared):
    assert n_hits_of(shared) == 3
    assert not list(shared.rglob("*.tmp"))


def test_kernels_with_bounds_checks_are_not_taken_for_those_without(shared, tmp_path):
    shutil.copytree(shared, tmp_path, dirs_exist_ok=True)
    assert n_hits_of(tmp_path, NUMBA_BOUNDSCHECK=1) == 0


def test_a_damaged_file_in_the_cache_is_compiled_again(shared, tmp_path):
    shutil.copytree(shared, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.rglob("*.nbc"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert n_hits_of(tmp_path) == 0
    assert n_hits_of(tmp_path) == 3


def test_numba_without_compilation_is_refused_when_kernels_are_imported(tmp_path):
    done = ended([sys.executable, "-c", PROGRAM, 0], NUMBA_CACHE_DIR=tmp_path, NUMBA_DISABLE_JIT=1)
    assert done.returncode != 0
    assert re.search("InputError: .*NUMBA_DISABLE_JIT", done.stderr)
