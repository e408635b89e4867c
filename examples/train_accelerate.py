#!/usr/bin/env python
"""Train with Hugging Face Accelerate; the data set shards itself and must not be passed to `prepare`.

    accelerate launch train_accelerate.py atlas.h5ad

or

    torchrun --nproc_per_node=2 train_accelerate.py atlas.h5ad
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

import dasksc


def main() -> None:
    """Train, and save the position in the epoch with the model and the optimizer."""
    parser = argparse.ArgumentParser(description="Train a cell-type classifier with Accelerate.")
    parser.add_argument("atlas", help="an .h5ad or .zarr with raw counts in X")
    parser.add_argument("--label", default="cell_type", help="obs column to predict")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("checkpoint"), help="checkpoint, saved every epoch")
    parser.add_argument("--resume", action="store_true", help="resume from --folder")
    args = parser.parse_args()

    # Without GPUs, Accelerate assumes a single process unless cpu=True.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    adata = dasksc.open(args.atlas, obs=[args.label])
    balanced = dasksc.ClassBalancedSampling(label_key=args.label)
    dataset = dasksc.scDataset(adata, balanced, 64, obs=[args.label], seed=0)
    torch.manual_seed(0)
    model = torch.nn.Linear(adata.n_vars, len(dataset.categories[args.label]))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    # Do not pass the data set or its DataLoader to prepare: Accelerate would shard the sharded batches again.
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(dataset)
    if args.resume:
        accelerator.load_state(str(args.folder))
    for _ in range(args.epochs):
        sums = torch.zeros(2, device=accelerator.device)  # correct predictions, cells
        for batch in dataset:
            batch = batch.to(accelerator.device)
            scores = model(batch.X.log1p())
            accelerator.backward(cross_entropy(scores, batch.obs[args.label]))
            optimizer.step()
            optimizer.zero_grad()
            right = (scores.argmax(dim=1) == batch.obs[args.label]).sum()
            sums += torch.stack([right, torch.full_like(right, len(batch.X))])
        accelerator.save_state(str(args.folder))
        right, n_cells = accelerator.reduce(sums).tolist()
        accelerator.print(
            f"{n_cells:.0f} cells on {accelerator.num_processes} processes: accuracy {right / n_cells:.1%}"
        )
    # A thread of Gloo releases tensors a moment after a collective operation ends, and may need the GIL to do so.
    # Without this pause, end_training can deadlock, because it holds the GIL while it waits for that thread.
    time.sleep(0.2)
    accelerator.end_training()


if __name__ == "__main__":
    main()
