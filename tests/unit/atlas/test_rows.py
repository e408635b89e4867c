"""Passes over every row of an atlas: bytes per row."""

from __future__ import annotations

import functools
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata import AnnData

import dasksc
from dasksc.storage import matrices

pytestmark = pytest.mark.faults

N = 2**20


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """Function that returns the path of an atlas with the given number of cells and a nearly empty X."""
    folder = tmp_path_factory.mktemp("rows")

    @functools.cache
    def written(n: int) -> str:
        every = np.arange(n, dtype=np.int64)
        obs = pd.DataFrame(
            {
                "cell_type": pd.Categorical.from_codes((every % 50).astype(np.int8), [f"type {i}" for i in range(50)]),
                "n_counts": (every % 997).astype(np.float32),
            },
            index=pd.Index([f"AAACCTGAG{row:09d}-1" for row in range(n)], dtype=object),
        )
        few = np.arange(0, n, 100)
        X = sp.csr_matrix((np.ones(len(few), dtype=np.float32), (few, few % 20)), shape=(n, 20))
        AnnData(X=X, obs=obs).write_h5ad(folder / f"{n}.h5ad")
        return str(folder / f"{n}.h5ad")

    return written


def bytes_a_row(work: Callable[[str], Any], path_of: Callable[[int], str], n: int, n_more: int) -> float:
    """Return the increase in peak allocation per row, in bytes, including the result and the columns read."""
    peaks = []
    work(path_of(1000))  # warm up: compile kernels and import modules
    for path in (path_of(n), path_of(n + n_more)):
        tracemalloc.start()
        result = work(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        del result
    return (peaks[1] - peaks[0]) / n_more


def dataset(data: Any, strategy: Any, batch_size: int = 64, **options: Any) -> dasksc.scDataset:
    return dasksc.scDataset(data, strategy, batch_size, 4, rank=0, world_size=1, seed=0, **options)


def balanced(data: Any) -> Any:
    return next(iter(dataset(data, dasksc.ClassBalancedSampling(label_key="cell_type"))))


def filtered(data: Any) -> Any:
    return next(iter(dataset(data, dasksc.BlockShuffling(64), filter="n_counts >= 0")))


def resumed(path: str, strategy: Any, batch_size: int) -> Any:
    left = dataset(path, strategy)
    batches = iter(left)
    for _ in range(5):
        next(batches)
    state = left.state_dict()
    batches.close()
    continued = dataset(path, strategy, batch_size)
    continued.load_state_dict(state)
    return next(iter(continued))


def checked(data: Any) -> Any:
    return dasksc.check(dataset(data, dasksc.BlockShuffling(64), obs=["cell_type"]))


# For each name: the operation, its limit in bytes per row, and the bytes per row of the columns that it reads.
WORKS: Mapping[str, tuple[Callable[[str], Any], int, int]] = {
    "first balanced batch": (balanced, 8, 1),
    "first filtered batch": (filtered, 16, 4),
    "rows_where": (lambda path: dasksc.rows_where(path, "n_counts >= 0"), 16, 4),
    "split, stratified": (lambda path: dasksc.split(path, stratify="cell_type"), 16, 1),
    "check": (checked, 8, 1),
    "describe": (lambda path: dasksc.describe(path, seconds=0), 8, 5),
    "resume in other batches": (lambda path: resumed(path, dasksc.BlockShuffling(64), 128), 8, 0),
    "resume in storage order, in other batches": (lambda path: resumed(path, dasksc.Streaming(), 128), 17, 0),
    # For joined files, a row is one row of each of the two files, so the limits are doubled.
    "first balanced batch of joined files": (lambda path: balanced([path, path]), 16, 2),
    # The columns of both files stay in memory until they have been copied into the joined columns.
    "describe of joined files": (lambda path: dasksc.describe([path, path], seconds=0), 16, 2 * 10),
}


@pytest.mark.parametrize("name", WORKS)
def test_passes_over_every_row_take_few_bytes_per_row(
    name: str, path_of: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Behave as for atlases whose row offsets are too large to be kept in memory.
    monkeypatch.setattr(matrices, "_INDPTR_KEPT_BYTES", 0)
    work, allowed, of_columns = WORKS[name]
    assert bytes_a_row(work, path_of, N, 2 * N) <= allowed + of_columns
