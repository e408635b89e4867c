"""Detection of the rank of this process."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from dasksc import InputError, RankMismatchError, World
from dasksc.plan.agreement import Agreement

pytestmark = pytest.mark.core

LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE"),
    *(
        "MPI_LOCALNRANKS",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_STEP_ID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_STEP_TASKS_PER_NODE",
    ),
    *("SLURM_NODEID", "MASTER_ADDR"),
)

SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "rank", "world_size", "local"),
    [
        # No variables: a single process.
        ({}, 0, 1, 1),
        # torchrun, two nodes with two processes each.
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 3, 4, 2),
        # deepspeed, whose launcher sets LOCAL_SIZE.
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, 3, 4, 2),
        # Part of torchrun's variables is not enough.
        ({"RANK": "3"}, 0, 1, 1),
        # mpirun from Open MPI.
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            *(1, 2, 2),
        ),
        # mpirun from MPICH and Intel MPI.
        ({"PMI_RANK": "1", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "4"}, 1, 8, 4),
        # horovodrun, which may use mpirun underneath.
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "9"}, 1, 2, 1),
        # srun.
        (SLURM, 3, 4, 1),
        # srun sets the number of tasks on each node, whether or not it was requested.
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4"}, 3, 4, 4),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x2),2", "SLURM_NODEID": "1"}, 3, 4, 1),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x2),2", "SLURM_NODEID": "2"}, 3, 4, 2),
        # The number of tasks on a node is that of the step, not that of the allocation.
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NTASKS_PER_NODE": "2"}, 3, 4, 4),
        ({**SLURM, "SLURM_NTASKS_PER_NODE": "2"}, 3, 4, 1),
        # A task of an sbatch script is not a rank.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, 0, 1, 1),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}, 0, 1, 1),
        # srun of a part of the allocation: the number of tasks is that of the step.
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "7"}, 7, 8, 1),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, 1, 2, 1),
        # A shell that salloc opens is an interactive step of one task; the allocation has four.
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, 0, 1, 1),
        # The same, without the number of its tasks.
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, 0, 1, 1),
        # The same, where srun starts the shell through PMI.
        (
            {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "PMI_RANK": "0", "PMI_SIZE": "1"},
            *(0, 1, 1),
        ),
        # A program that a rank of mpirun or srun starts, such as a shell: nothing tells it from the rank itself.
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "SHLVL": "2"}, 1, 2, 1),
        ({**SLURM, "SHLVL": "2"}, 3, 4, 1),
        # An sbatch script without srun is the batch step; processes that Slurm adopts, such as ssh, are in another one.
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}, 0, 1, 1),
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967292"}, 0, 1, 1),
        # srun --pty bash: one task.
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, 0, 1, 1),
        # mpirun in such a shell started this process.
        (
            {
                **SLURM,
                "SLURM_STEP_ID": "4294967290",
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
            },
            *(1, 2, 1),
        ),
        # torchrun in a task of an array, whose job has one task.
        (
            {
                "SLURM_PROCID": "0",
                "SLURM_NTASKS": "1",
                "SLURM_ARRAY_TASK_ID": "3",
                "SLURM_STEP_ID": "4294967291",
                "RANK": "1",
                "WORLD_SIZE": "2",
            },
            *(1, 2, 1),
        ),
        # A task of an array without torchrun.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_ARRAY_TASK_ID": "3"}, 0, 1, 1),
        # A worker of Ray Train, and a pod of Kubeflow: both set RANK and WORLD_SIZE for each process.
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}, 2, 4, 2),
        # A program that a rank of torchrun starts, such as a notebook: nothing tells it from the rank itself.
        ({"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "JPY_PARENT_PID": "9"}, 1, 2, 1),
        # mpirun -n 1, as a wrapper of a single program.
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", **SLURM, "SLURM_PROCID": "0"}, 0, 1, 1),
        # srun torchrun: torchrun started this process.
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"}, 0, 16, 4),
        # Kubeflow sets RANK and WORLD_SIZE, which take precedence over the variables of mpirun inside it.
        ({"RANK": "1", "WORLD_SIZE": "2", "PMI_RANK": "0", "PMI_SIZE": "5"}, 1, 2, 1),
        # Started manually on one machine.
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, 1, 2, 2),
    ],
)
def test_launchers_are_known_by_what_they_set(monkeypatch, environment, rank, world_size, local):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    world = World.detect()
    assert (world.rank, world.world_size, world.local_world_size) == (rank, world_size, local)


def test_arguments_win_and_can_opt_out(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert World.detect(0, 1).world_size == 1
    assert (World.detect(rank=1).rank, World.detect(rank=1).world_size) == (1, 4)
    assert World.detect(world_size=8).rank == 3


def test_a_world_size_without_a_rank_is_refused_if_no_launcher_sets_it():
    with pytest.raises(InputError, match="world_size=2.*rank="):
        World.detect(world_size=2)
    assert World.detect(world_size=1).rank == 0


def test_variables_that_are_not_numbers_are_named(monkeypatch):
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match="RANK='first'.*WORLD_SIZE='4'"):
        World.detect()


def test_a_rank_beyond_the_world_names_where_it_came_from(monkeypatch):
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match="rank=4.*world_size=4.*from"):
        World.detect()


def faked(module: str, **members: object) -> SimpleNamespace:
    """Return a stand-in for a library that is not installed here, with the interface that its documentation states."""
    return SimpleNamespace(__name__=module, **members)


def test_an_initialised_horovod_wins_over_the_environment(monkeypatch):
    up = [True]
    horovod = faked(
        "horovod.torch",
        is_initialized=lambda: up[0],
        rank=lambda: 3,
        size=lambda: 4,
        local_size=lambda: 2,
    )
    monkeypatch.setitem(sys.modules, "horovod.torch", horovod)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "9")
    world = World.detect()
    assert (world.rank, world.world_size, world.local_world_size, world.source) == (3, 4, 2, "horovod.torch")
    up[0] = False
    assert World.detect().world_size == 9


def test_a_group_without_torch_distributed_is_refused():
    with pytest.raises(InputError, match="init_process_group.*init_device_mesh"):
        World.detect(group=object())


def test_keys_written_before_a_restart_by_torchrun_are_not_read(monkeypatch):
    dist = pytest.importorskip("torch.distributed")
    store = dist.HashStore()

    def agreement(attempt: int):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        # A new Agreement numbers data sets from the start, as in a new process.
        return Agreement(World(0, 2), dist.PrefixStore("run", store))

    first = agreement(0)
    first.begin(0, epoch=0, fingerprint="same")
    first.record_abandoned(0, n_batches=1)
    second = agreement(1)
    second.begin(0, epoch=3, fingerprint="same")
    second.require_not_abandoned(0, n_batches=1)
    with pytest.raises(RankMismatchError):
        agreement(1).begin(0, epoch=4, fingerprint="same")
    # A seed may persist across restarts, because it is equal on all ranks.
    assert agreement(0).seed(5) == agreement(1).seed(6) == 5


def test_a_rank_without_a_world_size_is_refused_with_the_detected_size(monkeypatch):
    with pytest.raises(InputError, match="rank=2.*world_size="):
        World.detect(rank=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="from.*RANK/WORLD_SIZE.*world_size="):
        World.detect(rank=3)
    assert World.detect(rank=1).world_size == 2
