"""Which rank this is, and what ranks agree on.

`World.detect` is the one place that looks at process groups and environments. `Agreement` lets ranks
compare notes through the process group's key-value store: never through a collective, which would
hang the ranks whenever one of them reads a batch by itself.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dasksc.errors import InputError, RankMismatchError

__all__ = ["Agreement", "World"]

logger = logging.getLogger(__name__)

# Launchers by what they set, in order: the first that is complete wins. `srun torchrun` and Kubeflow
# set several that differ, and the innermost launcher is the one that started this process.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "HOROVOD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a run.

    Parameters
    ----------
    rank
        This process, in [0, world_size).
    world_size
        All processes that share an epoch.
    local_world_size
        Those of them on this machine, which share its cores.
    source
        Where this was learnt, for messages.
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    source: str = "default"

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise InputError(
                f"rank={self.rank} and world_size={self.world_size} (from {self.source}) do not fit: "
                "rank must lie in [0, world_size)"
            )

    @classmethod
    def detect(cls, rank: int | None = None, world_size: int | None = None) -> World:
        """Find out rank and world size.

        The first that knows wins: the arguments; an initialised ``torch.distributed``; ``RANK`` and
        ``WORLD_SIZE`` as torchrun sets them; Horovod's, Open MPI's, PMI's and Slurm's variables.
        Arguments may be given one at a time; the other is then detected.

        Raises
        ------
        InputError
            If what was found is not a number or does not fit together.
        """
        for name, value in (("rank", rank), ("world_size", world_size)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise InputError(f"{name} must be a whole number or None; got {value!r}")
        found = _from_group() or _from_environment(os.environ)
        if rank is None and world_size is None:
            return found
        return cls(
            rank=found.rank if rank is None else rank,
            world_size=found.world_size if world_size is None else world_size,
            # An explicit world says nothing of where its ranks are; those detected still share the cores.
            local_world_size=found.local_world_size,
            source="arguments",
        )


def _distributed() -> Any:
    """Return ``torch.distributed`` if a process group is up, without importing torch for it."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return module


def _from_group() -> World | None:
    distributed = _distributed()
    if distributed is None:
        return None
    size = distributed.get_world_size()
    return World(distributed.get_rank(), size, _local_size(os.environ, size), "torch.distributed")


def _from_environment(environment: Mapping[str, str]) -> World:
    for rank_name, size_name in _LAUNCHERS:
        if rank_name not in environment or size_name not in environment:
            continue
        try:
            rank, size = int(environment[rank_name]), int(environment[size_name])
        except ValueError as error:
            raise InputError(
                f"{rank_name}={environment[rank_name]!r} and {size_name}={environment[size_name]!r} must be "
                "whole numbers; unset them or pass rank= and world_size="
            ) from error
        if rank_name == "SLURM_PROCID" and (size < 2 or "SLURM_STEP_ID" not in environment):
            continue  # an sbatch script or an interactive shell, not one of several tasks of an srun step
        return World(rank, size, _local_size(environment, size), f"{rank_name}/{size_name}")
    return World()


def _local_size(environment: Mapping[str, str], world_size: int) -> int:
    for name in _LOCAL_SIZES:
        try:
            return max(1, min(int(environment[name]), world_size))
        except (KeyError, ValueError):
            continue
    if "SLURM_STEP_TASKS_PER_NODE" in environment:
        return min(_slurm_tasks_here(environment), world_size)
    return world_size if environment.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1") else 1


