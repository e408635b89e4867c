"""Ranks of this run: process groups, rank and world size of this process, and agreement of the ranks on seed and epoch.

`World.detect` is the only code that inspects process groups and environment variables. Ranks agree by records in the
key-value store of ``torch.distributed``. They never use a collective, which would hang whenever one rank reads a batch
that the others do not read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from dasksc.checks import is_whole
from dasksc.errors import InputError, RankMismatchError

logger = logging.getLogger("dasksc.world")

_SETTLE_S = 0.2


def torch_distributed() -> Any:
    """Return ``torch.distributed`` if a process group is initialized, otherwise None; never import torch."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return module


def leave_group() -> None:
    """Destroy the process group, if there is one, after a short wait for its threads."""
    # A thread of Gloo releases the tensors of a collective a moment after the collective ends, and may need the GIL to
    # do so. If the interpreter exits first, PyTorch aborts the process ("terminate called without an active
    # exception"). Destroying the group at once can deadlock, since the call holds the GIL while it waits for the
    # thread.
    distributed = torch_distributed()
    if distributed is not None:
        time.sleep(_SETTLE_S)
        distributed.destroy_process_group()


# Environment variables of each launcher (rank, world size, local rank), in order of precedence: the first launcher
# whose rank and world size are set wins. `srun torchrun` and Kubeflow set the variables of several launchers, with
# different values. The innermost launcher, which started this process, comes first.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
# Slurm numbers the steps that srun does not start from here: interactive shells, batch scripts and others.
_FIRST_SPECIAL_STEP = 0xFFFF_FFFA
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "HOROVOD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)

# Names of the data-parallel dimensions of a device mesh, across which batches differ.
_DATA_PARALLEL = frozenset(
    ("dp", "ddp", "fsdp", "hsdp", "data", "data_parallel", "dp_replicate", "dp_shard", "replicate", "shard")
)


