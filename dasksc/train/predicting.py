"""Inference with trained models on any atlas, which is read with the options recorded in ``model.pt``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import dasksc
from dasksc import Batch, InputError, scDataset
from dasksc.atlas.lookup import nearest
from dasksc.train.config import Config
from dasksc.train.import_paths import find
from dasksc.train.saved_models import read_saved
from dasksc.transforms.tokenizer_config import from_config
from dasksc.transforms.vocabulary import Vocabulary

__all__ = [
    *("categories_for", "dataset_for", "imported_model", "method_of", "reading_options", "predict_trained"),
    "read_model",
]

_COPIED = ("layers", "obsm", "obs", "layout", "dtype")


def reading_options(config: Config, dataset: scDataset) -> dict[str, Any]:
    """Return the reading options of a model, as plain types.

    Parameters
    ----------
    config
        Configuration of the training run.
    dataset
        Data set that the model is trained on.
    """
    saved_options: dict[str, Any] = {name: getattr(config.data, name) for name in _COPIED}
    names = np.asarray(dataset.collection.var_names).astype(str)
    if config.tokenizer is not None:
        options = {name: value for name, value in config.tokenizer.options.items() if name != "masking"}
        transform: Any = dataset.transform
        ids = dict(transform.vocabulary.ids)
        return saved_options | {"tokenizer": {"options": options, "ids": ids}, "genes": None, "genes_key": None}
    match, genes = dataset.gene_match, config.data.genes
    if match is not None:
        names = np.asarray(match.names)
    elif genes is not None:
        names = names[np.asarray(genes)]
    is_unique = len(set(names)) == len(names)
    return saved_options | {
        "tokenizer": None,
        "genes": [str(name) for name in names] if is_unique else None,
        "genes_key": config.data.genes_key if match is not None else None,
    }


def dataset_for(saved_options: Mapping[str, Any], data: Any, *, batch_size: int, **options: Any) -> scDataset:
    """Return a data set that reads an atlas in the same way as a model's training data, but without masks and labels.

    Parameters
    ----------
    saved_options
        Result of `reading_options`.
    data
        Atlas in any form that `dasksc.open` accepts. If it is a path, the names of cells are not held in memory.
    batch_size
        Rows of a batch.
    **options
        Further arguments of `dasksc.scDataset`, such as ``genes_missing="zero"``.

    Raises
    ------
    InputError
        If the atlas lacks genes that the model was trained on.
    """
    adata = dasksc.open(data, obs=[], names=False)
    given = {name: saved_options[name] for name in _COPIED} | options
    if saved_options["tokenizer"] is not None:
        tokens = saved_options["tokenizer"]
        vocabulary = Vocabulary(tokens["ids"])
        transform: Any = from_config(tokens["options"], genes=adata.var_names, vocabulary=vocabulary)
        given = {**given, "layout": "csr"}
        given.pop("genes_missing", None)
    else:
        transform = _unchanged
        key, genes = saved_options["genes_key"], saved_options["genes"]
        names = adata.var_names if key is None else adata.var.get(key)
        # Pass `genes` only if the columns of the atlas differ from those of the model, since selecting columns takes
        # time in every batch.
        if genes is not None and (names is None or list(map(str, names)) != list(genes)):
            given |= {"genes": genes} | ({} if key is None else {"genes_key": key})
        else:
            given.pop("genes_missing", None)
    return scDataset(data, dasksc.Streaming(), batch_size, transform=transform, **given)


def _unchanged(batch: Batch) -> Batch:
    """Return a batch unchanged.

    Used as a transform, so that a data set without labels yields a `Batch` and not the tensor X.
    """
    return batch


def method_of(model: nn.Module, name: str | None) -> Callable[[Any], Any]:
    """Return the method to call for predictions, by default ``embed`` if the model has it, or the model itself.

    Raises
    ------
    InputError
        If the model has no such method.
    """
    if name is None:
        method = getattr(model, "embed", model)
    else:
        method = getattr(model, name, None)
    if not callable(method):
        methods = [one for one in dir(type(model)) if not one.startswith("_") and one not in dir(nn.Module)]
        raise InputError(f"{type(model).__name__} has no method {name!r}; {nearest(str(name), methods)}")
    result: Callable[[Any], Any] = method
    return result


def categories_for(model: nn.Module, name: str | None, categories: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the labels of the integer codes that a classifier's ``predict`` returns; empty for other methods."""
    label = getattr(model, "label", None)
    return (
        {"predicted": list(categories[label])}
        if name == "predict" and isinstance(label, str) and label in categories
        else {}
    )


def read_model(path: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the reading options in a ``model.pt`` (None for older versions), and the categories of obs columns.

    Raises
    ------
    InputError
        If the path is the folder of a checkpoint, which has neither.
    """
    if path.is_dir():
        raise InputError(f"{path} is a checkpoint; give the model.pt that was written at the end of training")
    saved = read_saved(path)
    return saved.get("reading"), saved.get("categories", {})


def predict_trained(
    config: Config, model: nn.Module, dataset: scDataset, *, device: torch.device, progress: bool = False
) -> dasksc.PredictionReport:
    """Predict according to the section ``predict`` of a configuration. All ranks must call this function.

    Parameters
    ----------
    config
        Configuration of the training run.
    model
        The trained model, sharded or not.
    dataset
        Data set that the model was trained on.
    device
        Device of this rank.
    progress
        If True, show a progress bar.
    """
    section = config.predict
    assert section is not None
    data: Any = config.data.path if section.path is None else section.path
    open_options = config.data.open
    if not isinstance(data, str) or open_options != type(open_options)():
        data = dasksc.open(data, mmap=config.data.mmap, **open_options.model_dump())
    sizes = {"fetch_factor": config.data.fetch_factor, "memory_limit": config.data.memory_limit}
    reading = dataset_for(
        reading_options(config, dataset), data, batch_size=section.batch_size or config.data.batch_size, **sizes
    )
    return dasksc.predict(
        method_of(model, section.method),
        reading,
        section.out,
        key=section.key,
        categories=categories_for(model, section.method, dict(dataset.categories)),
        device=device,
        overwrite=section.overwrite,
        nan=section.nan,
        progress=progress,
    )


def imported_model(path: str) -> Any:
    """Return the model or function of an import path, ``package.module:name``.

    Raises
    ------
    InputError
        If there is no such object, or it is a class.
    """
    model = find(path, {}, what="model")
    if isinstance(model, type) or not callable(model):
        raise InputError(f"--model {path} is {model!r}; give a function of a batch, or a module instance")
    return model
