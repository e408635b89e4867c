"""Predictions of several ranks with DDP and FSDP when ranks fail or receive SIGKILL at random moments."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import dasksc
from tests.support.data import make_adata, write_store
from tests.support.predictions import plain, written
from tests.support.programs import PROGRAMS, run, torchrun

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("ddp")]


@pytest.fixture
def atlas(tmp_path: Path) -> Path:
    return write_store(make_adata(203), tmp_path, "h5ad")


@pytest.mark.parametrize(("n_ranks", "how"), [(3, "ddp"), (2, "fsdp"), (3, "fsdp")])
def test_ranks_of_a_group_write_what_the_plain_loop_yields(atlas, tmp_path, n_ranks, how):
    printed = torchrun(n_ranks, "predict_ranks.py", atlas, tmp_path / "emb.zarr", how)
    assert np.array_equal(written(tmp_path / "emb.zarr"), plain(atlas, is_whole=how == "ddp"))
    reports = re.findall(r"^rank (\d): (\d+) cells, True, \(203, \d\)$", printed, re.MULTILINE)
    assert len(reports) == n_ranks, printed
    assert sum(int(n) for _, n in reports) == 203
    # After prediction, `predict` restores the training mode of the model, also inside a DDP wrapper.
    assert len(re.findall(r"^rank \d again: 0, training True$", printed, re.MULTILINE)) == n_ranks


def test_when_a_rank_fails_the_others_report_it_and_a_later_run_completes_the_rest(atlas, tmp_path):
    out = tmp_path / "emb.zarr"
    printed = torchrun(2, "predict_ranks.py", atlas, out, "failing")
    assert "rank 1 failed: ZeroDivisionError: this rank fails" in printed
    assert "rank 0 failed: StorageError: rank 1 failed: ZeroDivisionError: this rank fails." in printed
    assert not out.exists()


@pytest.mark.parametrize("kind", ["new", "store"])
def test_predictions_killed_ten_times_are_whole_or_not_there(atlas, tmp_path, kind):
    source, out = atlas, tmp_path / "out.zarr"
    if kind == "store":
        dasksc.convert(atlas, out)
        source = out
    printed = json.loads(run([sys.executable, PROGRAMS / "predict_kills.py", source, out, "X_killed"]))
    assert printed["n_kills"] == 10
    assert printed["n_looks"] > 10
    assert sorted(printed["units_after_kills"]) == printed["units_after_kills"]
    assert not list(tmp_path.glob("*.partial"))
