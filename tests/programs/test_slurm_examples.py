"""Programs of examples/slurm, run with stand-ins for the commands of Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import programs
from tests.support.programs import ROOT

pytestmark = pytest.mark.programs

SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))
# Long options in the manual of sbatch that a job of several nodes may need.
OPTIONS = {
    *("account", "array", "chdir", "constraint", "cpus-per-gpu", "cpus-per-task", "dependency", "error", "exclude"),
    *("exclusive", "export", "gpus", "gpus-per-node", "gpus-per-task", "gres", "job-name", "mail-type", "mail-user"),
    *("mem", "mem-per-cpu", "mem-per-gpu", "nodelist", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output"),
    *("partition", "qos", "requeue", "reservation", "signal", "time", "tmp"),
}
COMMANDS = {
    "scontrol": "echo localhost",
    # Start the tasks of a step on this machine, and fail if one of them fails.
    "srun": """while [ "${1#-}" != "$1" ]; do shift; done
        tasks=
        for i in $(seq 0 $((SLURM_NTASKS - 1))); do
            SLURM_STEP_ID=0 SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & tasks="$tasks $!"
        done
        for task in $tasks; do wait "$task" || exit 1; done""",
    "sbatch": 'sh "$1" > "$1.log" 2>&1 & echo "Submitted batch job $!"',
    "scancel": 'kill "$@"',
}


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """Return the environment of a job of two tasks on this machine."""
    for name, text in COMMANDS.items():
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/sh\n{text}\n")
        command.chmod(0o755)
    paths = [str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    job = {"JOB_ID": str(os.getpid()), "JOB_NODELIST": "localhost", "JOB_NUM_NODES": "1", "NTASKS": "2"}
    variables = {f"SLURM_{name}": value for name, value in job.items()}
    return {"PATH": os.pathsep.join(paths), "SLURMD_NODENAME": "localhost", **variables}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_batch_script_has_known_options_before_its_first_command(script):
    options, body = re.fullmatch(r"#!/bin/bash\n((?:#.*\n)+)([\s\S]*)", script.read_text()).groups()
    named = re.findall(r"^#SBATCH --([a-z-]+)(?:=\S+)?$", options, re.MULTILINE)
    assert set(named) <= OPTIONS
    assert len(named) == script.read_text().count("#SBATCH")
    assert body.startswith("set -euo pipefail")
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize(
    ("script", "n_tasks", "arguments", "written"),
    [
        ("srun", 2, ["ATLAS", "--max-steps=2", "--checkpoint=run"], "run"),
        ("torchrun", 1, ["ATLAS", "--max-steps=2"], "run.pt"),
        (
            "train_yaml",
            2,
            ["examples/configs/classifier.yaml", "--data.path=ATLAS", "--training.max_steps=2"],
            "model.pt",
        ),
    ],
)
def test_a_batch_script_trains_on_two_ranks(atlas_of, slurm, tmp_path, script, n_tasks, arguments, written):
    atlas = str(atlas_of(2_000, 300))
    arguments = [one.replace("ATLAS", atlas).replace("=run", f"={tmp_path / 'run'}") for one in arguments]
    if script == "train_yaml":
        arguments.append(f"--training.checkpoint_dir={tmp_path}")
    slurm |= {"SLURM_NTASKS": str(n_tasks), "CHECKPOINT": str(tmp_path / "run.pt")}
    printed = programs.run(["bash", f"examples/slurm/{script}.sbatch", *arguments], cwd=ROOT, **slurm)
    assert (tmp_path / written).exists()
    assert re.search(r"2 ranks|world_size +2", printed)


def test_dask_workers_in_jobs_read_every_cell(atlas_of, slurm, tmp_path):
    pytest.importorskip("dask_jobqueue")
    pytest.importorskip("cryptography")
    options = ["--jobs=2", "--cores=1", "--memory=1GB", f"--shared={tmp_path}"]
    program = [sys.executable, ROOT / "examples/slurm/dask_workers.py", atlas_of(2_000, 300), *options]
    assert programs.run(program, cwd=tmp_path, **slurm).startswith("2000 cells from ")
