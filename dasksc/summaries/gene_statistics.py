"""Statistics of genes, groups of cells, and cells, in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray

from dasksc.atlas.elements import require_key
from dasksc.checks import names_or_none, nearest, some
from dasksc.errors import InputError, MissingKeyError, WrongTypeError
from dasksc.kernels import statistics as kernels
from dasksc.loader.genes import GeneRequest
from dasksc.readers.options import Openable
from dasksc.summaries.reading import Groups, Pass, PassRows, moments_of


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Result of `statistics`.

    Parameters
    ----------
    genes
        Table with one row per gene, indexed by name: ``n``, the number of cells; ``sum``; ``mean``, NaN without cells;
        ``var`` (``ddof=1``), NaN for fewer than two cells; and ``count_nonzero``.
    groups
        AnnData with one row per group and one column per gene, and with the layers ``sum``, ``mean``, ``var`` and
        ``count_nonzero``, as from `scanpy.get.aggregate`. Its obs has the labels and ``n_obs_aggregated``, the number
        of cells; its var is `genes`. None without ``by``.
    cells
        Table with one row per cell that was read, with the column names of `scanpy.pp.calculate_qc_metrics`. None
        without ``qc``.

    Examples
    --------
    >>> found = dasksc.statistics("atlas.h5ad", by=["cell_type", "donor"])
    >>> found.groups.layers["mean"].shape
    (72, 300)
    >>> found.cells is None
    True
    """

    genes: pd.DataFrame
    groups: AnnData | None = None
    cells: pd.DataFrame | None = None


def statistics(
    adata: Openable | Sequence[Openable] | Mapping[str, Openable],
    *,
    by: str | Sequence[str] | None = None,
    filter: str | None = None,
    layer: str | None = None,
    qc: Mapping[str, Any] | Sequence[str] | None = None,
    progress: bool = False,
) -> Statistics:
    """Compute statistics of genes and cells in one pass over an atlas.

    Parameters
    ----------
    adata
        Any argument or result of `dasksc.open`.
    by
        One or several obs columns whose labels define groups of cells. Cells without a label belong to no group, but
        count in the statistics over all cells.
    filter
        Expression over obs that selects cells, as for `dasksc.rows_where`. Default: all cells.
    layer
        Name of the layer to use instead of X.
    qc
        Sets of genes, such as mitochondrial genes, whose share of the counts is computed for each cell: names of
        boolean columns of var, or a dict that maps the name of each set to gene names, a mask or positions. An empty
        list gives only totals and numbers of genes. None gives no statistics of cells.
    progress
        Show a progress bar (requires tqdm).

    Returns
    -------
    Statistics
        Statistics of genes, groups and cells.

    Raises
    ------
    InputError
        If an argument does not fit the atlas, or if the statistics and the rows being read need more memory than
        ``dasksc.memory-limit``.

    Notes
    -----
    Rows are read as in an epoch of `Streaming`: on the active Dask Client, else on threads. Memory does not grow with
    the number of cells, except for `Statistics.cells`, for `filter` (8 bytes per cell) and for `by` (the columns of obs
    and the group of each cell, 1 byte per cell for up to 255 groups; about 24 bytes per cell while groups are
    numbered). Each gene of each group needs 64 bytes. For each gene and group, the first nonzero value is subtracted
    from all nonzeros before they are summed in float64, so variances are accurate even if means are large.

    Examples
    --------
    >>> found = dasksc.statistics("atlas.h5ad", by="cell_type", qc=[])
    >>> found.genes[["mean", "count_nonzero"]].head(2).round(3)
               mean  count_nonzero
    gene_000  0.098            183
    gene_001  0.757            856
    >>> found.groups.shape
    (6, 300)
    """
    columns = names_or_none("by", by)
    if by is not None and not columns:
        raise InputError("by=[] is empty; leave it out for statistics over all cells")
    source = Pass(adata, layer=layer, columns=columns, filter=filter, names=qc is not None, progress=progress)
    groups = Groups(source.obs, columns)
    cells = None if qc is None else _Cells(source, qc)
    moments = moments_of(source, groups, (lambda rows: None) if cells is None else cells.add)
    n = source.n_rows
    mean, squares = moments.over_all()
    genes = pd.DataFrame(
        {
            "n": n,
            "sum": moments.sum.sum(axis=0),
            "mean": mean,
            "var": squares / (n - 1) if n > 1 else np.nan,
            "count_nonzero": moments.n_nonzero.sum(axis=0),
        },
        index=source.adata.var_names,
    )
    grouped = None
    if columns:
        labelled = slice(len(groups.labels))
        layers = {
            "sum": moments.sum,
            "mean": moments.mean,
            "var": moments.variance(),
            "count_nonzero": moments.n_nonzero,
        }
        grouped = AnnData(
            obs=groups.labels.assign(n_obs_aggregated=groups.n_rows[labelled]),
            var=genes,
            layers={name: one[labelled] for name, one in layers.items()},
        )
    return Statistics(genes=genes, groups=grouped, cells=None if cells is None else cells.table())


