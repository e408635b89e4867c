"""Predictions of real ranks: under torchrun, with DDP and FSDP, and killed by SIGKILL at random moments."""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import torch
from torch import nn

import dasksc
from tests.support.data import make_adata
from tests.support.programs import PROGRAMS, run, torchrun

pytestmark = [pytest.mark.core, pytest.mark.xdist_group("ddp")]

N_OBS, N_VARS, BATCH = 203, 17, 8


@pytest.fixture
def atlas(tmp_path: Path) -> Path:
    path = tmp_path / "atlas.h5ad"
    make_adata(N_OBS, N_VARS).write_h5ad(path)
    return path


def plain(atlas: Path, *, is_whole: bool) -> np.ndarray:
    torch.manual_seed(0)
    first, second = nn.Linear(N_VARS, 6), nn.Linear(6, 3)
    dataset = dasksc.scDataset(atlas, dasksc.Streaming(), BATCH)
    with torch.no_grad():
        return np.concatenate([(second(first(batch)) if is_whole else first(batch)).numpy() for batch in dataset])


def written(path: Path) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ad.read_zarr(path).obsm["X_emb"]


@pytest.mark.parametrize(("n_ranks", "how"), [(3, "ddp"), (2, "fsdp"), (3, "fsdp")])
def test_ranks_of_a_group_write_what_the_plain_loop_yields(atlas, tmp_path, n_ranks, how):
    printed = torchrun(n_ranks, "predict_ranks.py", atlas, tmp_path / "emb.zarr", how)
    assert np.array_equal(written(tmp_path / "emb.zarr"), plain(atlas, is_whole=how == "ddp"))
    reports = re.findall(r"^rank (\d): (\d+) cells, True, \(203, \d\)$", printed, re.MULTILINE)
    assert len(reports) == n_ranks, printed
    assert sum(int(n) for _, n in reports) == N_OBS
    # The modes of DDP and its module are one; of a model in training mode it is restored.
    assert len(re.findall(r"^rank \d again: 0, training True$", printed, re.MULTILINE)) == n_ranks


def test_when_a_rank_fails_the_others_say_so_and_the_rest_is_done_later(atlas, tmp_path):
    out = tmp_path / "emb.zarr"
    printed = torchrun(2, "predict_ranks.py", atlas, out, "failing")
    assert "rank 1 failed: ZeroDivisionError: this rank fails" in printed
    assert "rank 0 failed: StorageError: rank 1 failed ZeroDivisionError: this rank fails. Complete" in printed
    assert not out.exists()


@pytest.mark.parametrize("kind", ["new", "store", "file"])
def test_predictions_killed_ten_times_are_whole_or_not_there(atlas, tmp_path, kind):
    out = atlas if kind == "file" else tmp_path / "out.zarr"
    source = atlas
    if kind == "store":
        dasksc.convert(atlas, out)
        source = out
    printed = json.loads(run([sys.executable, PROGRAMS / "predict_kills.py", source, out, "X_killed"]))
    assert printed["n_kills"] == 10
    assert printed["n_looks"] > 10
    assert sorted(printed["units_after_kills"]) == printed["units_after_kills"]
    assert not list(tmp_path.glob("*.partial"))
