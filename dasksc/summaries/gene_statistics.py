"""Statistics of genes, groups of cells, and cells, in one pass."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray

from dasksc.atlas.lookup import nearest, require_key, some
from dasksc.atlas.options import Openable
from dasksc.checks import names_or_none
from dasksc.errors import InputError, MissingKeyError, WrongTypeError
from dasksc.kernels import moments as kernels
from dasksc.loader.genes import GeneRequest
from dasksc.summaries.reading import MOMENT_BYTES, Groups, Moments, Pass, groups_of

__all__ = ["Statistics", "check_destination", "statistics", "write_statistics"]


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Result of `statistics`.

    Parameters
    ----------
    genes
        Table with one row per gene, indexed by name: ``n``, the number of cells; ``sum``; ``mean``, NaN without cells;
        ``var`` (``ddof=1``), NaN for fewer than two cells; and ``count_nonzero``. Sums, means and variances are
        float64.
    groups
        AnnData with one row per group and one column per gene, and with the layers ``sum``, ``mean``, ``var`` and
        ``count_nonzero``, in the layout of `scanpy.get.aggregate`. Its obs has the labels and ``n_obs_aggregated``, the
        number of cells. None without ``by``.
    cells
        Table with one row per cell that was read, with the column names of `scanpy.pp.calculate_qc_metrics`. None
        without ``qc``.

    Examples
    --------
    >>> found = dasksc.statistics("atlas.h5ad", by=["cell_type", "donor"])
    >>> found.to_anndata().layers["mean"].shape
    (72, 300)
    >>> found.cells is None
    True
    """

    genes: pd.DataFrame
    groups: AnnData | None = None
    cells: pd.DataFrame | None = None

    def to_anndata(self) -> AnnData:
        """Return all statistics as one AnnData.

        Returns
        -------
        AnnData
            One row per group, or a single row ``"all"`` if cells were not grouped, and one column per gene; `genes` as
            var, and `cells` as ``uns["cells"]``.
        """
        if self.groups is not None:
            adata = self.groups.copy()
            adata.var = self.genes
        else:
            layers = {name: self.genes[[name]].to_numpy().T for name in ("sum", "mean", "var", "count_nonzero")}
            n_obs = self.genes["n"].to_numpy()[:1]
            obs = pd.DataFrame({"n_obs_aggregated": n_obs if len(n_obs) else [0]}, index=["all"])
            adata = AnnData(obs=obs, var=self.genes, layers=layers)
        if self.cells is not None:
            adata.uns["cells"] = self.cells.set_axis(self.cells.index.astype(str))
        return adata


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
        Sets of genes, such as mitochondrial genes, whose share of the counts is computed for each cell: either names of
        boolean columns of var, or a dict that maps the name of each set to gene names, a mask or positions. An empty
        list gives only the total and the number of genes of each cell. None gives no statistics of cells.
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
    MissingKeyError
        If the atlas lacks a column or layer.

    Notes
    -----
    Rows are read as in an epoch of `Streaming`: on the active Dask Client, else on threads. Memory does not grow with
    the number of cells, except for `Statistics.cells`, for `filter` (8 bytes per cell) and for `by` (1 byte per cell
    for up to 126 groups, plus the columns of obs). Each gene of each group needs 64 bytes. The rows being read use the
    part of ``dasksc.memory-limit`` that the statistics do not need. For each gene and group, the first nonzero value is
    subtracted from all nonzeros before they are summed in float64, so variances are accurate even if means are large.

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
    source = Pass(adata, layer=layer, columns=columns, filter=filter, names=qc is not None, progress=progress)
    n_vars = source.adata.n_vars
    groups = None if by is None else groups_of(source.obs, columns)
    cells = None if qc is None else _Cells(source, qc)
    n_rows = np.zeros(0, dtype=np.int64) if groups is None else groups.n_rows
    n_others = source.n_rows - int(n_rows.sum())
    # The last group holds the rows without a label, which count in the statistics over all cells.
    if n_others or not len(n_rows):
        n_rows = np.append(n_rows, n_others)
    source.reserve_groups(len(n_rows), MOMENT_BYTES, groups)
    moments = Moments(n_rows, n_vars)
    for rows in source:
        if groups is None:
            codes = np.zeros(len(rows.indptr) - 1, dtype=np.int64)
        else:
            codes = groups.codes[rows.places].astype(np.int64)
            codes[codes < 0] = len(groups.labels)
        moments.add(rows, codes)
        if cells is not None:
            cells.add(rows)
    return Statistics(
        genes=_genes(moments, source),
        groups=None if groups is None else _grouped(moments, groups, source),
        cells=None if cells is None else cells.table(),
    )


def _genes(moments: Moments, source: Pass) -> pd.DataFrame:
    n = source.n_rows
    mean, squares = moments.over_all()
    return pd.DataFrame(
        {
            "n": np.full(source.adata.n_vars, n, dtype=np.int64),
            "sum": moments.sum.sum(axis=0),
            "mean": mean,
            "var": squares / (n - 1) if n > 1 else np.full(source.adata.n_vars, np.nan),
            "count_nonzero": moments.n_nonzero.sum(axis=0),
        },
        index=source.adata.var_names,
    )


