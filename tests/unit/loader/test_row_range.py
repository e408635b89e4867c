"""Ranges of rows, read in storage order by fetches of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import pytest

import dasksc
from dasksc.loader.row_range import RowRange
from tests.support.data import make_adata

pytestmark = pytest.mark.core

N_OBS, N_VARS, BATCH = 2_000, 4_000, 100
ROW_BYTES = 4 * N_VARS


@pytest.fixture(scope="module", params=["plain", "chunked"])
def atlas(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Dense atlas, and its number of rows per chunk; 0 if rows can be read individually."""
    path = tmp_path_factory.mktemp("range") / "atlas.h5ad"
    adata = anndata.AnnData(np.arange(N_OBS * N_VARS, dtype=np.float32).reshape(N_OBS, N_VARS))
    adata.write_h5ad(path)
    if request.param == "plain":
        return path, 0
    with h5py.File(path, "r+") as file:
        attributes = dict(file["X"].attrs)
        del file["X"]
        file.create_dataset("X", data=adata.X, chunks=(400, N_VARS), compression="lzf").attrs.update(attributes)
    return path, 400


@pytest.mark.parametrize("fetch_factor", [1, 4, 64])
def test_fetches_hold_little_and_the_batches_are_those_of_large_ones(
    atlas: tuple[Path, int], fetch_factor: int
) -> None:
    path, chunk_rows = atlas
    dataset = dasksc.scDataset(path, dasksc.BlockShuffling(8), BATCH, fetch_factor=fetch_factor, seed=0)
    one = RowRange(dataset, 300, 1_950)
    # 32 MiB or eight chunks, whichever is more.
    most = -(-max(2**25 // ROW_BYTES, 8 * chunk_rows) // BATCH)
    assert one.fetch_factor == min(fetch_factor, most)
    assert dataset.fetch_factor == fetch_factor
    first = [float(batch[0, 0]) for batch in one]
    assert first == [float(start * N_VARS) for start in range(300, 1_950, BATCH)]
    assert one.memory.job_bytes <= dataset.memory.job_bytes


def test_collections_that_are_indexed_keep_their_fetches() -> None:
    dataset = dasksc.scDataset(make_adata(50, 5, layout="dense").X, dasksc.BlockShuffling(4), 4, fetch_factor=3, seed=0)
    one = RowRange(dataset, 8, 50)
    assert one.fetch_factor == 3
    assert np.array_equal(np.concatenate(list(one)), make_adata(50, 5, layout="dense").X[8:])
