"""Ranks, devices, and the distribution of a model over them with DDP, FSDP or DataParallel."""

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
from dasksc._compat.torch import check_training
from dasksc.planning.process_groups import leave_group
from dasksc.train.config import Config, Fsdp, Training
from dasksc.train.launch import local_rank_of, n_nodes_of, rendezvous

__all__ = [
    "RankContext",
    "DistributedModel",
    "clip_gradient",
    "batch_length",
    "number_of",
    "joined_ranks",
    "scale_gradient",
    "distribute",
    "strategy_of",
    "unused_of",
]

logger = logging.getLogger(__name__)

_DTYPES = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Rank, device and strategy of this process.

    Parameters
    ----------
    rank, world_size, local_world_size
        As in `dasksc.World`.
    device
        Device of this rank.
    strategy
        ``single``, ``dp``, ``ddp`` or ``fsdp``.
    """

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    strategy: str

    def reduced(self, values: torch.Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce `values` over all ranks in place, and return them."""
        if dist.is_initialized():
            dist.all_reduce(values, how)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank."""
        if not dist.is_initialized():
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def on_rank_zero(self, act: Callable[[], None], what: str) -> None:
        """Run a function on rank 0 while the other ranks wait. All ranks must call this method.

        Parameters
        ----------
        act
            Function that rank 0 runs.
        what
            Beginning of the error message if the function fails. Every rank then raises an error, so none waits for a
            failed one.

        Raises
        ------
        StorageError
            If rank 0 raised an `OSError` other than `BrokenPipeError`.
        TrainingError
            On the other ranks, if rank 0 raised any other error. Rank 0 raises the original error.
        """
        error: Exception | None = None
        if self.rank == 0:
            try:
                act()
            except Exception as raised:
                error = raised
        # Success costs one reduction of a scalar. The message is broadcast only after a failure, since a broadcast is
        # slower.
        if not self.reduced(torch.tensor(float(error is not None), device=self.device)).item():
            return
        is_of_storage = isinstance(error, OSError) and not isinstance(error, BrokenPipeError)
        on_rank = " on rank 0" if self.world_size > 1 else ""
        is_of_storage, reason = self.broadcast((is_of_storage, f"{type(error).__name__}{on_rank}, {error}"))
        if error is not None and not is_of_storage:
            raise error
        raise (StorageError if is_of_storage else TrainingError)(f"{what}: {reason}") from error


def strategy_of(training: Training, world_size: int, n_nodes: int | None = None) -> str:
    """Return the training strategy of a configuration for a number of ranks; `n_nodes` is None if unknown.

    Raises
    ------
    InputError
        If the strategy or the shard size does not fit the number of ranks, or the run does not have the size that the
        configuration gives.
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
            f"training.strategy={strategy!r} runs in one process, but this run has {world_size}; use ddp or fsdp"
        )
    if strategy == "dp" and training.checkpoints_activations:
        raise InputError(
            "training.strategy='dp' runs copies of the model, and with activation_checkpointing every copy would run "
            "the layers of the first copy; use ddp or fsdp, or leave activation_checkpointing out"
        )
    if strategy != "dp" and training.num_gpus is not None and training.num_gpus != world_size:
        raise InputError(
            f"training.num_gpus={training.num_gpus} is the total over all nodes, and this run has {world_size} "
            f"process{'es' if world_size > 1 else ''}. Start {training.num_gpus}, or give --set "
            f"training.num_gpus={world_size}"
        )
    if n_nodes is not None and training.num_nodes not in (None, n_nodes):
        raise InputError(
            f"training.num_nodes={training.num_nodes}, but the number of nodes of this run is {n_nodes}. Start it on "
            f"{training.num_nodes}, or give --set training.num_nodes={n_nodes}"
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
            f"training.fsdp.shard_size={size} is for sharding_strategy: HYBRID_SHARD, but the strategy is "
            f"{fsdp.sharding_strategy}; use HYBRID_SHARD, or leave shard_size out"
        )
    if world_size % size:
        raise InputError(f"training.fsdp.shard_size={size} must divide the number of ranks, {world_size}")


