"""Statements of README.md about other loaders, tested against the installed versions.

``pip install scDataset annbatch``; annbatch needs Python 3.12.
"""

from __future__ import annotations

from collections.abc import Callable

import anndata
import numpy as np
import pytest
import scipy.sparse as sp
from torch.utils.data import DataLoader

import dasksc

pytestmark = pytest.mark.programs

N_CELLS, N_RANKS, BATCH = 1_000, 4, 128
Rows = list[list[int]]  # rows of each batch of an epoch


def cells() -> np.ndarray:
    """Return cells that contain their row number."""
    return np.arange(N_CELLS, dtype=np.float32)[:, None]


def dasksc_epoch(rank: int, epoch: int) -> Rows:
    loader = dasksc.scDataset(cells(), dasksc.BlockShuffling(), BATCH, rank=rank, world_size=N_RANKS, seed=0)
    loader.set_epoch(epoch)
    return [batch.ravel().tolist() for batch in loader]


def scdataset_epoch(rank: int, epoch: int) -> Rows:
    scdataset = pytest.importorskip("scdataset")
    loader = scdataset.scDataset(cells(), scdataset.BlockShuffling(), BATCH, rank=rank, world_size=N_RANKS, seed=epoch)
    return [batch.ravel().tolist() for batch in loader]


def annbatch_epoch(rank: int, epoch: int) -> Rows:
    annbatch = pytest.importorskip("annbatch")
    samplers = pytest.importorskip("annbatch.samplers")
    every = samplers.RandomSampler(chunk_size=8, preload_nchunks=16, batch_size=BATCH, rng=np.random.default_rng(epoch))
    sampler = samplers.DistributedSampler(every, dist_info=lambda: (rank, N_RANKS))
    loader = annbatch.Loader(batch_sampler=sampler, preload_to_gpu=False)
    loader.add_adata(anndata.AnnData(sp.csr_matrix(cells())))
    return [np.asarray(batch["X"].todense()).ravel().tolist() for batch in loader]


def annloader(adata: anndata.AnnData) -> DataLoader:
    with pytest.warns(FutureWarning, match="AnnLoader"):
        return anndata.experimental.AnnLoader(adata, batch_size=BATCH, shuffle=True)


def annloader_epoch(rank: int, epoch: int) -> Rows:
    # AnnLoader has no notion of ranks.
    return [batch.X.ravel().tolist() for batch in annloader(anndata.AnnData(cells()))]


LOADERS = {
    "dasksc": dasksc_epoch,
    "scDataset": scdataset_epoch,
    "annbatch": annbatch_epoch,
    "AnnLoader": annloader_epoch,
}


@pytest.mark.parametrize(
    ("name", "batches_of_ranks"),
    [
        ("dasksc", [2, 2, 2, 2]),
        ("scDataset", [8, 0, 0, 0]),
        ("annbatch", [1, 1, 1, 1]),
        ("AnnLoader", [8, 8, 8, 8]),
    ],
)
def test_batches_of_each_of_four_ranks(name, batches_of_ranks, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(N_RANKS))
    found = []
    for rank in range(N_RANKS):
        monkeypatch.setenv("RANK", str(rank))
        found.append(len(LOADERS[name](rank, 0)))
    assert found == batches_of_ranks


@pytest.mark.parametrize(
    ("name", "n_reads", "n_never_read"),
    [("dasksc", 1_000, 0), ("scDataset", 1_000, 0), ("annbatch", 512, 488), ("AnnLoader", 4_000, 0)],
)
def test_cells_that_an_epoch_reads_and_those_that_no_epoch_reads(name, n_reads, n_never_read):
    reads = []
    for epoch in range(10):
        rows = [row for rank in range(N_RANKS) for batch in LOADERS[name](rank, epoch) for row in batch]
        assert len(rows) == n_reads
        reads += rows
    assert N_CELLS - len(set(reads)) == n_never_read


def dasksc_loader() -> DataLoader:
    return DataLoader(dasksc.scDataset(cells(), dasksc.BlockShuffling(), BATCH, seed=0), batch_size=None, num_workers=2)


def scdataset_loader() -> DataLoader:
    scdataset = pytest.importorskip("scdataset")
    return DataLoader(
        scdataset.scDataset(cells(), scdataset.BlockShuffling(), BATCH, seed=0),
        batch_size=None,
        num_workers=2,
    )


@pytest.mark.parametrize(
    ("make_loader", "repeats"), [(dasksc_loader, False), (scdataset_loader, True)], ids=["dasksc", "scDataset"]
)
def test_whether_dataloader_workers_repeat_the_first_epoch(make_loader: Callable[[], DataLoader], repeats):
    loader = make_loader()
    first, second = ([int(row) for batch in loader for row in batch.ravel()] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(N_CELLS))
    assert (first == second) == repeats
