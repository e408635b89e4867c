"""Which rank this is, and what ranks agree on.

`World.detect` is the one place that looks at process groups and environments. `Agreement` lets ranks
compare notes through the key-value store of ``torch.distributed`` or ``jax.distributed``: never through
a collective, which would hang the ranks whenever one of them reads a batch by itself.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import re
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dasksc.errors import InputError, RankMismatchError

__all__ = ["LAUNCHERS", "Agreement", "World", "leave_group", "shared_store"]

logger = logging.getLogger("dasksc.world")

# Launchers by what they set (rank, number of ranks, rank among those of the node), in order: the first that is
# complete wins. `srun torchrun` and Kubeflow set several that differ, and the innermost launcher is the one that
# started this process.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "HOROVOD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)

# What the dimensions of a device mesh are called across which batches differ.
_DATA_PARALLEL = frozenset(
    ("dp", "ddp", "fsdp", "hsdp", "data", "data_parallel", "dp_replicate", "dp_shard", "replicate", "shard")
)
_SETTLE_S = 0.2


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
    group
        What tells these processes from other groups of the same run; empty where they are all there are.
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    source: str = "default"
    group: str = ""

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise InputError(
                f"rank={self.rank} and world_size={self.world_size} (from {self.source}) do not fit: "
                "rank must lie in [0, world_size)"
            )

    @classmethod
    def detect(cls, rank: int | None = None, world_size: int | None = None, group: Any = None) -> World:
        """Find out rank and world size.

        The first that knows wins, and one that says otherwise is logged: the arguments; `group`; an
        initialised ``torch.distributed``, Horovod or ``jax.distributed``; ``RANK`` and ``WORLD_SIZE`` as
        torchrun sets them; Horovod's, Open MPI's, PMI's and Slurm's variables. `rank` and `world_size` may
        be given one at a time; the other is then detected.

        Parameters
        ----------
        rank, world_size
            Which of how many processes this is.
        group
            A ``torch.distributed`` process group, or a ``DeviceMesh`` of one dimension or with one or more
            that are called ``"dp"``, ``"data"``, ``"fsdp"``, ``"dp_replicate"``, ``"dp_shard"`` and the like.

        Raises
        ------
        InputError
            If what was found is not a number or does not fit together, or this process is not in `group`.
        """
        for name, value in (("rank", rank), ("world_size", world_size)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise InputError(f"{name} must be a whole number or None; got {value!r}")
        sources = _sources(group)
        found = next(sources)
        if rank is None and world_size is None:
            with contextlib.suppress(InputError):  # what is not used need not make sense
                for other in sources:
                    if (other.rank, other.world_size) != (found.rank, found.world_size):
                        _log_ignored(found, other)
            return found
        if rank is None and world_size is not None and world_size > 1 and found == World():
            raise InputError(
                f"world_size={world_size} was given without rank=, and nothing tells which of them this process is: "
                "every one would read the share of rank 0. Give rank=, or start the processes with torchrun"
            )
        return cls(
            rank=found.rank if rank is None else rank,
            world_size=found.world_size if world_size is None else world_size,
            # An explicit world says nothing of where its ranks are; those detected still share the cores.
            local_world_size=found.local_world_size,
            source="arguments",
        )


def _sources(group: Any) -> Iterator[World]:
    """Whatever knows the rank of this process, in order; at last a world of one if nothing did."""
    if group is not None:
        yield _of_group(group)
    n_found = 0
    for world in itertools.chain(_from_libraries(), _from_environment(os.environ)):
        n_found += 1
        yield world
    if not n_found:
        yield World()


@functools.cache
def _log_ignored(found: World, other: World) -> None:
    logger.info(
        "rank %d of %d from %s; %s says rank %d of %d, which is not used",
        *(found.rank, found.world_size, found.source, other.source, other.rank, other.world_size),
    )


def _distributed() -> Any:
    """Return ``torch.distributed`` if a process group is up, without importing torch for it."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return module


