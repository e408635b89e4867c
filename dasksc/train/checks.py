"""Checks of a training configuration that need neither data nor ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dasksc import DaskscError, InputError
from dasksc.sampling.named import STRATEGIES
from dasksc.train.config import Config
from dasksc.train.import_paths import arguments_of, check_arguments, find
from dasksc.train.models import BUILT_IN
from dasksc.train.optim import make_optimizer
from dasksc.transforms.tokenizer_config import from_config

__all__ = ["check"]

# Placeholders for the values that models receive from the data (`dasksc.train.models`).
_FACTS = {"n_genes": 2, "n_labels": 2, "n_tokens": 5, "pad_id": 0, "n_bins": 5, "max_seq_len": 2**20}


def check(config: Config) -> None:
    """Raise an error for names, arguments and values that are invalid for any data.

    Parameters
    ----------
    config
        Configuration of the training. Its model and optimizer are constructed without memory for parameters.

    Raises
    ------
    DaskscError
        If there are problems; the message lists all of them.
    """
    problems: list[DaskscError] = []
    for part in (_check_strategy, _check_tokenizer, _check_model, _check_optimizer, _check_folder):
        try:
            part(config)
        except DaskscError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise InputError("; ".join(map(str, problems)))


def _check_strategy(config: Config) -> None:
    strategy = config.data.strategy
    check_arguments(
        find(strategy.name, STRATEGIES, what="data.strategy.name"), strategy.arguments, what="data.strategy"
    )


def _check_tokenizer(config: Config) -> None:
    if config.tokenizer is None:
        return
    tokens = from_config(config.tokenizer.options, genes=["a gene"])
    if config.tokenizer.vocabulary is not None:
        type(tokens.vocabulary).read(config.tokenizer.vocabulary)


def _check_model(config: Config) -> None:
    model_class = find(config.model.name, BUILT_IN, what="model.name")
    if not callable(model_class):
        raise InputError(f"model.name={config.model.name!r} is no torch.nn.Module; got {model_class!r}")
    arguments = config.model.arguments
    facts = {name: value for name, value in _FACTS.items() if name in arguments_of(model_class)}
    check_arguments(model_class, facts | arguments, what="model")
    if config.model.name in BUILT_IN:  # constructors of other models may have side effects
        with torch.device("meta"):
            _made(model_class, facts | arguments, "model")


def _check_optimizer(config: Config) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    wanted = config.training.optimizer
    _made(lambda: make_optimizer([parameter], wanted), {}, "training.optimizer")


def _made(make: Callable[..., Any], arguments: dict[str, Any], what: str) -> None:
    try:
        make(**arguments)
    except (InputError, MemoryError, ImportError):
        raise
    except Exception as error:
        raise InputError(f"{what} has a value that cannot be used: {type(error).__name__}: {error}") from error


def _check_folder(config: Config) -> None:
    folder = Path(config.training.checkpoint_dir)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise InputError(
            f"training.checkpoint_dir={config.training.checkpoint_dir!r} cannot be written to: {there} is "
            f"{'not writable' if there.is_dir() else 'no directory'}"
        )
