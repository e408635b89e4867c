"""The example that reads experiments of cell-load divides a small screen as the TOML file says."""

from __future__ import annotations

import sys
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import dasksc
from tests.support import programs
from tests.support.programs import ROOT

pytestmark = pytest.mark.programs

GENES = ["ctrl", "AARS", "NUP107", "MYC", "TP53"]
TOML = """
[datasets]
"screen.v2" = "{folder}/screen"
"other" = "{folder}/o{{ne,wt}}o*.h5ad"

[training]
"screen.v2" = "train"

[zeroshot]
"screen.v2.jurkat" = "test"
"other.hepg2" = "val"

[fewshot."screen.v2.rpe1"]
val = ["AARS"]
test = ["AARS", "NUP107", "GONE"]
"""


def write(path: Path, cell_types: list[str], seed: int) -> None:
    obs = pd.DataFrame([(line, gene) for line in cell_types for gene in GENES] * 6, columns=["line", "target"])
    obs = obs.sample(frac=1, random_state=seed).set_axis([f"{path.stem}{i}" for i in range(len(obs))])
    ad.AnnData(np.ones((len(obs), 2), "f4"), obs=obs, var=pd.DataFrame(index=["a", "b"])).write_h5ad(path)


def test_cells_go_to_the_parts_that_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "screen").mkdir()
    files = {"screen/both.h5": ["jurkat", "rpe1"], "screen/k562.h5ad": ["k562"], "oneo1.h5ad": ["hepg2"]}
    files["oneo2.h5ad"] = ["a549"]
    for seed, (name, cell_types) in enumerate(files.items()):
        write(tmp_path / name, cell_types, seed)
    (tmp_path / "experiment.toml").write_text(TOML.format(folder=tmp_path))
    options = ["--cell-type-key=line", "--pert-col=target", "--control-pert=ctrl"]
    program = ROOT / "examples" / "cell_load_experiment.py"
    command = [sys.executable, program, tmp_path / "experiment.toml", *options, "--out", tmp_path / "parts.npz"]
    printed = programs.run(command, is_preloaded=True)
    assert "screen.v2.rpe1 has GONE" in printed
    obs = dasksc.open([tmp_path / name for name in files]).obs
    with np.load(tmp_path / "parts.npz") as parts:
        counts = {
            part: obs.iloc[rows].groupby(["line", "target"], observed=True).size().to_dict()
            for part, rows in parts.items()
        }
    perturbed = GENES[1:]
    expected = {
        "train": [("k562", gene) for gene in GENES]
        + [("rpe1", gene) for gene in ("ctrl", "MYC", "TP53")]
        + [(line, "ctrl") for line in ("jurkat", "hepg2")],
        "val": [*(("hepg2", gene) for gene in perturbed), ("rpe1", "AARS")],
        "test": [*(("jurkat", gene) for gene in perturbed), ("rpe1", "AARS"), ("rpe1", "NUP107")],
    }
    assert counts == {part: dict.fromkeys(conditions, 6) for part, conditions in expected.items()}
