#!/usr/bin/env python
"""Train with DataLoader workers, and save their position in the epoch with torchdata's StatefulDataLoader.

    python train_workers.py atlas.h5ad --stop-after 20
    python train_workers.py atlas.h5ad --resume

DataLoader workers are worthwhile only if Python hooks take much of the time. Otherwise, training without workers is
faster, and `dataset.state_dict()` suffices to save the position.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torchdata.stateful_dataloader import StatefulDataLoader

import dasksc


def main() -> None:
    """Train for one epoch, in one run or in two."""
    parser = argparse.ArgumentParser(description="Train with DataLoader workers, and resume.")
    parser.add_argument("atlas", help="an .h5ad or .zarr with raw counts in X")
    parser.add_argument("--label", default="cell_type", help="obs column to predict")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--stop-after", type=int, help="number of batches after which to save and stop")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    args = parser.parse_args()

    adata = dasksc.open(args.atlas, obs=[args.label])
    dataset = dasksc.scDataset(adata, dasksc.BlockShuffling(block_size=16), 64, obs=[args.label], seed=0)
    loader = StatefulDataLoader(dataset, batch_size=None, num_workers=args.workers)
    torch.manual_seed(0)
    model = torch.nn.Linear(adata.n_vars, len(dataset.categories[args.label]))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    n_cells = 0
    if args.resume:
        saved = torch.load(args.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        n_cells = saved["n_cells"]
    for i, batch in enumerate(loader, start=1):
        loss = cross_entropy(model(batch.X.log1p()), batch.obs[args.label])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        n_cells += len(batch.X)
        if i == args.stop_after:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            torch.save({**states, "n_cells": n_cells}, args.checkpoint)
            break
    print(f"{n_cells} of {adata.n_obs} cells, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