def _jax() -> Any:
    """Return the state of ``jax.distributed`` if that is up.

    Its public names would start JAX's devices, which waits for every other process.
    """
    jax, internals = sys.modules.get("jax"), sys.modules.get("jax._src.distributed")
    if jax is None or internals is None or not jax.distributed.is_initialized():
        return None
    return internals.global_state


def _from_libraries() -> Iterator[World]:
    distributed = _distributed()
    if distributed is not None:
        size = distributed.get_world_size()
        yield World(distributed.get_rank(), size, _local_size(os.environ, size), "torch.distributed")
    for name in ("horovod.torch", "horovod.tensorflow", "horovod.keras"):
        horovod = sys.modules.get(name)
        if horovod is not None and horovod.is_initialized():
            yield World(horovod.rank(), horovod.size(), horovod.local_size(), name)
            break
    jax = _jax()
    if jax is not None:
        size = jax.num_processes
        yield World(jax.process_id, size, _local_size(os.environ, size), "jax.distributed")


def _of_group(group: Any) -> World:
    """The world of a process group or device mesh; its ranks share this machine with all others of the run."""
    distributed = _distributed()
    if distributed is None:
        raise InputError("group= needs torch.distributed: call init_process_group or init_device_mesh first")
    here = distributed.get_rank()
    if group == distributed.GroupMember.NON_GROUP_MEMBER:
        raise InputError(_not_in_group(here))
    if isinstance(group, distributed.ProcessGroup):
        ranks = distributed.get_process_group_ranks(group)
    elif hasattr(group, "mesh_dim_names") and hasattr(group, "get_coordinate"):
        ranks = _data_parallel_ranks(group, here)
    else:
        raise InputError(f"group must be a torch.distributed process group or a DeviceMesh; got {group!r}")
    if here not in ranks:
        raise InputError(_not_in_group(here))
    n_all = distributed.get_world_size()
    return World(
        rank=ranks.index(here),
        world_size=len(ranks),
        local_world_size=_local_size(os.environ, n_all),
        source="group",
        group="" if ranks == list(range(n_all)) else _name_of(ranks),
    )


def _not_in_group(rank: int) -> str:
    return f"rank {rank} is not in group=. Make the data set on the ranks of the group only"


def _data_parallel_ranks(mesh: Any, here: int) -> list[int]:
    """Global ranks of the processes that differ from this one in the data-parallel dimensions of a mesh only."""
    names = mesh.mesh_dim_names or ()
    at = mesh.get_coordinate()
    if at is None:
        raise InputError(_not_in_group(here))
    across = [i for i in range(mesh.ndim) if mesh.ndim == 1 or (names and names[i] in _DATA_PARALLEL)]
    if not across:
        raise InputError(
            f"group is a DeviceMesh with the dimensions {names or mesh.ndim}, none of which is known to be "
            "data-parallel. Give the one across which batches differ: group=mesh['its name']"
        )
    index = tuple(slice(None) if i in across else at[i] for i in range(mesh.ndim))
    ranks: list[int] = mesh.mesh[index].flatten().tolist()
    return ranks


def _name_of(ranks: Sequence[int]) -> str:
    """What a group's keys begin with: the same on all its ranks, and another in every other group."""
    return hashlib.blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()


def _from_environment(environment: Mapping[str, str]) -> Iterator[World]:
    for rank_name, size_name, _ in LAUNCHERS:
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
        yield World(rank, size, _local_size(environment, size), f"{rank_name}/{size_name}")


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


def leave_group() -> None:
    """Destroy the process group, if there is one, when its threads have let go of what they did last.

    A thread of Gloo drops the tensors of a collective a moment after the collective is done, for which it may need
    the interpreter's lock. If the interpreter ends first, PyTorch aborts the process ("terminate called without an
    active exception"); and destroying the group holds that lock while it waits for the thread.
    """
    distributed = _distributed()
    if distributed is not None:
        time.sleep(_SETTLE_S)
        distributed.destroy_process_group()


