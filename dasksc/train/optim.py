"""Optimizers and learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dasksc.train.config import Optimizer, Scheduler
from dasksc.train.import_paths import arguments_of, check_arguments, find

__all__ = ["LearningRate", "factor_at", "hyperparameters_of", "make_optimizer"]

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


def make_optimizer(parameters: Iterable[nn.Parameter], wanted: Optimizer, *, scale: int = 1) -> torch.optim.Optimizer:
    """Create the optimizer of a configuration, with its learning rate multiplied by `scale`."""
    optimizer_class = find(wanted.name, _OPTIMIZERS, what="training.optimizer.name")
    arguments = {"lr": wanted.lr, **wanted.arguments}
    check_arguments(optimizer_class, {"params": None, **arguments}, what="training.optimizer")
    optimizer: torch.optim.Optimizer = optimizer_class(
        [p for p in parameters if p.requires_grad], **{**arguments, "lr": wanted.lr * scale}
    )
    return optimizer


def hyperparameters_of(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the names of the constructor arguments of an optimizer: the hyperparameters of its parameter groups.

    Other entries of the groups are state: some optimizers keep estimates or counts there.
    """
    # Arguments of base classes are included, since a subclass may pass them on as **options.
    classes = [cls for cls in type(optimizer).__mro__ if issubclass(cls, torch.optim.Optimizer)]
    return {name for cls in classes for name in arguments_of(cls)}


def factor_at(step: int, scheduler: Scheduler, total_steps: int) -> float:
    """Return the factor of the learning rate for a step, counted from 0.

    The factor increases to 1 during the warm-up and decreases to ``scheduler.final`` at `total_steps`, unless the
    schedule is constant.
    """
    if step < scheduler.warmup_steps:
        return (step + 1) / (scheduler.warmup_steps + 1)
    if scheduler.name == "constant":
        return 1.0
    total = scheduler.total_steps or total_steps
    done = min(1.0, (step - scheduler.warmup_steps) / max(1, total - scheduler.warmup_steps))
    fraction_remaining = 0.5 * (1 + math.cos(math.pi * done)) if scheduler.name == "cosine_warmup" else 1 - done
    return scheduler.final + (1 - scheduler.final) * fraction_remaining


class LearningRate:
    """Learning rate schedule that depends only on the step, so checkpoints need not store its state.

    Parameters
    ----------
    optimizer
        Optimizer whose current learning rates correspond to a factor of 1.
    scheduler
        ``scheduler`` section of the configuration.
    total_steps
        Number of steps of the run; the attribute may be changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Scheduler, total_steps: int) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self.total_steps = total_steps
        self._rates: list[Any] = [group["lr"] for group in optimizer.param_groups]

    def set(self, step: int) -> float:
        """Set the learning rate of each parameter group for a step, and return that of the first group."""
        factor = factor_at(step, self._scheduler, self.total_steps)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        return float(self._rates[0] * factor)