class _Cells:
    """Total, number of genes, and shares of sets of genes, for each cell."""

    def __init__(self, source: Pass, qc: Mapping[str, Any] | Sequence[str]) -> None:
        adata, self._names = source.adata, list(qc) if isinstance(qc, Mapping) else names_or_none("qc", qc)
        # Per cell: totals of all genes and of each set, the number of genes, and the columns of the table (two, and two
        # more for each set).
        n_bytes = 8 * source.n_rows * (4 + 3 * len(self._names))
        source.reserve(f"statistics of {source.n_rows:,} cells", n_bytes, "Select cells with filter=")
        self._masks = np.zeros((len(self._names), adata.n_vars), dtype=bool)
        for mask, name in zip(self._masks, self._names, strict=True):
            mask[:] = _mask(adata, name, qc[name]) if isinstance(qc, Mapping) else _marked(adata, name)
        self._index = source.obs.index
        self._totals = np.full((source.n_rows, 1 + len(self._names)), 0.0)  # filled immediately, as in `moments_of`
        self._counts = np.full(source.n_rows, 0)

    def add(self, rows: PassRows) -> None:
        totals, counts = self._totals[rows.places], self._counts[rows.places]
        kernels.add_rows(rows.indptr, rows.columns, rows.values, self._masks, totals, counts)

    def table(self) -> pd.DataFrame:
        """Return the statistics with the column names of `scanpy.pp.calculate_qc_metrics`."""
        total = self._totals[:, 0]
        columns: dict[str, NDArray[Any]] = {"n_genes_by_counts": self._counts, "total_counts": total}
        for name, part in zip(self._names, self._totals.T[1:], strict=True):
            columns[f"total_counts_{name}"] = part
            with np.errstate(invalid="ignore", divide="ignore"):
                columns[f"pct_counts_{name}"] = part / total * 100
        return pd.DataFrame(columns, index=self._index)


def _marked(adata: AnnData, name: str) -> NDArray[np.bool_]:
    column = adata.var[require_key("var", name, adata.var, of=adata)]
    if column.dtype != bool:
        raise InputError(f"var column {name!r} has dtype {column.dtype}; qc= needs a boolean for each gene")
    return np.asarray(column)


def _mask(adata: AnnData, name: str, genes: Any) -> NDArray[np.bool_]:
    if isinstance(genes, str) or not isinstance(genes, Iterable):
        raise WrongTypeError(
            f"qc[{name!r}]={genes!r} must be a list of gene names or positions, or a mask; for a prefix: "
            f"qc={{{name!r}: adata.var_names.str.startswith('MT-')}}"
        )
    chosen = np.asarray([*genes])
    absent = [] if chosen.dtype.kind in "biuf" else [gene for gene in chosen.tolist() if gene not in adata.var_names]
    if absent:
        raise MissingKeyError(
            f"var_names has no {some(absent)}, which qc[{name!r}] lists; {nearest(str(absent[0]), adata.var_names)}"
        )
    if chosen.dtype == bool and not chosen.any():
        raise InputError(f"the mask qc[{name!r}] selects no gene; var_names are {some(adata.var_names)}")
    mask = np.zeros(adata.n_vars, dtype=bool)
    if chosen.size:  # an empty set selects no genes
        columns, _ = GeneRequest(chosen).columns_of(adata.var, adata.n_vars)
        mask[slice(None) if columns is None else columns.positions] = True
    return mask
