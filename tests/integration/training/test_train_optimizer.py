"""State and arguments of the optimizer of a resumed training run."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from dasksc.train import load_model
from tests.support.training import saved, train

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"weight_decay": 0.5}, {"weight_decay": 0.0}, {"weight_decay": 0.0}),
        ({"betas": [0.5, 0.9]}, {"betas": [0.8, 0.99], "eps": 1e-5}, {"betas": (0.8, 0.99), "eps": 1e-5}),
        (
            {"name": "sgd", "momentum": 0.9, "nesterov": True},
            {"name": "sgd", "momentum": 0.5},
            {"momentum": 0.5, "nesterov": False},
        ),
    ],
    ids=str,
)
def test_the_arguments_of_the_optimizer_are_those_of_the_resumed_run(before, after, expected, raw, folder):
    train(raw, training__optimizer={"lr": 1e-3, **before})
    train(raw, training__optimizer={"lr": 1e-3, **after}, training__resume_from="auto", training__max_steps=8)
    assert saved(folder / "step-00000008", *expected) == expected


def test_the_state_of_the_optimizer_is_that_of_the_checkpoint(raw, folder, tmp_path):
    raw["training"]["optimizer"] = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    train(raw)
    # Only the stored momentum moves the parameters, since the dampening multiplies new gradients by 0.
    stopped = {"name": "sgd", "lr": 0.1, "momentum": 1.0, "dampening": 1.0}
    train(raw, training__optimizer=stopped, training__resume_from="auto", training__max_steps=8)
    first, second, third = (load_model(folder / f"step-0000000{step}").state_dict() for step in (4, 6, 8))
    buffers = {f"layers.last.{name}": torch.zeros_like(third[f"layers.last.{name}"]) for name in ("weight", "bias")}
    state = {name: {"momentum_buffer": buffer} for name, buffer in buffers.items()}
    with warnings.catch_warnings(action="ignore"):
        load({"optimizer": {"state": state}}, checkpoint_id=folder / "step-00000006", no_dist=True)
    for name, buffer in buffers.items():
        assert buffer.abs().max() > 0
        assert not torch.equal(first[name], second[name])
        torch.testing.assert_close(third[name], second[name] - 2 * 0.1 * buffer)
