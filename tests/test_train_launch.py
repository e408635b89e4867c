"""`dasksc train` as it is started: by itself with several processes, by mpirun, by srun; and the files in examples/."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from dasksc import DaskscError, InputError, cli
from dasksc.train import Config, fit
from dasksc.train.launch import launch, node_rank_of, telling_once
from dasksc.train.loop import _Run
from dasksc.train.parallel import Place
from tests.programs.with_slurm import free_ports
from tests.support.programs import MPIRUN, NO_GPU, ROOT, ended, run
from tests.support.training import COMMAND, GUIDE, N_CELLS, N_GENES, N_TYPES, alone, assert_same, training

pytestmark = pytest.mark.programs

CONFIGS = sorted((ROOT / "examples" / "configs").glob("*.yaml"))


@pytest.fixture(scope="session")
def atlas(atlas_of) -> Path:
    return atlas_of(600, 200, n_types=5)


@pytest.fixture(scope="session")
def small(atlas_of) -> Path:
    return atlas_of(N_CELLS, N_GENES, n_types=N_TYPES, seed=1)


def train(command: list[object], folder: Path, environment: dict[str, str] | None = None) -> str:
    return run(command, cwd=folder, environment=environment, OMP_NUM_THREADS="1")


def refused(command: list[object], folder: Path) -> str:
    with pytest.raises(AssertionError) as error:
        train(command, folder)
    return str(error.value)


def write(folder: Path, atlas: Path, **training: Any) -> Path:
    raw = {
        "data": {"path": str(atlas), "batch_size": 32, "fetch_factor": 4},
        "model": {"name": "mlp_classifier", "label": "cell_type", "hidden_dim": 16},
        "training": {"max_epochs": 1, "log_every_n_steps": 1, "checkpoint_dir": "run", **training},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(raw))
    return folder / "c.yaml"


def test_a_rank_that_is_killed_is_started_again_and_the_losses_are_those_of_a_run_unbroken(small, tmp_path):
    raw = training(small, tmp_path / "run", training__fsdp={"min_num_params": 300}, training__save_every=2)
    mark = tmp_path / "mark"
    raw["model"] = {"name": "tests.programs.train_models:Fragile", "label": "cell_type", "dropout": 0.0}
    raw["model"] |= {"mark": str(mark), "at": 6, "rank": 1, "how": "kill"}
    raw["training"]["resume_from"] = "auto"
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(raw))
    started = [*COMMAND, "--config", "c.yaml", "--nproc", 2, "--max-restarts", 1, "--json"]
    report = json.loads(train(started, tmp_path))
    assert mark.exists()
    assert (report["world_size"], report["strategy"]) == (2, "fsdp")
    assert_same(tmp_path / "run", alone(small, 2), "loss", "validation_loss")


def test_two_nodes_start_a_rank_each(atlas, tmp_path):
    config = write(tmp_path, atlas, num_gpus=2, num_nodes=2)
    (port,) = free_ports(1)
    options = ["--config", config, "--nproc", 1, "--master-addr", "127.0.0.1", "--master-port", port, "--json"]
    environment = {**os.environ, **NO_GPU, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            [*map(str, [*COMMAND, *options, "--node-rank", rank])],
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        printed, complaints = zip(*(node.communicate(timeout=240) for node in nodes), strict=True)
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [0, 0], "".join(complaints)[-6000:]
    report = json.loads(printed[0])
    assert (report["world_size"], report["n_cells"], printed[1]) == (2, 600, "")


def test_open_mpi_starts_the_ranks(atlas, tmp_path, mpirun):
    config = write(tmp_path, atlas, num_gpus=2)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")} | NO_GPU
    report = json.loads(train([*MPIRUN, *COMMAND, "--config", config, "--json"], tmp_path, environment))
    assert (report["world_size"], report["strategy"], report["n_cells"]) == (2, "ddp", 600)


def test_a_configuration_for_two_nodes_is_refused_on_one(atlas, tmp_path):
    config = write(tmp_path, atlas, num_gpus=2, num_nodes=2)
    options = ["--standalone", "--nproc-per-node", 2, "-m", "dasksc", "train", "--config", config]
    told = refused([sys.executable, "-m", "torch.distributed.run", *options], tmp_path)
    assert "training.num_nodes=2, and this run is on 1" in told


def test_srun_starts_the_ranks(atlas, tmp_path, slurm):
    config = write(tmp_path, atlas, num_gpus=2)
    command = ["srun", "-n", 2, *COMMAND, "--config", config, "--json"]
    report = json.loads(train(command, tmp_path, slurm | NO_GPU))
    assert (report["world_size"], report["strategy"], report["n_cells"]) == (2, "ddp", 600)


def test_a_file_of_the_guide_for_eight_gpus_runs_scaled_down_to_two_processes(atlas, tmp_path):
    if importlib.util.find_spec("dasksc.tokens") is None:
        pytest.skip("dasksc.tokens is not there")
    (tmp_path / "guide.yaml").write_text(GUIDE)
    changes = {
        "data.paths": f"[{atlas}]",
        "data.max_genes": 20,
        "tokenizer.max_genes": 20,
        "data.num_workers": 1,
        "model.hidden_dim": 16,
        "model.num_layers": 2,
        "model.num_heads": 2,
        "model.max_seq_len": 20,
        "training.num_gpus": 2,
        "training.num_nodes": 1,
        "training.max_steps": 2,
        "training.fsdp.min_num_params": 1000,
        "training.logger": "csv",
    }
    sets = [part for name, value in changes.items() for part in ("--set", f"{name}={value}")]
    report = json.loads(train([*COMMAND, "--config", "guide.yaml", "--json", *sets], tmp_path))
    assert (report["world_size"], report["strategy"], report["n_steps"]) == (2, "fsdp", 2)
    assert report["n_cells"] == 2 * 2 * 4 * 32


def test_an_error_that_all_ranks_make_is_one_line(atlas, tmp_path):
    config = write(tmp_path, atlas)
    done = ended(
        [*COMMAND, "--config", config, "--nproc", 2, "--set", "model.label=cell_typ"], cwd=tmp_path, OMP_NUM_THREADS="1"
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.match("dasksc: .*'cell_typ'", line)


def test_a_rank_that_is_killed_is_told_with_its_signal_in_one_line(small, tmp_path):
    done = ended(
        [*COMMAND, "--config", fragile(small, tmp_path, how="kill"), "--nproc", 2], cwd=tmp_path, OMP_NUM_THREADS="1"
    )
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("dasksc:"))
    assert line.startswith("dasksc: rank 1 was killed by SIGKILL")
    assert "Traceback" not in done.stderr


def test_a_rank_that_fails_shows_its_traceback_once_and_those_it_leaves_show_none(small, tmp_path):
    done = ended(
        [*COMMAND, "--config", fragile(small, tmp_path, how="error"), "--nproc", 2], cwd=tmp_path, OMP_NUM_THREADS="1"
    )
    assert done.returncode == 1
    assert "dasksc: rank 1 failed" in done.stderr
    assert done.stderr.count("RuntimeError: the power is gone") == done.stderr.count("Traceback") == 1
    assert "ChildFailedError" not in done.stderr


def fragile(atlas: Path, folder: Path, *, how: str) -> Path:
    """Write a training whose rank 1 ends at its third batch."""
    path = write(folder, atlas)
    raw = yaml.safe_load(path.read_text())
    raw["data"]["batch_size"] = 8
    raw["model"] = {"name": "tests.programs.train_models:Fragile", "label": "cell_type"}
    raw["model"] |= {"mark": str(folder / "mark"), "at": 3, "rank": 1, "how": how}
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.mark.parametrize(
    ("exit_codes", "told"),
    [
        # It has told why by itself, and the launcher has ended the other.
        ({0: 1, 1: -15}, None),
        ({0: 1, 1: 1}, None),
        ({0: -15, 1: -9}, "rank 1 was killed by SIGKILL"),
        ({0: -11, 1: -6}, "rank 0 was killed by SIGSEGV; rank 1 was killed by SIGABRT"),
        # Somebody else has.
        ({2: -15, 3: -15}, "rank 2 was killed by SIGTERM; rank 3 was killed by SIGTERM"),
        ({0: 3, 1: -15}, "rank 0 ended with exit code 3"),
    ],
)
def test_how_ranks_ended_is_told_where_they_could_not(exit_codes, told, monkeypatch):
    failures = {r: ProcessFailure(local_rank=r, pid=1, exitcode=code, error_file="") for r, code in exit_codes.items()}
    monkeypatch.setattr(torchrun, "main", raising(ChildFailedError("dasksc", failures)))
    with pytest.raises(SystemExit if told is None else DaskscError) as error:
        launch(["train"], n_processes=2)
    assert str(error.value).split(" (")[0] == ("1" if told is None else told)


def test_a_launcher_that_is_stopped_says_so(monkeypatch):
    monkeypatch.setattr(torchrun, "main", raising(SignalException("", signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        launch(["train"], n_processes=2)
    monkeypatch.setattr(torchrun, "main", raising(SignalException("", signal.SIGTERM)))
    with pytest.raises(DaskscError, match="stopped by SIGTERM"):
        launch(["train"], n_processes=2)


def raising(error: BaseException) -> Any:
    def raises(*_: Any) -> None:
        raise error

    return raises


def test_ranks_tell_the_same_error_once_for_each_start_and_others_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dasksc.train.launch._GRACE_S", 0.0)
    monkeypatch.setenv("DASKSC_TRAIN_TOLD", str(tmp_path))

    def told(error: Exception, attempt: int = 0) -> str:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        with pytest.raises(SystemExit) as end, telling_once():
            raise error
        assert end.value.code == 1
        return capsys.readouterr().err

    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert "Connection closed by peer" in told(lost)  # by a rank of another node
    assert told(InputError("a"), 1) == "dasksc: a\n"
    assert told(InputError("a"), 1) == ""
    assert told(InputError("b"), 1) == "dasksc: b\n"
    assert told(lost, 1) == told(torch.distributed.DistNetworkError("gone"), 1) == ""
    # From the same line: what differs may be the number of a device.
    first, second = told(ValueError("c"), 1), told(ValueError("d"), 1)
    assert first.startswith("dasksc: rank 0 failed:\nTraceback")
    assert first.endswith("ValueError: c\n")
    assert second == ""
    assert told(InputError("a"), 2) == "dasksc: a\n"


def test_errors_are_raised_as_they_are_where_the_command_has_not_started_the_ranks(monkeypatch):
    monkeypatch.delenv("DASKSC_TRAIN_TOLD", raising=False)
    with pytest.raises(ValueError, match="as it is"), telling_once():
        raise ValueError("as it is")


@pytest.mark.parametrize(
    ("options", "changes", "told"),
    [
        (["--nproc", 2], {"num_gpus": 8}, "num_gpus=8 is the total over all nodes, and this run has 2"),
        (["--nproc", 2, "--nnodes", 2, "--node-rank", 1], {"num_gpus": 2}, "and this run has 4"),
        (["--nproc", 2, "--nnodes", 2, "--node-rank", 0], {"num_nodes": 4}, "num_nodes=4, and this run is on 2"),
        (["--nproc", 2], {"strategy": "single"}, "strategy='single' is of one process, and this run has 2"),
        (["--nproc", 2], {"strategy": "dp"}, "strategy='dp' is of one process, and this run has 2"),
        (
            ["--nproc", 4],
            {"fsdp": {"sharding_strategy": "HYBRID_SHARD", "shard_size": 3}},
            "shard_size=3 does not divide the 4 ranks",
        ),
        (["--nproc", 2], {"fsdp": {"shard_size": 2}}, "shard_size=2 is for sharding_strategy: HYBRID_SHARD"),
        (["--nproc", 2, "--nnodes", 2, "--node-rank", 2], {}, "node 2 is none of the 2 nodes"),
        (["--nproc", 2, "--node-rank", 1], {}, "node 1 is none of the 1 node"),
        (["--node-rank", 1], {}, "node 1 is none of the 1 node"),
        (["--nproc", 2, "--nnodes", 2], {}, "which of the 2 nodes"),
        ([], {"num_nodes": 2}, "which of the 2 nodes"),
        (["--nproc", 2], {"logger": ["csv", "wandb"]}, "training.logger=wandb needs it: pip install wandb"),
        (["--nproc", 2], {"logger": "tensorboard"}, "training.logger=tensorboard needs it"),
    ],
)
def test_what_needs_no_ranks_is_told_before_they_are_started(options, changes, told, tmp_path, monkeypatch):
    monkeypatch.setattr(torchrun, "main", raising(AssertionError("ranks were started")))
    for name in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "GROUP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    config = write(tmp_path, tmp_path / "atlas.h5ad", **changes)
    shown = CliRunner().invoke(cli.group, [*map(str, ["train", "--config", config, *options])])
    assert isinstance(shown.exception, InputError), shown.exception
    assert told in str(shown.exception)


def test_nodes_may_have_unequally_many_gpus(tmp_path, monkeypatch):
    started: list[str] = []
    monkeypatch.setattr(torchrun, "main", started.extend)
    config = write(tmp_path, tmp_path / "atlas.h5ad", num_gpus=10_001, num_nodes=2)
    options = ["--nproc", "auto", "--node-rank", "0", "--master-addr", "127.0.0.1"]
    shown = CliRunner().invoke(cli.group, ["train", "--config", str(config), *options])
    assert shown.exception is None
    assert {"--nnodes=2", "--node-rank=0"} <= set(started)


# A step of one task on each of two nodes, and a script that runs on the first node of a job of two.
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
        # A step of its own on each node: all are the first of theirs.
        {"SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"},
        {"SLURM_JOB_NUM_NODES": "2"},
    ],
)
def test_nodes_that_are_started_alike_are_not_all_the_first(environment):
    with pytest.raises(InputError, match="which of the 2 nodes .* --node-rank"):
        node_rank_of(None, 2, environment)
    with pytest.raises(InputError, match="node 2 is none of the 2 nodes of this run, which are numbered from 0"):
        node_rank_of(2, 2, environment)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_looks_for_its_loggers_before_anything_is_read(rank, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = Config.load(write(tmp_path, tmp_path / "nothing.h5ad", logger="wandb"))
    place = Place(rank=rank, world_size=2, local_world_size=2, device=torch.device("cpu"), strategy="ddp")
    with pytest.raises(InputError, match="training.logger=wandb needs it: pip install wandb"):
        _Run(config, place, print)


def configurations() -> dict[str, str]:
    """Every configuration in examples/ and on the page, by name."""
    page = (ROOT / "docs" / "training.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert blocks
    return {path.stem: path.read_text() for path in CONFIGS} | {f"page-{i}": text for i, text in enumerate(blocks)}


@pytest.mark.parametrize("name", configurations())
def test_every_configuration_in_examples_and_docs_runs_for_two_steps(name, atlas, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(configurations()[name])
    Path("atlas.h5ad").symlink_to(atlas)
    raw = yaml.safe_load(configurations()[name])
    if "tokenizer" in raw and importlib.util.find_spec("dasksc.tokens") is None:
        pytest.skip("dasksc.tokens is not there")
    changes = [f"model.{size}=16" for size in ("hidden_dim", "latent_dim") if size in raw["model"]]
    changes += ["training.num_gpus=1", "training.num_nodes=1", "training.max_steps=2"]
    lines: list[str] = []
    report = fit(Config.load("c.yaml", changes=changes), say=lines.append)
    assert report.n_steps == 2
    assert Path(report.model).exists()
    assert lines
