"""``model.pt``, a single file for inference with a trained model, and data sets that read an atlas for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import dasksc
from dasksc import InputError, MissingPathError, scDataset
from dasksc.inference.model import check_name
from dasksc.inference.publishing import target_path
from dasksc.inspection.report import Report
from dasksc.options import nearest
from dasksc.output.work_folder import atomic_path
from dasksc.train.checkpoint import read_state, read_tensors
from dasksc.train.config import Config, created, found
from dasksc.train.data import opened, tokens_of
from dasksc.train.parallel import Ranks
from dasksc.train.sections import MODELS
from dasksc.transforms.vocabulary import Vocabulary


def save_model(path: Path, model: nn.Module, saved: Mapping[str, Any], ranks: Ranks) -> None:
    """Write a model and the plain types `saved` to one file. All ranks call this function; rank 0 gathers it."""
    parameters = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def write() -> None:
        with atomic_path(path) as partial:
            torch.save({**saved, "parameters": parameters}, partial)

    ranks.on_rank_zero(write, f"the model {path} cannot be written")


def load_model(path: str | os.PathLike[str]) -> nn.Module:
    """Load a trained model for inference in one process.

    Unpickling is restricted, and only subclasses of ``torch.nn.Module`` are instantiated.

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
    CorruptDataError, InputError
        If the file or checkpoint does not exist, is damaged, or was not written by `dasksc.train`.

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
    model_class = found(name, MODELS, what=f"the model of {path}")
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


def reading_options(config: Config, dataset: scDataset) -> dict[str, Any]:
    """Return how a model reads its data, the training data set, as plain types."""
    saved = {name: getattr(config.data, name) for name in ("layers", "obsm", "obs", "layout", "dtype")}
    saved |= {"tokenizer": None, "genes": None, "genes_key": None}
    if config.tokenizer is not None:
        transform: Any = dataset.transform
        masking = ("mask_ratio", "random_replace_ratio", "keep_ratio")
        options = {name: value for name, value in config.tokenizer.items() if name not in (*masking, "vocabulary")}
        return saved | {"tokenizer": {"options": options, "ids": dict(transform.vocabulary.ids)}}
    match = dataset.gene_match
    names = np.asarray(dataset.collection.var_names).astype(str)
    if match is not None:
        names = np.asarray(match.names)
        saved["genes_key"] = config.data.genes_key
    elif config.data.genes is not None:
        names = names[np.asarray(config.data.genes)]
    is_unique = len(set(names)) == len(names)
    return saved | {"genes": [str(name) for name in names] if is_unique else None}


def dataset_for(saved: Mapping[str, Any], data: Any, *, batch_size: int, **options: Any) -> scDataset:
    """Return a data set of an atlas by `reading_options`, without masks and, from a path, without names of cells."""
    adata = dasksc.open(data, obs=[], names=False)
    given = {name: saved[name] for name in ("layers", "obsm", "obs", "layout", "dtype")} | options
    given["return_index"] = True  # a data set without labels yields a `Batch`, not the tensor X
    genes, key = saved["genes"], saved["genes_key"]
    names = adata.var_names if key is None else adata.var.get(key)
    # Selecting columns takes time in every batch.
    selects = genes is not None and (names is None or list(map(str, names)) != list(genes))
    if selects:
        given |= {"genes": genes, "genes_key": key}
    else:
        given.pop("genes_missing", None)
    if (tokens := saved["tokenizer"]) is not None:
        tokenizer = tokens_of(tokens["options"], genes=adata.var_names, vocabulary=Vocabulary(tokens["ids"]))
        given |= {"layout": "csr", "transform": tokenizer}
    return scDataset(data, dasksc.Streaming(), batch_size, **given)


def method_of(model: nn.Module, name: str | None) -> Callable[[Any], Any]:
    """Return the method to call for predictions, by default ``embed`` if the model has it, or the model itself."""
    method: Any = getattr(model, "embed", model) if name is None else getattr(model, name, None)
    if not callable(method):
        methods = [one for one in dir(type(model)) if not one.startswith("_") and one not in dir(nn.Module)]
        raise InputError(f"{type(model).__name__} has no method {name!r}{nearest(str(name), methods)}")
    result: Callable[[Any], Any] = method
    return result


def categories_for(model: nn.Module, name: str | None, categories: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the labels of the integer codes that a classifier's ``predict`` returns; empty for other methods."""
    label: Any = getattr(model, "label", None)
    return {"predicted": list(categories[label])} if name == "predict" and label in categories else {}


def check_predictions(section: Mapping[str, Any], model: nn.Module) -> None:
    """Raise an error for a section ``predict`` that would fail after the training."""
    target_path(section["out"])
    check_name(section.get("key", "X_emb"))
    method_of(model, section.get("method"))


def predict_trained(config: Config, model: nn.Module, dataset: scDataset, ranks: Ranks) -> Report:
    """Predict according to the section ``predict`` of a configuration. All ranks must call this function."""
    assert config.predict is not None
    options = dict(config.predict)
    path, method = options.pop("path", None) or config.data.path, options.pop("method", None)
    is_plain = isinstance(path, str) and not any(one not in (None, False, "inner") for one in config.data.open.values())
    reading = dataset_for(
        reading_options(config, dataset),
        path if is_plain else opened(path, config.data, names=True),  # from a path, names of cells are never in memory
        batch_size=options.pop("batch_size", None) or config.data.batch_size,
        fetch_factor=config.data.fetch_factor,
        memory_limit=config.data.memory_limit,
    )
    return dasksc.predict(
        method_of(model, method),
        reading,
        categories=categories_for(model, method, dict(dataset.categories)),
        device=ranks.device,
        progress=config.data.progress and ranks.rank == 0,
        **options,
    )
