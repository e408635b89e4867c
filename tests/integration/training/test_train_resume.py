"""Resuming a training run on two ranks and on one, checkpoints that do not match, and retention of checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dasksc import InputError
from tests.support.training import train

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]


class Wide(nn.Module):
    """Model with a class attribute `width`, which a test sets to imitate a change of the model's code."""

    width = 4

    def __init__(self, n_genes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(n_genes, self.width)

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(batch if isinstance(batch, torch.Tensor) else batch["X"]).square().mean()}


ADAMW, SGD = {"name": "adamw"}, {"name": "sgd"}


@pytest.mark.parametrize(
    ("model", "optimizers", "facts"),
    [
        ({"hidden_dim": 32}, (ADAMW, ADAMW), r"'hidden_dim': 16.*'hidden_dim': 32"),
        ({"num_layers": 1}, (ADAMW, ADAMW), r"layers\.blocks\.1"),
        ({"name": "autoencoder", "label": None}, (ADAMW, ADAMW), "mlp_classifier.*autoencoder"),
        ({}, (ADAMW, {"name": "adam"}), "optimizer .*'adamw'.*'adam'"),
        ({}, (SGD, SGD | {"momentum": 0.9}), "momentum_buffer"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(model, optimizers, facts, raw, folder):
    train(raw, training__optimizer=optimizers[0])
    raw["model"] = {name: value for name, value in (raw["model"] | model).items() if value is not None}
    with pytest.raises(InputError, match=facts) as caught:
        train(raw, training__optimizer=optimizers[1], training__resume_from="auto")
    assert str(folder / "step-00000006") in str(caught.value)


def test_a_checkpoint_of_changed_code_is_refused(raw, monkeypatch):
    raw["model"] = {"name": f"{__name__}:Wide"}
    train(raw)
    monkeypatch.setattr(Wide, "width", 5)
    with pytest.raises(InputError, match="40.*40"):
        train(raw, training__resume_from="auto")
