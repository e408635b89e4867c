#!/usr/bin/env python
"""Train with Hugging Face's Trainer on any number of processes, and resume from the latest checkpoint.

    torchrun --nproc_per_node=2 train_transformers.py atlas.h5ad

To resume:

    torchrun --nproc_per_node=2 train_transformers.py atlas.h5ad --resume
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import TrainingArguments

import dasksc
from dasksc.integrations.transformers import scTrainer


class Classifier(torch.nn.Module):
    """Linear map from log counts to one score per label; its output includes the loss, which the Trainer requires."""

    def __init__(self, n_genes: int, n_labels: int, label: str) -> None:
        super().__init__()
        self.label = label
        self.scores = torch.nn.Linear(n_genes, n_labels)

    def forward(self, X: torch.Tensor, obs: dict[str, torch.Tensor], **rest: object) -> dict[str, torch.Tensor]:
        """Return the loss and the scores, shape (batch, n_labels), of a batch passed as keyword arguments."""
        scores = self.scores(torch.log1p(X))
        return {"loss": cross_entropy(scores, obs[self.label]), "scores": scores}


def main() -> None:
    """Train and evaluate the classifier."""
    parser = argparse.ArgumentParser(description="Train a cell-type classifier with transformers' Trainer.")
    parser.add_argument("atlas", help="an .h5ad or .zarr with raw counts in X")
    parser.add_argument("--label", default="cell_type", help="obs column to predict")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--folder", default="checkpoints")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    arguments = TrainingArguments(
        output_dir=args.folder,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=64,
        learning_rate=2e-3,
        save_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    adata = dasksc.open(args.atlas, obs=[args.label])
    held_out = np.random.default_rng(0).random(adata.n_obs) < 0.1
    balanced = dasksc.ClassBalancedSampling(label_key=args.label, indices=np.flatnonzero(~held_out))
    every_cell = dasksc.Streaming(indices=np.flatnonzero(held_out))
    training = dasksc.scDataset(adata, balanced, 64, obs=[args.label], seed=0)
    validation = dasksc.scDataset(adata, every_cell, 64, obs=[args.label], seed=0)
    torch.manual_seed(0)
    model = Classifier(adata.n_vars, len(training.categories[args.label]), args.label)
    trainer = scTrainer(model, arguments, train_dataset=training, eval_dataset=validation)
    trainer.train(resume_from_checkpoint=args.resume)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"{trainer.state.global_step} steps: held-out loss {loss:.3f}")


if __name__ == "__main__":
    main()
