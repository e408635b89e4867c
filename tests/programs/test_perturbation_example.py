"""Example for perturbation screens: on held-out conditions, its model of cell sets beats both mean baselines."""

from __future__ import annotations

import re

import pytest

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
