"""Highly variable genes of an atlas, equal to those that scanpy finds in memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.checks import name_or_none, whole_number
from dasksc.errors import InputError
from dasksc.kernels import statistics as kernels
from dasksc.readers.options import Openable
from dasksc.summaries.reading import Groups, Moments, Pass, PassRows, moments_of

logger = logging.getLogger("dasksc.summaries")

# Bytes for each gene of each batch: moments, and the scores computed from them.
_SCORE_BYTES = 13 * 8
# The fit crashes the process if this share of the genes is less than one gene.
_SPAN = 0.3


def highly_variable_genes(
    adata: Openable | Sequence[Openable] | Mapping[str, Openable],
    n_top_genes: int,
    flavor: Literal["seurat_v3"] = "seurat_v3",
    batch_key: str | None = None,
    *,
    layer: str | None = None,
    filter: str | None = None,
    progress: bool = False,
) -> pd.DataFrame:
    """Find the most variable genes in two passes, as `scanpy.pp.highly_variable_genes` does in memory.

    Parameters
    ----------
    adata
        Any argument or result of `dasksc.open`, with counts.
    n_top_genes
        Number of genes to find.
    flavor
        ``"seurat_v3"``: compare variances of counts, standardized by a curve of variance against mean [1]_.
    batch_key
        Name of an obs column with batches. Genes are ranked in each batch, and those with the lowest median rank over
        the batches in which they are highly variable are selected.
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
        If the flavor is another; if a value is NaN or negative, or a cell has no batch; if the curve cannot be fitted
        to a batch; or if the sums and the rows being read need more memory than ``dasksc.memory-limit``.
    ImportError
        If scikit-misc, which provides the fit, is not installed.

    Notes
    -----
    The function selects the same genes as scanpy. Only genes whose scores differ from one another by less than 1e-6
    (relative) may be ranked differently, because the order of summation differs. Memory is that of `statistics`, but
    each gene of each batch needs 104 bytes. scanpy has other flavors, for an atlas in memory.

    References
    ----------
    .. [1] Stuart et al.: Comprehensive integration of single-cell data, Cell 177 (2019).

    Examples
    --------
    >>> table = dasksc.highly_variable_genes("atlas.h5ad", n_top_genes=50)
    >>> chosen = table.index[table["highly_variable"]]
    >>> dataset = dasksc.scDataset("atlas.h5ad", batch_size=64, genes=list(chosen), seed=0)
    >>> next(iter(dataset)).shape
    torch.Size([64, 50])
    """
    if flavor != "seurat_v3":
        raise InputError(
            f"flavor={flavor!r}: dasksc has only 'seurat_v3', which needs counts. For other flavors, read the atlas "
            "into memory, and use scanpy.pp.highly_variable_genes"
        )
    n_top_genes = whole_number("n_top_genes", n_top_genes)
    columns = [] if name_or_none("batch_key", batch_key) is None else [str(batch_key)]
    source = Pass(adata, layer=layer, columns=columns, filter=filter, progress=progress)
    if not source.n_rows:
        raise InputError("there are no cells to find variable genes in; the filter selects none")
    if not source.adata.n_vars:
        raise InputError("there are no genes to choose from; the atlas has none")
    batches = Groups(source.obs, columns, is_sorted=True)  # scanpy uses the order of `numpy.unique`
    if len(batches.n_rows) > len(batches.labels):
        n_missing = batches.n_rows[-1]
        raise InputError(f"obs column {batch_key!r} has no batch for {n_missing} cells; leave them out with filter=")
    try:
        from skmisc.loess import loess
    except ImportError as error:
        raise ImportError("highly_variable_genes needs scikit-misc: pip install 'dasksc[hvg]'") from error
    has_fractions = has_negative = False

    def check(rows: PassRows) -> None:
        nonlocal has_fractions, has_negative
        has_fractions |= bool((rows.values != np.floor(rows.values)).any())
        has_negative |= bool((rows.values < 0).any())

    moments = moments_of(source, batches, check, _SCORE_BYTES)
    if not np.isfinite(moments.sum).all():
        raise InputError(f"{source.label} has NaN or infinite values, so variances are undefined; fill them first")
    if has_negative:
        raise InputError(f"{source.label} has values below 0 instead of counts; give the layer of counts with layer=")
    if has_fractions:
        logger.warning("%s has fractions instead of counts; give the layer of counts with layer=", source.label)
    normed = _standardized_variances(source, batches, moments, loess)
    # Tied genes are ordered as in scanpy, which uses NumPy's default sort, not a stable one.
    ranks = np.argsort(np.argsort(-normed, axis=1), axis=1).astype(np.float64)
    n_batches = (ranks < n_top_genes).sum(axis=0)
    rank = np.full(len(n_batches), np.nan)  # the median over the batches in which a gene is a top gene
    is_top = n_batches > 0
    rank[is_top] = np.nanmedian(np.where(ranks < n_top_genes, ranks, np.nan)[:, is_top], axis=0)
    mean, squares = moments.over_all()
    found = pd.DataFrame(
        {
            "means": mean,
            "variances": squares / max(source.n_rows - 1, 1),
            "highly_variable_nbatches": n_batches,
            "highly_variable_rank": rank,
            "variances_norm": normed.mean(axis=0),
            "highly_variable": False,
        },
        index=source.adata.var_names,
    )
    # Genes are sorted by rank, then by the number of batches, then by their position.
    order = np.lexsort((-n_batches, np.nan_to_num(rank, nan=np.inf)))
    found.iloc[order[:n_top_genes], -1] = True
    return found if columns else found.drop(columns="highly_variable_nbatches")


def _standardized_variances(source: Pass, batches: Groups, moments: Moments, loess: Any) -> NDArray[np.float64]:
    """Return variances of clipped values in units of those expected from the means, shape (n_batches, n_vars)."""
    means, variances = moments.mean, np.nan_to_num(moments.variance(), nan=0.0)
    deviations = np.ones_like(means)  # for a gene that does not vary
    for name, mean, variance, deviation in zip(batches.labels.index, means, variances, deviations, strict=True):
        varies = variance > 0
        try:
            if varies.sum() * _SPAN < 1:
                raise ValueError("too few genes vary")
            model = loess(np.log10(mean[varies]), np.log10(variance[varies]), span=_SPAN, degree=2)
            model.fit()
        except ValueError as error:
            of, advice = f"batch {name!r}", "Leave small batches out with filter=, or omit batch_key="
            if batches.labels.columns.empty:
                of, advice = "the cells", "Give more cells, or counts of more genes"
            raise InputError(
                f"the curve of variance against mean cannot be fitted to {of}, in which {int(varies.sum())} genes "
                f"vary: {error}. {advice}"
            ) from error
        deviation[varies] = np.sqrt(10**model.outputs.fitted_values)
    n_rows = batches.n_rows[:, None].astype(np.float64)
    bounds = deviations * np.sqrt(n_rows) + means
    sums = np.full((*means.shape, 2), 0.0)  # filled immediately, as in `moments_of`
    for rows in source:
        codes = batches.codes(rows.places)
        kernels.add_clipped(rows.indptr, rows.columns, rows.values, codes, bounds, sums)
    total, squares = sums[:, :, 0], sums[:, :, 1]
    with np.errstate(invalid="ignore", divide="ignore"):
        return (n_rows * means**2 + squares - 2 * total * means) / ((n_rows - 1) * deviations**2)
