"""Highly variable genes of an atlas, equal to those that scanpy finds in memory.

Each flavor scores genes by their moments in each batch of cells, computed in one or two passes:

=======================  ======  =========================================================================
flavor                   passes  sums
=======================  ======  =========================================================================
``"seurat"``             1       moments of ``expm1(X)``
``"cell_ranger"``        1       moments of X
``"seurat_v3"``          2       moments of X; sums of X clipped at a bound derived from the moments
``"pearson_residuals"``  2       moments of X; residuals, including those of zeros
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
from dasksc.checks import name_or_none, whole_number
from dasksc.errors import InputError
from dasksc.kernels import moments as kernels
from dasksc.summaries.dispersions import by_dispersion
from dasksc.summaries.reading import Groups, Moments, Pass, groups_of

__all__ = ["highly_variable_genes"]

logger = logging.getLogger("dasksc.summaries")

Flavor = Literal["seurat", "cell_ranger", "seurat_v3", "pearson_residuals"]

# Bytes for each gene of each batch: moments, and the scores computed from them.
_SCORE_BYTES = 13 * 8
# The fit crashes the process if this share of the genes is less than one gene.
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
    """Find the most variable genes, as `scanpy.pp.highly_variable_genes` does in memory.

    Parameters
    ----------
    adata
        Any argument or result of `dasksc.open`.
    n_top_genes
        Number of genes to find.
    flavor
        ``"seurat"`` and ``"cell_ranger"`` compare dispersions [1]_ [2]_, expect log-normalized counts
        (`dasksc.normalize`), and take one pass. ``"seurat_v3"`` compares variances standardized by a curve of variance
        against mean [3]_, expects counts, and takes two passes. ``"pearson_residuals"`` compares variances of Pearson
        residuals [4]_, as `scanpy.experimental.pp.highly_variable_genes` does, expects counts, and takes two passes.
    batch_key
        Name of an obs column with batches. Genes are ranked in each batch. ``"seurat_v3"`` selects the genes with the
        lowest median rank over the batches in which they are highly variable. The other flavors select the genes that
        are highly variable in the largest number of batches.
    layer
        Name of the layer to use instead of X.
    filter
        Expression over obs that selects cells, as for `dasksc.rows_where`. Default: all cells.
    progress
        Show a progress bar (requires tqdm).

    Returns
    -------
    pandas.DataFrame
        Table with one row per gene: ``highly_variable``, bool, and the columns that scanpy returns for the flavor.

    Raises
    ------
    InputError
        If the flavor is unknown; if a value is NaN, or a cell has no batch; if a value is negative (flavors that expect
        counts) or infinite, or so large that its exponential overflows (flavors that expect logarithms); or if the sums
        and the rows being read need more memory than ``dasksc.memory-limit``.
    MissingKeyError
        If the atlas lacks a column or layer.
    ImportError
        If the flavor is ``"seurat_v3"`` and scikit-misc, which provides the fit, is not installed.

    Notes
    -----
    The function selects the same genes as scanpy. Only genes whose scores differ from one another by less than 1e-6
    (relative) may be ranked differently, because the order of summation differs. Memory does not grow with the number
    of cells, except for `filter` (8 bytes per cell) and for `batch_key` (1 byte per cell for up to 126 batches, plus
    the column of obs). Each gene of each batch needs 104 bytes. ``"pearson_residuals"`` computes a residual for each
    gene of each cell, including zeros.

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
    name_or_none("batch_key", batch_key)
    columns = [] if batch_key is None else [batch_key]
    source = Pass(adata, layer=layer, columns=columns, filter=filter, progress=progress)
    if not source.n_rows:
        raise InputError("there are no cells to find variable genes in; the filter selects none")
    if not source.adata.n_vars:
        raise InputError("there are no genes to choose from; the atlas has none")
    batches = _batches(source, batch_key)
    expects_counts = flavor in ("seurat_v3", "pearson_residuals")
    if flavor == "seurat_v3":
        _import_loess()
    source.reserve_groups(len(batches.labels), _SCORE_BYTES, batches)
    moments, kinds = _moments(source, batches, is_logarithm=flavor == "seurat")
    if kinds & kernels.NOT_A_NUMBER:
        raise InputError(f"{source.label} has missing values (NaN), so variances are undefined; fill the values first")
    if expects_counts and kinds & kernels.NEGATIVE:
        raise InputError(
            f"{source.label} has values below 0, but flavor={flavor!r} needs counts; give the layer of counts with "
            "layer="
        )
    if expects_counts and kinds & kernels.FRACTIONS:
        logger.warning(
            "flavor=%r expects counts, but %s has fractional values; give the layer of counts with layer=",
            flavor,
            source.label,
        )
    if not (expects_counts or (np.isfinite(moments.sum).all() and np.isfinite(moments.squares).all())):
        raise InputError(
            f"{source.label} has values that are infinite or too large for flavor={flavor!r}, which expects "
            "log-normalized values; normalize the counts first with dasksc.normalize, or use flavor='seurat_v3'"
        )
    if not (expects_counts or kinds & (kernels.FRACTIONS | kernels.NEGATIVE)):
        logger.warning(
            "flavor=%r expects log-normalized values, but %s has only whole numbers, such as counts; normalize the "
            "atlas first with dasksc.normalize, or use flavor='seurat_v3'",
            flavor,
            source.label,
        )
    has_batches = batch_key is not None
    if flavor == "seurat_v3":
        found = _by_fit(source, batches, moments, n_top_genes)
    elif flavor == "pearson_residuals":
        found = _by_residuals(source, batches, moments, n_top_genes)
    else:
        is_expressed = moments.n_nonzero > 0
        found = by_dispersion(
            moments.mean,
            _variance(moments),
            is_expressed if has_batches else None,
            flavor=flavor,
            n_top_genes=n_top_genes,
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
        raise InputError(f"obs column {batch_key!r} has no batch for {n_missing} cells; leave them out with filter=")
    # scanpy uses the order of `numpy.unique`.
    order = np.argsort(np.asarray(batches.labels[batch_key], dtype=object), kind="stable")
    places = np.argsort(order)
    return Groups(places.astype(batches.codes.dtype)[batches.codes], batches.labels.iloc[order])


def _moments(source: Pass, batches: Groups, *, is_logarithm: bool) -> tuple[Moments, int]:
    """Return the moments of genes in batches, and the flags of `kinds_of` for the values."""
    n_rows = batches.n_rows
    moments = Moments(n_rows, source.adata.n_vars)
    base = source.adata.uns.get("log1p", {}).get("base") if is_logarithm else None
    kinds = 0
    for rows in source:
        values = rows.values
        kinds |= kernels.kinds_of(values)
        if is_logarithm:
            # Computed in the data type of the values, as in scanpy.
            with np.errstate(over="ignore"):  # an overflow raises an error after all rows are added
                values = np.expm1(values if base is None else values * values.dtype.type(np.log(base)))
        moments.add(rows, batches.codes[rows.places], values)
    return moments, kinds


def _variance(moments: Moments) -> NDArray[np.float64]:
    """Return the variances of genes in batches; 0 for a batch of one cell, as in scanpy."""
    return np.nan_to_num(moments.variance(), nan=0.0)


def _import_loess() -> Any:
    try:
        from skmisc.loess import loess
    except ImportError as error:
        raise ImportError("flavor='seurat_v3' needs scikit-misc: pip install 'dasksc[hvg]'") from error
    return loess


def _by_fit(source: Pass, batches: Groups, moments: Moments, n_top_genes: int) -> pd.DataFrame:
    normed = _standardized_variances(source, batches, moments)
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
    # Genes are sorted by rank, then by the number of batches, then by their position.
    order = np.lexsort((-n_batches, np.nan_to_num(rank, nan=np.inf)))
    return _with_top(found, order, n_top_genes)


def _standardized_variances(source: Pass, batches: Groups, moments: Moments) -> NDArray[np.float64]:
    loess = _import_loess()
    means = moments.mean
    deviations = np.ones_like(means)  # for a gene that does not vary
    names = batches.labels.index
    for name, mean, variance, deviation in zip(names, means, _variance(moments), deviations, strict=True):
        varies = variance > 0
        try:
            if varies.sum() * _SPAN < 1:
                raise ValueError("too few genes vary")
            model = loess(np.log10(mean[varies]), np.log10(variance[varies]), span=_SPAN, degree=2)
            model.fit()
        except ValueError as error:
            raise InputError(
                f"flavor='seurat_v3' fits a curve of variance against mean, which fails for batch {name!r} "
                f"({int(varies.sum())} genes vary in it): {error}. Leave small batches out with filter=, or use "
                "another flavor"
            ) from error
        deviation[varies] = np.sqrt(10**model.outputs.fitted_values)
    n_rows = batches.n_rows[:, None].astype(np.float64)
    bounds = deviations * np.sqrt(n_rows) + means
    sums = np.full((*means.shape, 2), 0.0)  # filled immediately, as in Moments
    for rows in source:
        codes = batches.codes[rows.places].astype(np.int64)
        kernels.add_clipped(rows.indptr, rows.columns, rows.values, codes, bounds, sums)
    total, squares = sums[:, :, 0], sums[:, :, 1]
    with np.errstate(invalid="ignore", divide="ignore"):
        return (n_rows * means**2 + squares - 2 * total * means) / ((n_rows - 1) * deviations**2)


def _by_residuals(source: Pass, batches: Groups, moments: Moments, n_top_genes: int) -> pd.DataFrame:
    residuals = _residual_variances(source, batches, moments)
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


def _residual_variances(source: Pass, batches: Groups, moments: Moments) -> NDArray[np.float64]:
    n_rows = batches.n_rows.astype(np.float64)
    totals = moments.sum
    shares = np.divide(totals, totals.sum(axis=1, keepdims=True), out=np.zeros_like(totals), where=totals > 0)
    # scanpy clips all batches at the bound of the first one.
    clip = float(np.sqrt(n_rows[0]))
    sums = np.full((len(totals), 2, totals.shape[1]), 0.0)  # filled immediately, as in Moments
    for rows in source:
        codes = batches.codes[rows.places].astype(np.int64)
        kernels.add_residuals(rows.indptr, rows.columns, rows.values, codes, shares, _THETA, clip, sums)
    # Residuals have a mean near 0, so this difference loses little precision.
    variances: NDArray[np.float64] = sums[:, 1] / n_rows[:, None] - (sums[:, 0] / n_rows[:, None]) ** 2
    return np.maximum(variances, 0)


def _ranked(scores: NDArray[np.float64], n_top_genes: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """For each gene, return the number of batches in which it is a top gene, and its median rank in these batches."""
    # Tied genes are ordered as in scanpy, which uses NumPy's default sort, not a stable one.
    ranks = np.argsort(np.argsort(-scores, axis=1), axis=1).astype(np.float64)
    n_batches = (ranks < n_top_genes).sum(axis=0)
    median = np.full(ranks.shape[1], np.nan)
    is_top = n_batches > 0
    median[is_top] = np.nanmedian(np.where(ranks < n_top_genes, ranks, np.nan)[:, is_top], axis=0)
    return n_batches, median


def _with_top(found: pd.DataFrame, order: NDArray[np.int64], n_top_genes: int) -> pd.DataFrame:
    is_top = np.zeros(len(found), dtype=bool)
    is_top[order[:n_top_genes]] = True
    return found.assign(highly_variable=is_top)
