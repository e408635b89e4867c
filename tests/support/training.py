"""Small training runs: configurations, metrics, and the same training as a plain loop."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dasksc.train import Config, fit

N_CELLS, N_GENES, N_TYPES = 203, 40, 5
EPOCHS = 2
SHARE = 0.1


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


def changed(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with changes that are named section__key."""
    raw = copy.deepcopy(raw)
    for name, value in changes.items():
        section, _, key = name.partition("__")
        raw[section][key] = value
    return raw


def train(raw: dict[str, Any], *, plots: bool = False, **changes: Any) -> Any:
    """Train with changes that are named section__key, without the plot, which takes longer than all other steps."""
    with nullcontext() if plots else patch("dasksc.train.loop.plot"):
        return fit(Config.of(changed(raw, changes)), say=lambda line: None)