def unused_of(config: Config, context: RankContext) -> list[str]:
    """Return a message for each key of the configuration that has no effect in this run.

    Parameters
    ----------
    config
        Configuration of the training run.
    context
        Rank and device of this process.
    """
    data, training, fsdp = config.data, config.training, config.training.fsdp
    lines = []
    if data.prefetch_factor is not None and not data.num_workers:
        lines.append(
            f"data.prefetch_factor={data.prefetch_factor} is not used: data.num_workers is 0; data.prefetch sets "
            "how far the threads of a rank read ahead"
        )
    if training.wandb_project is not None and "wandb" not in training.loggers:
        loggers = ", ".join(training.loggers)
        lines.append(f"training.wandb_project={training.wandb_project} is not used: training.logger is {loggers}")
    if context.strategy == "dp" and context.device.type == "cpu" and (training.num_gpus or 1) > 1:
        lines.append(
            f"training.num_gpus={training.num_gpus} is not used: this process sees no GPU, and training.strategy=dp "
            "has one copy of the model on the CPU"
        )
    if fsdp is None or training.strategy not in (None, "fsdp"):
        return lines  # `strategy_of` reports that the whole section has no effect
    if fsdp.sharding_strategy == "NO_SHARD":
        given = {"cpu_offload": fsdp.cpu_offload, "shard_size": fsdp.shard_size}
        lines += [
            f"training.fsdp.{name}={value} is not used: NO_SHARD is DDP" for name, value in given.items() if value
        ]
    is_one_copy = fsdp.shard_size is None and context.world_size == context.local_world_size > 1
    if fsdp.sharding_strategy == "HYBRID_SHARD" and is_one_copy:
        lines.append(
            f"HYBRID_SHARD equals FULL_SHARD here: all {context.world_size} ranks are on one node and share one copy "
            "of the model. For more copies, give training.fsdp.shard_size"
        )
    return lines


def replicas_of(training: Training, n_gpus: int) -> list[int]:
    """Return the indices of the GPUs of this machine that ``dp`` uses; empty if there are none.

    Raises
    ------
    InputError
        If the configuration requests more GPUs than there are.
    """
    wanted = training.num_gpus or n_gpus
    if n_gpus and wanted > n_gpus:
        raise InputError(
            f"training.num_gpus={wanted}, but training.strategy='dp' has only the {n_gpus} "
            f"GPU{'s' if n_gpus > 1 else ''} that this process sees; give --set training.num_gpus={n_gpus}, or use ddp"
        )
    return list(range(min(wanted, n_gpus)))


@contextlib.contextmanager
def joined_ranks(training: Training) -> Iterator[RankContext]:
    """Join the process group of the run, and leave it at the end.

    Parameters
    ----------
    training
        ``training`` section of the configuration.

    Yields
    ------
    RankContext
        Rank and device of this process.

    Raises
    ------
    UnsupportedVersionError
        With a PyTorch before 2.9.
    """
    check_training(torch.__version__)
    world = World.detect()
    strategy = strategy_of(training, world.world_size, n_nodes_of(world, os.environ))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", local_rank_of(world, os.environ) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    joins = strategy in ("ddp", "fsdp") and not dist.is_initialized()
    if joins:
        # Offloaded parameters and the metadata of checkpoints are exchanged between CPUs, hence gloo.
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        timeout = dt.timedelta(seconds=training.timeout_s)
        if world.world_size > 1:
            os.environ.update(rendezvous(os.environ, world.world_size))
            dist.init_process_group(backend, rank=world.rank, world_size=world.world_size, timeout=timeout)
        else:
            alone = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
    try:
        yield RankContext(
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
class DistributedModel:
    """Model distributed for training.

    Parameters
    ----------
    bare
        Module of the user, whose parameters are trained; under FSDP they are sharded.
    whole
        Module called in training, which may wrap `bare`.
    dtype
        Data type of autocast; None disables it.
    device
        Device of this rank.
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
        """Run the model without the wrapper for training. Under FSDP all ranks must call this method together."""
        with self.autocast(), torch.no_grad():
            outputs: dict[str, torch.Tensor] = self.bare(batch)
            return outputs

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which operations compute in the precision of the run."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)

    @property
    def is_sharded(self) -> bool:
        """True if the parameters are sharded over ranks."""
        return isinstance(self.bare, FSDPModule)

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Return a context that synchronizes gradients over ranks only for the last batch of a step."""
        if isinstance(self.bare, FSDPModule):
            self.bare.set_requires_gradient_sync(is_last)
        elif isinstance(self.whole, DistributedDataParallel) and not is_last:
            return self.whole.no_sync()
        return contextlib.nullcontext()


def _per_batch(outputs: dict[str, torch.Tensor], batch: Any) -> dict[str, torch.Tensor]:
    """Return means over a batch; DataParallel returns one mean per replica."""
    if all(value.ndim == 0 for value in outputs.values()):
        return outputs
    n = outputs.get("n")
    if n is None:
        sizes = [len(part) for part in torch.arange(batch_length(batch)).chunk(len(outputs["loss"]))]
        counts = torch.tensor(sizes, device=outputs["loss"].device)
    else:
        counts = n
    weights = counts / counts.sum().clamp(min=1)
    means = {name: (value * weights).sum() for name, value in outputs.items() if name != "n"}
    return means if n is None else {**means, "n": n.sum()}


def batch_length(batch: Any) -> int:
    """Return the number of rows of a batch: the length of its first tensor."""
    if isinstance(batch, dict):
        return next((n for n in map(batch_length, batch.values()) if n), 0)
    if isinstance(batch, list | tuple):
        return batch_length(batch[0])
    return int(batch.shape[0]) if hasattr(batch, "shape") else 0


def distribute(model: nn.Module, training: Training, context: RankContext) -> DistributedModel:
    """Distribute a model over the ranks; its parameters must be equal on every rank.

    Parameters
    ----------
    model
        Model on the CPU. It is modified in place, and moved to the device of the rank.
    training
        ``training`` section of the configuration.
    context
        Rank and device of this process.

    Returns
    -------
    DistributedModel
        The model, with its wrapper for training.
    """
    dtype = _DTYPES[training.precision]
    if training.checkpoints_activations:
        checkpoint_activations(model)
    if context.strategy == "fsdp":
        _shard(model, training.fsdp or Fsdp(), context, dtype)
        whole: nn.Module = model
    else:
        model.to(context.device)
        whole = model
        if context.strategy == "ddp":
            whole = DistributedDataParallel(model, find_unused_parameters=training.find_unused_parameters)
        elif context.strategy == "dp":
            whole = DataParallel(model, device_ids=replicas_of(training, torch.cuda.device_count()))
    return DistributedModel(bare=model, whole=whole, dtype=dtype, device=context.device)


def _shard(model: nn.Module, fsdp: Fsdp, context: RankContext, dtype: torch.dtype | None) -> None:
    """Shard every sufficiently large module, inner modules first."""
    # Parameters are gathered in low precision, and gradients are reduced in float32. Inputs of modules are not cast,
    # since float16 rounds counts above 2,048 and overflows above 65,504, and bfloat16 rounds counts above 256. Autocast
    # casts the inputs of each operation instead.
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=context.device.type == "cuda") if fsdp.cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": _mesh(fsdp, context),
        "reshard_after_forward": fsdp.sharding_strategy != "SHARD_GRAD_OP",
        "mp_policy": precision,
        "offload_policy": offload,
    }
    for module in modules_to_shard(model, fsdp.min_num_params):
        fully_shard(module, **options)
    fully_shard(model, **options)


