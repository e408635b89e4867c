"""Detection of the rank of this process."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from dasksc import InputError, RankMismatchError, World
from dasksc.plan.ranks import Agreement

pytestmark = pytest.mark.core

# Four tasks started by srun; this process is the last.
SRUN = "SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_STEP_ID=0"
# A shell that salloc opens is an interactive step of one task; its number stands for a step that srun did not start.
SHELL = "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_ID=4294967290"
MPI = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2"
NODES = "SLURM_STEP_TASKS_PER_NODE=1(x2),2"

# Variables, and the rank, world size and local world size that they mean.
LAUNCHERS = [
    ("", 0, 1, 1),
    # torchrun, Ray Train and Kubeflow; deepspeed sets LOCAL_SIZE. One of torchrun's variables is not enough.
    ("RANK=3 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2", 3, 4, 2),
    ("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_SIZE=2", 3, 4, 2),
    ("RANK=3", 0, 1, 1),
    ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1", 1, 2, 2),
    # mpirun from Open MPI, and from MPICH or Intel MPI; horovodrun, which may use mpirun underneath.
    (f"{MPI} OMPI_COMM_WORLD_LOCAL_SIZE=2", 1, 2, 2),
    ("PMI_RANK=1 PMI_SIZE=8 MPI_LOCALNRANKS=4", 1, 8, 4),
    ("HOROVOD_RANK=1 HOROVOD_SIZE=2 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=9", 1, 2, 1),
    # srun sets the number of tasks on each node; the number of a node's tasks is that of the step.
    (SRUN, 3, 4, 1),
    (f"{SRUN} SLURM_STEP_TASKS_PER_NODE=4", 3, 4, 4),
    (f"{SRUN} {NODES} SLURM_NODEID=1", 3, 4, 1),
    (f"{SRUN} {NODES} SLURM_NODEID=2", 3, 4, 2),
    (f"{SRUN} SLURM_STEP_TASKS_PER_NODE=4 SLURM_NTASKS_PER_NODE=2", 3, 4, 4),
    (f"{SRUN} SLURM_NTASKS_PER_NODE=2", 3, 4, 1),
    # srun of a part of the allocation, and srun --pty bash.
    (f"{SRUN} SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=7", 7, 8, 1),
    (f"{SRUN} SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1", 1, 2, 1),
    (f"{SRUN} SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0", 0, 1, 1),
    # Shells, batch scripts, processes that Slurm adopts, and tasks of an array are not ranks.
    (SHELL, 0, 1, 1),
    (f"{SHELL} SLURM_STEP_NUM_TASKS=1", 0, 1, 1),
    (f"{SHELL} PMI_RANK=0 PMI_SIZE=1", 0, 1, 1),
    (f"{SHELL} SLURM_STEP_ID=4294967291", 0, 1, 1),
    (f"{SHELL} SLURM_STEP_ID=4294967292", 0, 1, 1),
    ("SLURM_PROCID=0 SLURM_NTASKS=4", 0, 1, 1),
    ("SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_ARRAY_TASK_ID=3", 0, 1, 1),
    # The innermost launcher started this process: mpirun in a shell, torchrun in a task of an array or under srun.
    (f"{SHELL} {MPI}", 1, 2, 1),
    ("SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_ARRAY_TASK_ID=3 SLURM_STEP_ID=4294967291 RANK=1 WORLD_SIZE=2", 1, 2, 1),
    (f"{SRUN} RANK=0 WORLD_SIZE=16 LOCAL_WORLD_SIZE=4", 0, 16, 4),
    ("RANK=1 WORLD_SIZE=2 PMI_RANK=0 PMI_SIZE=5", 1, 2, 1),
    (f"{SRUN} SLURM_PROCID=0 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", 0, 1, 1),
    # Nothing tells a program that a rank starts, such as a shell, from the rank itself.
    (f"{MPI} SHLVL=2", 1, 2, 1),
]


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    named = " ".join([environment for environment, *_ in LAUNCHERS] + ["HOROVOD_LOCAL_SIZE=1"])
    for variable in named.split():
        monkeypatch.delenv(variable.split("=")[0], raising=False)


@pytest.mark.parametrize(("environment", "rank", "world_size", "local"), LAUNCHERS)
def test_launchers_are_known_by_what_they_set(monkeypatch, environment, rank, world_size, local):
    for variable in environment.split():
        monkeypatch.setenv(*variable.split("="))
    world = World.detect()
    assert (world.rank, world.world_size, world.local_world_size) == (rank, world_size, local)


def test_arguments_win_and_can_opt_out(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert World.detect(0, 1).world_size == 1
    assert (World.detect(rank=1).rank, World.detect(rank=1).world_size) == (1, 4)
    assert World.detect(world_size=8).rank == 3
    monkeypatch.setenv("RANK", "first")
    assert World.detect(0, 1).world_size == 1


@pytest.mark.parametrize(
    ("environment", "arguments", "facts"),
    [
        ("", {"world_size": 2}, "world_size=2.*rank="),
        ("", {"rank": 2}, "rank=2.*world_size="),
        ("RANK=0 WORLD_SIZE=2", {"rank": 3}, "from.*RANK/WORLD_SIZE.*world_size="),
        ("RANK=first WORLD_SIZE=4", {}, "RANK='first'.*WORLD_SIZE='4'"),
        ("RANK=4 WORLD_SIZE=4", {}, "rank=4.*world_size=4.*from"),
        ("", {"group": object()}, "init_process_group.*init_device_mesh"),
    ],
)
def test_ranks_that_cannot_be_known_are_refused(monkeypatch, environment, arguments, facts):
    for variable in environment.split():
        monkeypatch.setenv(*variable.split("="))
    with pytest.raises(InputError, match=facts):
        World.detect(**arguments)


def test_an_initialised_horovod_wins_over_the_environment(monkeypatch):
    up = [True]
    # A stand-in, with the interface that its documentation states.
    ranks = {"rank": lambda: 3, "size": lambda: 4, "local_size": lambda: 2}
    horovod = SimpleNamespace(__name__="horovod.torch", is_initialized=lambda: up[0], **ranks)
    monkeypatch.setitem(sys.modules, "horovod.torch", horovod)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "9")
    world = World.detect()
    assert (world.rank, world.world_size, world.local_world_size, world.source) == (3, 4, 2, "horovod.torch")
    up[0] = False
    assert World.detect().world_size == 9


def test_keys_written_before_a_restart_by_torchrun_are_not_read(monkeypatch):
    dist = pytest.importorskip("torch.distributed")
    store = dist.HashStore()

    def agreement(attempt: int):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        # A new Agreement numbers data sets from the start, as in a new process.
        return Agreement(World(0, 2), dist.PrefixStore("run", store))

    first = agreement(0)
    first.begin(0, epoch=0, fingerprint="same")
    first.end(0, 1, is_whole=False)
    second = agreement(1)
    second.begin(0, epoch=3, fingerprint="same")
    second.require_not_abandoned(0)
    with pytest.raises(RankMismatchError):
        agreement(1).begin(0, epoch=4, fingerprint="same")
    # A seed may persist across restarts, because it is equal on all ranks.
    assert agreement(0).seed(5, "kind") == agreement(1).seed(6, "kind") == 5
