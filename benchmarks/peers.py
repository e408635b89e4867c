#!/usr/bin/env python
"""Print the batches and cells that other loaders read on four ranks, for the table in README.md.

    python benchmarks/peers.py

``pip install scDataset annbatch``; annbatch needs Python 3.12. Loaders that are not installed are left out.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import anndata
import numpy as np
import scipy.sparse as sp
from torch.utils.data import DataLoader

import dasksc

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
    import scdataset

    loader = scdataset.scDataset(cells(), scdataset.BlockShuffling(), BATCH, rank=rank, world_size=N_RANKS, seed=epoch)
    return [batch.ravel().tolist() for batch in loader]


def annbatch_epoch(rank: int, epoch: int) -> Rows:
    import annbatch
    from annbatch import samplers

    every = samplers.RandomSampler(chunk_size=8, preload_nchunks=16, batch_size=BATCH, rng=np.random.default_rng(epoch))
    sampler = samplers.DistributedSampler(every, dist_info=lambda: (rank, N_RANKS))
    loader = annbatch.Loader(batch_sampler=sampler, preload_to_gpu=False)
    loader.add_adata(anndata.AnnData(sp.csr_matrix(cells())))
    return [np.asarray(batch["X"].todense()).ravel().tolist() for batch in loader]


def annloader_epoch(rank: int, epoch: int) -> Rows:
    # AnnLoader has no notion of ranks.
    with warnings.catch_warnings(action="ignore"):
        loader = anndata.experimental.AnnLoader(anndata.AnnData(cells()), batch_size=BATCH, shuffle=True)
    return [batch.X.ravel().tolist() for batch in loader]


LOADERS: dict[str, Callable[[int, int], Rows]] = {
    "dasksc": dasksc_epoch,
    "scDataset": scdataset_epoch,
    "annbatch": annbatch_epoch,
    "AnnLoader": annloader_epoch,
}


def repeats_with_workers(module: str) -> bool:
    """Return True if the second epoch of two DataLoader workers has the order of the first."""
    peer = __import__(module)
    dataset = peer.scDataset(cells(), peer.BlockShuffling(), BATCH, seed=0)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    first, second = ([int(row) for batch in loader for row in batch.ravel()] for _ in range(2))
    return first == second


def main() -> None:
    os.environ["WORLD_SIZE"] = str(N_RANKS)
    for name, epoch_of in LOADERS.items():
        n_batches: list[int] = []
        seen: set[int] = set()
        try:
            for epoch in range(10):
                n_read = 0
                for rank in range(N_RANKS):
                    os.environ["RANK"] = str(rank)
                    batches = epoch_of(rank, epoch)
                    n_batches.append(len(batches))
                    n_read += sum(map(len, batches))
                    seen.update(row for batch in batches for row in batch)
        except ImportError as error:
            print(f"{name}: {error}")
            continue
        print(f"{name}: {n_batches[:N_RANKS]} batches of each rank, {n_read} cells in an epoch, ", end="")
        print(f"{N_CELLS - len(seen)} cells that no epoch reads")
    del os.environ["WORLD_SIZE"], os.environ["RANK"]
    for module in ("dasksc", "scdataset"):
        try:
            print(f"{module}: the second epoch of two workers repeats the first: {repeats_with_workers(module)}")
        except ImportError as error:
            print(f"{module}: {error}")


if __name__ == "__main__":
    main()
