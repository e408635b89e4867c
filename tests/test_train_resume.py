"""Going on with a training: which branch, with what optimizer, and what does not fit."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

from dasksc import CorruptDataError, InputError, MissingPathError, StorageError
from dasksc.train import checkpoint, load_model
from dasksc.train.checkpoint import Checkpoints
from dasksc.train.config import Optimizer
from dasksc.train.optim import hyperparameters_of, make_optimizer
from dasksc.train.parallel import Place
from tests.support.programs import torchrun
from tests.support.training import (
    RTOL,
    alone,
    assert_same,
    changed,
    checkpoints,
    figures,
    losses,
    rows_of,
    small,
    train,
    training,
)

HERE = "tests.test_train_resume"
ALONE = Place(rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"), strategy="single")


pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="session")
def atlas(training_atlas) -> Path:
    return training_atlas


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def raw(atlas, folder) -> dict[str, Any]:
    """A training of six steps, with a checkpoint every second one."""
    return small(atlas, folder, training__max_steps=6, training__save_every=2, training__save_top_k=-1)


class Counting(torch.optim.SGD):
    """Counts its steps where some optimizers keep what they learn: in the parameter groups."""

    def __init__(self, params: Any, *, gain: float = 1.0, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            group |= {"gain": gain, "n_steps": 0}

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["n_steps"] += group["lr"] > 0  # torch takes a step without a rate, to make the state
        return super().step(closure)


class Wide(nn.Module):
    """A model whose code is changed by setting `width`."""

    width = 4

    def __init__(self, n_genes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(n_genes, self.width)

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(batch if isinstance(batch, torch.Tensor) else batch["X"]).square().mean()}


def saved(path: Path, *names: str) -> dict[str, Any]:
    """Return arguments of the optimizer as a checkpoint has them."""
    group = dict.fromkeys(names)
    with checkpoint._quiet():
        load({"optimizer": {"param_groups": [group]}}, checkpoint_id=path, no_dist=True)
    return group


# --- Branches -----------------------------------------------------------------------------------------


def test_auto_goes_on_with_the_branch_that_was_trained_last(raw, folder, tmp_path, caplog):
    train(raw)
    shutil.copytree(folder, tmp_path / "before")
    other = {"training__optimizer": {"lr": 1e-2}}
    train(raw, training__resume_from=str(folder / "step-00000002"), training__max_steps=5, **other)
    assert checkpoints(folder) == [2, 4, 5]
    assert checkpoints(folder / "abandoned-1") == [4, 6]
    (told,) = [record for record in caplog.records if "abandoned-1" in record.getMessage()]
    assert told.levelno == logging.WARNING
    assert "step-00000004, step-00000006" in told.getMessage()
    report = train(raw, training__resume_from="auto", training__max_steps=8, **other)
    assert (report.n_steps, checkpoints(folder)) == (8, [2, 4, 5, 6, 8])
    named = str(tmp_path / "before" / "step-00000002")
    unbroken = {"training__checkpoint_dir": str(tmp_path / "unbroken"), "training__resume_from": named}
    train(raw, training__max_steps=8, **unbroken, **other)
    assert losses(folder)[2:] == losses(tmp_path / "unbroken")


def test_what_was_set_aside_is_whole_and_can_be_gone_on_with(raw, folder, tmp_path):
    train(raw)
    whole = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("step-00000006/*") if path.is_file()}
    train(raw, training__resume_from=str(folder / "step-00000004"))
    aside = folder / "abandoned-1"
    assert {path: (aside / path).read_bytes() for path in whole} == whole
    train(raw, training__resume_from=str(aside / "step-00000006"), training__max_steps=7)
    assert checkpoints(folder) == [7]
    assert checkpoints(folder / "abandoned-2") == [2, 4, 6]


def test_a_run_from_another_folder_sets_aside_what_it_finds_and_leaves_that_folder_alone(raw, folder, tmp_path):
    train(raw)
    elsewhere = {"training__checkpoint_dir": str(tmp_path / "elsewhere")}
    named = {"training__resume_from": str(folder / "step-00000004")}
    train(raw, **named, **elsewhere)
    train(raw, **named, **elsewhere)
    assert checkpoints(folder) == [2, 4, 6]
    assert not list(folder.glob("abandoned*"))
    assert checkpoints(tmp_path / "elsewhere") == checkpoints(tmp_path / "elsewhere" / "abandoned-1") == [6]


def test_nothing_is_set_aside_before_the_branch_has_a_checkpoint(raw, folder, monkeypatch):
    train(raw)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", _no_more_partial(Path.rename))
        with pytest.raises(OSError, match="the disk is gone"):
            train(raw, training__resume_from=str(folder / "step-00000002"), training__max_steps=3)
    names = {path.name for path in folder.glob("step-*")}
    assert names == {"step-00000002", "step-00000003.partial", "step-00000004", "step-00000006"}
    assert not list(folder.glob("abandoned*"))


def _no_more_partial(rename: Any) -> Any:
    def renamed(path: Path, target: Path) -> Path:
        if path.name.startswith("step-") and path.name.endswith(".partial"):
            raise OSError("the disk is gone")
        return rename(path, target)

    return renamed


def test_a_run_that_trains_no_further_sets_nothing_aside(raw, folder):
    train(raw)
    train(raw, training__resume_from=str(folder / "step-00000002"), training__max_steps=2)
    assert checkpoints(folder) == [2, 4, 6]


def test_going_on_from_the_latest_sets_nothing_aside(raw, folder, monkeypatch):
    train(raw)
    monkeypatch.chdir(folder.parent)
    # The same folder by another name.
    train(raw, training__resume_from=f"{folder.name}/step-00000006", training__max_steps=8)
    train(raw, training__resume_from="auto", training__max_steps=10)
    assert checkpoints(folder) == [2, 4, 6, 8, 10]
    assert not list(folder.glob("abandoned*"))


def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_best_are_chosen_without_those_of_the_abandoned_branch(tmp_path):
    kept = Checkpoints(folder=tmp_path, keep=1, mode="min", place=ALONE)
    everything = Checkpoints(folder=tmp_path, keep=-1, mode="min", place=ALONE)
    for step, value in [(1, 5.0), (2, 0.1), (4, 0.2)]:
        everything.save(step, *linear(), {}, value)
    kept.save(3, *linear(), {}, 3.0, branched_at=1)
    assert checkpoints(tmp_path) == [3]
    kept.save(5, *linear(), {}, 4.0)
    assert checkpoints(tmp_path) == [3, 5]
    assert checkpoints(tmp_path / "abandoned-1") == [2, 4]


def test_copies_under_other_names_are_neither_taken_nor_removed(tmp_path):
    kept = Checkpoints(folder=tmp_path, keep=0, mode="min", place=ALONE)
    shutil.copytree(kept.save(9, *linear(), {}, 0.1), tmp_path / "copy-of-step-00000009")
    kept.save(10, *linear(), {}, None)
    assert [path.name for path in kept.all()] == ["step-00000010"]
    assert (tmp_path / "copy-of-step-00000009" / "state.json").exists()


# --- The optimizer ------------------------------------------------------------------------------------


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
def test_the_arguments_of_the_optimizer_are_those_of_the_run_that_goes_on(before, after, expected, raw, folder):
    train(raw, training__optimizer={"lr": 1e-3, **before})
    train(raw, training__optimizer={"lr": 1e-3, **after}, training__resume_from="auto", training__max_steps=8)
    assert saved(folder / "step-00000008", *expected) == expected


def test_the_state_of_the_optimizer_is_that_of_the_checkpoint(raw, folder, tmp_path):
    raw["training"]["optimizer"] = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    train(raw)
    # Nothing moves but by the momentum that is there: what is added to it is multiplied by 0.
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


def test_the_rate_of_the_run_that_goes_on_follows_its_scheduler(raw, folder):
    raw["training"]["scheduler"] = {"name": "linear_warmup", "total_steps": 10}
    train(raw)
    train(raw, training__optimizer={"lr": 1e-2}, training__resume_from="auto", training__max_steps=8)
    rates = [row["lr"] for row in rows_of(folder) if "lr" in row]
    assert rates == pytest.approx([1e-3 * (1 - step / 10) for step in range(6)] + [1e-2 * 0.4, 1e-2 * 0.3])


def test_what_an_optimizer_learns_in_its_groups_is_kept(raw, folder):
    counting = {"name": f"{HERE}:Counting", "lr": 0.1}
    train(raw, training__optimizer={**counting, "gain": 2.0, "momentum": 0.9})
    train(raw, training__optimizer={**counting, "gain": 3.0, "momentum": 0.5}, training__resume_from="auto")
    train(
        raw,
        training__optimizer={**counting, "gain": 3.0, "momentum": 0.5},
        training__resume_from="auto",
        training__max_steps=8,
    )
    assert saved(folder / "step-00000008", "gain", "n_steps", "momentum") == {
        "gain": 3.0,
        "n_steps": 8,
        "momentum": 0.5,
    }


def test_hyperparameters_are_what_constructors_take():
    optimizer = make_optimizer([nn.Parameter(torch.ones(1))], Optimizer(name=f"{HERE}:Counting"))
    names = hyperparameters_of(optimizer)
    assert {"lr", "momentum", "weight_decay", "gain", "params"} <= names
    assert "n_steps" not in names


# --- Two ranks ----------------------------------------------------------------------------------------

SHARDED: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"training__fsdp": {"min_num_params": 300}}}
two_ranks_group = pytest.mark.xdist_group("train_resume")


@pytest.fixture(scope="module")
def two_ranks(atlas, tmp_path_factory) -> Path:
    """The folder of trainings of two ranks under torchrun that stop and go on, all in one start."""
    folder = tmp_path_factory.mktemp("two")
    trainings: dict[str, Any] = {}
    for name, section in SHARDED.items():
        stopped = training(atlas, folder / f"{name}-epochs", training__max_steps=5, **section)
        trainings[f"{name}-stopped"] = stopped
        trainings[f"{name}-epoch"] = changed(
            stopped, {"training__max_steps": None, "training__max_epochs": 1, "training__resume_from": "auto"}
        )
        branches = small(atlas, folder / name, training__save_every=2, training__save_top_k=-1, **section)
        optimizer = {"weight_decay": 0.0}
        changes: dict[str, dict[str, Any]] = {
            "first": {"max_steps": 6, "optimizer": {"weight_decay": 0.5, "betas": [0.5, 0.9]}},
            "branch": {"max_steps": 5, "optimizer": optimizer, "resume_from": str(folder / name / "step-00000002")},
            "again": {"max_steps": 7, "optimizer": optimizer, "resume_from": "auto"},
        }
        for step, options in changes.items():
            trainings[f"{name}-{step}"] = {**branches, "training": branches["training"] | options}
        trainings[f"{name}-wide"] = changed(trainings[f"{name}-again"], {"model__hidden_dim": 32})
    (folder / "trainings.json").write_text(json.dumps(trainings))
    torchrun(2, "train_many.py", folder / "trainings.json")
    return folder


@two_ranks_group
@pytest.mark.parametrize("name", SHARDED)
def test_a_run_that_two_ranks_stop_and_resume_and_one_ends_has_the_losses_of_a_plain_loop(name, two_ranks, atlas):
    raw = json.loads((two_ranks / "trainings.json").read_text())[f"{name}-epoch"]
    report = train(raw, training__max_epochs=2)
    assert (report.strategy, report.world_size) == ({"ddp": "single"}.get(name, name), 1)
    expected = alone(atlas, 2, then=1)
    assert_same(two_ranks / f"{name}-epochs", expected, "loss")
    # The first is of where it was stopped.
    found = figures(two_ranks / f"{name}-epochs", "validation_loss")[1:]
    np.testing.assert_allclose(found, expected["validation_loss"], rtol=RTOL)


@two_ranks_group
@pytest.mark.parametrize("name", SHARDED)
def test_two_ranks_go_on_from_an_older_step_with_the_arguments_of_the_new_run(name, two_ranks):
    assert {path.stem for path in two_ranks.glob("*.error")} == {"ddp-wide", "fsdp-wide"}
    assert "hidden_dim=16 there and 32 here" in (two_ranks / f"{name}-wide.error").read_text()
    assert checkpoints(two_ranks / name) == [2, 4, 5, 6, 7]
    assert checkpoints(two_ranks / name / "abandoned-1") == [4, 6]
    expected = {"weight_decay": 0.0, "betas": (0.9, 0.999)}
    assert saved(two_ranks / name / "step-00000004", *expected) == expected
    assert saved(two_ranks / name / "step-00000007", *expected) == expected


# --- What does not fit --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_dim": 32}, r"model\.hidden_dim=16 there and 32 here.* is \[16, 40\] there and \[32, 40\] here"),
        ({"num_layers": 3}, r"model\.num_layers not given there and 3 here.*layers\.blocks\.2\.0\.weight is only here"),
        ({"num_layers": 1}, r"model\.num_layers not given there and 1 here.*layers\.blocks\.1\.\S+ is only there"),
        ({"name": "autoencoder", "label": None}, "model.name='mlp_classifier' there and 'autoencoder' here"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_model_is_refused(change, told, raw, folder):
    train(raw)
    raw["model"] = {name: value for name, value in (raw["model"] | change).items() if value is not None}
    with pytest.raises(InputError, match=told) as caught:
        train(raw, training__resume_from="auto")
    assert str(folder / "step-00000006") in str(caught.value)
    assert "another training.checkpoint_dir" in str(caught.value)


def test_a_checkpoint_of_an_atlas_with_other_genes_is_refused(raw, atlas, tmp_path):
    train(raw)
    ad.read_h5ad(atlas)[:, 3:].write_h5ad(tmp_path / "fewer.h5ad")
    with pytest.raises(InputError, match=r"model\.n_genes=40 there and 37 here"):
        train(raw, data__path=str(tmp_path / "fewer.h5ad"), training__resume_from="auto")


def test_a_checkpoint_of_changed_code_is_refused(raw, monkeypatch):
    raw["model"] = {"name": f"{HERE}:Wide"}
    train(raw)
    monkeypatch.setattr("tests.test_train_resume.Wide.width", 5)
    with pytest.raises(InputError, match=r"arguments are the same, so its code or data.*layer\.weight is \[4, 40\]"):
        train(raw, training__resume_from="auto")


def test_arguments_that_change_no_shape_may_change(raw):
    train(raw)
    raw["model"]["dropout"] = 0.5
    assert train(raw, training__resume_from="auto", training__max_steps=8).n_steps == 8


@pytest.mark.parametrize(("before", "after"), [("sgd", "adamw"), ("adamw", "sgd"), ("adamw", "adam")])
def test_a_checkpoint_of_another_optimizer_is_refused(before, after, raw):
    train(raw, training__optimizer={"name": before})
    with pytest.raises(InputError, match=rf"training\.optimizer\.name='{before}' there and '{after}' here"):
        train(raw, training__optimizer={"name": after}, training__resume_from="auto")


def test_an_optimizer_that_needs_state_the_checkpoint_has_not_is_refused(raw):
    train(raw, training__optimizer={"name": "sgd"})
    told = r"training\.optimizer\.momentum not given there and 0\.9 here.*momentum_buffer is only here"
    with pytest.raises(InputError, match=told):
        train(raw, training__optimizer={"name": "sgd", "momentum": 0.9}, training__resume_from="auto")


def test_a_checkpoint_that_does_not_name_its_optimizer_is_known_by_its_state(raw, folder):
    train(raw, training__optimizer={"name": "sgd"})
    file = folder / "step-00000006" / "state.json"
    state = json.loads(file.read_text())
    del state["optimizer"]
    file.write_text(json.dumps(state))
    with pytest.raises(InputError, match=r"does not fit training\.optimizer.*\.step is only here"):
        train(raw, training__resume_from="auto")
    options = {"training__optimizer": {"name": "sgd"}, "training__max_steps": 8}
    assert train(raw, training__resume_from="auto", **options).n_steps == 8


@pytest.mark.parametrize("text", ["", '{"version": 1, "st', "[]", "\udcff"], ids=["empty", "cut", "list", "binary"])
def test_a_state_that_is_cut_off_is_named(text, raw, folder):
    train(raw)
    file = folder / "step-00000006" / "state.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CorruptDataError, match=f"{file}.*Remove"):
        train(raw, training__resume_from="auto")
    with pytest.raises(CorruptDataError, match=str(file)):
        load_model(file.parent)
    with pytest.raises(MissingPathError, match=r"no checkpoint at .*state\.json"):
        load_model(folder)


def test_an_older_checkpoint_that_is_damaged_stops_no_run_and_stays(raw, folder, caplog):
    train(raw)
    (folder / "step-00000002" / "state.json").write_text("")
    train(raw, training__resume_from="auto", training__max_steps=8, training__save_top_k=0)
    assert checkpoints(folder) == [2, 8]
    assert str(folder / "step-00000002" / "state.json") in caplog.text


def test_tensors_that_are_damaged_are_refused_with_the_path(raw, folder):
    train(raw)
    path = folder / "step-00000006"
    metadata = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(metadata[:100])
    with pytest.raises(CorruptDataError, match=rf"{path}/\.metadata"):
        train(raw, training__resume_from="auto")
    (path / ".metadata").write_bytes(metadata)
    for shard in path.glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:200])
    for going_on in (lambda: train(raw, training__resume_from="auto"), lambda: load_model(path)):
        with pytest.raises(InputError, match=f"{path} cannot be loaded: .*damaged"):
            going_on()


def test_interrupting_a_load_is_no_error_of_the_checkpoint(raw, monkeypatch):
    train(raw)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemReader.read_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(raw, training__resume_from="auto")


def test_a_disk_that_cannot_be_written_is_named(raw, folder, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", full)
    with pytest.raises(StorageError, match=f"{folder}/step-00000002.partial cannot be written: .*No space left"):
        train(raw)
