"""Job scripts in examples/slurm, submitted to a one-node Slurm cluster without GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.programs import ROOT, run

pytestmark = [pytest.mark.programs, pytest.mark.xdist_group("slurm")]

SCRIPTS = ROOT / "examples" / "slurm"
UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


@pytest.fixture(scope="session")
def atlas(atlas_of) -> Path:
    return atlas_of(1_000, 300)


def ask(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
    return done.stdout.strip()


def submit(slurm, script: str, folder: Path, *arguments: object, nodes: int = 1, tasks: int, **more: str) -> str:
    """Run a job script on one node without GPUs to completion; return its output."""
    text = re.sub(r"^#SBATCH --gpus.*\n", "", (SCRIPTS / script).read_text(), flags=re.MULTILINE)
    (folder / script).write_text(text)
    options = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}", "--cpus-per-task=1", f"--output={folder}/job.out"]
    # The state is polled here, since `sbatch --wait` may poll only every half minute.
    command = ["sbatch", "--parsable", *options, f"--chdir={ROOT}", str(folder / script), *map(str, arguments)]
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), slurm["PATH"]]
    )  # scripts run the first python on the path
    job = ask(slurm | {"PATH": path, **more}, *command)
    end = time.monotonic() + 240
    while (state := ask(slurm, "squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")) in UNFINISHED:
        assert time.monotonic() < end, f"job {job} is still {state}"
        time.sleep(0.2)
    output = (folder / "job.out").read_text() if (folder / "job.out").exists() else ""
    assert state == "COMPLETED", f"{state}: {output[-4000:]}"
    return output


def test_torchrun_on_each_node_trains_and_a_requeued_job_goes_on(slurm, atlas, tmp_path):
    checkpoint = {"CHECKPOINT": str(tmp_path / "run.pt")}
    options = (atlas, "--batch-size", 32)
    first = submit(slurm, "torchrun.sbatch", tmp_path, *options, "--max-steps", 5, tasks=1, **checkpoint)
    assert re.search(r"epoch 0: [\d,]+ cells/s on 2 ranks", first)
    second = submit(slurm, "torchrun.sbatch", tmp_path, *options, "--epochs", 2, tasks=1, **checkpoint)
    assert re.findall(r"epoch (\d): [\d,]+ cells/s", second) == ["0", "1"]


def test_tasks_of_srun_are_ranks(slurm, atlas, tmp_path):
    printed = submit(slurm, "srun.sbatch", tmp_path, atlas, "--batch-size", 32, "--width", 8, tasks=2)
    assert re.search(r"step 16: [\d,]+ cells/s on 2 ranks", printed)


def test_a_yaml_training_runs_on_all_ranks_and_a_requeued_job_resumes(slurm, atlas, tmp_path):
    changes = {
        "data.path": atlas,
        "data.batch_size": 32,
        "model.hidden_dim": 16,
        "training.checkpoint_dir": tmp_path / "run",
        "training.max_epochs": 2,
    }
    options = [part for name, value in changes.items() for part in ("--set", f"{name}={value}")]
    config = ROOT / "examples" / "configs" / "classifier.yaml"
    first = submit(slurm, "train_yaml.sbatch", tmp_path, config, *options, "--set", "training.max_steps=5", tasks=2)
    assert re.search(r"ranks +2 x cpu, ddp", first)
    assert "resuming from" not in first
    assert (tmp_path / "run" / "step-00000005").is_dir()
    again = submit(slurm, "train_yaml.sbatch", tmp_path, config, *options, tasks=2)[len(first) :]
    # 900 training cells are 15 batches per rank.
    assert re.search(r"resuming from \S+/run/step-00000005\b.*steps +30 in 2 epochs", again, re.DOTALL)


def test_dask_workers_that_slurm_starts_read_an_epoch(slurm, atlas, tmp_path):
    pytest.importorskip("dask_jobqueue")
    command = [sys.executable, SCRIPTS / "dask_workers.py", atlas, "--shared", tmp_path]
    printed = run([*command, "--jobs", 1, "--cores", 1, "--memory", "2GB"], cwd=tmp_path, environment=slurm)
    assert re.search(r"1000 cells from 1 Slurm jobs, [\d,]+ cells/s", printed)
