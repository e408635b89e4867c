"""Checkpoints of another model or optimizer."""

from __future__ import annotations

import pytest

from dasksc import InputError
from tests.support.training import train

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]


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