@dataclass(frozen=True, slots=True)
class World:
    """Rank of this process and size of its group.

    Parameters
    ----------
    rank
        Rank of this process, in [0, world_size).
    world_size
        Number of processes that share an epoch.
    local_world_size
        Number of processes on this machine, which share its cores.
    source
        Origin of these numbers, such as ``"arguments"``, for messages.
    group
        Identifier of the group among the groups of the same run; empty if the group contains all processes.

    Examples
    --------
    >>> dasksc.World.detect(rank=1, world_size=4)
    World(rank=1, world_size=4, local_world_size=1, source='arguments', group='')
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    source: str = "default"
    group: str = ""

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise InputError(
                f"rank={self.rank} and world_size={self.world_size} (from {self.source}) are inconsistent: rank must "
                "lie in [0, world_size)"
            )

    @classmethod
    def detect(cls, rank: int | None = None, world_size: int | None = None, group: Any = None) -> World:
        """Detect rank and world size.

        The first available source wins. The order is: the arguments; `group`; an initialized
        ``torch.distributed``, Horovod or ``jax.distributed``; ``RANK`` and ``WORLD_SIZE`` as set by
        torchrun; the variables of Horovod, Open MPI, PMI and Slurm. If only one of `rank` and
        `world_size` is given, the other is detected.

        Parameters
        ----------
        rank, world_size
            Rank of this process and number of processes.
        group
            A ``torch.distributed`` process group, or a ``DeviceMesh``. The mesh must have a single
            dimension, or at least one of its dimensions must be named ``"dp"``, ``"data"``, ``"fsdp"``,
            ``"dp_replicate"``, ``"dp_shard"`` or similar.

        Raises
        ------
        InputError
            If a value is not a whole number, the values are inconsistent, or this process is not in `group`.
        """
        for name, value in (("rank", rank), ("world_size", world_size)):
            if value is not None and not is_whole(value):
                raise InputError(f"{name} must be a whole number or None; got {value!r}")
        sources = itertools.chain(_from_libraries(), _from_environment(), (cls(),))
        try:
            found = next(sources) if group is None else _of_group(group)
        except InputError:  # variables of a launcher that contradict each other
            if group is not None or rank is None or world_size is None:
                raise
            found = cls()
        if rank is None and world_size is None:
            return found
        if rank is None and world_size is not None and world_size > 1 and found == World():
            raise InputError(
                f"world_size={world_size} was given without rank=, but the rank of this process is unknown: every "
                "process would read the share of rank 0. Give rank=, or start the processes with torchrun"
            )
        if rank is not None and world_size is None and rank >= found.world_size:
            detected = f"the number of processes is {found.world_size} (from {found.source})"
            known = "no launcher was detected" if found == cls() else detected
            raise InputError(f"rank={rank} was given without world_size=, and {known}. Give world_size= as well")
        return cls(
            rank=found.rank if rank is None else int(rank),
            world_size=found.world_size if world_size is None else int(world_size),
            # Explicit arguments do not say how many ranks run on this machine, so the detected number is kept.
            local_world_size=found.local_world_size,
            source="arguments",
        )


def _from_libraries() -> Iterator[World]:
    distributed = torch_distributed()
    if distributed is not None:
        size = distributed.get_world_size()
        yield World(distributed.get_rank(), size, _local_size(size), "torch.distributed")
    for name in ("horovod.torch", "horovod.tensorflow", "horovod.keras"):
        horovod = sys.modules.get(name)
        if horovod is not None and horovod.is_initialized():
            yield World(horovod.rank(), horovod.size(), horovod.local_size(), name)
            break
    jax = sys.modules.get("jax.distributed")
    if jax is not None and jax.is_initialized():
        # The public functions of JAX would initialize its devices, and so wait for all other processes.
        state = sys.modules["jax._src.distributed"].global_state
        yield World(state.process_id, state.num_processes, _local_size(state.num_processes), "jax.distributed")


def _of_group(group: Any) -> World:
    # The local world size counts all ranks of the run on this machine, since they share its cores.
    distributed = torch_distributed()
    if distributed is None:
        raise InputError("group= needs torch.distributed: call init_process_group or init_device_mesh first")
    here = distributed.get_rank()
    if group == distributed.GroupMember.NON_GROUP_MEMBER:
        raise _not_in_group(here)
    if isinstance(group, distributed.ProcessGroup):
        ranks = distributed.get_process_group_ranks(group)
    elif hasattr(group, "mesh_dim_names") and hasattr(group, "get_coordinate"):
        ranks = _data_parallel_ranks(group, here)
    else:
        raise InputError(f"group must be a torch.distributed process group or a DeviceMesh; got {group!r}")
    if here not in ranks:
        raise _not_in_group(here)
    n_all = distributed.get_world_size()
    # The name is the same on all ranks of the group, and different from that of any other group.
    name = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    return World(
        rank=ranks.index(here),
        world_size=len(ranks),
        local_world_size=_local_size(n_all),
        source="group",
        group="" if ranks == list(range(n_all)) else name,
    )


def _not_in_group(rank: int) -> InputError:
    return InputError(f"rank {rank} is not in group=. Create the data set only on the ranks of the group")


def _data_parallel_ranks(mesh: Any, here: int) -> list[int]:
    """Return the global ranks of processes that differ from this one only in data-parallel dimensions of a mesh."""
    names = mesh.mesh_dim_names or ()
    at = mesh.get_coordinate()
    if at is None:
        raise _not_in_group(here)
    across = [i for i in range(mesh.ndim) if mesh.ndim == 1 or (names and names[i] in _DATA_PARALLEL)]
    if not across:
        raise InputError(
            f"group is a DeviceMesh of {mesh.ndim} dimensions {names or 'without names (mesh_dim_names=)'}, none of "
            "which has a known name of a data-parallel dimension. Give the dimension across which batches differ: "
            "group=mesh['its name']"
        )
    index = tuple(slice(None) if i in across else at[i] for i in range(mesh.ndim))
    ranks: list[int] = mesh.mesh[index].flatten().tolist()
    return ranks


def _from_environment() -> Iterator[World]:
    environment = os.environ
    for rank_name, size_name, _ in LAUNCHERS:
        if rank_name not in environment or size_name not in environment:
            continue
        try:
            rank, size = int(environment[rank_name]), int(size_in(environment, size_name))
        except ValueError as error:
            raise InputError(
                f"{rank_name}={environment[rank_name]!r} and {size_name}={environment[size_name]!r} must be "
                "whole numbers; unset them or pass rank= and world_size="
            ) from error
        step = environment.get("SLURM_STEP_ID", "")
        is_srun_step = step.isdigit() and int(step) < _FIRST_SPECIAL_STEP
        if rank_name != "SLURM_PROCID" or (size > 1 and is_srun_step):
            yield World(rank, size, _local_size(size), f"{rank_name}/{size_name}")


def size_in(environment: Mapping[str, str], name: str) -> str:
    """Return the world size in a variable; in a Slurm step, the number of its tasks, not that of the allocation."""
    return environment.get("SLURM_STEP_NUM_TASKS", environment[name]) if name == "SLURM_NTASKS" else environment[name]


def _local_size(world_size: int) -> int:
    for name in _LOCAL_SIZES:
        try:
            return max(1, min(int(os.environ[name]), world_size))
        except (KeyError, ValueError):
            continue
    # SLURM_NTASKS_PER_NODE is the request of the allocation. Slurm writes "2(x3),1" for two tasks on each of three
    # nodes and one on the fourth.
    if tasks := os.environ.get("SLURM_STEP_TASKS_PER_NODE"):
        counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
        per_node = [int(n) for n, n_nodes in counts for _ in range(int(n_nodes or 1))]
        node = int(os.environ.get("SLURM_NODEID", 0))
        return min(per_node[node], world_size) if node < len(per_node) else 1
    return world_size if os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1") else 1


def shared_store(prefix: str) -> Any:
    """Return the key-value store shared by the processes of this run, or None; `prefix` is added to all keys."""
    distributed = torch_distributed()
    if distributed is None:
        return None
    # There is no public function that returns the store of the process group.
    return distributed.PrefixStore(prefix, distributed.distributed_c10d._get_default_store())


# Numbers of data sets that each rank of each group has created, in all and of each kind, by store. The run's own store
# stands under `World`, because torch may replace the object by another with the same keys.
_Counts: TypeAlias = defaultdict[tuple[int, str, str], Iterator[int]]
_counts: weakref.WeakKeyDictionary[Any, _Counts] = weakref.WeakKeyDictionary()


def is_shared(world: World) -> bool:
    """Return True if other processes read the same epochs: other ranks, or tensor-parallel ones the same batches."""
    return world.world_size > 1 or bool(world.group)


class Agreement:
    """Agreement between the ranks of one data set, through the store of their process group."""

    # Data sets of different ranks are matched by the order in which each rank makes them for the same group. Every rank
    # of the group must therefore make the same data sets in the same order. The exception is a data set that only one
    # rank makes: with ``rank=0, world_size=1``, it is not compared with others. Every call takes one or two round trips
    # to the store and waits for no other rank.

    def __init__(self, world: World, store: Any = None) -> None:
        self._world = world
        self._given_store = store
        self._counts = _counts.setdefault(World if store is None else store, defaultdict(itertools.count))
        self._ordinal = next(self._counts[world.rank, world.group, ""]) if is_shared(world) else None

    def _under(self, prefix: str) -> Any:
        if self._given_store is None:
            return shared_store(prefix)
        return sys.modules["torch.distributed"].PrefixStore(prefix, self._given_store)

    def _store(self) -> Any:
        if self._ordinal is None:
            return None
        # A store can outlive processes that torchrun restarts. The restart count separates old records from new ones.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return self._under(f"dasksc/{attempt}/{self._world.group}/{self._ordinal}")

    @property
    def has_store(self) -> bool:
        """True if ranks can compare: there is a process group."""
        return self._store() is not None

    def seed(self, proposed: int, kind: str) -> int:
        """Propose a seed and return the agreed one, which is the first proposal of any rank."""
        # Data sets of the same kind are numbered apart, so that another one on a single rank does not shift the seeds.
        # All groups of the same size agree on one seed, because tensor-parallel ranks belong to different data-parallel
        # groups and must read the same rows.
        if self._store() is None:
            raise InputError(
                f"seed=None with world_size={self._world.world_size} and no process group: the ranks cannot agree "
                "on a seed. Pass the same seed= on every rank, or call torch.distributed.init_process_group first"
            )
        kind = f"{self._world.world_size}/{kind}"
        number = next(self._counts[self._world.rank, self._world.group, kind])
        return int(self._under("dasksc/seed").compare_set(f"{kind}/{number}", "", str(proposed)))

    def begin(
        self, iteration: str, epoch: int, fingerprint: str, settings: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Record the epoch and data that an iteration reads, or compare them with those another rank has recorded."""
        store = self._store()
        if store is None:
            return
        mine = f"{self._world.rank} {epoch} {fingerprint} {json.dumps(dict(settings))}"
        note = store.compare_set(f"begin/{iteration}", "", mine).decode()
        rank, its_epoch, its_fingerprint, its_settings = note.split(" ", 3)
        if its_fingerprint != fingerprint:
            raise RankMismatchError(
                f"ranks {rank} and {self._world.rank} read different data, or sample them differently: "
                f"{self._differences(rank, json.loads(its_settings), settings)}. Create the same data sets in the same "
                "order on every rank, with the same files, strategy, batch size, fetch_factor and seed"
            )
        if int(its_epoch) != epoch:
            raise RankMismatchError(
                f"in iteration {iteration} over this data set, rank {rank} reads epoch {its_epoch} and rank "
                f"{self._world.rank} reads epoch {epoch}. Call set_epoch with the same number on every rank, or on none"
            )

    def _differences(self, rank: str, its_settings: Mapping[str, str], settings: Mapping[str, str]) -> str:
        names = [name for name in {**settings, **its_settings} if settings.get(name) != its_settings.get(name)]
        its, mine = ([one.get(name, "not set") for name in names] for one in (its_settings, settings))
        texts = [
            f"{name} is {its} on rank {rank} and {mine} on rank {self._world.rank}"
            for name, its, mine in zip(names, its, mine, strict=True)
        ]
        return "; ".join(texts) or (
            "all arguments look the same, but array values, labels in obs, genes or versions of dasksc differ"
        )

    def require_not_abandoned(self, iteration: int) -> None:
        """Check, after the first batch of an iteration, that no other rank has ended it there."""
        store = self._store()
        if store is not None and store.check([f"end/{iteration}"]):
            rank, n_batches = store.get(f"end/{iteration}").decode().split()
            if n_batches in ("0", "1"):
                raise self._shifted(iteration, rank, n_batches, "continued")

    def end(self, iteration: int, n_batches: int, *, is_whole: bool) -> None:
        """Record the end of an iteration; warn if another rank has ended it after another number of batches."""
        store = self._store()
        if store is None:
            return
        mine = "all" if is_whole else str(n_batches)
        try:
            rank, its = store.compare_set(f"end/{iteration}", "", f"{self._world.rank} {mine}").decode().split()
        except RuntimeError as error:  # the process of the store may have exited
            logger.warning("the other ranks cannot be notified that this rank ended its iteration: %s", error)
            return
        if its != mine:
            what_this_did = "read it to the end" if is_whole else f"stopped it after {mine}"
            logger.warning("%s", self._shifted(iteration, rank, its, what_this_did))

    def _shifted(self, iteration: int, rank: str, n_batches: str, what_this_did: str) -> RankMismatchError:
        return RankMismatchError(
            f"rank {rank} stopped iteration {iteration} over this data set after {n_batches} batches; rank "
            f"{self._world.rank} {what_this_did}. The epochs of these ranks no longer match. Read the same number of "
            "batches on every rank. To inspect a batch on one rank only, create another data set with rank=0, "
            "world_size=1"
        )
