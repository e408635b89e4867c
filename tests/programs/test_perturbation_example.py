"""Example for perturbation screens: on held-out conditions, its model of cell sets beats both mean baselines."""

from __future__ import annotations

import re

import anndata
import numpy as np
import pytest

from dasksc.datasets import synthetic_screen
from tests.support.programs import ROOT, TORCHRUN, run

pytestmark = pytest.mark.programs


def test_the_model_beats_both_means_on_two_ranks(tmp_path):
    program = ROOT / "examples" / "train_perturbation.py"
    command = [*TORCHRUN, "--standalone", "--nproc_per_node=2", program, "--cells", "16000", "--epochs", "10"]
    printed = run(command, is_preloaded=True, TMPDIR=str(tmp_path))
    assert len(re.findall(r"^epoch \d+: loss", printed, re.MULTILINE)) == 10
    assert "20 conditions held out" in printed
    errors = dict(re.findall(r"^  (.*?) +(\d\.\d+)$", printed, re.MULTILINE))
    assert set(errors) == {"set model", "same perturbation, other lines", "mean of all"}
    model, same, mean = (float(errors[name]) for name in errors)
    assert model < 0.9 * same < 0.9 * mean


def test_the_screen_has_effects_only_where_genes_are_expressed(tmp_path):
    synthetic_screen(tmp_path / "screen.h5ad", 6_000, 60, lines=2, perturbations=3)
    adata = anndata.read_h5ad(tmp_path / "screen.h5ad")
    assert adata.obs.cell_line.is_monotonic_increasing
    X = np.log1p(adata.X.toarray())
    for line in adata.obs.cell_line.cat.categories:
        own = (adata.obs.cell_line == line).to_numpy()
        is_control = (adata.obs.gene == "non-targeting").to_numpy()
        base = X[own & is_control].mean(axis=0)
        change = np.abs(X[own & ~is_control].mean(axis=0) - base)
        assert change[base < 0.2].max() < 0.1 < change[base > 0.8].max()
