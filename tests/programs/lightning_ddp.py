"""Train with Lightning's ddp on CPU processes that it starts, and resume; write the rows of each rank."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import dasksc
from dasksc.integrations.lightning import scDataModule
from dasksc.plan.ranks import leave_group

warnings.filterwarnings("error", ".*sampler|.*not resumable|.*length")


class Recorder(pl.LightningModule):
    """Small model that records the rows it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(17, 1)
        self.seen: dict[str, list[list[int]]] = {"train": [], "validate": []}

    def training_step(self, batch, batch_idx):
        self.seen["train"].append(batch.index.tolist())
        return self.layer(batch.X).mean()

    def validation_step(self, batch, batch_idx):
        self.seen["validate"].append(batch.index.tolist())
        self.log("loss", self.layer(batch.X).mean(), sync_dist=True, batch_size=len(batch.X))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def train(folder: Path, path: str, name: str, ckpt_path: str | None = None) -> None:
    """Train two epochs on two devices, from a checkpoint if one is given."""
    data = scDataModule(
        path,
        8,
        train=dasksc.BlockShuffling(4, indices=np.arange(50)),
        validate=dasksc.Streaming(indices=np.arange(50, 60)),
        fetch_factor=2,
        obs=["cell_type"],
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        callbacks=[ModelCheckpoint(folder / name, "{step}", every_n_train_steps=1, save_top_k=-1)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    model = Recorder()
    trainer.fit(model, data, ckpt_path=ckpt_path)
    (folder / f"{name}-{trainer.global_rank}.json").write_text(json.dumps(model.seen))


def main(path: str, folder: str) -> None:
    """Train without interruption, then resume that training from its third step."""
    train(Path(folder), path, "whole")
    train(Path(folder), path, "rest", ckpt_path=f"{folder}/whole/step=3.ckpt")
    leave_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
