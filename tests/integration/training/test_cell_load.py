"""Rows that the TOML files of cell-load experiments assign to training, validation and test sets."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import dasksc
from dasksc.errors import DaskscError
from dasksc.integrations.cell_load import from_toml

pytestmark = pytest.mark.core

GENES = ["ctrl", "AARS", "NUP107", "MYC", "TP53"]
TOML = """
[datasets]
screen.v2 = "{folder}/screen"
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cell_load")
    (folder / "screen").mkdir()
    write(folder / "screen" / "k562.h5ad", ["k562"], 0)
    write(folder / "screen" / "both.h5", ["jurkat", "rpe1"], 1)
    write(folder / "oneo1.h5ad", ["hepg2"], 2)
    write(folder / "oneo2.h5ad", ["a549"], 3)
    return folder


def read(folder: Path, text: str = TOML, **options: Any) -> Any:
    text = text.replace("screen.v2 =", '"screen.v2" =', 1)
    (folder / "experiment.toml").write_text(text.format(folder=folder))
    names = {"cell_type_key": "line", "pert_col": "target", "control_pert": "ctrl"}
    return from_toml(folder / "experiment.toml", **names | options)


def test_cell_types_and_perturbations_go_to_the_parts_that_the_file_says(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        experiment = read(folder)
    assert "1 perturbations of [fewshot] occur in no cell: screen.v2.rpe1: GONE" in caplog.text
    obs = experiment.adata.obs
    assert set(obs["file"]) == {"screen.v2/both", "screen.v2/k562", "other/oneo1", "other/oneo2"}
    assert (obs["dataset"].astype(str) == obs["file"].astype(str).str.split("/").str[0]).all()
    found = {
        part: {(line, gene) for line, gene in zip(obs["line"].iloc[rows], obs["target"].iloc[rows], strict=True)}
        for part, rows in experiment.parts.items()
    }
    perturbed = GENES[1:]
    assert found["train"] == {
        *(("k562", gene) for gene in GENES),
        *(("rpe1", gene) for gene in ("ctrl", "MYC", "TP53")),
        *((line, "ctrl") for line in ("jurkat", "hepg2")),
    }
    assert found["val"] == {*(("hepg2", gene) for gene in perturbed), ("rpe1", "AARS")}
    assert found["test"] == {*(("jurkat", gene) for gene in perturbed), ("rpe1", "AARS"), ("rpe1", "NUP107")}
    # Every condition has six cells, all in the same split.
    assert {part: len(rows) for part, rows in experiment.parts.items()} == {
        part: 6 * len(conditions) for part, conditions in found.items()
    }
    assert all((np.diff(rows) > 0).all() for rows in experiment.parts.values())
    assert experiment.table.loc[("screen.v2", "rpe1")].tolist() == [2, 12, 1, 6, 2, 12, 6]
    assert experiment.table.loc[("other", "a549")].tolist() == [0, 0, 0, 0, 0, 0, 6]
    dataset = dasksc.scDataset(
        experiment.adata, dasksc.Streaming(indices=experiment.parts["test"]), 64, rank=0, world_size=1
    )
    assert sum(len(batch) for batch in dataset) == 36


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (("[training]", "[trainign]"), "'trainign'.*'training'"),
        (('= "train"', '= "test"'), "must be 'train'"),
        (('jurkat" = "test"', 'jurkat" = "tset"'), "'train'.*'val'.*'test'"),
        (("v2.jurkat", "v2.jurkta"), "'screen.v2'.*'jurkta'.*'jurkat'"),
        (('"other.hepg2"', "other.hepg2"), '"other.hepg2"'),
        (('"other.hepg2"', '"outer.hepg2"'), "screen.v2"),
        (('val = ["AARS"]', 'val = "AARS"'), "must hold lists of perturbations"),
        (('val = ["AARS"]', 'train = ["AARS"]'), "must hold lists of perturbations"),
        (("v2.rpe1", "v2.jurkat"), r"\[zeroshot\].*\[fewshot\]"),
        (("/screen", "/scren"), ".h5.*.h5ad"),
        (("[zeroshot]", "[zeroshot"), "is not a TOML file"),
        (('"{folder}/screen"', "3"), "must be a path"),
    ],
    ids=range(12),
)
def test_invalid_toml_files_are_refused(folder: Path, change: tuple[str, str], match: str) -> None:
    with pytest.raises(DaskscError, match=match):
        read(folder, TOML.replace(*change))


def test_an_experiment_without_controls_or_without_a_file_is_refused(folder: Path) -> None:
    with pytest.raises(DaskscError, match="no cell has control_pert='non-targeting' in obs\\['target'\\]"):
        read(folder, control_pert="non-targeting")
    with pytest.raises(DaskscError, match="there is no experiment at"):
        from_toml(folder / "nowhere.toml")
