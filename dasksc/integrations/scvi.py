"""Data module for scvi-tools: ``SCVI.train(datamodule=...)`` without an AnnData in memory.

Requires ``pip install dasksc[scvi]``. The interface is experimental in scvi-tools; tested with version 1.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
from anndata import AnnData
from scvi.data import AnnDataManager
from scvi.data.fields import (
    CategoricalJointObsField,
    CategoricalObsField,
    LayerField,
    NumericalJointObsField,
    NumericalObsField,
)

import dasksc
from dasksc import Batch, InputError, SamplingStrategy, WrongTypeError, scDataset
from dasksc.atlas.elements import require_key
from dasksc.checks import names_or_none
from dasksc.displays import with_options_of
from dasksc.integrations.lightning import scDataModule
from dasksc.plan.binding import StrategyName

__all__ = ["SCVIDataModule"]

# Arguments of `scDataset` whose value the models determine: batches are dense float32 tensors with row numbers.
_FIXED = (
    *("layout", "dtype", "return_index"),
    *("fetch_callback", "fetch_transform", "batch_callback", "batch_transform"),
)


class SCVIDataModule(scDataModule):
    """Data module that yields batches with the keys that scvi-tools models expect.

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
        Name of the model class. SCANVI needs an AnnData.
    obs, layers, obsm
        Further elements to read. A `transform` receives them, but the model does not.
    transform
        As for `dasksc.scDataset`, in all stages and for inference. The result is a `Batch`.
    fetch_factor, drop_last, seed, genes, filter, equal_ranks, ...
        As for `dasksc.scDataset`.

    Attributes
    ----------
    registry
        Setup of the data in the format of scvi-tools, for the argument ``registry=`` of a model. Further attributes
        (``n_batch``, ``batch_labels`` and so on) are those that its models read.

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
            raise InputError(f"{', '.join(refused)} cannot be given here: models need dense float32 tensors")
        self.adata = dasksc.open(data_collection, mmap=options.pop("mmap", "auto"))
        if layer is not None:
            self.adata = self.adata.copy()
            self.adata.X = self.adata.layers[require_key("layers", layer, self.adata.layers, of=self.adata)]
        categorical = names_or_none("categorical_covariate_keys", categorical_covariate_keys)
        continuous = names_or_none("continuous_covariate_keys", continuous_covariate_keys)
        fields = _Fields(batch_key, labels_key, categorical, continuous)
        transform = options.pop("transform", None)
        transforms = transform if isinstance(transform, list | tuple) else [] if transform is None else [transform]
        super().__init__(
            self.adata,
            batch_size,
            train=train,
            validate=validate,
            obs=list(dict.fromkeys([*fields.columns, *names_or_none("obs", options.pop("obs", None))])),
            transform=[*transforms, fields],
            return_index=True,
            **options,
        )
        whole = self.inference_dataloader()
        expression, genes = options.get("filter"), options.get("genes")
        rows = slice(None) if expression is None else dasksc.rows_where(self.adata, expression)
        obs = self.adata.obs[fields.columns].iloc[rows]
        for key in fields.columns:
            if key in whole.categories:  # labels in the order of the codes in batches; others are missing
                obs[key] = pd.Categorical(obs[key], whole.categories[key])
            _check_column(obs[key], whole, is_continuous=key in continuous)
        match, names = whole.gene_match, self.adata.var_names
        names = match.names if match is not None else names if genes is None else names[genes]
        manager = AnnDataManager(
            [
                LayerField("X", None),
                CategoricalObsField("batch", batch_key),
                CategoricalObsField("labels", labels_key),
                NumericalObsField("size_factor", None, required=False),
                CategoricalJointObsField("extra_categorical_covs", categorical),
                NumericalJointObsField("extra_continuous_covs", continuous),
            ],
            setup_method_args={
                "model_name": model_name,
                "setup_method_name": "setup_datamodule",
                "setup_args": {
                    "layer": layer,
                    "batch_key": batch_key,
                    "labels_key": labels_key,
                    "size_factor_key": None,
                    "categorical_covariate_keys": categorical or None,
                    "continuous_covariate_keys": continuous or None,
                },
            },
        )
        # Only the shape of X matters here.
        X = sp.csr_matrix((len(obs), len(names)), dtype=np.float32)
        manager.register_fields(AnnData(X, obs=obs, var=pd.DataFrame(index=np.asarray(names))))
        self.registry = manager.registry
        states = {name: field["state_registry"] for name, field in self.registry["field_registries"].items()}
        self.n_obs, self.n_vars = X.shape
        self.batch_labels = None if batch_key is None else states["batch"]["categorical_mapping"]
        self.label_keys = None if labels_key is None else states["labels"]["categorical_mapping"]
        self.n_batch = len(states["batch"]["categorical_mapping"])
        self.n_labels = len(states["labels"]["categorical_mapping"])
        self.n_samples = 0

    def _make(self, name: str, **options: Any) -> scDataset:
        dataset = super()._make(name, **options)
        plan = dataset.plan()
        if name == "train" and plan.n_rank_rows - (plan.n_batches - 1) * plan.batch_size == 1:
            raise InputError(
                f"with batch_size={plan.batch_size}, the last batch of an epoch has one cell, but batch normalization "
                f"needs two. Give {'' if plan.batch_size == 1 else 'drop_last=True or '}another batch_size"
            )
        return dataset

    def inference_dataloader(self, indices: Any = None, batch_size: int | None = None) -> scDataset:
        """Return a data set in storage order, for methods that take ``dataloader=``; each reads it from its beginning.

        It has the rows of `indices` (default: all) that match `filter`. On several ranks, each reads all of them.
        """
        size = self.batch_size if batch_size is None else batch_size
        options = {"drop_last": False, "equal_ranks": False, "rank": 0, "world_size": 1, "group": None}
        return self._read(dasksc.Streaming(indices=indices), size, **options)


@dataclass(frozen=True, slots=True)
class _Fields:
    """Transform that renames the items of a batch to the keys of scvi-tools."""

    batch: str | None
    labels: str | None
    categorical: list[str]
    continuous: list[str]
    _takes_csr: ClassVar[bool] = True  # X passes unchanged

    @property
    def columns(self) -> list[str]:
        keys = dict.fromkeys([self.batch, self.labels, *self.categorical, *self.continuous])
        return [key for key in keys if key is not None]

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


def _check_column(column: pd.Series[Any], dataset: scDataset, *, is_continuous: bool) -> None:
    """Raise an error if a column has missing values, or another type than its use needs."""
    name = f"obs[{column.name!r}]"
    if not (pd.api.types.is_numeric_dtype(column.dtype) if is_continuous else column.name in dataset.categories):
        need = "numeric, for a continuous covariate" if is_continuous else "categorical: .astype('category')"
        raise InputError(f"{name} has dtype {column.dtype}; it must be {need}")
    is_known = np.isfinite(column.to_numpy(np.float64, na_value=np.nan)) if is_continuous else column.notna()
    if not is_known.all():
        raise InputError(
            f"{name} has {int((~is_known).sum()):,} values that are missing, infinite or no category, first in cell "
            f"{column.index[int(np.argmin(is_known))]!r}; replace them, or leave out these cells with filter="
        )