def _slurm_tasks_here(environment: Mapping[str, str]) -> int:
    """Return how many tasks of an srun step this node has: of "2(x3),1", two on each of three nodes, then one."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment["SLURM_STEP_TASKS_PER_NODE"])
    per_node = [int(n) for n, n_nodes in counts for _ in range(int(n_nodes or 1))]
    node = int(environment.get("SLURM_NODEID", 0))
    return per_node[node] if node < len(per_node) else 1


_ordinals = itertools.count()


class Agreement:
    """What the ranks of one data set compare through the process group's store.

    Ranks find each other by the order in which they make data sets, so every rank must make the same
    ones in the same order; a data set for one rank alone takes ``rank=0, world_size=1`` and has none.
    Every call is one or two round trips to the store and waits for no other rank.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._ordinal = next(_ordinals) if world.world_size > 1 and _distributed() is not None else None

    def _store(self) -> Any:
        distributed = _distributed()
        if self._ordinal is None or distributed is None:
            return None
        store = distributed.distributed_c10d._get_default_store()
        return distributed.PrefixStore(f"dasksc/{self._ordinal}", store)

    def seed(self, proposed: int) -> int:
        """Return the seed that the first rank to ask proposed.

        Raises
        ------
        InputError
            If there is no process group through which to agree.
        """
        store = self._store()
        if store is None:
            raise InputError(
                f"seed=None with world_size={self._world.world_size} and no process group: the ranks cannot agree "
                "on a seed. Pass seed=, the same on every rank, or call torch.distributed.init_process_group first"
            )
        return int(store.compare_set("seed", "", str(proposed)))

    def begin(self, iteration: int, epoch: int, fingerprint: str) -> None:
        """Say which epoch of what this rank's n-th iteration reads; compare with who said so first.

        Raises
        ------
        RankMismatchError
            If another rank reads another epoch or other data.
        """
        store = self._store()
        if store is None:
            return
        mine = f"{self._world.rank} {epoch} {fingerprint}"
        rank, its_epoch, its_fingerprint = store.compare_set(f"begin/{iteration}", "", mine).decode().split(" ", 2)
        if its_fingerprint != fingerprint:
            raise RankMismatchError(
                f"ranks {rank} and {self._world.rank} read different data or sample it differently in their "
                f"iteration {iteration} (fingerprints {its_fingerprint[:8]} and {fingerprint[:8]}). Make the same "
                "data sets in the same order on every rank, with the same files, strategy, sizes and seed"
            )
        if int(its_epoch) != epoch:
            raise RankMismatchError(
                f"in their iteration {iteration}, rank {rank} reads epoch {its_epoch} and rank {self._world.rank} "
                f"reads epoch {epoch}. Call set_epoch with the same number on every rank, or on none"
            )

    def go_on(self, iteration: int, n_batches: int) -> None:
        """Check, having yielded `n_batches`, that no other rank has given this iteration up by then.

        Raises
        ------
        RankMismatchError
            If one has: its epochs are now shifted against this rank's.
        """
        left = self._left(iteration)
        if left is not None and left[1] <= n_batches:
            raise self._shifted(iteration, *left, f"goes on after {n_batches}")

    def leave(self, iteration: int, n_batches: int) -> None:
        """Say that this rank gives its iteration up after `n_batches`; warn if another did elsewhere."""
        store = self._store()
        if store is None:
            return
        rank, n = store.compare_set(f"left/{iteration}", "", f"{self._world.rank} {n_batches}").decode().split()
        if int(n) != n_batches:
            logger.warning("%s", self._shifted(iteration, int(rank), int(n), f"left it after {n_batches}"))

    def finish(self, iteration: int) -> None:
        """Warn, at the end of an iteration, if another rank has given it up."""
        left = self._left(iteration)
        if left is not None:
            logger.warning("%s", self._shifted(iteration, *left, "read it to its end"))

    def _left(self, iteration: int) -> tuple[int, int] | None:
        """The rank that gave an iteration up first, and after how many batches."""
        store = self._store()
        if store is None or not store.check([f"left/{iteration}"]):
            return None
        rank, n = store.get(f"left/{iteration}").decode().split()
        return int(rank), int(n)

    def _shifted(self, iteration: int, rank: int, n: int, what_this_did: str) -> RankMismatchError:
        return RankMismatchError(
            f"rank {rank} left its iteration {iteration} after {n} batches; rank {self._world.rank} {what_this_did}: "
            "the epochs of these ranks no longer match. To look at a batch on one rank alone, make a data set with "
            "rank=0, world_size=1 for it; otherwise take equally many batches on every rank"
        )
