"""Launchers, really run: Open MPI's mpirun, and srun on a Slurm cluster of one node; the others by what they set."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from make_atlas import make_atlas

from tests.programs.with_slurm import cluster, free_ports, missing

ROOT = Path(__file__).parents[1]
LAUNCHED = ROOT / "tests" / "programs" / "launched.py"
TRAIN = ROOT / "examples" / "train_ddp.py"
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]


@pytest.fixture(scope="module")
def atlas(tmp_path_factory) -> Path:
    return make_atlas(tmp_path_factory.mktemp("atlas") / "atlas.h5ad", 1_000, 300)


@pytest.fixture(scope="module")
def mpirun() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")


@pytest.fixture(scope="module")
def slurm():
    if absent := missing():
        pytest.skip(f"no Slurm here (Debian: slurm-wlm, munge; as root): {', '.join(absent)}")
    with cluster() as environment:
        yield environment


def run(command: list[object], environment: dict[str, str] | None = None) -> str:
    (port,) = free_ports(1)
    ours = {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [*map(str, command)],
        env={**(environment or os.environ), **ours},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def launched(folder: Path, command: list[object], environment: dict[str, str] | None = None) -> list[dict]:
    """What each rank of a launched program wrote, after checking that together they read an epoch."""
    run([*command, LAUNCHED, folder], environment)
    ranks = [json.loads(file.read_text()) for file in sorted(folder.iterdir())]
    assert [rank["rank"] for rank in ranks] == list(range(len(ranks)))
    assert {rank["world_size"] for rank in ranks} == {len(ranks)}
    assert len({len(rank["batches"]) for rank in ranks}) == 1
    seen = Counter(chain(*chain(*(rank["batches"] for rank in ranks))))
    assert set(seen) == set(range(103))
    assert sum(seen.values()) - 103 < len(ranks)
    return ranks


def test_mpirun_starts_ranks_that_share_an_epoch(mpirun, tmp_path):
    ranks = launched(tmp_path, [*MPIRUN, sys.executable])
    assert [rank["source"] for rank in ranks] == ["OMPI_COMM_WORLD_RANK/OMPI_COMM_WORLD_SIZE"] * 2
    assert [rank["local_world_size"] for rank in ranks] == [2, 2]


def test_ddp_trains_under_mpirun(mpirun, atlas):
    printed = run([*MPIRUN, sys.executable, TRAIN, atlas, "--batch-size", 32])
    assert re.search(r"epoch 0: [\d,]+ cells/s on 2 ranks", printed)


def test_srun_starts_ranks_that_share_an_epoch(slurm, tmp_path):
    ranks = launched(tmp_path, ["srun", "-n", 2, sys.executable], slurm)
    assert [rank["source"] for rank in ranks] == ["SLURM_PROCID/SLURM_NTASKS"] * 2
    # Both tasks are on this node and share its cores.
    assert [rank["local_world_size"] for rank in ranks] == [2, 2]


def test_srun_of_one_torchrun_a_node_counts_torchruns_ranks(slurm, tmp_path):
    (port,) = free_ports(1)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2"]
    meeting = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=one"]
    ranks = launched(tmp_path, ["srun", "-n", 2, *torchrun, *meeting], slurm)
    assert [rank["source"] for rank in ranks] == ["RANK/WORLD_SIZE"] * 4
    assert [rank["local_world_size"] for rank in ranks] == [2] * 4


def test_ddp_trains_under_srun(slurm, atlas):
    printed = run(["srun", "-n", 2, sys.executable, TRAIN, atlas, "--batch-size", 32], slurm)
    assert re.search(r"epoch 0: [\d,]+ cells/s on 2 ranks", printed)


def test_one_task_of_an_sbatch_script_is_no_rank(slurm, tmp_path):
    (alone,) = launched(tmp_path, ["srun", "-n", 1, sys.executable], slurm)
    assert alone["source"] == "default"


def test_the_cluster_takes_its_daemons_with_it():
    if absent := missing():
        pytest.skip(f"no Slurm here: {', '.join(absent)}")
    script = ROOT / "tests" / "programs" / "with_slurm.py"
    print_folder = "import os; print(os.path.dirname(os.environ['SLURM_CONF']))"
    folder = run([sys.executable, script, "srun", "-n", 1, sys.executable, "-c", print_folder]).strip()
    assert "slurm-" in folder
    assert not Path(folder).exists()
    running = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if _readable(file)]
    assert not [command for command in running if folder.encode() in command]


def _readable(file: Path) -> bool:
    try:
        file.read_bytes()
    except OSError:
        return False
    return True
