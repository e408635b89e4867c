"""Resuming a training run on two ranks and on one, checkpoints that do not match, and retention of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anndata as ad
import pytest
import torch
from torch import nn

from dasksc import InputError
from dasksc.train.checkpoint import Checkpoints
from dasksc.train.parallel import RankContext
from tests.support.training import (
    checkpoints,
    six_steps,
    train,
)

ALONE = RankContext(rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"), strategy="single")

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def raw(training_atlas, folder) -> dict[str, Any]:
    return six_steps(training_atlas, folder)


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
        ({"hidden_dim": 32}, r"model\.hidden_dim.*32.*16"),
        (
            {"num_layers": 3},
            r"model\.num_layers.*layers\.blocks\.2\.0\.weight",
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
    with pytest.raises(InputError, match=r"model\.n_genes.*37.*40"):
        train(raw, data__path=str(tmp_path / "fewer.h5ad"), training__resume_from="auto")


def test_a_checkpoint_of_changed_code_is_refused(raw, monkeypatch):
    raw["model"] = {"name": f"{__name__}:Wide"}
    train(raw)
    monkeypatch.setattr(Wide, "width", 5)
    with pytest.raises(
        InputError,
        match="40.*40",
    ):
        train(raw, training__resume_from="auto")


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
