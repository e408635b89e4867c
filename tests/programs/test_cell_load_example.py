"""The example that reads experiments of cell-load divides a small screen as the TOML file says."""

from __future__ import annotations

import sys
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from cell_load_experiment import from_toml

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
NAMES = {"cell_type_key": "line", "pert_col": "target", "control_pert": "ctrl"}


def write(path: Path, cell_types: list[str], seed: int) -> None:
    obs = pd.DataFrame([(line, gene) for line in cell_types for gene in GENES] * 6, columns=["line", "target"])
    obs = obs.sample(frac=1, random_state=seed).set_axis([f"{path.stem}{i}" for i in range(len(obs))])
    ad.AnnData(np.ones((len(obs), 2), "f4"), obs=obs, var=pd.DataFrame(index=["a", "b"])).write_h5ad(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiment")
    (folder / "screen").mkdir()
    write(folder / "screen" / "k562.h5ad", ["k562"], 0)
    write(folder / "screen" / "both.h5", ["jurkat", "rpe1"], 1)
    write(folder / "oneo1.h5ad", ["hepg2"], 2)
    write(folder / "oneo2.h5ad", ["a549"], 3)
    return folder


def written(folder: Path, text: str) -> Path:
    (folder / "experiment.toml").write_text(text.format(folder=folder))
    return folder / "experiment.toml"


def test_cells_go_to_the_parts_that_the_file_says(folder: Path) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in NAMES.items()]
    program = ROOT / "examples" / "cell_load_experiment.py"
    command = [sys.executable, program, written(folder, TOML), *options, "--out", folder / "parts.npz"]
    printed = programs.run(command, is_preloaded=True)
    assert "screen.v2.rpe1 has GONE" in printed
    paths = [folder / name for name in ("screen/both.h5", "screen/k562.h5ad", "oneo1.h5ad", "oneo2.h5ad")]
    obs = dasksc.open(paths).obs
    with np.load(folder / "parts.npz") as parts:
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


@pytest.mark.parametrize(
    ("given", "instead", "fact"),
    [
        ("[training]", "[trainign]", "trainign"),
        ('= "train"', '= "test"', "'train'"),
        ('jurkat" = "test"', 'jurkat" = "tset"', "'tset'"),
        ("v2.jurkat", "v2.jurkta", "v2.jurkta"),
        ('"other.hepg2"', "other.hepg2", "in quotes"),
        ('val = ["AARS"]', 'val = "AARS"', "'AARS'"),
        ("v2.rpe1", "v2.jurkat", "fewshot"),
        ("/screen", "/scren", "h5ad"),
    ],
)
def test_what_a_file_cannot_say_is_refused(folder: Path, given: str, instead: str, fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        from_toml(written(folder, TOML.replace(given, instead)), **NAMES)
