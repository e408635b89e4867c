"""Objects by the names in a configuration, and ``model.pt``, a single file for inference with its loader."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from dasksc import InputError, MissingPathError
from dasksc.atlas.lookup import nearest
from dasksc.train.checkpoint import read_state, read_tensors
from dasksc.train.models import BUILT_IN
from dasksc.train.parallel import Ranks

__all__ = ["created", "found", "load_model", "read_saved", "save_model"]


def found(name: str, built_in: Mapping[str, Any], *, what: str) -> Any:
    """Return the object that a short name or ``package.module:name`` stands for; errors name the key `what`."""
    module, colon, attribute = name.partition(":")
    if not colon:
        if name not in built_in:
            hint = f"{nearest(name, built_in)} To use your own, give 'package.module:name'"
            raise InputError(f"{what}={name!r} is not known; {hint}")
        return built_in[name]
    try:
        return attrgetter(attribute)(import_module(module))
    except (ImportError, AttributeError) as error:
        raise InputError(f"{what}={name!r} cannot be imported: {error}. Is its directory on PYTHONPATH?") from error


def created(make: Callable[..., Any], arguments: Mapping[str, Any], *, what: str) -> Any:
    """Call a class with arguments of a section of the configuration, which errors name."""
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise InputError(f"{what}: {getattr(make, '__name__', make)} has {error}") from error
    try:
        return make(**arguments)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} has an invalid value: {error}") from error


def save_model(path: Path, model: nn.Module, saved: Mapping[str, Any], ranks: Ranks) -> None:
    """Write a model and the plain types `saved` to one file. All ranks call this function; rank 0 gathers it."""
    parameters = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def write() -> None:
        partial = path.with_name(path.name + ".partial")
        torch.save({**saved, "parameters": parameters}, partial)
        partial.rename(path)

    ranks.on_rank_zero(write, f"the model {path} cannot be written")


def load_model(path: str | os.PathLike[str]) -> nn.Module:
    """Load a trained model for inference in one process.

    Parameters
    ----------
    path
        Path of a ``model.pt``, or of a checkpoint (``step-...``) written by any number of ranks.

    Returns
    -------
    torch.nn.Module
        Model on the CPU, in evaluation mode.

    Raises
    ------
    MissingPathError
        If the path does not exist.
    CorruptDataError, InputError
        If the file or checkpoint is damaged, or was not written by `dasksc.train`. For security, unpickling is
        restricted, and only subclasses of ``torch.nn.Module`` are instantiated.

    Examples
    --------
    >>> from dasksc.train import Config, fit, load_model
    >>> raw = {"data": {"path": "atlas.h5ad"}, "model": {"name": "autoencoder"}, "training": {"logger": "csv"}}
    >>> report = fit(Config.of(raw, changes=["training.max_steps=5"]), say=lambda line: None)
    >>> model = load_model(report.model)
    >>> batch = next(iter(dasksc.scDataset("atlas.h5ad", batch_size=64, return_index=True, seed=0)))
    >>> model.embed(batch).shape
    torch.Size([64, 32])
    """
    path = Path(path)
    if not path.exists():
        raise MissingPathError(f"there is no model at {path}")
    saved = read_saved(path) if path.is_file() else read_state(path)
    arguments = dict(saved["model"])
    name = arguments.pop("name")
    model_class = found(name, BUILT_IN, what=f"the model of {path}")
    # The file may come from an unknown source, so it may name any function, such as os:system.
    if not isinstance(model_class, type) or not issubclass(model_class, nn.Module):
        raise InputError(
            f"{path} names {name!r} as its model, which is not a torch.nn.Module class. If you trust the file, create "
            "the model, and call model.load_state_dict(torch.load(path, weights_only=True)['parameters'])"
        )
    model: nn.Module = created(model_class, arguments, what=str(path))
    if path.is_file():
        model.load_state_dict(saved["parameters"])
    else:  # tensors are read into those of the model
        read_tensors({"model": model.state_dict()}, path, no_dist=True)
    return model.eval()


def read_saved(path: Path) -> dict[str, Any]:
    """Return the content of a ``model.pt``: tensors and plain types."""
    if path.is_dir():
        raise InputError(f"{path} is a checkpoint; give the model.pt that was written at the end of training")
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # damaged bytes may raise any error, and torch advises to load without restrictions
        raise InputError(f"{path} is not a model.pt that dasksc train wrote, or is damaged") from error
    if not isinstance(saved, dict) or not {"model", "parameters"} <= set(saved):
        raise InputError(f"{path} is not a model.pt that dasksc train wrote: it does not contain the name of a model")
    return saved
