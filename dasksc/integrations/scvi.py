"""Data module for scvi-tools: ``SCVI.train(datamodule=...)`` without an AnnData in memory.

Requires ``pip install dasksc[scvi]``. The interface is experimental in scvi-tools; tested with version 1.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

import dasksc
from dasksc import Batch, InputError, SamplingStrategy, scDataset
from dasksc.displays import with_options_of
from dasksc.integrations.lightning import scDataModule
from dasksc.sampling.named import StrategyName

try:
    from scvi import __version__ as scvi_version
except ImportError as error:
    raise ImportError("dasksc.integrations.scvi needs scvi-tools: pip install 'dasksc[scvi]'") from error

__all__ = ["SCVIDataModule"]


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
    fetch_factor, drop_last, seed, filter, equal_ranks, transform, return_index, ...
        As for `dasksc.scDataset`.

    Attributes
    ----------
    adata
        The collection as an AnnData, opened with `dasksc.open`.

    Raises
    ------
    InputError
        If a column does not exist, has missing values, or has an unsuitable data type.

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

    @with_options_of(scDataset, without=("strategy", "rank", "world_size"))
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
        self.adata = dasksc.open(data_collection)
        if layer is not None:
            self.adata = self.adata.copy()
            self.adata.X = self.adata.layers[layer]
        self._layer = layer
        self._batch_key, self._labels_key = batch_key, labels_key
        self._categorical = list(categorical_covariate_keys)
        self._continuous = list(continuous_covariate_keys)
        self._model_name = model_name
        wanted = [key for key in (batch_key, labels_key, *self._categorical) if key is not None]
        self._labels = {key: self._categories(key) for key in wanted}
        columns = list(dict.fromkeys([*wanted, *self._continuous, *options.pop("obs", ())]))
        super().__init__(self.adata, batch_size, train=train, validate=validate, obs=columns, **options)

    def _categories(self, key: str) -> list[Any]:
        """Return the labels of a column, in the order of their codes in `dasksc.scDataset`."""
        reader = scDataset(self.adata, dasksc.Streaming(), 1, obs=[key], rank=0, world_size=1, seed=0)
        if key not in reader.categories:
            raise InputError(f"obs[{key!r}] is not categorical; convert it: adata.obs[{key!r}].astype('category')")
        if self.adata.obs[key].isna().any():
            raise InputError(
                f"obs[{key!r}] has missing values, to which scvi-tools assigns no category; replace them with a "
                "category, such as 'unknown'"
            )
        return reader.categories[key]

    # --- Data interface of scvi-tools models ------------------------------------------------------------

    @property
    def n_obs(self) -> int:
        """Number of cells of the collection."""
        return int(self.adata.n_obs)

    @property
    def n_vars(self) -> int:
        """Number of genes."""
        return int(self.adata.n_vars)

    @property
    def var_names(self) -> Any:
        """Names of the genes."""
        return np.asarray(self.adata.var_names)

    @property
    def n_batch(self) -> int:
        """Number of batches as defined by scvi-tools: categories of `batch_key`."""
        return 1 if self._batch_key is None else len(self._labels[self._batch_key])

    @property
    def n_labels(self) -> int:
        """Number of categories of `labels_key`."""
        return 1 if self._labels_key is None else len(self._labels[self._labels_key])

    @property
    def n_samples(self) -> int:
        """Number of categories of a sample key; 0, because SCVI has no sample key."""
        return 0

    @property
    def batch_labels(self) -> list[Any] | None:
        """Categories of `batch_key`, in the order of their codes."""
        return None if self._batch_key is None else self._labels[self._batch_key]

    @property
    def label_keys(self) -> list[Any] | None:
        """Categories of `labels_key`, in the order of their codes."""
        return None if self._labels_key is None else self._labels[self._labels_key]

    @property
    def registry(self) -> dict[str, Any]:
        """Setup of the data in the format of scvi-tools, for the ``registry=`` argument of a model."""
        n_cats = [len(self._labels[key]) for key in self._categorical]
        categorical = {"field_keys": self._categorical, "n_cats_per_key": n_cats} if n_cats else {}
        if n_cats:
            categorical["mapping"] = {key: np.asarray(self._labels[key]) for key in self._categorical}
        continuous = {"columns": np.asarray(self._continuous, dtype=object)} if self._continuous else {}
        fields = {
            "X": _field(
                "X",
                {"n_obs": self.n_obs, "n_vars": self.n_vars, "column_names": self.var_names},
                {"n_vars": self.n_vars, "n_cells": self.n_obs},
            ),
            "batch": _field("obs", _mapping(self.batch_labels, self._batch_key), {"n_batch": self.n_batch}),
            "labels": _field("obs", _mapping(self.label_keys, self._labels_key), {"n_labels": self.n_labels}),
            "size_factor": _field(None, {}, {}),
            "extra_categorical_covs": _field("obsm", categorical, {"n_extra_categorical_covs": len(n_cats)}),
            "extra_continuous_covs": _field("obsm", continuous, {"n_extra_continuous_covs": len(self._continuous)}),
        }
        return {
            "scvi_version": scvi_version,
            "model_name": self._model_name,
            "setup_method_name": "setup_datamodule",
            "setup_args": {
                "layer": self._layer,
                "batch_key": self._batch_key,
                "labels_key": self._labels_key,
                "size_factor_key": None,
                "categorical_covariate_keys": self._categorical or None,
                "continuous_covariate_keys": self._continuous or None,
            },
            "field_registries": fields,
        }

    # --- Batches ------------------------------------------------------------------------------------------

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Rename the items of a batch to the keys of scvi-tools."""
        return self._renamed(batch)

    def _renamed(self, batch: Batch) -> dict[str, torch.Tensor]:
        none = torch.zeros(len(batch.index), 1, dtype=torch.int64)
        renamed = {
            "X": batch.X,
            "batch": none if self._batch_key is None else batch.obs[self._batch_key][:, None],
            "labels": none if self._labels_key is None else batch.obs[self._labels_key][:, None],
            "ind_x": batch.index[:, None],
        }
        if self._categorical:
            renamed["extra_categorical_covs"] = torch.stack([batch.obs[key] for key in self._categorical], dim=1)
        if self._continuous:
            columns = [batch.obs[key].float() for key in self._continuous]
            renamed["extra_continuous_covs"] = torch.stack(columns, dim=1)
        return renamed

    def inference_dataloader(self, indices: Any = None, batch_size: int | None = None) -> Iterator[Any]:
        """Return an iterator over batches in storage order, for methods that take ``dataloader=``.

        Parameters
        ----------
        indices
            Row numbers to read; default: all rows.
        batch_size
            Rows per batch; default: the batch size of training.
        """
        options = {**self._options, "drop_last": False, "equal_ranks": False, "rank": 0, "world_size": 1}
        dataset = scDataset(self.adata, dasksc.Streaming(indices=indices), batch_size or self._batch_size, **options)
        return map(self._renamed, dataset)


def _field(attribute: str | None, state: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    data = {} if attribute is None else {"attr_name": attribute, "attr_key": None}
    return {"data_registry": data, "state_registry": state, "summary_stats": summary}


def _mapping(labels: list[Any] | None, key: str | None) -> dict[str, Any]:
    return {"categorical_mapping": None if labels is None else np.asarray(labels), "original_key": key}
