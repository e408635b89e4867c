"""Highly variable genes by normalized dispersion: the flavors ``"seurat"`` and ``"cell_ranger"``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

__all__ = ["by_dispersion"]

_N_BINS = 20
# Median absolute deviation of a normal distribution with a standard deviation of 1.
_NORMAL_DEVIATION = 0.6744897501960817


def by_dispersion(
    means: NDArray[np.float64],
    variances: NDArray[np.float64],
    is_expressed: NDArray[np.bool_] | None,
    *,
    flavor: str,
    n_top_genes: int,
) -> pd.DataFrame:
    """Find highly variable genes by normalized dispersions.

    Parameters
    ----------
    means, variances
        Mean and variance of each gene in each batch, shape (n_batches, n_vars).
    is_expressed
        Mask of the genes expressed in each batch, shape (n_batches, n_vars), bool; None: a single batch whose genes
        are all scored.
    flavor
        ``"seurat"`` or ``"cell_ranger"``.
    n_top_genes
        Number of genes to find.

    Returns
    -------
    pandas.DataFrame
        ``means``, ``dispersions``, ``dispersions_norm``, ``highly_variable``, and, for several batches, the number of
        batches in which the gene is highly variable.
    """
    if is_expressed is None:
        return _of_batch(means[0], variances[0], flavor, n_top_genes)
    stacked = np.zeros((*means.shape, 4))  # stays 0 for genes that are not expressed in a batch
    for values, mean, variance, expressed in zip(stacked, means, variances, is_expressed, strict=True):
        if not expressed.any():
            continue
        values[expressed] = _of_batch(mean[expressed], variance[expressed], flavor, n_top_genes)
    n_tops = stacked[:, :, -1].sum(axis=0).astype(np.int64)
    scores = _nan_mean(stacked[:, :, 2])
    found = pd.DataFrame(
        {
            "means": _nan_mean(stacked[:, :, 0]),
            "dispersions": _nan_mean(stacked[:, :, 1]),
            "dispersions_norm": scores,
            "highly_variable_nbatches": n_tops,
            "highly_variable_intersection": n_tops == len(stacked),
        }
    )
    order = np.lexsort((-np.nan_to_num(scores, nan=-np.inf), -n_tops))
    is_top = np.zeros(len(found), dtype=bool)
    is_top[order[:n_top_genes]] = True
    return found.assign(highly_variable=is_top)


def _of_batch(mean: NDArray[np.float64], variance: NDArray[np.float64], flavor: str, n_top_genes: int) -> pd.DataFrame:
    mean = np.where(mean == 0, 1e-12, mean)
    with np.errstate(invalid="ignore", divide="ignore"):
        dispersion = variance / mean
        if flavor == "seurat":
            dispersion = np.log(np.where(dispersion == 0, np.nan, dispersion))
            mean = np.log1p(mean)
    genes = pd.DataFrame({"means": mean, "dispersions": dispersion})
    if flavor == "seurat":
        bins: Any = pd.cut(genes["means"], bins=_N_BINS)
        grouped = genes["dispersions"].groupby(bins, observed=True)
        center, width = grouped.transform("mean"), grouped.transform("std")
        # A gene that is alone in its bin has a normalized dispersion of 1.
        alone = width.isna()
        width, center = width.where(~alone, center), center.where(~alone, 0.0)
    else:
        edges = np.r_[-np.inf, np.percentile(mean, np.arange(10, 105, 5)), np.inf]
        # If many genes are expressed in no cell, several percentiles are equal, and bin edges coincide. scanpy raises
        # an error in this case.
        bins = pd.cut(genes["means"], bins=edges, duplicates="drop")
        grouped = genes["dispersions"].groupby(bins, observed=True)
        center = grouped.transform("median")
        width = (genes["dispersions"] - center).abs().groupby(grouped.ngroup()).transform("median") / _NORMAL_DEVIATION
    with np.errstate(invalid="ignore", divide="ignore"):
        normed = ((genes["dispersions"] - center) / width).to_numpy()
    ascending = np.sort(normed[~np.isnan(normed)])
    lowest = ascending[-min(n_top_genes, len(ascending))] if len(ascending) else np.inf
    return genes.assign(dispersions_norm=normed, highly_variable=np.nan_to_num(normed, nan=-np.inf) >= lowest)


def _nan_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return means over the batches with a value; NaN if no batch has one."""
    n = (~np.isnan(values)).sum(axis=0)
    return np.where(n > 0, np.nansum(values, axis=0) / np.maximum(n, 1), np.nan)
