"""Predictions of ranks, and the plain loop that they must match."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import torch
from torch import nn

import dasksc
from tests.support.data import make_adata
from tests.support.programs import torchrun

N_OBS, N_VARS, BATCH = 203, 17, 8


def write_atlas(folder: Path) -> Path:
    """Write the atlas whose rows the ranks predict."""
    path = folder / "atlas.h5ad"
    make_adata(N_OBS, N_VARS).write_h5ad(path)
    return path


def assert_ranks_write_the_plain_loop(atlas: Path, out: Path, n_ranks: int, how: str) -> None:
    """Predict on ranks of ``torchrun`` under DDP or FSDP; fail unless `out` equals the result of the plain loop."""
    printed = torchrun(n_ranks, "predict_ranks.py", atlas, out, how)
    assert np.array_equal(written(out), plain(atlas, is_whole=how == "ddp"))
    reports = re.findall(r"^rank (\d): (\d+) cells, True, \(203, \d\)$", printed, re.MULTILINE)
    assert len(reports) == n_ranks, printed
    assert sum(int(n) for _, n in reports) == N_OBS
    # After prediction, `predict` restores the training mode of the model, also inside a DDP wrapper.
    assert len(re.findall(r"^rank \d again: 0, training True$", printed, re.MULTILINE)) == n_ranks


def plain(atlas: Path, *, is_whole: bool) -> np.ndarray:
    """Return the predictions of a plain loop over the atlas, with the model of the ranks or only its first layer."""
    torch.manual_seed(0)
    first, second = nn.Linear(dasksc.open(atlas).n_vars, 6), nn.Linear(6, 3)
    dataset = dasksc.scDataset(atlas, dasksc.Streaming(), BATCH)
    with torch.no_grad():
        return np.concatenate([(second(first(batch)) if is_whole else first(batch)).numpy() for batch in dataset])


def written(path: Path) -> np.ndarray:
    """Return the predictions in a store."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ad.read_zarr(path).obsm["X_emb"]
