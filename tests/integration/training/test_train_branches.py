"""Branches of a resumed training run, and the state of its optimizer."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from dasksc.train import checkpoint, load_model
from tests.support.training import checkpoints, losses, rows_of, saved, six_steps, train

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def raw(training_atlas, folder) -> dict[str, Any]:
    return six_steps(training_atlas, folder)


def test_auto_goes_on_with_the_branch_that_was_trained_last(raw, folder, tmp_path, caplog):
    train(raw)
    shutil.copytree(folder, tmp_path / "before")
    other = {"training__optimizer": {"lr": 1e-2}}
    train(raw, training__resume_from=str(folder / "step-00000002"), training__max_steps=5, **other)
    assert checkpoints(folder) == [2, 4, 5]
    assert checkpoints(folder / "abandoned-1") == [4, 6]
    (warning,) = [record for record in caplog.records if "abandoned-1" in record.getMessage()]
    assert warning.levelno == logging.WARNING
    assert "step-00000004, step-00000006" in warning.getMessage()
    report = train(raw, training__resume_from="auto", training__max_steps=8, **other)
    assert (report.n_steps, checkpoints(folder)) == (8, [2, 4, 5, 6, 8])
    named = str(tmp_path / "before" / "step-00000002")
    unbroken = {"training__checkpoint_dir": str(tmp_path / "unbroken"), "training__resume_from": named}
    train(raw, training__max_steps=8, **unbroken, **other)
    assert losses(folder)[2:] == losses(tmp_path / "unbroken")


def test_a_branch_that_was_set_aside_is_complete_and_can_be_resumed(raw, folder, tmp_path):
    train(raw)
    whole = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("step-00000006/*") if path.is_file()}
    train(raw, training__resume_from=str(folder / "step-00000004"))
    aside = folder / "abandoned-1"
    assert {path: (aside / path).read_bytes() for path in whole} == whole
    train(raw, training__resume_from=str(aside / "step-00000006"), training__max_steps=7)
    assert checkpoints(folder) == [7]
    assert checkpoints(folder / "abandoned-2") == [2, 4, 6]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"weight_decay": 0.5}, {"weight_decay": 0.0}, {"weight_decay": 0.0}),
        ({"weight_decay": 0.5}, {}, {"weight_decay": 0.01}),
        ({"betas": [0.5, 0.9]}, {"betas": [0.8, 0.99], "eps": 1e-5}, {"betas": (0.8, 0.99), "eps": 1e-5}),
        ({"amsgrad": True}, {}, {"amsgrad": False}),
        (
            {"name": "sgd", "momentum": 0.9, "nesterov": True},
            {"name": "sgd", "momentum": 0.5},
            {"momentum": 0.5, "nesterov": False},
        ),
        ({"name": "sgd", "momentum": 0.9}, {"name": "sgd"}, {"momentum": 0}),
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
    with checkpoint._quiet():
        load({"optimizer": {"state": state}}, checkpoint_id=folder / "step-00000006", no_dist=True)
    for name, buffer in buffers.items():
        assert buffer.abs().max() > 0
        assert not torch.equal(first[name], second[name])
        torch.testing.assert_close(third[name], second[name] - 2 * 0.1 * buffer)


def test_the_learning_rate_of_a_resumed_run_follows_its_scheduler(raw, folder):
    raw["training"]["scheduler"] = {"name": "linear_warmup", "total_steps": 10}
    train(raw)
    train(raw, training__optimizer={"lr": 1e-2}, training__resume_from="auto", training__max_steps=8)
    rates = [row["lr"] for row in rows_of(folder) if "lr" in row]
    assert rates == pytest.approx([1e-3 * (1 - step / 10) for step in range(6)] + [1e-2 * 0.4, 1e-2 * 0.3])
