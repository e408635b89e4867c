"""Predict with Lightning's ddp on two CPU processes that it starts: ``lightning_predict.py IN OUT``."""

from __future__ import annotations

import sys
from unittest import mock

import lightning.pytorch as pl
import torch

import dasksc
from dasksc.inference import work
from dasksc.integrations.lightning import Writer, scDataModule
from dasksc.planning.process_groups import leave_group


class Embedder(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(17, 4)

    def predict_step(self, batch, batch_idx):
        return self.layer(batch)


def main(path: str, out: str) -> None:
    writer = Writer(out)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=[writer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with mock.patch.object(work, "_LEAST_ROWS", 16), mock.patch.object(work, "_MOST_ROWS", 16):
        trainer.predict(Embedder(), datamodule=scDataModule(path, 8, predict=dasksc.Streaming()))
    assert writer.report.is_complete
    assert 0 < writer.report.n_predicted < writer.report.n_obs
    leave_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
