"""Command `dasksc train` without ranks: its output before they start, and its report of their exit."""

from __future__ import annotations

import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from dasksc import DaskscError, InputError, cli
from dasksc.train import Config
from dasksc.train.launch import as_rank, launch, node_rank_of
from dasksc.train.loop import _Run
from dasksc.train.parallel import RankContext

pytestmark = pytest.mark.core


def write(folder: Path, **training: Any) -> Path:
    """Write the configuration of a training whose atlas is an empty file."""
    (folder / "atlas.h5ad").touch()
    raw = {
        "data": {"path": str(folder / "atlas.h5ad"), "batch_size": 32, "fetch_factor": 4},
        "model": {"name": "mlp_classifier", "label": "cell_type", "hidden_dim": 16},
        "training": {"checkpoint_dir": str(folder / "run"), **training},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(raw))
    return folder / "c.yaml"


@pytest.mark.parametrize(
    ("exit_codes", "message"),
    [
        # Rank 0 has reported its error, and the launcher has ended rank 1.
        ({0: 1, 1: -15}, None),
        ({0: 1, 1: 1}, None),
        ({0: -15, 1: -9}, "rank 1 was killed by SIGKILL"),
        ({0: -11, 1: -6}, "rank 0 was killed by SIGSEGV; rank 1 was killed by SIGABRT"),
        # Both were ended from outside.
        ({2: -15, 3: -15}, "rank 2 was killed by SIGTERM; rank 3 was killed by SIGTERM"),
        ({0: 3, 1: -15}, "rank 0 ended with exit code 3"),
    ],
)
def test_the_launcher_reports_how_ranks_ended_if_they_could_not(exit_codes, message, monkeypatch):
    failures = {r: ProcessFailure(local_rank=r, pid=1, exitcode=code, error_file="") for r, code in exit_codes.items()}
    monkeypatch.setattr("dasksc.train.launch._torchrun", raising(ChildFailedError("dasksc", failures)))
    with pytest.raises(SystemExit if message is None else DaskscError) as error:
        launch(["train"], n_processes=2)
    assert str(error.value).split(" (")[0] == ("1" if message is None else message)


def test_a_launcher_that_is_stopped_says_so(monkeypatch):
    monkeypatch.setattr("dasksc.train.launch._torchrun", raising(SignalException("", signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        launch(["train"], n_processes=2)
    monkeypatch.setattr("dasksc.train.launch._torchrun", raising(SignalException("", signal.SIGTERM)))
    with pytest.raises(DaskscError, match="stopped by SIGTERM"):
        launch(["train"], n_processes=2)


def raising(error: BaseException) -> Any:
    def raises(*_: Any) -> None:
        raise error

    return raises


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_each_error_is_reported_once_per_start(monkeypatch, capsys):
    monkeypatch.setattr("dasksc.train.launch._GRACE_S", 0.0)
    log = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    reports: list[str] = []

    def fail(error: Exception) -> None:
        raise error

    def starts(*attempts: list[Exception | None]) -> Any:
        """Return a stand-in for torch's launcher whose ranks raise the given errors at each start."""

        def run(options: list[str]) -> None:
            (folder,) = (one.removeprefix("--log-dir=") for one in options if one.startswith("--log-dir="))
            for number, raised in enumerate(attempts):
                for rank, error in enumerate(raised):
                    file = Path(folder, "run", f"attempt_{number}", str(rank), "error.json")
                    file.parent.mkdir(parents=True)
                    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
                    if error is not None:
                        with pytest.raises(SystemExit) as end:
                            as_rank(partial(fail, error))
                        assert end.value.code == 1
                log.error("failed (exitcode: %s)", 1)
                reports.append(capsys.readouterr().err)
            failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="")
            raise ChildFailedError("dasksc", {0: failure})

        return run

    def of(*attempts: list[Exception | None], node_rank: int = 0) -> list[str]:
        reports.clear()
        monkeypatch.setattr("dasksc.train.launch._torchrun", starts(*attempts))
        with pytest.raises(SystemExit):
            launch(["train"], n_processes=4, node_rank=node_rank)
        return [*reports, capsys.readouterr().err]

    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    (alone, at_end) = of([None, lost])  # connection closed by a rank of another node
    assert alone.endswith("Connection closed by peer\n")
    assert at_end == ""
    gone = torch.distributed.DistNetworkError("gone")
    lines = ["dasksc: a\ndasksc: b\n", "dasksc: a\n", ""]
    assert of([lost, InputError("a"), InputError("a"), InputError("b"), gone], [InputError("a"), gone]) == lines
    # Errors from the same line are reported once; their text may differ, for example in the device number.
    different = ValueError("d")
    different.add_note("in batch 3")
    first, _ = of([None, ValueError("c"), different], node_rank=1)
    assert first.startswith("dasksc: rank 5 failed:\nTraceback")
    assert first.endswith("ValueError: c\n")


def test_errors_are_raised_unchanged_if_the_command_has_not_started_the_ranks(monkeypatch):
    monkeypatch.delenv("DASKSC_TRAIN_LAUNCHED", raising=False)

    def fail() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        as_rank(fail)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        (["--nproc", 2], {"num_gpus": 8}, "num_gpus=8 is the total over all nodes, and this run has 2"),
        (["--nproc", 2, "--nnodes", 2, "--node-rank", 1], {"num_gpus": 2}, "and this run has 4"),
        (
            ["--nproc", 2, "--nnodes", 2, "--node-rank", 0],
            {"num_nodes": 4},
            "num_nodes=4, but the number of nodes of this run is 2",
        ),
        (["--nproc", 2], {"strategy": "single"}, "strategy='single' runs in one process, but this run has 2"),
        (["--nproc", 2], {"strategy": "dp"}, "strategy='dp' runs in one process, but this run has 2"),
        (
            ["--nproc", 4],
            {"fsdp": {"sharding_strategy": "HYBRID_SHARD", "shard_size": 3}},
            "shard_size=3 must divide the number of ranks, 4",
        ),
        (["--nproc", 2], {"fsdp": {"shard_size": 2}}, "shard_size=2 is for sharding_strategy: HYBRID_SHARD"),
        (["--nproc", 2, "--nnodes", 2, "--node-rank", 2], {}, "node 2 is not one of the 2 nodes"),
        (["--nproc", 2, "--node-rank", 1], {}, "node 1 is not one of the 1 node"),
        (["--node-rank", 1], {}, "node 1 is not one of the 1 node"),
        (["--nproc", 2, "--nnodes", 2], {}, "the run has 2 nodes"),
        ([], {"num_nodes": 2}, "the run has 2 nodes"),
        (
            ["--nproc", 2],
            {"logger": ["csv", "wandb"]},
            "training.logger=wandb needs the package wandb: pip install wandb",
        ),
        (["--nproc", 2], {"logger": "tensorboard"}, "training.logger=tensorboard needs the package tensorboard"),
    ],
)
def test_errors_that_need_no_ranks_are_reported_before_ranks_start(options, changes, message, tmp_path, monkeypatch):
    monkeypatch.setattr("dasksc.train.launch._torchrun", raising(AssertionError("ranks were started")))
    for name in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "GROUP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    config = write(tmp_path, **changes)
    result = CliRunner().invoke(cli.group, [*map(str, ["train", "--config", config, *options])])
    assert isinstance(result.exception, InputError), result.exception
    assert message in str(result.exception)


