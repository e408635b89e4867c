"""Runs of `dasksc train`, started by torchrun and mpirun; and the configurations in examples/."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dasksc.datasets import demo_data
from dasksc.train import Config, fit
from tests.support.programs import MPIRUN, NO_GPU, ROOT, TORCHRUN, run
from tests.support.training import COMMAND, alone, assert_same, training

pytestmark = pytest.mark.programs

CONFIGS = sorted((ROOT / "examples" / "configs").glob("*.yaml"))


@pytest.fixture(scope="session")
def atlas(atlas_of) -> Path:
    return atlas_of(600, 200, n_types=5)


@pytest.fixture(scope="session")
def small(training_atlas) -> Path:
    return training_atlas


def train(command: list[object], folder: Path, environment: dict[str, str] | None = None) -> str:
    return run(command, cwd=folder, environment=environment, OMP_NUM_THREADS="1")


def write(folder: Path, atlas: Path, **training: Any) -> Path:
    raw = {
        "data": {"path": str(atlas), "batch_size": 32, "fetch_factor": 4},
        "model": {"name": "mlp_classifier", "label": "cell_type", "hidden_dim": 16},
        "training": {"max_epochs": 1, "log_every_n_steps": 1, "checkpoint_dir": "run", **training},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(raw))
    return folder / "c.yaml"


def test_a_killed_rank_restarts_and_losses_equal_those_of_an_uninterrupted_run(small, tmp_path):
    raw = training(small, tmp_path / "run", training__fsdp={"min_num_params": 300}, training__save_every=2)
    mark = tmp_path / "mark"
    raw["model"] = {"name": "tests.programs.train_models:Fragile", "label": "cell_type", "dropout": 0.0}
    raw["model"] |= {"mark": str(mark), "at": 6, "rank": 1, "how": "kill"}
    raw["training"]["resume_from"] = "auto"
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(raw))
    ranks = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    # By default, all attempts share one store, and gloo connects to ranks of earlier attempts.
    environment = {**os.environ, **NO_GPU, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*ranks, "-m", "dasksc", "train", "--config", "c.yaml", "--json"]
    report = json.loads(train(command, tmp_path, environment))
    assert mark.exists()
    assert (report["world_size"], report["strategy"]) == (2, "fsdp")
    assert_same(tmp_path / "run", alone(small, 2), "loss", "validation_loss")


def test_open_mpi_starts_the_ranks(atlas, tmp_path, mpirun):
    config = write(tmp_path, atlas, num_gpus=2)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")} | NO_GPU
    report = json.loads(train([*MPIRUN, *COMMAND, "--config", config, "--json"], tmp_path, environment))
    assert (report["world_size"], report["strategy"], report["n_cells"]) == (2, "ddp", 600)


def configurations() -> dict[str, str]:
    """Return every configuration in examples/ and on the page, by name."""
    page = (ROOT / "docs" / "guides" / "training.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert blocks
    return {path.stem: path.read_text() for path in CONFIGS} | {f"page-{i}": text for i, text in enumerate(blocks)}


@pytest.mark.parametrize("name", configurations())
def test_every_configuration_in_examples_and_docs_runs_for_two_steps(name, atlas, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(configurations()[name])
    Path("atlas.h5ad").symlink_to(atlas)
    demo_data("demo")
    raw = yaml.safe_load(configurations()[name])
    if "tokenizer" in raw and importlib.util.find_spec("dasksc.tokens") is None:
        pytest.skip("dasksc.tokens is not there")
    changes = [f"model.{size}=16" for size in ("hidden_dim", "latent_dim") if size in raw["model"]]
    changes += ["training.num_gpus=1", "training.max_steps=2"]
    lines: list[str] = []
    report = fit(Config.load("c.yaml", changes=changes), say=lines.append)
    assert report.n_steps == 2
    assert Path(report.model).exists()
    assert lines
