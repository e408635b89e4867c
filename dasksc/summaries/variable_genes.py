"""Highly variable genes of an atlas, as scanpy finds them in memory.

Each flavor is what becomes of moments of genes in batches of cells, of which one or two passes are needed:

=======================  ======  =========================================================================
flavor                   passes  what they add up
=======================  ======  =========================================================================
``"seurat"``             1       moments of ``expm1(X)``
``"cell_ranger"``        1       moments of X
``"seurat_v3"``          2       moments of X; values clipped at what a fit of these allows
``"pearson_residuals"``  2       moments of X; residuals, of which zeros have some, too
=======================  ======  =========================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.atlas.options import Openable
from dasksc.config import whole_number
from dasksc.errors import InputError
from dasksc.kernels import moments as kernels
from dasksc.summaries.dispersions import by_dispersion
from dasksc.summaries.reading import Groups, Moments, Pass, groups_of, refuse_too_large

__all__ = ["highly_variable_genes"]

logger = logging.getLogger("dasksc.summaries")

Flavor = Literal["seurat", "cell_ranger", "seurat_v3", "pearson_residuals"]

# Bytes for each gene of each batch in a second pass: results of the first, bounds, sums and scores.
_SECOND_BYTES = 13 * 8
_SPAN = 0.3
_THETA = 100.0


def highly_variable_genes(
    adata: Openable | Sequence[Openable] | Mapping[str, Openable],
    n_top_genes: int,
    flavor: Flavor = "seurat",
    batch_key: str | None = None,
    *,
    layer: str | None = None,
    filter: str | None = None,
    progress: bool = False,
) -> pd.DataFrame:
    """Find the genes that vary most, as `scanpy.pp.highly_variable_genes` does in memory.

    Parameters
    ----------
    adata
        What `dasksc.open` takes or returns.
    n_top_genes
        How many genes to find.
    flavor
        ``"seurat"`` and ``"cell_ranger"`` compare dispersions [1]_ [2]_ and expect logarithms of normalized counts
        (`dasksc.normalize`); one pass each. ``"seurat_v3"`` compares variances after a fit to their means [3]_ and
        expects counts; two passes. ``"pearson_residuals"`` compares variances of the residuals of a model of counts
        [4]_, as `scanpy.experimental.pp.highly_variable_genes` does; two passes.
    batch_key
        An obs column. Genes are found in each of its batches, and those that are in most of them are taken.
    layer
        Use this layer instead of X.
    filter
        Use only cells for which an expression over obs holds, as for `dasksc.rows_where`.
    progress
        Show a progress bar (needs tqdm).

    Returns
    -------
    pandas.DataFrame
        A row for each gene: ``highly_variable``, bool, and the columns that scanpy returns for the flavor.

    Raises
    ------
    InputError
        If the flavor is none of these, a value or a batch is missing, or, for flavors that expect counts, a value is
        below 0.
    MissingKeyError
        If there is no such column or layer.
    ImportError
        If the flavor is ``"seurat_v3"`` and scikit-misc, which has the fit, is not installed.

    Notes
    -----
    The genes are those of scanpy, except for scores that are equal to a relative 1e-6, since sums are added up in
    another order. Memory does not grow with the number of cells, except for `filter` (8 bytes a cell) and for
    `batch_key` (1 byte a cell for up to 126 batches, and the column); 104 bytes are needed for each gene of each batch.
    ``"pearson_residuals"`` computes a residual for each gene of each cell, zeros included.

    References
    ----------
    .. [1] Satija et al.: Spatial reconstruction of single-cell gene expression data, Nature Biotechnology 33 (2015).
    .. [2] Zheng et al.: Massively parallel digital transcriptional profiling of single cells, Nature Communications
       8 (2017).
    .. [3] Stuart et al.: Comprehensive integration of single-cell data, Cell 177 (2019).
    .. [4] Lause, Berens, Kobak: Analytic Pearson residuals for normalization of single-cell RNA-seq UMI data, Genome
       Biology 22 (2021).

    Examples
    --------
    >>> table = dasksc.highly_variable_genes(dasksc.normalize("atlas.h5ad"), n_top_genes=50)
    >>> chosen = table.index[table["highly_variable"]]
    >>> dataset = dasksc.scDataset("atlas.h5ad", batch_size=64, genes=list(chosen), seed=0)
    >>> next(iter(dataset)).shape
    torch.Size([64, 50])
    """
    if flavor not in get_args(Flavor):
        raise InputError(f"flavor={flavor!r} is none of {', '.join(map(repr, get_args(Flavor)))}")
    n_top_genes = whole_number("n_top_genes", n_top_genes)
    columns = [] if batch_key is None else [batch_key]
    source = Pass(adata, layer=layer, columns=columns, filter=filter, progress=progress)
    if not source.n_rows:
        raise InputError("there are no cells to find variable genes in; the filter leaves none")
    batches = _batches(source, batch_key)
    expects_counts = flavor in ("seurat_v3", "pearson_residuals")
    if flavor == "seurat_v3":
        _import_loess()
    if expects_counts:
        refuse_too_large(len(batches.labels), source.adata.n_vars, _SECOND_BYTES)
    source.n_groups = len(batches.labels)
    moments, kinds = _moments(source, batches, is_logarithm=flavor == "seurat")
    if kinds & kernels.NOT_A_NUMBER:
        raise InputError(f"{source.label} has missing values (NaN), so genes have no variance; fill them first")
    if expects_counts and kinds & kernels.NEGATIVE:
        raise InputError(
            f"{source.label} has values below 0, but flavor={flavor!r} needs counts; give the layer of counts with "
            "layer="
        )
    if expects_counts and kinds & kernels.FRACTIONS:
        logger.warning("flavor=%r expects counts, but %s has fractional values", flavor, source.label)
    has_batches = batch_key is not None
    if flavor == "seurat_v3":
        found = _by_fit(source, batches, moments, n_top_genes)
    elif flavor == "pearson_residuals":
        found = _by_residuals(source, batches, moments, n_top_genes)
    else:
        is_there = moments.n_nonzero > 0
        found = by_dispersion(
            moments.mean, _variance(moments), is_there if has_batches else None, flavor=flavor, n_top_genes=n_top_genes
        )
    if not has_batches:
        found = found.drop(columns=[name for name in found if name.startswith("highly_variable_n") or "inter" in name])
    return found.set_axis(source.adata.var_names)


def _batches(source: Pass, batch_key: str | None) -> Groups:
    if batch_key is None:
        return Groups(np.zeros(source.n_rows, dtype=np.int8), pd.DataFrame(index=["all"]))
    batches = groups_of(source.obs, [batch_key])
    n_missing = int((batches.codes < 0).sum())
    if n_missing:
        raise InputError(f"obs column {batch_key!r} has no batch for {n_missing} cells; leave them out by filter=")
    # In the order of `numpy.unique`, in which scanpy takes them.
    order = np.argsort(np.asarray(batches.labels[batch_key], dtype=object), kind="stable")
    places = np.argsort(order)
    return Groups(places.astype(batches.codes.dtype)[batches.codes], batches.labels.iloc[order])


def _moments(source: Pass, batches: Groups, *, is_logarithm: bool) -> tuple[Moments, int]:
    """Return the moments of genes in batches, and which kinds of values there are."""
    n_rows = batches.n_rows
    moments = Moments(n_rows, source.adata.n_vars)
    base = source.adata.uns.get("log1p", {}).get("base") if is_logarithm else None
    kinds = 0
    for rows in source:
        values = rows.values
        kinds |= kernels.kinds_of(values)
        if is_logarithm:
            # In the type of the values, as scanpy does.
            values = np.expm1(values if base is None else values * values.dtype.type(np.log(base)))
        moments.add(rows, batches.codes[rows.places], values)
    return moments, kinds


def _variance(moments: Moments) -> NDArray[np.float64]:
    """Return variances of genes in batches, 0 where a batch has one cell, as scanpy has them."""
    return np.nan_to_num(moments.variance(), nan=0.0)


def _import_loess() -> Any:
    try:
        from skmisc.loess import loess
    except ImportError as error:
        raise ImportError("flavor='seurat_v3' needs scikit-misc: pip install 'dasksc[hvg]'") from error
    return loess


def _by_fit(source: Pass, batches: Groups, moments: Moments, n_top_genes: int) -> pd.DataFrame:
    loess = _import_loess()
    means, variances = moments.mean, _variance(moments)
    deviations = np.ones_like(means)  # of a gene that does not vary
    for name, mean, variance, deviation in zip(batches.labels.index, means, variances, deviations, strict=True):
        varies = variance > 0
        try:
            model = loess(np.log10(mean[varies]), np.log10(variance[varies]), span=_SPAN, degree=2)
            model.fit()
        except ValueError as error:
            raise InputError(
                f"flavor='seurat_v3' fits variances to means of genes, which fails for batch {name!r} "
                f"({int(varies.sum())} genes vary in it): {error}. Leave small batches out by filter=, or use another "
                "flavor"
            ) from error
        deviation[varies] = np.sqrt(10**model.outputs.fitted_values)
    n_rows = batches.n_rows[:, None].astype(np.float64)
    bounds = deviations * np.sqrt(n_rows) + means
    sums = np.zeros((*means.shape, 2))
    for rows in source:
        codes = batches.codes[rows.places].astype(np.int64)
        kernels.add_clipped(rows.indptr, rows.columns, rows.values, codes, bounds, sums)
    total, squares = sums[:, :, 0], sums[:, :, 1]
    with np.errstate(invalid="ignore", divide="ignore"):
        normed = (n_rows * means**2 + squares - 2 * total * means) / ((n_rows - 1) * deviations**2)
    n_batches, rank = _ranked(normed, n_top_genes)
    mean, over_all = moments.over_all()
    found = pd.DataFrame(
        {
            "means": mean,
            "variances": over_all / max(source.n_rows - 1, 1),
            "highly_variable_nbatches": n_batches,
            "highly_variable_rank": rank,
            "variances_norm": normed.mean(axis=0),
        }
    )
    # By rank, then by the number of batches; in the order of genes where both are equal.
    order = np.lexsort((-n_batches, np.nan_to_num(rank, nan=np.inf)))
    return _with_top(found, order, n_top_genes)


def _by_residuals(source: Pass, batches: Groups, moments: Moments, n_top_genes: int) -> pd.DataFrame:
    n_rows = batches.n_rows.astype(np.float64)
    totals = moments.sum
    shares = np.divide(totals, totals.sum(axis=1, keepdims=True), out=np.zeros_like(totals), where=totals > 0)
    # scanpy clips all batches at what it finds for the first.
    clip = float(np.sqrt(n_rows[0]))
    sums = np.zeros((len(totals), 2, totals.shape[1]))
    for rows in source:
        codes = batches.codes[rows.places].astype(np.int64)
        kernels.add_residuals(rows.indptr, rows.columns, rows.values, codes, shares, _THETA, clip, sums)
    # Residuals have a mean near 0, so that little is lost by this difference.
    residuals = np.maximum(sums[:, 1] / n_rows[:, None] - (sums[:, 0] / n_rows[:, None]) ** 2, 0)
    n_batches, rank = _ranked(residuals, n_top_genes)
    mean, over_all = moments.over_all()
    found = pd.DataFrame(
        {
            "means": mean,
            "variances": over_all / max(source.n_rows - 1, 1),
            "residual_variances": residuals.mean(axis=0),
            "highly_variable_rank": rank,
            "highly_variable_nbatches": n_batches,
            "highly_variable_intersection": n_batches == len(residuals),
        }
    )
    order = np.lexsort((np.nan_to_num(rank, nan=np.inf), -n_batches))
    return _with_top(found, order, n_top_genes)


def _ranked(scores: NDArray[np.float64], n_top_genes: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return in how many batches each gene is among the top ones, and the median of its ranks in these."""
    ranks = np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1, kind="stable").astype(np.float64)
    n_batches = (ranks < n_top_genes).sum(axis=0)
    median = np.full(ranks.shape[1], np.nan)
    some = n_batches > 0
    median[some] = np.nanmedian(np.where(ranks < n_top_genes, ranks, np.nan)[:, some], axis=0)
    return n_batches, median


def _with_top(found: pd.DataFrame, order: NDArray[np.int64], n_top_genes: int) -> pd.DataFrame:
    is_top = np.zeros(len(found), dtype=bool)
    is_top[order[:n_top_genes]] = True
    return found.assign(highly_variable=is_top)
