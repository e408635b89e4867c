"""Limits on memory, divided among ranks and their workers; and ranges of rows, read by fetches of any size."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata
import h5py
import numpy as np
import pytest

import dasksc
from dasksc.inference import RowRange
from dasksc.loader import projection
from dasksc.loader.position import RankSession
from dasksc.loader.projection import MemoryProjection
from dasksc.memory import Limit
from dasksc.plan.ranks import World
from tests.support.data import make_adata

pytestmark = pytest.mark.core

MIB = 2**20
LIMIT = Limit(n_bytes=2**35, held=0, source="a test")


@pytest.fixture
def dataset(tmp_path: Path) -> dasksc.scDataset:
    path = dasksc.datasets.synthetic(tmp_path / "atlas.h5ad", n_obs=500, n_vars=200)
    return dasksc.scDataset(path, batch_size=50, seed=0, memory_limit=900 * MIB)


@pytest.mark.parametrize(("n_ranks", "n_workers"), [(1, None), (2, None), (1, 3), (2, 3)])
def test_ranks_and_workers_divide_the_memory_and_the_page_cache(
    dataset: dasksc.scDataset, monkeypatch: pytest.MonkeyPatch, n_ranks: int, n_workers: int | None
) -> None:
    world = World(rank=0, world_size=n_ranks, local_world_size=n_ranks)
    worker = None if n_workers is None else SimpleNamespace(num_workers=n_workers, id=0)
    shares: list[dict[str, Any]] = []
    given: list[dict[str, Any]] = []
    original = MemoryProjection.mode_within

    def share_of(limit: Limit, **options: Any) -> int:
        shares.append(options)
        return 7_000 * MIB

    def mode_within(self: MemoryProjection, **options: Any) -> Any:
        given.append(options)
        return original(self, **options)

    monkeypatch.setattr(projection.process_memory, "memory_limit", lambda: LIMIT)
    monkeypatch.setattr(RankSession, "detect", lambda self: world)
    monkeypatch.setattr(projection, "get_worker_info", lambda: worker)
    monkeypatch.setattr(projection.process_memory, "share_of", share_of)
    monkeypatch.setattr(MemoryProjection, "mode_within", mode_within)
    assert dataset.memory.reading_mode().fits
    n_processes = n_ranks * (n_workers or 1)
    assert [one["n_processes"] for one in shares] == [n_processes] * len(shares)
    assert given
    for one in given:
        assert one["n_sharing"] == n_processes
        assert one["available"] == 7_000 * MIB
        assert one["limit"] == 900 * MIB // (n_workers or 1)


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
    atlas: tuple[Path, int], fetch_factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, chunk_rows = atlas
    monkeypatch.setattr(projection.process_memory, "own_bytes", lambda: 2**30)  # may change between two projections
    dataset = dasksc.scDataset(path, dasksc.BlockShuffling(8), BATCH, fetch_factor=fetch_factor, seed=0)
    one = RowRange(dataset, 300, 1_950)
    # 32 MiB or eight chunks, whichever is more.
    most = -(-max(2**25 // ROW_BYTES, 8 * chunk_rows) // BATCH)
    assert one.fetch_factor == min(fetch_factor, most)
    assert dataset.fetch_factor == fetch_factor
    assert [float(batch[0, 0]) for batch in one] == [float(start * N_VARS) for start in range(300, 1_950, BATCH)]
    assert one.memory.job_bytes <= dataset.memory.job_bytes


def test_collections_that_are_indexed_keep_their_fetches() -> None:
    dataset = dasksc.scDataset(make_adata(50, 5, layout="dense").X, dasksc.BlockShuffling(4), 4, fetch_factor=3, seed=0)
    one = RowRange(dataset, 8, 50)
    assert one.fetch_factor == 3
    assert np.array_equal(np.concatenate(list(one)), make_adata(50, 5, layout="dense").X[8:])
