"""Checks of a training configuration that need neither data nor ranks."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from dasksc import DaskscError, InputError, MissingPathError
from dasksc.atlas.lookup import nothing_at
from dasksc.sampling.named import STRATEGIES
from dasksc.storage import is_url
from dasksc.train.config import Config
from dasksc.train.config_problems import problems_in
from dasksc.train.guide_layout import translated
from dasksc.train.import_paths import arguments_of, check_arguments, find
from dasksc.train.models import BUILT_IN
from dasksc.train.optim import make_optimizer
from dasksc.train.yaml_trees import changed, copied, read_file
from dasksc.transforms.tokenizer_config import from_config

__all__ = ["check_config", "load_config"]

# Placeholders for the model arguments that are filled in from the data (`dasksc.train.models`).
_FACTS = {"n_genes": 2, "n_labels": 2, "n_tokens": 5, "pad_id": 0, "n_bins": 5, "max_seq_len": 2**20}
# Values of missing sections, so that the other sections can be checked.
_PLACEHOLDERS: dict[str, dict[str, Any]] = {
    "data": {"path": "atlas.h5ad"},
    "model": {"name": "mlp_classifier", "label": "label"},
}


def check_config(config: Config) -> None:
    """Raise an error for names, arguments and values that are invalid whatever the data.

    Parameters
    ----------
    config
        Configuration of the training run. Its model and optimizer are constructed on the meta device, which allocates
        no memory for parameters.

    Raises
    ------
    DaskscError
        If there are problems; the message lists all of them.
    """
    problems = _problems(config)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise InputError("; ".join(map(str, problems)))


def load_config(path: str, *, changes: Iterable[str] = (), with_paths: bool = True) -> Config:
    """Read and check a YAML file; see `Config.load` and `check_config`.

    Parameters
    ----------
    path, changes
        As for `Config.load`.
    with_paths
        If True, the paths of data and checkpoints must exist.

    Raises
    ------
    DaskscError
        If there are problems. The message lists violations of the schema. For the keys that satisfy it, the message
        also lists missing paths and the problems that `check_config` finds.
    """
    raw, changes = read_file(path), list(changes)
    try:
        config = Config.of(raw, changes=changes, source=path)
    except InputError as error:
        if not isinstance(found := error.__cause__, ValidationError):
            raise
        rest = _without(translated(changed(raw, changes)), found)
        try:
            config = Config.model_validate(rest)
        except ValidationError:  # the mistake is in a combination of keys
            raise error from found
        # A model without a name was replaced by a placeholder, and cannot be checked.
        is_named = not any(one["type"] == "missing" and one["loc"][0] == "model" for one in found.errors())
        has_data = not any(one["type"] == "missing" and one["loc"][0] == "data" for one in found.errors())
        problems = problems_in(Config, found)
        missing = _missing_paths(config, with_data=has_data) if with_paths else []
        problems += map(str, [*_problems(config, with_model=is_named), *missing])
        if len(problems) == 1:
            raise
        raise _mistakes(path, problems) from found
    missing = _missing_paths(config) if with_paths else []
    if not missing:
        check_config(config)
        return config
    errors = [*_problems(config), *missing]
    raise errors[0] if len(errors) == 1 else _mistakes(path, [*map(str, errors)])


def _mistakes(path: str, problems: Sequence[str]) -> InputError:
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return InputError(f"{path} has {len(problems)} mistakes:{lines}")


def _missing_paths(config: Config, *, with_data: bool = True) -> list[DaskscError]:
    """Return an error for each local path that does not exist; patterns and URLs are left to `dasksc.open`."""
    validation = config.data.validation
    given = {"data.path": config.data.path, "data.validation.path": None if validation is None else validation.path}
    problems: list[DaskscError] = []
    for key, value in given.items() if with_data else ():
        paths = value.values() if isinstance(value, dict) else [value] if isinstance(value, str) else value or ()
        problems += [
            MissingPathError(f"{key}: {nothing_at(path)}")
            for path in paths
            if not (is_url(path) or glob.has_magic(path) or os.path.exists(path))
        ]
    resumed = config.training.resume_from
    if resumed not in (None, "auto") and not (Path(str(resumed)) / "state.json").exists():
        problems.append(
            MissingPathError(
                f"training.resume_from={resumed!r} is not a checkpoint; give the folder of one, such as "
                "checkpoints/step-00000100, or auto"
            )
        )
    return problems


def _without(tree: dict[str, Any], found: ValidationError) -> dict[str, Any]:
    """Return a configuration without its invalid values, and with placeholders for missing sections."""
    tree = copied(tree)
    for error in found.errors():
        section: Any = tree
        *sections, last = error["loc"][: _depth(tree, error["loc"])]
        for key in sections:
            section = section[key]
        section.pop(last, None)
    for error in found.errors():
        if error["type"] == "missing" and error["loc"][0] in _PLACEHOLDERS:
            name = str(error["loc"][0])
            tree[name] = {**_PLACEHOLDERS[name], **(tree.get(name) or {})}
    return tree


def _depth(tree: Any, location: Sequence[str | int]) -> int:
    """Follow `location` into `tree`, and return the number of keys up to the first value that is not a dict."""
    depth = 0
    while depth < len(location) - 1 and isinstance(tree.get(location[depth]), dict):
        tree = tree[location[depth]]
        depth += 1
    return depth + 1


def _problems(config: Config, *, with_model: bool = True) -> list[DaskscError]:
    problems: list[DaskscError] = []
    parts = (
        _check_strategy,
        _check_tokenizer,
        *([_check_model] if with_model else []),
        _check_optimizer,
        _check_folder,
    )
    for part in parts:
        try:
            part(config)
        except DaskscError as error:
            problems.append(error)
    return problems


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
        raise InputError(f"model.name={config.model.name!r} is not a torch.nn.Module; got {model_class!r}")
    arguments = config.model.arguments
    facts = {name: value for name, value in _FACTS.items() if name in arguments_of(model_class)}
    check_arguments(model_class, facts | arguments, what="model")
    if config.model.name in BUILT_IN:  # constructors of other models may have side effects
        with torch.device("meta"):
            _check_creation(model_class, facts | arguments, "model")


def _check_optimizer(config: Config) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    wanted = config.training.optimizer
    _check_creation(lambda: make_optimizer([parameter], wanted), {}, "training.optimizer")


def _check_creation(make: Callable[..., Any], arguments: dict[str, Any], what: str) -> None:
    try:
        make(**arguments)
    except (InputError, MemoryError, ImportError):
        raise
    except Exception as error:
        raise InputError(f"{what} has an invalid value: {type(error).__name__}: {error}") from error


def _check_folder(config: Config) -> None:
    folder = Path(config.training.checkpoint_dir)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(
            f"training.checkpoint_dir={config.training.checkpoint_dir!r} cannot be written to: {existing} is "
            f"{'not writable' if existing.is_dir() else 'not a directory'}"
        )
