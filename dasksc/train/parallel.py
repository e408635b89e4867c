"""Ranks, devices, and a model spread over them with torch's own parts."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dasksc import InputError, StorageError, TrainingError, World
from dasksc.planning.process_groups import leave_group
from dasksc.train.config import Config, Fsdp, Training
from dasksc.train.launch import local_rank_of, n_nodes_of, rendezvous

__all__ = [
    "Place",
    "Spread",
    "clip_gradient",
    "count_rows",
    "number_of",
    "places",
    "scale_gradient",
    "spread",
    "strategy_of",
    "unused_of",
]

logger = logging.getLogger(__name__)

_DTYPES = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process is.

    Parameters
    ----------
    rank, world_size, local_world_size
        As in `dasksc.World`.
    device
        Of this rank.
    strategy
        ``single``, ``dp``, ``ddp`` or ``fsdp``.
    """

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    strategy: str

    def reduced(self, values: torch.Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Combine `values` of all ranks, in place."""
        if dist.is_initialized():
            dist.all_reduce(values, how)
        return values

    def agreed(self, value: Any) -> Any:
        """Return the value of rank 0."""
        if not dist.is_initialized():
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def by_first(self, act: Callable[[], None], what: str) -> None:
        """Let rank 0 do something while the others wait. All ranks must call it.

        Parameters
        ----------
        act
            What rank 0 does.
        what
            Begins the message if that fails, on every rank: none waits for one that has failed.

        Raises
        ------
        StorageError
            If rank 0 raised an `OSError`.
        TrainingError
            If it raised anything else, or its output is a closed pipe; rank 0 raises that error itself.
        """
        error: Exception | None = None
        if self.rank == 0:
            try:
                act()
            except Exception as raised:
                error = raised
        # One number where all is well; the words, which take longer, only where it is not.
        if not self.reduced(torch.tensor(float(error is not None), device=self.device)).item():
            return
        is_of_storage = isinstance(error, OSError) and not isinstance(error, BrokenPipeError)
        is_of_storage, said = self.agreed((is_of_storage, f"{type(error).__name__}, {error}"))
        if error is not None and not is_of_storage:
            raise error
        raise (StorageError if is_of_storage else TrainingError)(f"{what}: {said} on rank 0") from error


def strategy_of(training: Training, world_size: int, n_nodes: int | None = None) -> str:
    """Return the strategy that a configuration means, for so many ranks; `n_nodes` is None where it is not known.

    Raises
    ------
    InputError
        If it cannot have so many, or cannot be sharded so, or the run is not of the size that the configuration says.
    """
    strategy = training.strategy
    if strategy is None:
        strategy = "fsdp" if training.fsdp is not None else "ddp" if world_size > 1 else "single"
    elif strategy != "fsdp" and training.fsdp is not None:
        logger.info("training.fsdp is not used: training.strategy is %s", strategy)
    if strategy == "fsdp" and training.fsdp is not None and training.fsdp.sharding_strategy == "NO_SHARD":
        strategy = "ddp"
    if strategy in ("single", "dp") and world_size > 1:
        raise InputError(
            f"training.strategy={strategy!r} is of one process, and this run has {world_size}; use ddp or fsdp"
        )
    if strategy == "dp" and training.checkpoints_activations:
        raise InputError(
            "training.strategy='dp' runs copies of the model, in which activation_checkpointing would run the blocks "
            "of the first one; use ddp or fsdp, or leave activation_checkpointing out"
        )
    if strategy != "dp" and training.num_gpus is not None and training.num_gpus != world_size:
        raise InputError(
            f"training.num_gpus={training.num_gpus} is the total over all nodes, and this run has {world_size} "
            f"process{'es' if world_size > 1 else ''}. Start as many, or --set training.num_gpus={world_size}"
        )
    if n_nodes is not None and training.num_nodes not in (None, n_nodes):
        raise InputError(
            f"training.num_nodes={training.num_nodes}, and this run is on {n_nodes}. Start it on as many, or "
            f"--set training.num_nodes={n_nodes}"
        )
    if strategy == "fsdp" and training.fsdp is not None:
        _check_shard_size(training.fsdp, world_size)
    return strategy


def _check_shard_size(fsdp: Fsdp, world_size: int) -> None:
    size = fsdp.shard_size
    if size is None:
        return
    if fsdp.sharding_strategy != "HYBRID_SHARD":
        raise InputError(
            f"training.fsdp.shard_size={size} is for sharding_strategy: HYBRID_SHARD, and it is "
            f"{fsdp.sharding_strategy}; use that, or leave shard_size out"
        )
    if world_size % size:
        raise InputError(
            f"training.fsdp.shard_size={size} does not divide the {world_size} ranks; copies need equally many"
        )


def unused_of(config: Config, place: Place) -> list[str]:
    """Return a line for each key that was given and has no effect in this run.

    Parameters
    ----------
    config
        Of the training.
    place
        Where this process is.
    """
    data, training, fsdp = config.data, config.training, config.training.fsdp
    lines = []
    if data.prefetch_factor is not None and not data.num_workers:
        lines.append(
            f"data.prefetch_factor={data.prefetch_factor} is not used: data.num_workers is 0; what the threads of a "
            "rank read ahead is data.prefetch"
        )
    if training.wandb_project is not None and "wandb" not in training.loggers:
        loggers = ", ".join(training.loggers)
        lines.append(f"training.wandb_project={training.wandb_project} is not used: training.logger is {loggers}")
    if place.strategy == "dp" and place.device.type == "cpu" and (training.num_gpus or 1) > 1:
        lines.append(
            f"training.num_gpus={training.num_gpus} is not used: this process sees no GPU, and training.strategy=dp "
            "has one copy of the model on the CPU"
        )
    if fsdp is None or training.strategy not in (None, "fsdp"):
        return lines  # `strategy_of` tells it of the section as a whole
    if fsdp.sharding_strategy == "NO_SHARD":
        given = {"cpu_offload": fsdp.cpu_offload, "shard_size": fsdp.shard_size}
        lines += [
            f"training.fsdp.{name}={value} is not used: NO_SHARD is DDP" for name, value in given.items() if value
        ]
    is_one_copy = fsdp.shard_size is None and place.world_size == place.local_world_size > 1
    if fsdp.sharding_strategy == "HYBRID_SHARD" and is_one_copy:
        lines.append(
            f"HYBRID_SHARD is FULL_SHARD here: all {place.world_size} ranks are on one node, and share one copy. For "
            "more copies give training.fsdp.shard_size"
        )
    return lines


def replicas_of(training: Training, n_gpus: int) -> list[int]:
    """Return which of the GPUs of this machine ``dp`` uses; without any, none.

    Raises
    ------
    InputError
        If the configuration wants more than there are.
    """
    wanted = training.num_gpus or n_gpus
    if n_gpus and wanted > n_gpus:
        raise InputError(
            f"training.num_gpus={wanted}, and training.strategy='dp' has only the {n_gpus} "
            f"GPU{'s' if n_gpus > 1 else ''} that this process sees; --set training.num_gpus={n_gpus}, or use ddp"
        )
    return list(range(min(wanted, n_gpus)))


@contextlib.contextmanager
def places(training: Training) -> Iterator[Place]:
    """Join the other ranks of the run, and leave them at the end.

    Parameters
    ----------
    training
        The section of the configuration.

    Yields
    ------
    Place
        Where this process is.
    """
    world = World.detect()
    strategy = strategy_of(training, world.world_size, n_nodes_of(world, os.environ))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", local_rank_of(world, os.environ) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    joins = strategy in ("ddp", "fsdp") and not dist.is_initialized()
    if joins:
        # Offloaded parameters, and what checkpoints tell each other, go from CPU to CPU.
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        timeout = dt.timedelta(seconds=training.timeout_s)
        if world.world_size > 1:
            os.environ.update(rendezvous(os.environ, world.world_size))
            dist.init_process_group(backend, rank=world.rank, world_size=world.world_size, timeout=timeout)
        else:
            alone = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
    try:
        yield Place(
            rank=world.rank,
            world_size=world.world_size,
            local_world_size=world.local_world_size,
            device=device,
            strategy=strategy,
        )
    finally:
        if joins:
            leave_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A model as it is trained.

    Parameters
    ----------
    bare
        The user's module, whose parameters are trained; under FSDP they are sharded.
    whole
        What is called in training.
    dtype
        Of autocast; None: none.
    device
        Of this rank.
    """

    bare: nn.Module
    whole: nn.Module
    dtype: torch.dtype | None
    device: torch.device

    def __call__(self, batch: Any) -> dict[str, torch.Tensor]:
        """Run the model on a batch, in the precision of the run."""
        with self.autocast():
            return _per_batch(self.whole(batch), batch)

    def evaluate(self, batch: Any) -> dict[str, torch.Tensor]:
        """Run the model without what `whole` adds for training. Under FSDP all ranks must call it together."""
        with self.autocast(), torch.no_grad():
            outputs: dict[str, torch.Tensor] = self.bare(batch)
            return outputs

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which operations compute in the precision of the run."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)

    @property
    def is_sharded(self) -> bool:
        """Whether no rank has all parameters."""
        return isinstance(self.bare, FSDPModule)

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Leave gradients where they are until the last batch of a step."""
        if isinstance(self.bare, FSDPModule):
            self.bare.set_requires_gradient_sync(is_last)
        elif isinstance(self.whole, DistributedDataParallel) and not is_last:
            return self.whole.no_sync()
        return contextlib.nullcontext()


def _per_batch(outputs: dict[str, torch.Tensor], batch: Any) -> dict[str, torch.Tensor]:
    """Return means over a batch; DataParallel gives one of each part of it."""
    if all(value.ndim == 0 for value in outputs.values()):
        return outputs
    n = outputs.get("n")
    if n is None:
        sizes = [len(part) for part in torch.arange(count_rows(batch)).chunk(len(outputs["loss"]))]
        counts = torch.tensor(sizes, device=outputs["loss"].device)
    else:
        counts = n
    weights = counts / counts.sum().clamp(min=1)
    means = {name: (value * weights).sum() for name, value in outputs.items() if name != "n"}
    return means if n is None else {**means, "n": n.sum()}


def count_rows(batch: Any) -> int:
    """Return the rows of a batch: the length of its first tensor."""
    if isinstance(batch, dict):
        return next((n for n in map(count_rows, batch.values()) if n), 0)
    if isinstance(batch, list | tuple):
        return count_rows(batch[0])
    return int(batch.shape[0]) if hasattr(batch, "shape") else 0


def spread(model: nn.Module, training: Training, place: Place) -> Spread:
    """Spread a model over the ranks; every rank must give the same parameters.

    Parameters
    ----------
    model
        On the CPU. It is changed, and put on the rank's device.
    training
        The section of the configuration.
    place
        Where this process is.

    Returns
    -------
    Spread
        The model as it is trained.
    """
    dtype = _DTYPES[training.precision]
    if training.checkpoints_activations:
        checkpoint_activations(model)
    if place.strategy == "fsdp":
        _shard(model, training.fsdp or Fsdp(), place, dtype)
        whole: nn.Module = model
    else:
        model.to(place.device)
        whole = model
        if place.strategy == "ddp":
            whole = DistributedDataParallel(model, find_unused_parameters=training.find_unused_parameters)
        elif place.strategy == "dp":
            whole = DataParallel(model, device_ids=replicas_of(training, torch.cuda.device_count()))
    return Spread(bare=model, whole=whole, dtype=dtype, device=place.device)


def _shard(model: nn.Module, fsdp: Fsdp, place: Place, dtype: torch.dtype | None) -> None:
    """Shard every module of enough parameters, those inside it first."""
    # Mixed with autocast, which casts what each operation takes: what is gathered is small, what is reduced exact, and
    # the batch as it was read, for of counts above 256 half precision makes others, above 65,504 none.
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=place.device.type == "cuda") if fsdp.cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": _mesh(fsdp, place),
        "reshard_after_forward": fsdp.sharding_strategy != "SHARD_GRAD_OP",
        "mp_policy": precision,
        "offload_policy": offload,
    }
    for module in modules_to_shard(model, fsdp.min_num_params):
        fully_shard(module, **options)
    fully_shard(model, **options)


def modules_to_shard(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Return the modules below `model` that are gathered by themselves, those inside others first.

    A module is one if it has at least `min_num_params` parameters that none inside it has taken.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> set[nn.Parameter]:
        """Return the parameters that are left."""
        left = set(module.parameters(recurse=False))
        # Its parts are never called, only their parameters used.
        if isinstance(module, nn.MultiheadAttention):
            left = set(module.parameters())
        else:
            for child in module.children():
                left |= visit(child)
        is_called = not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
        if module is not model and is_called and sum(p.numel() for p in left) >= min_num_params:
            found.append(module)
            return set()
        return left

    visit(model)
    return found


def _mesh(fsdp: Fsdp, place: Place) -> DeviceMesh:
    _check_shard_size(fsdp, place.world_size)
    if fsdp.sharding_strategy != "HYBRID_SHARD":
        return init_device_mesh(place.device.type, (place.world_size,), mesh_dim_names=("dp",))
    size = fsdp.shard_size or place.local_world_size
    if place.world_size % size:
        raise InputError(
            f"HYBRID_SHARD shards inside a node, and the {size} ranks of this one do not divide the "
            f"{place.world_size} of the run; give a training.fsdp.shard_size that does"
        )
    names = ("dp_replicate", "dp_shard")
    return init_device_mesh(place.device.type, (place.world_size // size, size), mesh_dim_names=names)


def checkpoint_activations(model: nn.Module) -> None:
    """Compute each repeated block of a model again in the backward pass.

    These are the elements of its outermost ``ModuleList``; of a model without one, its children. Names of parameters
    stay as they are.
    """
    for block in list(_blocks(model)) or list(model.children()):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _blocks(child)


def clip_gradient(parameters: Iterable[nn.Parameter], largest: float) -> torch.Tensor:
    """Scale the gradient to a norm of at most `largest`; return the norm it had, for `number_of`."""
    return nn.utils.clip_grad_norm_(list(parameters), largest)


def scale_gradient(parameters: Iterable[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply the gradient, of which a rank may have a part, by a number that is the same on all ranks."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.mul_(factor.to(local.device))


def number_of(value: torch.Tensor) -> float:
    """Return a scalar tensor as a number; waits for the device. All ranks must call it, for it may be spread."""
    return float(value.full_tensor() if isinstance(value, DTensor) else value)
