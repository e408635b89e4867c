#!/usr/bin/env python
"""Train a cell-type classifier with DataParallel, in one process on all GPUs (or the CPU).

    python train_dp.py atlas.h5ad

DistributedDataParallel (train_ddp.py) is faster, even on one machine. This example is for programs
that already use DataParallel. The program passes whole batches to the model, and DataParallel splits
the cells of each batch among the GPUs.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dasksc


class Classifier(nn.Module):
    """Linear map from log counts to one score per label."""

    def __init__(self, n_genes: int, n_labels: int) -> None:
        super().__init__()
        self.scores = nn.Linear(n_genes, n_labels)

    def forward(self, batch: dasksc.Batch) -> torch.Tensor:
        """Return the scores of a batch, or of its part on this GPU, shape (cells, n_labels)."""
        return self.scores(torch.log1p(batch.X))


def main() -> None:
    """Train the classifier and print its progress."""
    parser = argparse.ArgumentParser(description="Train a cell-type classifier with DataParallel.")
    parser.add_argument("atlas", help="an .h5ad or .zarr with raw counts in X")
    parser.add_argument("--label", default="cell_type", help="obs column to predict")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=256, help="cells in a batch, over all GPUs")
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    adata = dasksc.open(args.atlas, obs=[args.label])
    dataset = dasksc.scDataset(
        adata,
        dasksc.BlockShuffling(block_size=16),
        batch_size=args.batch_size,
        obs=[args.label],
        seed=0,
    )
    torch.manual_seed(0)
    model = Classifier(adata.n_vars, len(dataset.categories[args.label]))
    model = nn.DataParallel(model).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        total_loss = right = n_cells = 0
        start = time.perf_counter()
        for batch in dataset:
            batch = batch.to(device)
            labels = batch.obs[args.label]
            scores = model(batch)
            loss = cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total_loss += loss.item() * len(labels)
            right += (scores.argmax(dim=1) == labels).sum().item()
            n_cells += len(labels)
        mean_loss, accuracy = total_loss / n_cells, right / n_cells
        speed = n_cells / (time.perf_counter() - start)
        print(f"epoch {epoch}: loss {mean_loss:.3f}  accuracy {accuracy:.1%}  {speed:,.0f} cells/s")


if __name__ == "__main__":
    main()