class _JaxStore:
    """The key-value store of ``jax.distributed``, with the few methods of torch's that are used here."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` unless it is set; return its value. `expected` is torch's, and empty."""
        with contextlib.suppress(RuntimeError):  # somebody was first
            self._client.key_value_set(f"{self._prefix}/{key}", desired)
        return self.get(key)

    def get(self, key: str) -> bytes:
        """Return the value of a key that is set."""
        value: str = self._client.key_value_try_get(f"{self._prefix}/{key}")
        return value.encode()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        try:
            return all(map(self.get, keys))
        except RuntimeError:
            return False


def shared_store(prefix: str) -> Any:
    """Return the store of keys that the processes of this run share, under a prefix; None if they share nothing."""
    distributed = _distributed()
    if distributed is not None:
        return distributed.PrefixStore(prefix, distributed.distributed_c10d._get_default_store())
    jax = _jax()
    return None if jax is None else _JaxStore(jax.client, prefix)


@contextlib.contextmanager
def _unless_gone() -> Iterator[None]:
    """Go on where the store went with its process: an iteration that ends must show its own error, not this one."""
    try:
        yield
    except RuntimeError as error:
        logger.warning("the other ranks cannot be told of the end of an iteration: %s", error)


_Ordinals = defaultdict[tuple[int, str], Iterator[int]]

# Data sets that each rank of each group has made: through the store of the run, which torch may replace by another
# object with the same notes, and through each store that was given.
_ordinals: _Ordinals = defaultdict(itertools.count)
_ordinals_of_stores: weakref.WeakKeyDictionary[Any, _Ordinals] = weakref.WeakKeyDictionary()


class Agreement:
    """What the ranks of one data set compare through the store of their process group.

    Ranks find each other by the order in which they make data sets for the same group, so every rank of
    it must make the same ones in the same order; a data set for one rank alone takes ``rank=0,
    world_size=1`` and has none. Every call is one or two round trips to the store and waits for no other
    rank.

    Parameters
    ----------
    world
        Rank, world size and group of this process or thread.
    store
        Key-value store that all ranks share, a ``torch.distributed.Store``. By default that of the process group.
    """

    def __init__(self, world: World, store: Any = None) -> None:
        self._world = world
        self._given_store = store
        ordinals = _ordinals if store is None else _ordinals_of_stores.setdefault(store, defaultdict(itertools.count))
        has_peers = world.world_size > 1 and (store is not None or self.is_possible())
        self._ordinal = next(ordinals[world.rank, world.group]) if has_peers else None

    @staticmethod
    def is_possible() -> bool:
        """Whether there is a store by now."""
        return _distributed() is not None or _jax() is not None

    def _under(self, prefix: str) -> Any:
        if self._given_store is None:
            return shared_store(prefix)
        import torch.distributed as distributed

        return distributed.PrefixStore(prefix, self._given_store)  # type: ignore[attr-defined]

    def _store(self) -> Any:
        if self._ordinal is None:
            return None
        # A store can outlive the processes that torchrun restarts, and notes of those before are not of these.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return self._under(f"dasksc/{attempt}/{self._world.group}/{self._ordinal}")

    def seed(self, proposed: int) -> int:
        """Return the seed that the first rank to ask proposed.

        Groups of one size agree on one seed: tensor-parallel ranks are in different data-parallel groups,
        and must read the same rows.

        Raises
        ------
        InputError
            If there is no process group through which to agree.
        """
        if self._store() is None:
            raise InputError(
                f"seed=None with world_size={self._world.world_size} and no process group: the ranks cannot agree "
                "on a seed. Pass seed=, the same on every rank, or call torch.distributed.init_process_group first"
            )
        which = self._world.world_size if self._world.group else "all"
        return int(self._under(f"dasksc/seed/{which}").compare_set(str(self._ordinal), "", str(proposed)))

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
        with _unless_gone():
            rank, n = store.compare_set(f"left/{iteration}", "", f"{self._world.rank} {n_batches}").decode().split()
            if int(n) != n_batches:
                logger.warning("%s", self._shifted(iteration, int(rank), int(n), f"left it after {n_batches}"))

    def finish(self, iteration: int) -> None:
        """Warn, at the end of an iteration, if another rank has given it up."""
        with _unless_gone():
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
