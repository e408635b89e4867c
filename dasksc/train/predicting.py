"""Inference with trained models on any atlas, which is read with the options recorded in ``model.pt``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import dasksc
from dasksc import Batch, InputError, scDataset
from dasksc.atlas.lookup import nearest
from dasksc.train.config import Config
from dasksc.train.data import opened
from dasksc.train.parallel import Ranks
from dasksc.train.saved_models import found, read_saved
from dasksc.transforms.tokenizer_config import from_config
from dasksc.transforms.vocabulary import Vocabulary

__all__ = [
    *("categories_for", "dataset_for", "imported_model", "method_of", "reading_options", "predict_trained"),
    "read_model",
]


def reading_options(config: Config, dataset: scDataset) -> dict[str, Any]:
    """Return how a model reads its data, the training data set, as plain types."""
    saved = {name: getattr(config.data, name) for name in ("layers", "obsm", "obs", "layout", "dtype")}
    saved |= {"tokenizer": None, "genes": None, "genes_key": None}
    if config.tokenizer is not None:
        transform: Any = dataset.transform
        options = {name: value for name, value in config.tokenizer.items() if name not in ("masking", "vocabulary")}
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
    """Return a data set that reads an atlas as a model's training data, but without masks and labels.

    `saved` is the result of `reading_options`, `data` an atlas in any form that `dasksc.open` accepts (from a path, the
    names of cells are not held in memory), and `options` are further arguments of `dasksc.scDataset`.
    """
    adata = dasksc.open(data, obs=[], names=False)
    given = {name: saved[name] for name in ("layers", "obsm", "obs", "layout", "dtype")} | options
    transform: Any = _unchanged
    genes, key = saved["genes"], saved["genes_key"]
    names = adata.var_names if key is None else adata.var.get(key)
    # Selecting columns takes time in every batch.
    selects = genes is not None and (names is None or list(map(str, names)) != list(genes))
    if selects:
        given |= {"genes": genes, "genes_key": key}
    else:
        given.pop("genes_missing", None)
    if (tokens := saved["tokenizer"]) is not None:
        vocabulary = Vocabulary(tokens["ids"])
        transform = from_config(tokens["options"], genes=adata.var_names, vocabulary=vocabulary)
        given["layout"] = "csr"
    return scDataset(data, dasksc.Streaming(), batch_size, transform=transform, **given)


def _unchanged(batch: Batch) -> Batch:
    """Return a batch unchanged: with this transform, a data set without labels yields a `Batch`, not the tensor X."""
    return batch


def method_of(model: nn.Module, name: str | None) -> Callable[[Any], Any]:
    """Return the method to call for predictions, by default ``embed`` if the model has it, or the model itself."""
    method = getattr(model, "embed", model) if name is None else getattr(model, name, None)
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


def read_model(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the reading options in a ``model.pt``, and the categories of obs columns."""
    saved = read_saved(path)
    return saved["reading"], saved["categories"]


def predict_trained(config: Config, model: nn.Module, dataset: scDataset, ranks: Ranks) -> dasksc.PredictionReport:
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


def imported_model(path: str) -> Any:
    """Return the model or function of an import path, ``package.module:name``."""
    model = found(path, {}, what="model")
    if isinstance(model, type) or not callable(model):
        raise InputError(f"--model {path} is {model!r}; give a function of a batch, or a module instance")
    return model