def test_a_configuration_for_two_nodes_is_refused_under_torchrun_on_one_node(tmp_path, monkeypatch):
    # Variables that torchrun sets for a single rank on a single node.
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}
    for name, value in {**environment, "TORCHELASTIC_RUN_ID": "one"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(cli.group, ["train", "--config", str(write(tmp_path, num_nodes=2))])
    assert isinstance(result.exception, InputError), result.exception
    assert "training.num_nodes=2, but the number of nodes of this run is 1" in str(result.exception)


def test_nodes_may_have_unequally_many_gpus(tmp_path, monkeypatch):
    started: list[str] = []
    monkeypatch.setattr("dasksc.train.launch._torchrun", started.extend)
    config = write(tmp_path, num_gpus=10_001, num_nodes=2)
    options = ["--nproc", "auto", "--node-rank", "0", "--master-addr", "127.0.0.1"]
    result = CliRunner().invoke(cli.group, ["train", "--config", str(config), *options])
    assert result.exception is None
    assert {"--nnodes=2", "--node-rank=0"} <= set(started)


# A step with one task on each of two nodes, and a script on the first node of a job with two nodes.
STEP = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
SCRIPT = {"SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("given", "n_nodes", "environment", "expected"),
    [
        (None, 1, {}, 0),
        (0, 1, {}, 0),
        (1, 2, {}, 1),
        (0, 2, STEP, 0),
        (None, 2, STEP, 1),
        (None, 2, SCRIPT, 0),
        (None, 2, {"GROUP_RANK": "1"}, 1),
    ],
)
def test_which_node_this_is_follows_from_flag_and_environment(given, n_nodes, environment, expected):
    assert node_rank_of(given, n_nodes, environment) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {},
        # With a separate step on each node, every node is the first of its step.
        {"SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"},
        {"SLURM_JOB_NUM_NODES": "2"},
    ],
)
def test_nodes_that_are_started_alike_are_not_all_the_first(environment):
    with pytest.raises(InputError, match="the run has 2 nodes .* --node-rank"):
        node_rank_of(None, 2, environment)
    with pytest.raises(InputError, match="node 2 is not one of the 2 nodes of this run, which are numbered from 0"):
        node_rank_of(2, 2, environment)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_looks_for_its_loggers_before_anything_is_read(rank, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = Config.load(write(tmp_path, logger="wandb"))
    context = RankContext(rank=rank, world_size=2, local_world_size=2, device=torch.device("cpu"), strategy="ddp")
    with pytest.raises(InputError, match="training.logger=wandb needs the package wandb: pip install wandb"):
        _Run(config, context, print)