def _grouped(moments: Moments, groups: Groups, source: Pass) -> AnnData:
    n_groups = len(groups.labels)
    layers = {
        "sum": moments.sum[:n_groups],
        "mean": moments.mean[:n_groups],
        "var": moments.variance()[:n_groups],
        "count_nonzero": moments.n_nonzero[:n_groups],
    }
    return AnnData(
        obs=groups.labels.assign(n_obs_aggregated=groups.n_rows),
        var=pd.DataFrame(index=source.adata.var_names),
        layers=layers,
    )


class _Cells:
    """Total, number of genes, and shares of sets of genes, for each cell."""

    def __init__(self, source: Pass, qc: Mapping[str, Any] | Sequence[str]) -> None:
        if isinstance(qc, str):
            raise InputError(f"qc={qc!r} is a string; give a list of names: qc=[{qc!r}]")
        if not isinstance(qc, Iterable):
            raise WrongTypeError(f"qc must be a list of names of var columns, or a dict of sets of genes; got {qc!r}")
        masks = _of_var(source.adata, qc) if not isinstance(qc, Mapping) else _of_genes(source.adata, qc)
        self._names = list(masks)
        # Per cell: totals of all genes and of each set, the number of genes, and the columns of the table (two, and two
        # more for each set).
        n_bytes = 8 * source.n_rows * (2 + len(masks) + 2 + 2 * len(masks))
        source.reserve(f"statistics of {source.n_rows:,} cells", n_bytes, "Select cells with filter=")
        self._masks = np.zeros((len(masks), source.adata.n_vars), dtype=bool)
        for mask, one in zip(self._masks, masks.values(), strict=True):
            mask[:] = one
        self._index = source.obs.index
        self._totals = np.full((source.n_rows, 1 + len(masks)), 0.0)  # filled immediately, as in Moments
        self._counts = np.full(source.n_rows, 0)

    def add(self, rows: Any) -> None:
        """Compute the statistics of some rows."""
        places, indptr, columns, values = rows
        kernels.add_rows(indptr, columns, values, self._masks, self._totals[places], self._counts[places])

    def table(self) -> pd.DataFrame:
        """Return the statistics with the column names of `scanpy.pp.calculate_qc_metrics`."""
        total = self._totals[:, 0]
        columns: dict[str, NDArray[Any]] = {"n_genes_by_counts": self._counts, "total_counts": total}
        for i, name in enumerate(self._names):
            part = self._totals[:, 1 + i]
            columns[f"total_counts_{name}"] = part
            with np.errstate(invalid="ignore", divide="ignore"):
                columns[f"pct_counts_{name}"] = part / total * 100
        return pd.DataFrame(columns, index=self._index)


def _of_var(adata: AnnData, names: Sequence[str]) -> dict[str, NDArray[np.bool_]]:
    masks = {}
    for name in names:
        column = adata.var[require_key("var", name, adata.var, of=adata)]
        if column.dtype != bool:
            raise InputError(f"var column {name!r} has dtype {column.dtype}; qc= needs a boolean for each gene")
        masks[name] = column.to_numpy()
    return masks


def _of_genes(adata: AnnData, sets: Mapping[str, Any]) -> dict[str, NDArray[np.bool_]]:
    masks = {}
    for name, genes in sets.items():
        mask = np.zeros(adata.n_vars, dtype=bool)
        if isinstance(genes, str):
            raise WrongTypeError(
                f"qc[{name!r}]={genes!r} is a string; give a list of gene names or, for a prefix, a mask: "
                f"qc={{{name!r}: adata.var_names.str.startswith({genes!r})}}"
            )
        if not isinstance(genes, Iterable):
            raise WrongTypeError(f"qc[{name!r}] must be gene names, a mask or positions; got {genes!r}")
        chosen = np.asarray([*genes] if isinstance(genes, Set) else genes)
        absent = (
            [] if chosen.dtype.kind in "biuf" else [gene for gene in chosen.tolist() if gene not in adata.var_names]
        )
        if absent:
            raise MissingKeyError(
                f"var_names has no {some(absent)}, which qc[{name!r}] lists; {nearest(str(absent[0]), adata.var_names)}"
            )
        if chosen.dtype == bool and not chosen.any():
            raise InputError(f"the mask qc[{name!r}] selects no gene; var_names are {some(adata.var_names)}")
        # An empty set selects no genes; `GeneRequest` would refuse it.
        if chosen.any() if chosen.dtype == bool else len(chosen):
            columns, _ = GeneRequest(chosen).columns_of(adata.var, adata.n_vars)
            mask[columns.positions if columns is not None else slice(None)] = True
        masks[name] = mask
    return masks


def write_statistics(found: Statistics, path: str | os.PathLike[str]) -> None:
    """Write statistics as an h5ad file.

    Raises
    ------
    InputError
        As for `check_destination`.
    """
    found.to_anndata().write_h5ad(check_destination(path))


def check_destination(path: str | os.PathLike[str]) -> str:
    """Return the path as a string, if statistics can be written to it.

    Raises
    ------
    InputError
        If the path exists, its folder is missing, or its name does not end in ``.h5ad``.
    """
    name = os.fspath(path)
    if not name.endswith(".h5ad"):
        raise InputError(f"{name} must end in .h5ad")
    if os.path.exists(name):
        raise InputError(f"{name} exists; give another path, or remove it")
    if not os.path.isdir(os.path.dirname(name) or "."):
        raise InputError(f"there is no folder {os.path.dirname(name)} to write {os.path.basename(name)} to")
    return name
