"""Saved models: ``model.pt``, a single file for inference, and its loader `load_model`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from dasksc import InputError, MissingPathError
from dasksc.train.checkpoint import read_state, read_tensors
from dasksc.train.import_paths import find
from dasksc.train.models import BUILT_IN
from dasksc.train.parallel import RankContext

__all__ = ["build_model", "load_model", "read_saved", "save_model"]


def save_model(
    path: Path,
    model: nn.Module,
    *,
    name: str,
    arguments: Mapping[str, Any],
    context: RankContext,
    more: Mapping[str, Any],
) -> None:
    """Write a model to one file for `load_model`.

    All ranks must call this function; rank 0 needs memory for all parameters.

    Parameters
    ----------
    path
        Path of the file.
    model
        Model, sharded or not.
    name, arguments
        Name and constructor arguments of its class.
    context
        Rank and device of this process.
    more
        Additional content of the file: plain numbers, strings, lists and dicts.
    """
    parameters = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def write() -> None:
        partial = path.with_name(path.name + ".partial")
        torch.save({"name": name, "arguments": dict(arguments), "parameters": parameters, **more}, partial)
        partial.rename(path)

    context.on_rank_zero(write, f"the model {path} cannot be written")


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
    if path.is_file():
        saved = read_saved(path)
        model = _built(saved, path)
        model.load_state_dict(saved["parameters"])
    else:
        saved = read_state(path)["model"]
        model = _built(saved, path)
        parameters = get_model_state_dict(model)
        read_tensors({"model": parameters}, path, no_dist=True)
        model.load_state_dict(parameters)
    return model.eval()


def read_saved(path: Path) -> dict[str, Any]:
    """Return the content of a ``model.pt``: tensors and plain types.

    Raises
    ------
    InputError
        If the file is damaged, or is not a ``model.pt`` of `dasksc.train`.
    """
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # damaged bytes may raise any error
        # The message of torch recommends loading the file without restrictions.
        raise InputError(
            f"{path} is not a model.pt that dasksc train wrote, or is damaged. Give another file"
        ) from error
    if not isinstance(saved, dict) or not {"name", "arguments", "parameters"} <= set(saved):
        raise InputError(f"{path} is not a model.pt that dasksc train wrote: it does not contain the name of a model")
    return saved


def _built(saved: Mapping[str, Any], path: Path) -> nn.Module:
    """Create the model of a saved file."""
    name = saved["name"]
    model_class = find(name, BUILT_IN, what=f"the model of {path}")
    # The file may come from an unknown source, so it may name any function, such as os:system.
    if not isinstance(model_class, type) or not issubclass(model_class, nn.Module):
        raise InputError(
            f"{path} names {name!r} as its model, which is not a torch.nn.Module class, so dasksc does not call it. If "
            "you trust the file, create the model yourself and call "
            "model.load_state_dict(torch.load(path, weights_only=True)['parameters'])"
        )
    return build_model(name, saved["arguments"])


def build_model(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Create a model by its built-in name or import path."""
    model: nn.Module = find(name, BUILT_IN, what="model.name")(**arguments)
    return model
