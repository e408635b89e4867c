"""Sections of a training configuration that have no function of `dasksc` behind them.

The options are declared here and in the signatures of the functions that `dasksc.train.config` names, and nowhere else.
This module imports neither torch nor NumPy, because the command checks its options before it imports them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from dasksc.errors import InputError

__all__ = ["MODELS", "OPTIMIZERS", "STRATEGIES", "TOKENIZERS", "Fsdp", "Scheduler", "Training"]

MODELS = {
    "mlp_classifier": "dasksc.train.models:MLPClassifier",
    "autoencoder": "dasksc.train.models:Autoencoder",
    "vae": "dasksc.train.models:Autoencoder",
    "transformer_encoder": "dasksc.train.models:TokenTransformer",
}
"""Classes by the names of models; ``vae`` is the variational autoencoder."""

STRATEGIES = {
    name: f"dasksc:{cls}"
    for cls, names in {
        "BlockShuffling": ("shuffle", "block_shuffling"),
        "Streaming": ("stream", "streaming"),
        "ClassBalancedSampling": ("balance", "class_balanced_sampling"),
        "BlockWeightedSampling": ("block_weighted_sampling",),
        "CellSets": ("cell_sets",),
    }.items()
    for name in (*names, cls)
}
"""Classes by the names of sampling strategies."""

OPTIMIZERS = {"adam": "torch.optim.adam:Adam", "adamw": "torch.optim.adamw:AdamW", "sgd": "torch.optim.sgd:SGD"}
"""Classes by the names of optimizers."""

TOKENIZERS = {"rank_value": "dasksc.transforms.tokens:RankTokens", "value_bins": "dasksc.transforms.tokens:ValueBins"}
"""Classes by the names of tokenizers."""

_Logger = Literal["stdout", "csv", "tensorboard", "wandb"]


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """Schedule of the learning rate: the rate of a step is that of the optimizer times a factor.

    Parameters
    ----------
    name
        Shape after the warm-up: constant, cosine decay or linear decay.
    warmup_steps
        Number of steps over which the rate increases linearly.
    total_steps
        Step at which the factor reaches `final`; null: the last step of the run.
    final
        Factor at the end of the schedule.
    """

    name: Literal["constant", "cosine_warmup", "linear_warmup"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or not 0 <= self.final < math.inf:
            raise InputError(
                f"training.scheduler has warmup_steps={self.warmup_steps} and final={self.final}, which must not be "
                "negative"
            )


@dataclass(frozen=True, kw_only=True)
class Fsdp:
    """Sharding of parameters. The presence of this section selects FSDP, unless `Training.strategy` is set.

    Parameters
    ----------
    sharding_strategy
        What is sharded; SHARD_GRAD_OP keeps parameters gathered between forward and backward pass, HYBRID_SHARD shards
        within groups of `shard_size` ranks and replicates across groups, NO_SHARD is DDP.
    cpu_offload
        Keep parameters, gradients and optimizer state in host memory.
    min_num_params
        Modules with at least this many parameters are gathered separately, the others together.
    shard_size
        Number of ranks that share one copy of the parameters; null: the ranks of a node.
    activation_checkpointing
        As in `Training`; either enables it.
    """

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = "FULL_SHARD"
    cpu_offload: bool = False
    min_num_params: int = 1_000_000
    shard_size: int | None = None
    activation_checkpointing: bool = False


@dataclass(frozen=True, kw_only=True)
class Training:
    """Section ``training``.

    Parameters
    ----------
    strategy
        Parallelism; null: fsdp if there is a section `fsdp`, else ddp on several ranks and single on one.
    precision
        Precision; 16-mixed uses a gradient scaler.
    gradient_accumulation
        Number of batches per rank in an optimizer step; the last step of an epoch may have fewer.
    gradient_clip
        Maximum norm of the gradient, over all ranks.
    max_epochs
        Maximum number of epochs.
    max_steps
        Maximum number of optimizer steps. Without `max_epochs` and `max_steps`, a run lasts one epoch.
    optimizer
        Name of an optimizer and its arguments: ``{name: adamw, lr: 1e-3}``.
    scheduler
        Name of a schedule of the learning rate, or a section `Scheduler`.
    seed
        Seed of the model, of dropout and, unless `data.seed` is given, of the order of the cells.
    activation_checkpointing
        Recompute the activations of each block in the backward pass instead of storing them.
    fsdp
        Sharding of parameters, a section `Fsdp`; ``{}`` selects FSDP with its defaults.
    num_gpus
        Expected number of ranks on all nodes; a run with a different number is an error.
    checkpoint_dir
        Directory of checkpoints, metrics.csv and model.pt, which all ranks see.
    save_every
        Number of steps between checkpoints; null: one at the end of each epoch.
    save_top_k
        Number of best checkpoints to keep in addition to the latest; -1 keeps all.
    monitor
        Metric by which checkpoints are compared; null: validation_loss, or loss without validation.
    monitor_mode
        Direction of `monitor`; null: max for accuracies, else min.
    resume_from
        Path of a checkpoint, or auto for the latest one in `checkpoint_dir`, if any.
    validate_every
        Number of epochs between validations.
    logger
        Loggers, one or a list of stdout, csv, tensorboard and wandb; metrics.csv is always written.
    log_every_n_steps
        Number of steps between log lines.
    find_unused_parameters
        Option of DDP for models that do not use all of their parameters in each step.
    timeout_s
        Time after which a rank that waits for another raises an error, in seconds.
    """

    strategy: Literal["single", "ddp", "fsdp"] | None = None
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    gradient_accumulation: int = 1
    gradient_clip: float | None = None
    max_epochs: int | None = None
    max_steps: int | None = None
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "adamw"})
    scheduler: Scheduler = Scheduler()
    seed: int = 0
    activation_checkpointing: bool = False
    fsdp: Fsdp | None = None
    num_gpus: int | None = None
    checkpoint_dir: str = "checkpoints"
    save_every: int | None = None
    save_top_k: int = 1
    monitor: str | None = None
    monitor_mode: Literal["min", "max"] | None = None
    resume_from: str | None = None
    validate_every: int = 1
    logger: _Logger | list[_Logger] = "stdout"
    log_every_n_steps: int = 50
    find_unused_parameters: bool = False
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        counts = ("max_epochs", "max_steps", "save_every", "validate_every", "log_every_n_steps")
        for name in ("gradient_accumulation", *counts):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"training.{name}={value} must be at least 1")
        if self.gradient_clip is not None and not 0 < self.gradient_clip < math.inf:
            raise InputError(f"training.gradient_clip={self.gradient_clip} must be a positive number")

    @property
    def loggers(self) -> list[str]:
        """Names of the loggers."""
        return [self.logger] if isinstance(self.logger, str) else list(self.logger)