def modules_to_shard(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Return the submodules of `model` that are sharded and gathered separately, inner modules first.

    A module is included if it has at least `min_num_params` parameters, not counting those of included submodules.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> set[nn.Parameter]:
        """Return the parameters of `module` that no module in `found` contains."""
        remaining = set(module.parameters(recurse=False))
        # MultiheadAttention uses the parameters of its submodules directly, without calling them.
        if isinstance(module, nn.MultiheadAttention):
            remaining = set(module.parameters())
        else:
            for child in module.children():
                remaining |= visit(child)
        is_called = not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
        if module is not model and is_called and sum(p.numel() for p in remaining) >= min_num_params:
            found.append(module)
            return set()
        return remaining

    visit(model)
    return found


def _mesh(fsdp: Fsdp, context: RankContext) -> DeviceMesh:
    _check_shard_size(fsdp, context.world_size)
    if fsdp.sharding_strategy != "HYBRID_SHARD":
        return init_device_mesh(context.device.type, (context.world_size,), mesh_dim_names=("dp",))
    size = fsdp.shard_size or context.local_world_size
    if context.world_size % size:
        raise InputError(
            f"HYBRID_SHARD shards the model over the {size} ranks of a node, but {size} does not divide the number of "
            f"ranks, {context.world_size}; give a training.fsdp.shard_size that does"
        )
    names = ("dp_replicate", "dp_shard")
    return init_device_mesh(context.device.type, (context.world_size // size, size), mesh_dim_names=names)


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute each repeated block of a model in the backward pass instead of storing its activations.

    The blocks are the elements of the outermost ``ModuleList``s, or the children of a model that has none. Names of
    parameters do not change.
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
    """Scale the gradient to a norm of at most `largest`, and return its previous norm, a tensor that may be sharded."""
    return nn.utils.clip_grad_norm_(list(parameters), largest)


def scale_gradient(parameters: Iterable[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply the gradient, which may be sharded over ranks, by a number that is equal on all ranks."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.mul_(factor.to(local.device))


def number_of(value: torch.Tensor) -> float:
    """Convert a scalar tensor, which may be sharded, to a number, and synchronize the device.

    All ranks must call this function.
    """
    return float(value.full_tensor() if isinstance(value, DTensor) else value)
