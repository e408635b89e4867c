"""Data module for scvi-tools: ``SCVI.train(datamodule=...)`` without an AnnData in memory.

Requires ``pip install dasksc[scvi]``. The interface is experimental in scvi-tools; tested with version 1.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

import dasksc
from dasksc import Batch, InputError, SamplingStrategy, WrongTypeError, scDataset
from dasksc.atlas.lookup import require_key
from dasksc.displays import with_options_of
from dasksc.integrations.lightning import scDataModule
from dasksc.sampling.named import StrategyName

try:
    from scvi import __version__ as scvi_version
except ImportError as error:
    raise ImportError("dasksc.integrations.scvi needs scvi-tools: pip install 'dasksc[scvi]'") from error

__all__ = ["SCVIDataModule"]

# Arguments of `scDataset` whose value the models determine: batches are dense float32 tensors with row numbers.
_FIXED = (
    *("layout", "dtype", "return_index"),
    *("fetch_callback", "fetch_transform", "batch_callback", "batch_transform"),
)


class SCVIDataModule(scDataModule):
    """Data module that yields batches with the keys that scvi-tools models expect.

    .. code-block:: python

        data = SCVIDataModule("atlas.h5ad", 128, train=dasksc.BlockShuffling(), batch_key="donor")
        model = scvi.model.SCVI(registry=data.registry)
        model.train(datamodule=data, max_epochs=10)
        latent = model.get_latent_representation(dataloader=data.inference_dataloader())

    Parameters
    ----------
    data_collection
        A path or AnnData, with counts in X.
    batch_size
        Rows per batch, per device.
    train, validate
        Sampling strategies of training and validation, or their names.
    layer
        Layer with counts, read instead of X.
    batch_key, labels_key
        Categorical obs columns: the batches to correct for, and the cell types.
    categorical_covariate_keys, continuous_covariate_keys
        Further obs columns to correct for.
    model_name
        Name of the model class.
    obs, layers, obsm
        Names of further columns, layers and obsm entries to read, as for `dasksc.scDataset`. A `transform` receives
        them, but the model does not.
    transform
        As for `dasksc.scDataset`, in all stages and for inference. The result is a `Batch`.
    fetch_factor, drop_last, seed, genes, filter, equal_ranks, ...
        As for `dasksc.scDataset`.

    Attributes
    ----------
    adata
        The collection as an AnnData, opened with `dasksc.open`.
    n_obs, n_vars, var_names
        Number of cells that match `filter`, and number and names of the genes of a batch.
    n_batch, n_labels, n_continuous_cov, n_cats_per_cov, n_samples
        Numbers of categories of `batch_key` and `labels_key` (1 without), of continuous covariates, of categories of
        each categorical covariate, and of samples (0).
    batch_labels, label_keys
        Categories of `batch_key` and `labels_key`, in the order of their codes; None without.

    Raises
    ------
    InputError
        If a column does not exist, has an unsuitable data type, or has missing or infinite values in a cell that
        matches `filter`. When training begins, also if the last batch of an epoch has a single cell and the model has
        layers of batch normalization, which need two.

    Examples
    --------
    >>> import scvi
    >>> from dasksc.integrations.scvi import SCVIDataModule
    >>> data = SCVIDataModule("atlas.h5ad", 128, train=dasksc.BlockShuffling(), batch_key="donor", seed=0)
    >>> model = scvi.model.SCVI(registry=data.registry)
    >>> model.train(datamodule=data, max_epochs=1, accelerator="cpu", enable_progress_bar=False)
    >>> latent = model.get_latent_representation(dataloader=data.inference_dataloader())
    >>> latent.shape
    (2000, 10)
    """

    @with_options_of(scDataset, without=("strategy", "rank", "world_size", *_FIXED))
    def __init__(
        self,
        data_collection: Any,
        batch_size: int = 128,
        *,
        train: SamplingStrategy | StrategyName | None = None,
        validate: SamplingStrategy | StrategyName | None = None,
        layer: str | None = None,
        batch_key: str | None = None,
        labels_key: str | None = None,
        categorical_covariate_keys: Sequence[str] = (),
        continuous_covariate_keys: Sequence[str] = (),
        model_name: str = "SCVI",
        **options: Any,
    ) -> None:
        if refused := [f"{name}=" for name in _FIXED if name in options]:
            raise InputError(
                f"{', '.join(refused)} cannot be given here, because scvi-tools models need dense float32 tensors; "
                "leave it out"
            )
        self.adata = dasksc.open(data_collection, mmap=options.pop("mmap", "auto"))
        if layer is not None:
            self.adata = self.adata.copy()
            self.adata.X = self.adata.layers[require_key("layers", layer, self.adata.layers, of=self.adata)]
        self._fields = _Fields(
            batch=batch_key,
            labels=labels_key,
            categorical=_names("categorical_covariate_keys", categorical_covariate_keys),
            continuous=_names("continuous_covariate_keys", continuous_covariate_keys),
        )
        transform = options.pop("transform", None)
        transforms = transform if isinstance(transform, list | tuple) else [] if transform is None else [transform]
        columns = dict.fromkeys([*self._fields.columns, *_names("obs", options.pop("obs", ()))])
        super().__init__(
            self.adata,
            batch_size,
            train=train,
            validate=validate,
            obs=list(columns),
            transform=[*transforms, self._fields],
            return_index=True,
            **options,
        )
        whole = self.inference_dataloader()
        expression, genes, match = options.get("filter"), options.get("genes"), whole.gene_match
        rows = slice(None) if expression is None else dasksc.rows_where(self.adata, expression)
        read = self.adata.obs[self._fields.columns].iloc[rows]
        labels = {key: _categories(read[key], whole) for key in self._fields.categories}
        for key in self._fields.continuous:
            _refuse_unknown_numbers(read[key])
        names = self.adata.var_names if genes is None else self.adata.var_names[genes] if match is None else match.names
        self.var_names = np.asarray(names)
        self.n_obs, self.n_vars = len(read), len(self.var_names)
        self.batch_labels = None if batch_key is None else labels[batch_key]
        self.label_keys = None if labels_key is None else labels[labels_key]
        self.n_batch = 1 if batch_key is None else len(labels[batch_key])
        self.n_labels = 1 if labels_key is None else len(labels[labels_key])
        self.n_samples, self.n_continuous_cov = 0, len(self._fields.continuous)
        self.n_cats_per_cov = [len(labels[key]) for key in self._fields.categorical]
        self._labels, self._layer, self._model_name = labels, layer, model_name

    @property
    def registry(self) -> dict[str, Any]:
        """Setup of the data in the format of scvi-tools, for the ``registry=`` argument of a model."""
        keys = self._fields
        categorical, continuous = list(keys.categorical), list(keys.continuous)
        matrix = {"n_obs": self.n_obs, "n_vars": self.n_vars, "column_names": self.var_names}
        batch = {"categorical_mapping": self.batch_labels, "original_key": keys.batch}
        label = {"categorical_mapping": self.label_keys, "original_key": keys.labels}
        mapping = {key: self._labels[key] for key in categorical}
        covariates = {"field_keys": categorical, "n_cats_per_key": self.n_cats_per_cov, "mapping": mapping}
        numbers = {"columns": np.asarray(continuous, dtype=object)}
        fields: dict[str, tuple[str | None, dict[str, Any], dict[str, int]]] = {
            "X": ("X", matrix, {"n_vars": self.n_vars, "n_cells": self.n_obs}),
            "batch": ("obs", batch, {"n_batch": self.n_batch}),
            "labels": ("obs", label, {"n_labels": self.n_labels}),
            "size_factor": (None, {}, {}),
            "extra_categorical_covs": (
                "obsm",
                covariates if categorical else {},
                {"n_extra_categorical_covs": len(categorical)},
            ),
            "extra_continuous_covs": (
                "obsm",
                numbers if continuous else {},
                {"n_extra_continuous_covs": len(continuous)},
            ),
        }
        return {
            "scvi_version": scvi_version,
            "model_name": self._model_name,
            "setup_method_name": "setup_datamodule",
            "setup_args": {
                "layer": self._layer,
                "batch_key": keys.batch,
                "labels_key": keys.labels,
                "size_factor_key": None,
                "categorical_covariate_keys": categorical or None,
                "continuous_covariate_keys": continuous or None,
            },
            "field_registries": {
                name: {
                    "data_registry": {} if attribute is None else {"attr_name": attribute, "attr_key": None},
                    "state_registry": state,
                    "summary_stats": summary,
                }
                for name, (attribute, state, summary) in fields.items()
            },
        }

    def _make(self, name: str, **options: Any) -> scDataset:
        dataset = super()._make(name, **options)
        if name != "train" or self.trainer is None:
            return dataset
        plan = dataset.plan()
        n_last = plan.n_rank_rows - (plan.n_batches - 1) * plan.batch_size
        layers = self.trainer.lightning_module.modules()
        if n_last == 1 and any(isinstance(layer, torch.nn.BatchNorm1d) for layer in layers):
            raise InputError(
                f"with batch_size={plan.batch_size}, the last batch of an epoch has one cell, but the BatchNorm1d of "
                f"the model needs two. Give {'' if plan.batch_size == 1 else 'drop_last=True or '}another batch_size"
            )
        return dataset

    def inference_dataloader(self, indices: Any = None, batch_size: int | None = None) -> scDataset:
        """Return a data set in storage order, for methods that take ``dataloader=``; each reads it from its beginning.

        On several ranks, each reads all rows.

        Parameters
        ----------
        indices
            Row numbers to read; default: all rows. Rows that do not match `filter` are left out.
        batch_size
            Rows per batch; default: the batch size of training.
        """
        size = self.batch_size if batch_size is None else batch_size
        options = {"drop_last": False, "equal_ranks": False, "rank": 0, "world_size": 1, "group": None}
        return self._read(dasksc.Streaming(indices=indices), size, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields:
    """Transform that renames the items of a batch to the keys of scvi-tools."""

    batch: str | None
    labels: str | None
    categorical: tuple[str, ...]
    continuous: tuple[str, ...]

    @property
    def categories(self) -> list[str]:
        return [key for key in (self.batch, self.labels, *self.categorical) if key is not None]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys([*self.categories, *self.continuous]))

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        if not isinstance(batch, Batch):
            raise WrongTypeError(f"transform= returned a {type(batch).__name__}; return a dasksc.Batch for scvi-tools")
        none = torch.zeros(len(batch.index), 1, dtype=torch.int64)
        renamed = {
            "X": batch.X,
            "batch": none if self.batch is None else batch.obs[self.batch][:, None],
            "labels": none if self.labels is None else batch.obs[self.labels][:, None],
            "ind_x": batch.index[:, None],
        }
        if self.categorical:
            renamed["extra_categorical_covs"] = torch.stack([batch.obs[key] for key in self.categorical], dim=1)
        if self.continuous:
            columns = [batch.obs[key].float() for key in self.continuous]
            renamed["extra_continuous_covs"] = torch.stack(columns, dim=1)
        return renamed


def _names(option: str, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise WrongTypeError(f"{option}={given!r} is a string; give a list of names: {option}=[{given!r}]")
    return tuple(given)


def _categories(column: pd.Series[Any], dataset: scDataset) -> NDArray[Any]:
    """Return the labels of a column, in the order of their codes in batches."""
    if column.name not in dataset.categories:
        raise InputError(
            f"obs[{column.name!r}] is not categorical; convert it: adata.obs[{column.name!r}].astype('category')"
        )
    if n_missing := int(column.isna().sum()):
        raise InputError(
            f"obs[{column.name!r}] has {n_missing:,} missing values, to which scvi-tools assigns no category; replace "
            "them with a category, such as 'unknown', or leave out these cells with filter="
        )
    return np.asarray(dataset.categories[str(column.name)])


def _refuse_unknown_numbers(column: pd.Series[Any]) -> None:
    if not pd.api.types.is_numeric_dtype(column.dtype):
        raise InputError(f"obs[{column.name!r}] has dtype {column.dtype}; a continuous covariate must be numeric")
    is_known = np.isfinite(column.to_numpy(dtype=np.float64, na_value=np.nan))
    if not is_known.all():
        raise InputError(
            f"obs[{column.name!r}] has {int((~is_known).sum()):,} missing or infinite values, the first in cell "
            f"{column.index[int(is_known.argmin())]!r}; replace them, or leave out these cells with filter="
        )
