"""Subset of an atlas to convert: cells that an expression selects, and genes aligned with a list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray

from dasksc.atlas.assemble import assemble, unchecked
from dasksc.atlas.cell_names import nameless_index, number_rows
from dasksc.atlas.elements import Unwrapped
from dasksc.atlas.filtering import holds
from dasksc.atlas.options import OpenOptions
from dasksc.errors import InputError
from dasksc.loader.genes import GeneMatch, GeneRequest
from dasksc.pushdown import matrix_of
from dasksc.storage import ColumnMaps, Columns, ConcatenatedMatrix, Matrix, ReorderedMatrix, SummedMatrix

__all__ = ["Subset", "subset_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """Subset of an atlas, with lazy matrices that have not been read.

    `rows` are the rows of the selected cells, ascending, and `match` is the match of the names of genes; None if all
    were selected. `left_out` has the keys of varm and varp if these are dropped because genes are missing or summed.
    """

    adata: AnnData
    rows: NDArray[np.int64] | None
    match: GeneMatch | None
    left_out: tuple[str, ...]


def subset_of(adata: AnnData, expression: str | None, genes: GeneRequest, *, has_names: bool) -> Subset:
    """Return the cells for which an expression over obs holds, and the requested columns of X and of layers.

    `has_names` is False if the names of cells were not read.
    """
    rows = None if expression is None else np.flatnonzero(holds(expression, adata.obs, of=adata))
    if rows is not None and not len(rows):
        raise InputError(f"filter={expression!r} matches none of the {adata.n_obs} cells")
    columns, match = genes.columns_of(adata.var, adata.n_vars, of=adata)
    if rows is None and columns is None:
        return Subset(adata=adata, rows=None, match=None, left_out=())

    def of_cells(array: da.Array | None, kept: Columns | None = None) -> Unwrapped | None:
        return None if array is None else Unwrapped(matrix=_selected(matrix_of(array), rows, kept))

    def of_table(table: pd.DataFrame) -> pd.DataFrame:
        taken = table if rows is None else table.iloc[rows]
        return taken if has_names else taken.set_axis(nameless_index(len(taken)))

    # From AnnData 0.13 on, layers[None] is X.
    layers = {name: of_cells(array, columns) for name, array in adata.layers.items() if name is not None}
    is_changed = columns is not None and (columns.sums is not None or len(columns) != len(columns.positions))
    with unchecked():
        subset = assemble(
            x=of_cells(adata.X, columns),
            obs=of_table(adata.obs),
            var=adata.var if columns is None else _genes(adata.var, columns, match, genes.key),
            uns=adata.uns,
            layers=layers,
            obsm={
                name: of_table(element) if isinstance(element, pd.DataFrame) else _cells_of(element, rows)
                for name, element in adata.obsm.items()
            },
            varm={} if is_changed else {name: _columns_of(one, columns) for name, one in adata.varm.items()},
            obsp={},
            varp={} if is_changed else {name: _square(one, columns) for name, one in adata.varp.items()},
            raw=None
            if adata.raw is None
            else {"X": of_cells(adata.raw.X), "var": adata.raw.var, "varm": dict(adata.raw.varm)},
            options=OpenOptions(),
        )
    if not has_names:
        number_rows(subset)
    lost: Mapping[str, Any] = {"varm": adata.varm, "varp": adata.varp} if is_changed else {}
    return Subset(
        adata=subset,
        rows=rows,
        match=match,
        left_out=tuple(f"{group}/{name}" for group, held in lost.items() for name in held),
    )


def _selected(matrix: Matrix, rows: NDArray[np.int64] | None, columns: Columns | None) -> Matrix:
    """Return the selected rows and columns of a matrix, without reading them."""
    if columns is not None and columns.sums is not None:
        matrix = SummedMatrix(matrix, columns)
    elif columns is not None:
        # The output column of a missing gene is zero, since no column of the matrix is mapped to it.
        maps = ColumnMaps([columns.lookup], len(columns), fill_value=0)
        matrix = ConcatenatedMatrix(label=matrix.label, parts=[matrix], maps=maps)
    return matrix if rows is None else ReorderedMatrix(matrix, rows)


def _cells_of(element: Any, rows: NDArray[np.int64] | None) -> Any:
    if rows is None:
        return element
    if isinstance(element, da.Array):
        return Unwrapped(matrix=ReorderedMatrix(matrix_of(element), rows))
    return element[rows]


def _genes(var: pd.DataFrame, columns: Columns, match: GeneMatch | None, key: str | None) -> pd.DataFrame:
    """Return var of the kept genes; one that is summed has the row of its first column, a missing one only its name."""
    to = np.arange(len(columns)) if columns.to is None else columns.to
    first = np.full(len(columns), -1)
    # If several positions map to one column, the first is kept. NumPy keeps the last assignment, so the order is
    # reversed.
    first[to[::-1]] = columns.positions[::-1]
    missing = first < 0
    if not missing.any():
        table = var.iloc[first]
    else:
        # Missing genes have the position -1, which is not in the RangeIndex, so `reindex` fills their rows with missing
        # values.
        table = var.set_axis(pd.RangeIndex(len(var))).reindex(first)
    names = var.index.to_numpy(dtype=object)[first]
    if match is not None and missing.any():
        requested = np.array(match.names, dtype=object)
        names = np.where(missing, requested, names)
        if key is not None:
            table = table.assign(**{key: np.where(missing, requested, table[key].astype(object))})
    return table.set_axis(pd.Index(names, name=var.index.name))


def _columns_of(element: Any, columns: Columns | None) -> Any:
    if columns is None:
        return element
    return element.iloc[columns.positions] if isinstance(element, pd.DataFrame) else element[columns.positions]


def _square(element: Any, columns: Columns | None) -> Any:
    return element if columns is None else element[columns.positions][:, columns.positions]
