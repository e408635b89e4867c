"""Predictions of several ranks with FSDP."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.support.conversions import read
from tests.support.data import make_adata, write_store
from tests.support.predictions import plain
from tests.support.programs import torchrun

pytestmark = [pytest.mark.programs, pytest.mark.xdist_group("ddp")]


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_ranks_of_a_group_write_what_the_plain_loop_yields(tmp_path, n_ranks):
    atlas = write_store(make_adata(203), tmp_path, "h5ad")
    printed = torchrun(n_ranks, "predict_ranks.py", atlas, tmp_path / "emb.zarr")
    assert np.array_equal(read(tmp_path / "emb.zarr").obsm["X_emb"], plain(atlas, is_whole=False))
    reports = re.findall(r"^rank (\d): (\d+) cells, True, \(203, \d\)$", printed, re.MULTILINE)
    assert len(reports) == n_ranks, printed
    assert sum(int(n) for _, n in reports) == 203
    # After prediction, `predict` restores the training mode of the model.
    assert len(re.findall(r"^rank \d again: 0, training True$", printed, re.MULTILINE)) == n_ranks
