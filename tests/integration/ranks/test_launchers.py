"""Launchers: Open MPI's mpirun, srun on a one-node Slurm cluster, and the environment variables of other launchers."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections import Counter
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest

import dasksc
from tests.programs.with_slurm import free_ports
from tests.support.data import make_adata, write_store
from tests.support.programs import MPIRUN, PROGRAMS, ROOT, run, torchrun

pytestmark = pytest.mark.programs

on_slurm = pytest.mark.xdist_group("slurm")
LAUNCHED = PROGRAMS / "launched.py"
TRAIN = ROOT / "examples" / "train_ddp.py"


@pytest.fixture(scope="session")
def atlas(atlas_of) -> Path:
    return atlas_of(1_000, 300)


def start(command: list[object], environment: dict[str, str] | None = None) -> str:
    (port,) = free_ports(1)
    return run(command, environment=environment, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def launched(folder: Path, command: list[object], environment: dict[str, str] | None = None) -> list[dict]:
    """Return the output of each rank of a launched program; fail unless the ranks together read one epoch."""
    start([*command, LAUNCHED, folder], environment)
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
    printed = start([*MPIRUN, sys.executable, TRAIN, atlas, "--batch-size", 32])
    assert re.search(r"epoch 0: [\d,]+ cells/s on 2 ranks", printed)


@on_slurm
def test_srun_starts_ranks_that_share_an_epoch(slurm, tmp_path):
    ranks = launched(tmp_path, ["srun", "-n", 2, sys.executable], slurm)
    assert [rank["source"] for rank in ranks] == ["SLURM_PROCID/SLURM_NTASKS"] * 2
    # Both tasks are on this node and share its cores.
    assert [rank["local_world_size"] for rank in ranks] == [2, 2]


@on_slurm
def test_srun_with_one_torchrun_per_node_has_the_ranks_of_torchrun(slurm, tmp_path):
    (port,) = free_ports(1)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2"]
    meeting = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=one", "--local-addr=127.0.0.1"]
    ranks = launched(tmp_path, ["srun", "-n", 2, *torchrun, *meeting], slurm)
    assert [rank["source"] for rank in ranks] == ["RANK/WORLD_SIZE"] * 4
    assert [rank["local_world_size"] for rank in ranks] == [2] * 4


@on_slurm
def test_one_task_of_an_sbatch_script_is_no_rank(slurm, tmp_path):
    (alone,) = launched(tmp_path, ["srun", "-n", 1, sys.executable], slurm)
    assert alone["source"] == "default"


def test_deepspeed_trains_two_ranks_and_goes_on_from_its_checkpoint(tmp_path):
    pytest.importorskip("deepspeed")
    path = write_store(make_adata(60), tmp_path, "h5ad")
    torchrun(2, "deepspeed_program.py", path, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert sorted(chain(*chain(*(rank["seen"] for rank in ranks)))) == list(range(60))
    assert [rank["rest"] for rank in ranks] == [rank["seen"][2:] for rank in ranks]


class Repeating:
    """Loader that restarts without setting the epoch, as DeepSpeed's `RepeatingLoader` does."""

    def __init__(self, loader):
        self.loader = loader
        self.batches = iter(loader)

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)


@pytest.mark.parametrize("real", [False, True], ids=["as DeepSpeed does", "DeepSpeed's"])
def test_a_loader_repeated_without_set_epoch_reads_new_epochs(real, recwarn):
    # Importing DeepSpeed raises deprecation warnings of torch, so `recwarn` keeps warnings from being errors.
    repeating = pytest.importorskip("deepspeed.runtime.dataloader").RepeatingLoader if real else Repeating
    dataset = dasksc.scDataset(np.arange(40), dasksc.BlockShuffling(4), batch_size=10, seed=0)
    batches = [batch.tolist() for batch in islice(repeating(dataset), 12)]
    epochs = [list(chain(*batches[i : i + 4])) for i in (0, 4, 8)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(40))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_horovod_program_shares_each_epoch_with_a_faked_horovod(tmp_path, monkeypatch):
    # Horovod has no wheels, so the test fakes its module and sets the environment variables of horovodrun.
    program = PROGRAMS / "horovod_program.py"
    monkeypatch.setattr(sys, "argv", [str(program), str(tmp_path)])
    monkeypatch.setitem(sys.modules, "horovod.torch", None)  # removed again at the end
    for rank in range(2):
        environment = {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": str(rank)}
        for name, value in {**environment, "HOROVOD_LOCAL_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        runpy.run_path(str(program), run_name="__main__")
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for epoch in range(2):
        assert sorted(chain(*(rank[epoch] for rank in ranks))) == list(range(104))
    assert ranks[0][0] != ranks[0][1]
