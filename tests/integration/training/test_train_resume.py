"""Resuming a training run on two ranks and on one, checkpoints that do not match, and retention of checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch
from torch import nn

from dasksc import InputError
from dasksc.train.checkpoint import Checkpoints
from dasksc.train.config import Optimizer
from dasksc.train.optim import hyperparameters_of, make_optimizer
from dasksc.train.parallel import RankContext
from tests.support.programs import torchrun
from tests.support.training import (
    RTOL,
    alone,
    assert_same,
    changed,
    checkpoints,
    figures,
    six_steps,
    train,
    training,
)

ALONE = RankContext(rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"), strategy="single")

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def raw(training_atlas, folder) -> dict[str, Any]:
    return six_steps(training_atlas, folder)


# --- Two ranks ----------------------------------------------------------------------------------------

SHARDED: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"training__fsdp": {"min_num_params": 300}}}
two_ranks_group = pytest.mark.xdist_group("train_resume")


@pytest.fixture(scope="module")
def two_ranks(training_atlas, tmp_path_factory) -> Path:
    """Return the folder of runs on two ranks that stop within an epoch and resume, executed in one launch."""
    folder = tmp_path_factory.mktemp("two")
    trainings: dict[str, Any] = {}
    for name, section in SHARDED.items():
        stopped = training(training_atlas, folder / f"{name}-epochs", training__max_steps=5, **section)
        trainings[f"{name}-stopped"] = stopped
        trainings[f"{name}-epoch"] = changed(
            stopped, {"training__max_steps": None, "training__max_epochs": 1, "training__resume_from": "auto"}
        )
    (folder / "trainings.json").write_text(json.dumps(trainings))
    torchrun(2, "train_many.py", folder / "trainings.json")
    return folder


@two_ranks_group
@pytest.mark.parametrize("name", SHARDED)
def test_a_run_resumed_on_two_ranks_and_then_on_one_has_the_losses_of_a_plain_loop(name, two_ranks, training_atlas):
    raw = json.loads((two_ranks / "trainings.json").read_text())[f"{name}-epoch"]
    report = train(raw, training__max_epochs=2)
    assert (report.strategy, report.world_size) == ({"ddp": "single"}.get(name, name), 1)
    expected = alone(training_atlas, 2, then=1)
    assert_same(two_ranks / f"{name}-epochs", expected, "loss")
    # The first value is from the step at which the run stopped.
    found = figures(two_ranks / f"{name}-epochs", "validation_loss")[1:]
    np.testing.assert_allclose(found, expected["validation_loss"], rtol=RTOL)


# --- Checkpoints ----------------------------------------------------------------------------------------


def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_best_checkpoints_exclude_those_of_the_abandoned_branch(tmp_path):
    kept = Checkpoints(folder=tmp_path, keep=1, mode="min", context=ALONE)
    everything = Checkpoints(folder=tmp_path, keep=-1, mode="min", context=ALONE)
    for step, value in [(1, 5.0), (2, 0.1), (4, 0.2)]:
        everything.save(step, *linear(), {}, value)
    kept.save(3, *linear(), {}, 3.0, branched_at=1)
    assert checkpoints(tmp_path) == [3]
    kept.save(5, *linear(), {}, 4.0)
    assert checkpoints(tmp_path) == [3, 5]
    assert checkpoints(tmp_path / "abandoned-1") == [2, 4]


def test_copies_under_other_names_are_neither_taken_nor_removed(tmp_path):
    kept = Checkpoints(folder=tmp_path, keep=0, mode="min", context=ALONE)
    shutil.copytree(kept.save(9, *linear(), {}, 0.1), tmp_path / "copy-of-step-00000009")
    kept.save(10, *linear(), {}, None)
    assert [path.name for path in kept.all()] == ["step-00000010"]
    assert (tmp_path / "copy-of-step-00000009" / "state.json").exists()


def test_hyperparameters_are_what_constructors_take():
    optimizer = make_optimizer([nn.Parameter(torch.ones(1))], Optimizer(name="tests.support.training:Counting"))
    names = hyperparameters_of(optimizer)
    assert {"lr", "momentum", "weight_decay", "gain", "params"} <= names
    assert "n_steps" not in names


# --- Mismatches ---------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Model with a class attribute `width`, which a test sets to imitate a change of the model's code."""

    width = 4

    def __init__(self, n_genes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(n_genes, self.width)

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(batch if isinstance(batch, torch.Tensor) else batch["X"]).square().mean()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_dim": 32}, r"model\.hidden_dim is 32 and was 16.* has shape \[32, 40\] and had \[16, 40\]"),
        (
            {"num_layers": 3},
            r"model\.num_layers is 3 in this run and is not.*layers\.blocks\.2\.0\.weight is not in the checkpoint",
        ),
        (
            {"num_layers": 1},
            r"model\.num_layers is 1 in this run and is not given.*layers\.blocks\.1\.\S+ is only in the checkpoint",
        ),
        ({"name": "autoencoder", "label": None}, "model.name is 'autoencoder' and was 'mlp_classifier'"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_model_is_refused(change, message, raw, folder):
    train(raw)
    raw["model"] = {name: value for name, value in (raw["model"] | change).items() if value is not None}
    with pytest.raises(InputError, match=message) as caught:
        train(raw, training__resume_from="auto")
    assert str(folder / "step-00000006") in str(caught.value)
    assert "another training.checkpoint_dir" in str(caught.value)


def test_a_checkpoint_of_an_atlas_with_other_genes_is_refused(raw, training_atlas, tmp_path):
    train(raw)
    ad.read_h5ad(training_atlas)[:, 3:].write_h5ad(tmp_path / "fewer.h5ad")
    with pytest.raises(InputError, match=r"model\.n_genes is 37 and was 40"):
        train(raw, data__path=str(tmp_path / "fewer.h5ad"), training__resume_from="auto")


def test_a_checkpoint_of_changed_code_is_refused(raw, monkeypatch):
    raw["model"] = {"name": f"{__name__}:Wide"}
    train(raw)
    monkeypatch.setattr(Wide, "width", 5)
    with pytest.raises(
        InputError,
        match=r"arguments are the same, so the code or the data differ.*has shape \[5, 40\] and had \[4, 40\]",
    ):
        train(raw, training__resume_from="auto")


def test_arguments_that_change_no_shape_may_change(raw):
    train(raw)
    raw["model"]["dropout"] = 0.5
    assert train(raw, training__resume_from="auto", training__max_steps=8).n_steps == 8


@pytest.mark.parametrize(("before", "after"), [("sgd", "adamw"), ("adamw", "sgd"), ("adamw", "adam")])
def test_a_checkpoint_of_another_optimizer_is_refused(before, after, raw):
    train(raw, training__optimizer={"name": before})
    with pytest.raises(InputError, match=rf"training\.optimizer\.name is '{after}' and was '{before}'"):
        train(raw, training__optimizer={"name": after}, training__resume_from="auto")


def test_an_optimizer_whose_state_the_checkpoint_lacks_is_refused(raw):
    train(raw, training__optimizer={"name": "sgd"})
    message = r"training\.optimizer\.momentum is 0\.9 in this run and is not.*momentum_buffer is not in the checkpoint"
    with pytest.raises(InputError, match=message):
        train(raw, training__optimizer={"name": "sgd", "momentum": 0.9}, training__resume_from="auto")


def test_a_checkpoint_that_does_not_name_its_optimizer_is_known_by_its_state(raw, folder):
    train(raw, training__optimizer={"name": "sgd"})
    file = folder / "step-00000006" / "state.json"
    state = json.loads(file.read_text())
    del state["optimizer"]
    file.write_text(json.dumps(state))
    with pytest.raises(InputError, match=r"does not fit the section .*optimizer.*\.step is not in the checkpoint"):
        train(raw, training__resume_from="auto")
    options = {"training__optimizer": {"name": "sgd"}, "training__max_steps": 8}
    assert train(raw, training__resume_from="auto", **options).n_steps == 8
