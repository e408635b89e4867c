"""Ranks, devices, and the distribution of a model over them with DDP or FSDP."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dasksc import InputError, StorageError, TrainingError, World
from dasksc._compat import check_training
from dasksc.plan.ranks import LAUNCHERS, leave_group, size_in
from dasksc.train.sections import Fsdp, Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks(World):
    """Rank, device and strategy (``single``, ``ddp`` or ``fsdp``) of this process, among all ranks of the run."""

    device: torch.device
    strategy: str

    def reduced(self, values: torch.Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce `values` over all ranks in place, and return them."""
        if dist.is_initialized():
            dist.all_reduce(values, how)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank."""
        values = [value]
        if dist.is_initialized():
            dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def on_rank_zero(self, act: Callable[[], None], what: str) -> None:
        """Run a function on rank 0 while the others wait; if it fails, every rank raises an error, so none hangs."""
        error: Exception | None = None
        if self.rank == 0:
            try:
                act()
            except Exception as raised:
                error = raised
        if not self.reduced(torch.tensor(float(error is not None), device=self.device)).item():
            return
        is_of_storage = isinstance(error, OSError) and not isinstance(error, BrokenPipeError)
        is_of_storage, reason = self.broadcast((is_of_storage, f"{type(error).__name__} on rank 0, {error}"))
        if error is not None and not is_of_storage:
            raise error
        raise (StorageError if is_of_storage else TrainingError)(f"{what}: {reason}") from error


def strategy_of(training: Training, world_size: int) -> str:
    """Return the strategy of a run on a number of ranks; the configuration must allow that number."""
    fsdp, strategy = training.fsdp, training.strategy
    if strategy is None:
        strategy = "fsdp" if fsdp is not None else "ddp" if world_size > 1 else "single"
    if strategy == "fsdp" and fsdp is not None and fsdp.sharding_strategy == "NO_SHARD":
        strategy = "ddp"
    if strategy == "single" and world_size > 1:
        raise InputError(
            f"training.strategy='single' runs in one process, but this run has {world_size}; use ddp or fsdp"
        )
    if training.num_gpus not in (None, world_size):
        raise InputError(
            f"training.num_gpus={training.num_gpus} is the total over all nodes, but the number of processes of this "
            f"run is {world_size}. Start {training.num_gpus} with torchrun or srun, or leave num_gpus out"
        )
    return strategy


@contextlib.contextmanager
def joined_ranks(training: Training) -> Iterator[Ranks]:
    """Join the process group of the run, and leave it at the end."""
    check_training(torch.__version__)
    world = World.detect()
    strategy = strategy_of(training, world.world_size)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank_of(world, os.environ) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    joins = strategy != "single" and not dist.is_initialized()
    if joins:
        # Offloaded parameters and the metadata of checkpoints are exchanged between CPUs, hence gloo.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        alone = dist.HashStore() if world.world_size == 1 else None  # type: ignore[attr-defined]
        if alone is None:
            os.environ.update(rendezvous(os.environ, world.world_size))
        timeout = dt.timedelta(seconds=training.timeout_s)
        dist.init_process_group(backend, store=alone, rank=world.rank, world_size=world.world_size, timeout=timeout)
    try:
        yield Ranks(**asdict(world), device=device, strategy=strategy)
    finally:
        if joins:
            leave_group()


def local_rank_of(world: World, environment: Mapping[str, str]) -> int:
    """Return the rank of this process on its node, from a launcher whose rank and world size are those of `world`."""
    # Launchers may be nested, and an sbatch script gives local rank 0 to every rank that mpirun starts.
    here = (str(world.rank), str(world.world_size))
    for rank, size, local_rank in LAUNCHERS:
        agrees = rank in environment and size in environment and (environment[rank], size_in(environment, size)) == here
        if agrees and environment.get(local_rank, "").isdigit():
            return int(environment[local_rank])
    return world.rank % world.local_world_size if world.local_world_size > 1 else world.rank


def rendezvous(environment: Mapping[str, str], world_size: int) -> dict[str, str]:
    """Return the address and port at which the ranks meet, unless the launcher gave them: the first node of Slurm."""
    # mpirun starts the ranks of a Slurm job in other steps than srun, so its ranks read only the variables of the job.
    by_mpi = "OMPI_COMM_WORLD_SIZE" in environment
    job = (environment.get("PMIX_NAMESPACE", "") if by_mpi else "") or environment.get("SLURM_JOB_ID", "")
    nodes = environment.get("SLURM_JOB_NODELIST", "") if job else ""
    if by_mpi and environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(world_size):
        nodes, job = "127.0.0.1", job or str(os.getppid())
    elif not by_mpi and job:
        nodes = environment.get("SLURM_STEP_NODELIST", nodes)
        job += "." + environment.get("SLURM_STEP_ID", "")
    found = {name: environment[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environment}
    if match := re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes):  # the first of "gpu[003-007,12],login"
        port = 20_000 + zlib.crc32(job.encode()) % 10_000
        found = {"MASTER_ADDR": "".join(part or "" for part in match.groups()), "MASTER_PORT": str(port)} | found
    if len(found) < 2:
        raise InputError(
            f"the {world_size} ranks of this run do not know the address of the first node. Start them with torchrun "
            "or srun, or set MASTER_ADDR to its name and MASTER_PORT to a free port of it"
        )
    return found


def dtype_of(precision: str) -> torch.dtype | None:
    """Return the type of autocast; None for full precision."""
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)


def distribute(model: nn.Module, training: Training, ranks: Ranks) -> nn.Module:
    """Move a model to the device of this rank, distribute it in place, and return the module to call in training."""
    fsdp = training.fsdp or Fsdp()
    if training.activation_checkpointing or fsdp.activation_checkpointing:
        checkpoint_activations(model)
    if ranks.strategy == "fsdp":
        _shard(model, fsdp, ranks, dtype_of(training.precision))
        return model
    model.to(ranks.device)
    if ranks.strategy == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=training.find_unused_parameters)
    return model


def _shard(model: nn.Module, fsdp: Fsdp, ranks: Ranks, dtype: torch.dtype | None) -> None:
    # Parameters are gathered in low precision, and gradients are reduced in float32. Inputs of modules are not cast,
    # since float16 rounds counts above 2,048 and overflows above 65,504, and bfloat16 rounds counts above 256. Autocast
    # casts the inputs of each operation instead.
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None, cast_forward_inputs=False
    )
    options: dict[str, Any] = {
        "mesh": _mesh(fsdp, ranks),
        "reshard_after_forward": fsdp.sharding_strategy != "SHARD_GRAD_OP",
        "mp_policy": precision,
        "offload_policy": CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
        if fsdp.cpu_offload
        else OffloadPolicy(),
    }
    for module in modules_to_shard(model, fsdp.min_num_params):
        fully_shard(module, **options)
    fully_shard(model, **options)


def modules_to_shard(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Return submodules with `min_num_params` parameters of their own to gather separately, inner ones first."""
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    attentions = [one for one in model.modules() if isinstance(one, nn.MultiheadAttention)]
    # MultiheadAttention uses the parameters of its submodules directly, without calling them.
    uncalled = {model, *(part for one in attentions for part in one.modules() if part is not one)}
    found: list[nn.Module] = []
    taken: set[nn.Parameter] = set()
    for module in reversed(list(model.modules())):
        own = set(module.parameters()) - taken
        is_called = module not in uncalled and not isinstance(module, containers)
        if is_called and sum(one.numel() for one in own) >= min_num_params:
            found.append(module)
            taken |= own
    return found


def _mesh(fsdp: Fsdp, ranks: Ranks) -> DeviceMesh:
    """Return a mesh of all ranks, or for HYBRID_SHARD of copies by shards."""
    if fsdp.sharding_strategy != "HYBRID_SHARD":
        if fsdp.shard_size is not None:
            raise InputError(
                f"training.fsdp.shard_size={fsdp.shard_size} is for sharding_strategy: HYBRID_SHARD, but the strategy "
                f"is {fsdp.sharding_strategy}; use HYBRID_SHARD, or leave shard_size out"
            )
        return init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=("dp",))
    size = fsdp.shard_size or ranks.local_world_size
    if ranks.world_size % size:
        raise InputError(
            f"training.fsdp.shard_size={size} (default: the ranks of a node) must divide the number of ranks, "
            f"{ranks.world_size}"
        )
    names = ("dp_replicate", "dp_shard")
    return init_device_mesh(ranks.device.type, (ranks.world_size // size, size), mesh_dim_names=names)


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute each element of the outermost ``ModuleList``s, or child of a model without, in the backward pass."""
    for block in list(_blocks(model)) or list(model.children()):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _blocks(child)
