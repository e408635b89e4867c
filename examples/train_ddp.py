#!/usr/bin/env python
"""Train a cell-type classifier on all GPUs (NCCL), or on CPU processes (Gloo), of any number of nodes.

    torchrun --nproc_per_node=2 train_ddp.py atlas.h5ad

or, where MASTER_ADDR and MASTER_PORT say at which free port of which node the ranks meet:

    mpirun -n 2 python train_ddp.py atlas.h5ad
    srun -n 2 python train_ddp.py atlas.h5ad

Each rank reads its own share of every epoch. Training draws all cell types equally often, however
rare; validation sees every held-out cell exactly once.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dasksc


class Classifier(nn.Module):
    """A linear map from log counts to one score per label."""

    def __init__(self, n_genes: int, n_labels: int) -> None:
        super().__init__()
        self.scores = nn.Linear(n_genes, n_labels)

    def forward(self, counts: torch.Tensor) -> torch.Tensor:
        """Counts (batch, n_genes) to scores (batch, n_labels)."""
        return self.scores(torch.log1p(counts))


def train_epoch(model, optimizer, dataset, label, device) -> tuple[float, float, float]:
    """Mean loss and accuracy over all ranks, and cells per second of all ranks together."""
    model.train()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, right answers, cells
    start = time.perf_counter()
    for batch in dataset:
        batch = batch.to(device, non_blocking=True)
        scores = model(batch.X)
        loss = cross_entropy(scores, batch.obs[label])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums += tally(loss, scores, batch.obs[label])
    dist.all_reduce(sums)
    loss, right, n_cells = sums.tolist()
    return loss / n_cells, right / n_cells, n_cells / (time.perf_counter() - start)


@torch.no_grad()
def validate(model, dataset, label, device) -> tuple[float, float]:
    """Mean loss and accuracy over all held-out cells. Ranks may see unequally many: sums are reduced."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in dataset:
        batch = batch.to(device, non_blocking=True)
        scores = model.module(batch.X)  # the bare model: nothing in here waits for other ranks
        sums += tally(cross_entropy(scores, batch.obs[label]), scores, batch.obs[label])
    dist.all_reduce(sums)
    loss, right, n_cells = sums.tolist()
    return loss / n_cells, right / n_cells


def tally(loss: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed loss, right answers and cells of one batch."""
    right = (scores.argmax(dim=1) == labels).sum()
    return torch.stack([loss.detach() * len(labels), right, torch.full_like(right, len(labels))]).double()


def main() -> None:
    """Train on this rank's share."""
    parser = argparse.ArgumentParser(description="Train a cell-type classifier under torchrun.")
    parser.add_argument("atlas", help="an .h5ad or .zarr with raw counts in X")
    parser.add_argument("--label", default="cell_type", help="obs column to predict")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128, help="per rank")
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    world = dasksc.World.detect()  # what torchrun, mpirun or srun has set
    device = torch.device("cuda", world.rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=world.rank, world_size=world.world_size)

    adata = dasksc.open(args.atlas, obs=[args.label])
    held_out = np.random.default_rng(0).random(adata.n_obs) < 0.1  # the same on every rank
    balanced = dasksc.ClassBalancedSampling(label_key=args.label, indices=np.flatnonzero(~held_out))
    every_cell = dasksc.Streaming(indices=np.flatnonzero(held_out))
    common = {"batch_size": args.batch_size, "fetch_factor": 64, "seed": 0, "obs": [args.label]}
    common["pin_memory"] = on_gpu
    training = dasksc.scDataset(adata, balanced, progress=dist.get_rank() == 0, **common)
    validation = dasksc.scDataset(adata, every_cell, equal_ranks=False, **common)

    torch.manual_seed(0)
    model = Classifier(adata.n_vars, len(training.categories[args.label])).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        loss, right, speed = train_epoch(model, optimizer, training, args.label, device)
        val_loss, val_right = validate(model, validation, args.label, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {speed:,.0f} cells/s on {dist.get_world_size()} ranks ({device.type})")
            print(f"  training    loss {loss:.3f}  accuracy {right:.1%}")
            print(f"  validation  loss {val_loss:.3f}  accuracy {val_right:.1%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
