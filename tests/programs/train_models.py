"""Models for the tests of dasksc.train, referenced by their import paths."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dasksc.train.models import MLPClassifier


class Noting(nn.Module):
    """Small model that writes the rows of each training batch to one file per rank."""

    def __init__(self, n_genes: int, folder: str) -> None:
        super().__init__()
        self.linear = nn.Linear(n_genes, 1)
        self.folder = Path(folder)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        if self.training:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / f"rank-{os.environ.get('RANK', '0')}", "a") as file:
                print(json.dumps(batch["index"].tolist()), file=file)
        return {"loss": self.linear(batch["X"]).square().mean()}


class SetEffect(nn.Module):
    """Model that learns the mean difference between a set and its controls."""

    def __init__(self, n_genes: int) -> None:
        super().__init__()
        self.effect = nn.Parameter(torch.zeros(n_genes))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        found = (batch.X - batch.control.X).unflatten(0, (len(batch.sets), -1)).mean(dim=1)
        return {"loss": (found - self.effect).square().mean()}


class Fragile(MLPClassifier):
    """Model that once, in a forward pass of training, raises an error or kills its process."""

    def __init__(
        self,
        label: str,
        n_genes: int,
        n_labels: int,
        mark: str,
        at: int,
        rank: int = 0,
        how: str = "error",
        dropout: float = 0.1,
    ) -> None:
        super().__init__(label, n_genes, n_labels, hidden_dim=16, dropout=dropout)
        self.mark, self.at, self.rank, self.how = Path(mark), at, rank, how
        self.n_forward = 0

    def forward(self, batch: Any) -> dict[str, Tensor]:
        if self.training:
            self.n_forward += 1
            if self.n_forward == self.at and int(os.environ.get("RANK", "0")) == self.rank and not self.mark.exists():
                self.mark.touch()
                if self.how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("the power is gone")
        return super().forward(batch)


class Plain(nn.Module):
    """Model that has no list of blocks and accepts batches of X alone."""

    def __init__(self, n_genes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_genes, 4), nn.Dropout(0.5))

    def forward(self, batch: Any) -> dict[str, Tensor]:
        X = batch if isinstance(batch, Tensor) else batch["X"]
        return {"loss": self.layers(X).square().mean()}


class Exact(Plain):
    """Model that accepts only unmodified counts."""

    def forward(self, batch: Any) -> dict[str, Tensor]:
        X = batch if isinstance(batch, Tensor) else batch["X"]
        if X.dtype != torch.float32 or X.max() != X.max().round():
            raise TypeError(f"counts came as {X.dtype}")
        return super().forward(X.log1p())
