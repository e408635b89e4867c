"""Small training runs: configurations, metrics, and the same training as a plain loop."""

from __future__ import annotations

import copy
import csv
import sys
import warnings
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_loader import load

import dasksc
from dasksc.train import Config, fit
from dasksc.train.data import _split
from dasksc.train.models import MLPClassifier

N_CELLS, N_GENES, N_TYPES = 203, 40, 5
RTOL = 1e-4
EPOCHS = 2
SHARE = 0.1
COMMAND = [sys.executable, "-m", "dasksc", "train"]


def training(atlas: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a configuration; `changes` are named section__key."""
    raw: dict[str, Any] = {
        "data": {
            "path": str(atlas),
            "strategy": {"name": "BlockShuffling", "block_size": 4},
            "validation": SHARE,
            "batch_size": 8,
            "fetch_factor": 4,
        },
        "model": {"name": "mlp_classifier", "label": "cell_type", "hidden_dim": 16, "dropout": 0.0},
        "training": {
            "max_epochs": EPOCHS,
            "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
            "checkpoint_dir": str(folder),
            "log_every_n_steps": 1,
            "logger": "csv",
        },
    }
    return changed(raw, changes)


def small(atlas: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a configuration for one process with dropout, by default with two epochs of 13 steps."""
    raw = training(atlas, folder, data__validation=None, data__batch_size=16)
    del raw["model"]["dropout"], raw["training"]["optimizer"]
    return changed(raw, changes)


def six_steps(atlas: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a configuration for one process and six steps that keeps every second step as a checkpoint."""
    steps = {"training__max_steps": 6, "training__save_every": 2, "training__save_top_k": -1}
    return small(atlas, folder, **steps | changes)


def changed(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with changes that are named section__key."""
    raw = copy.deepcopy(raw)
    for name, value in changes.items():
        section, _, key = name.partition("__")
        raw[section][key] = value
    return raw


def figures(folder: Path, name: str = "loss") -> list[float]:
    with open(folder / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


@cache
def alone(
    atlas: Path, n_ranks: int, *, then: int | None = None, k: int = 1, clip: float | None = None, share: float = SHARE
) -> dict[str, list[float]]:
    """Run the same training in a plain loop, whose batches concatenate those of all ranks."""
    # `then` is the number of ranks in later epochs, if it differs from that of the first.
    adata = dasksc.open(atlas)
    rows, held_out = split_rows(adata, share=share)
    strategy = dasksc.BlockShuffling(4, indices=rows)
    options = {"batch_size": 8, "fetch_factor": 4, "seed": 0, "obs": ["cell_type"]}
    rest = dasksc.scDataset(adata, dasksc.Streaming(held_out), rank=0, world_size=1, **options)
    torch.manual_seed(0)
    model = MLPClassifier("cell_type", N_GENES, N_TYPES, hidden_dim=16, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: dict[str, list[float]] = {"loss": [], "accuracy": [], "gradient_norm": [], "validation_loss": []}
    for epoch in range(EPOCHS):
        n_now = then if then and epoch else n_ranks
        ranks = [dasksc.scDataset(adata, strategy, rank=r, world_size=n_now, **options) for r in range(n_now)]
        for rank in ranks:
            rank.set_epoch(epoch)
        steps = list(zip(*ranks, strict=True))
        for group in zip_longest(*[iter(steps)] * k):
            parts = [batch for step in group if step is not None for batch in step]
            outputs = model(joined(parts))
            outputs["loss"].backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf)
            optimizer.step()
            optimizer.zero_grad()
            values = {name: value.item() for name, value in outputs.items() if name != "n"}
            values["gradient_norm"] = norm.item()
            for name, value in values.items():
                found[name].append(value)
        with torch.no_grad():
            found["validation_loss"].append(model(joined(list(rest)))["loss"].item())
    return found


def joined(parts: list[Any]) -> dict[str, Any]:
    labels = torch.cat([part.obs["cell_type"] for part in parts])
    return {"X": torch.cat([part.X for part in parts]), "obs": {"cell_type": labels}}


def assert_same(folder: Path, expected: dict[str, list[float]], *names: str) -> None:
    for name in names:
        np.testing.assert_allclose(figures(folder, name), expected[name], rtol=RTOL, err_msg=f"{folder.name}: {name}")


def split_rows(adata: Any, **validation: Any) -> list[Any]:
    """Return the rows for training and the held-out rows of a section ``data.validation``."""
    return list(_split(adata, validation).values())


def train(raw: dict[str, Any], **changes: Any) -> Any:
    """Train with changes that are named section__key."""
    return fit(Config.of(changed(raw, changes)), say=lambda line: None)


def rows_of(folder: Path) -> list[dict[str, float]]:
    with open(folder / "metrics.csv", newline="") as file:
        return [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def saved(path: Path, *names: str) -> dict[str, Any]:
    """Return the optimizer arguments stored in a checkpoint."""
    group = dict.fromkeys(names)
    with warnings.catch_warnings(action="ignore"):
        load({"optimizer": {"param_groups": [group]}}, checkpoint_id=path, no_dist=True)
    return group
