"""Optimizers, and the learning rate over the steps."""

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
    """Make the optimizer of a configuration, its learning rate multiplied by `scale`."""
    optimizer_class = find(wanted.name, _OPTIMIZERS, what="training.optimizer.name")
    arguments = {"lr": wanted.lr, **wanted.arguments}
    check_arguments(optimizer_class, {"params": None, **arguments}, what="training.optimizer")
    optimizer: torch.optim.Optimizer = optimizer_class(
        [p for p in parameters if p.requires_grad], **{**arguments, "lr": wanted.lr * scale}
    )
    return optimizer


def hyperparameters_of(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the arguments of an optimizer's constructor: what a configuration says of its parameter groups.

    What else is in the groups is what it has learned, for some keep an estimate or a count there.
    """
    # Its own and inherited ones, which may be passed on as **options.
    classes = [cls for cls in type(optimizer).__mro__ if issubclass(cls, torch.optim.Optimizer)]
    return {name for cls in classes for name in arguments_of(cls)}


def factor_at(step: int, scheduler: Scheduler, total_steps: int) -> float:
    """Return the factor of the learning rate for a step, counted from 0.

    It rises over the warm-up, ends at 1, and falls to ``scheduler.final`` at `total_steps`.
    """
    if step < scheduler.warmup_steps:
        return (step + 1) / (scheduler.warmup_steps + 1)
    if scheduler.name == "constant":
        return 1.0
    total = scheduler.total_steps or total_steps
    done = min(1.0, (step - scheduler.warmup_steps) / max(1, total - scheduler.warmup_steps))
    left = 0.5 * (1 + math.cos(math.pi * done)) if scheduler.name == "cosine_warmup" else 1 - done
    return scheduler.final + (1 - scheduler.final) * left


class LearningRate:
    """Sets the learning rate of a step: it depends on the step alone, so a checkpoint needs no more than that.

    Parameters
    ----------
    optimizer
        Whose present rates are those at a factor of 1.
    scheduler
        The section of the configuration.
    total_steps
        Of the run; may be set anew.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Scheduler, total_steps: int) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self.total_steps = total_steps
        self._rates: list[Any] = [group["lr"] for group in optimizer.param_groups]

    def set(self, step: int) -> float:
        """Set the rates for a step; return the first."""
        factor = factor_at(step, self._scheduler, self.total_steps)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        return float(self._rates[0] * factor)
