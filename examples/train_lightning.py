#!/usr/bin/env python
"""Train a cell-type classifier with Lightning on any number of devices, and resume from a checkpoint.

    python train_lightning.py atlas.h5ad --devices 2
    python train_lightning.py atlas.h5ad --devices 2 --resume last
    python train_lightning.py atlas.h5ad --devices 2 --fsdp --precision bf16-mixed --accumulate 2 --clip 1.0

Checkpoints are written every 50 steps and for the best epochs. They contain the position in the epoch, so a resumed
run continues with the next batch, even on a different number of devices.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy

import dasksc
from dasksc.integrations.lightning import scDataModule


class Classifier(pl.LightningModule):
    """Linear map from log counts to one score per label."""

    def __init__(self, n_genes: int, n_labels: int, label: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.label = label
        self.scores = torch.nn.Linear(n_genes, n_labels)

    def configure_model(self) -> None:
        """Shard the layer if --fsdp is given; Lightning calls this method before fit, validate and predict."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.scores, FSDPModule):
            fully_shard(self.scores, mesh=self.device_mesh["data_parallel"])

    def forward(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the scores, shape (batch, n_labels), of counts with shape (batch, n_genes)."""
        return self.scores(torch.log1p(counts))

    def training_step(self, batch: dasksc.Batch, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return cross_entropy(self(batch.X), batch.obs[self.label])

    def validation_step(self, batch: dasksc.Batch, batch_idx: int) -> None:
        """Log the accuracy over the held-out cells of all devices."""
        right = (self(batch.X).argmax(dim=1) == batch.obs[self.label]).float().mean()
        self.log("accuracy", right, batch_size=len(batch.X), sync_dist=True, prog_bar=True)

    def predict_step(self, batch: dasksc.Batch, batch_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return row numbers and predicted labels."""
        return batch.index, self(batch.X).argmax(dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the Adam optimizer."""
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main() -> None:
    """Train, validate and predict."""
    parser = argparse.ArgumentParser(description="Train a cell-type classifier with Lightning.")
    parser.add_argument("atlas", help="an .h5ad or .zarr with raw counts in X")
    parser.add_argument("--label", default="cell_type", help="obs column to predict")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128, help="cells in a batch, per device")
    parser.add_argument("--fsdp", action="store_true", help="shard the model instead of replicating it on every device")
    parser.add_argument("--precision", default="32-true", help="precision of Lightning's Trainer, such as bf16-mixed")
    parser.add_argument("--accumulate", type=int, default=1, help="batches in a step")
    parser.add_argument("--clip", type=float, help="maximum norm of the gradient, over all devices")
    parser.add_argument("--folder", default="checkpoints", help="folder for checkpoints")
    parser.add_argument("--resume", help="checkpoint to resume from; last: the latest in --folder")
    args = parser.parse_args()

    adata = dasksc.open(args.atlas, obs=[args.label])
    held_out = np.random.default_rng(0).random(adata.n_obs) < 0.1  # identical in every process
    validation = np.flatnonzero(held_out)
    validation = validation[: len(validation) // args.devices * args.devices]  # FSDP needs equal batch counts
    data = scDataModule(
        adata,
        batch_size=args.batch_size,
        train=dasksc.ClassBalancedSampling(label_key=args.label, indices=np.flatnonzero(~held_out)),
        validate=dasksc.Streaming(indices=validation),
        predict=dasksc.Streaming(indices=validation),
        obs=[args.label],
        seed=0,
    )
    pl.seed_everything(0)
    model = Classifier(adata.n_vars, adata.obs[args.label].nunique(), args.label)
    strategy = "ddp" if args.devices > 1 else "auto"
    if args.fsdp:  # FSDPStrategy cannot clip gradients by norm
        strategy = ModelParallelStrategy(args.devices, tensor_parallel_size=1, save_distributed_checkpoint=False)
    best = ModelCheckpoint(args.folder, "best-{epoch}", monitor="accuracy", mode="max", save_top_k=3)
    trainer = pl.Trainer(
        accelerator="auto",
        devices=args.devices,
        strategy=strategy,
        precision=args.precision,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=args.clip,
        max_epochs=args.epochs,
        callbacks=[best, ModelCheckpoint(args.folder, every_n_train_steps=50, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, data, ckpt_path=args.resume)
    accuracy = trainer.callback_metrics["accuracy"].item()
    predictions = trainer.predict(model, data)
    n_cells = sum(len(rows) for rows, _ in predictions)
    print(f"rank {trainer.global_rank}: accuracy {accuracy:.1%}, predicted {n_cells} held-out cells", flush=True)
    trainer.strategy.barrier()  # when the first process ends, Lightning ends the others


if __name__ == "__main__":
    main()
