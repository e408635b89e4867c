"""Contents of a store to write: the elements of an atlas, or of selected cells and genes, by their keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import AnnData
from numpy.typing import NDArray

from dasksc.atlas.expressions import holds
from dasksc.atlas.stored import layers_of
from dasksc.errors import InputError
from dasksc.loader.genes import GeneMatch, GeneRequest
from dasksc.pushdown import matrix_of, row_local
from dasksc.storage import ColumnMaps, Columns, ConcatenatedMatrix, Matrix, ReorderedMatrix, SummedMatrix

ADVICE = (
    "Open the atlas, convert the values to one type that AnnData writes (strings with .astype(str), numbers, booleans "
    "or categories) or delete them, and pass the opened atlas to dasksc.convert."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Elements to write, by key."""

    matrices: dict[str, Matrix]  # with one row per cell, not read
    cells: dict[str, Any]  # tables and other arrays with one row per cell
    others: dict[str, Any]
    rows: NDArray[np.int64] | None  # of the selected cells, ascending; None for all
    match: GeneMatch | None
    left_out: list[str]

    @property
    def n_obs(self) -> int:
        return len(self.cells["obs"])


def contents_of(adata: AnnData, expression: str | None, genes: GeneRequest, layout: str | None) -> Contents:
    """Return the cells for which an expression over obs holds, and the requested columns of X and of layers."""
    rows = None if expression is None else np.flatnonzero(holds(expression, adata.obs, of=adata))
    if rows is not None and not len(rows):
        raise InputError(f"filter={expression!r} matches none of the {adata.n_obs} cells")
    columns, match = genes.columns_of(adata.var, adata.n_vars, of=adata)
    left_out = [f"obsp/{name}" for name in adata.obsp]
    cells = {"obs": adata.obs}
    cells |= {f"obsm/{name}": element for name, element in adata.obsm.items() if not isinstance(element, da.Array)}
    others: dict[str, Any] = {"var": adata.var}
    others |= {name: dict(getattr(adata, name)) for name in ("uns", "varm", "varp")}
    if columns is not None:
        others["var"] = _genes(adata.var, columns, match, genes.key)
        at = columns.positions
        if columns.sums is not None or len(columns) != len(at):
            left_out += [f"{group}/{name}" for group in ("varm", "varp") for name in others[group]]
            others |= {"varm": {}, "varp": {}}
        others["varm"] = {name: _taken(element, at) for name, element in others["varm"].items()}
        others["varp"] = {name: element[at][:, at] for name, element in others["varp"].items()}
    if adata.raw is not None:
        others |= {"raw/var": adata.raw.var, "raw/varm": dict(adata.raw.varm)}
    matrices = matrices_of(adata, layout)
    for key, matrix in matrices.items():
        if columns is not None and (key == "X" or key.startswith("layers/")):
            matrix = _with_columns(matrix, columns)
        matrices[key] = matrix if rows is None else ReorderedMatrix(matrix, rows)
    return Contents(
        matrices=matrices,
        cells={
            key: _storable(element if rows is None else _taken(element, rows), key) for key, element in cells.items()
        },
        others={key: _storable(element, key) for key, element in others.items()},
        rows=rows,
        match=match,
        left_out=left_out,
    )


def matrices_of(adata: AnnData, layout: str | None = None) -> dict[str, Matrix]:
    """Return the matrices with one row per cell, by their keys in a store; dense ones as CSR if `layout` is."""
    arrays: dict[str, Any] = {"X": adata.X}
    arrays |= {f"layers/{name}": array for name, array in layers_of(adata).items()}
    if adata.raw is not None:
        arrays["raw/X"] = adata.raw.X
    arrays = {key: array for key, array in arrays.items() if array is not None}
    for key, array in arrays.items() if layout == "csr" else ():
        if isinstance(array._meta, np.ndarray):
            meta = sp.csr_matrix((0, 0), dtype=array.dtype)
            arrays[key] = array.map_blocks(row_local(sp.csr_matrix), dtype=array.dtype, meta=meta)
    arrays |= {f"obsm/{name}": array for name, array in adata.obsm.items() if isinstance(array, da.Array)}
    for key in arrays:
        if any(part in ("", ".", "..") for part in key.split("/")) or key.count("/") > 1:
            raise InputError(f"{key!r} cannot be a key of a Zarr store; rename the element first")
    return {key: matrix_of(array) for key, array in arrays.items()}


def _with_columns(matrix: Matrix, columns: Columns) -> Matrix:
    if columns.sums is not None:
        return SummedMatrix(matrix, columns)
    # The output column of a missing gene is zero, since no column of the matrix is mapped to it.
    maps = ColumnMaps([columns.lookup], len(columns), fill_value=0)
    return ConcatenatedMatrix(label=matrix.label, parts=[matrix], maps=maps)


def _taken(element: Any, index: NDArray[np.int64]) -> Any:
    if not isinstance(element, pd.DataFrame):
        return element[index]
    taken = element.iloc[index]
    if isinstance(element.index, pd.RangeIndex):  # cells without names
        taken.index = pd.RangeIndex(len(taken))
    return taken


def _genes(var: pd.DataFrame, columns: Columns, match: GeneMatch | None, key: str | None) -> pd.DataFrame:
    """Return var of the kept genes; one that is summed has the row of its first column, a missing one only its name."""
    to = np.arange(len(columns)) if columns.to is None else columns.to
    first = np.full(len(columns), -1)
    # If several positions map to one column, the first is kept. NumPy keeps the last assignment, so the order is
    # reversed.
    first[to[::-1]] = columns.positions[::-1]
    missing = first < 0
    # The position -1 of missing genes is not in the RangeIndex, so `reindex` fills their rows with missing values.
    table = var.set_axis(pd.RangeIndex(len(var))).reindex(first) if missing.any() else var.iloc[first]
    names = var.index.to_numpy(dtype=object)[first]
    if match is not None and missing.any():
        requested = np.array(match.names, dtype=object)
        names = np.where(missing, requested, names)
        if key is not None:
            table = table.assign(**{key: np.where(missing, requested, table[key].astype(object))})
    return table.set_axis(pd.Index(names, name=var.index.name))


def _storable(element: Any, what: str) -> Any:
    """Give object columns a type: AnnData writes objects as strings, ``"nan"`` for a missing value, ``"1"`` for 1."""
    if not isinstance(element, pd.DataFrame):
        return element
    typed = element.copy(deep=False)
    for name, column in element.items():
        if column.dtype == object:
            typed[name] = _typed(column, f"{what} column {name!r}")
        elif isinstance(column.dtype, pd.CategoricalDtype) and column.cat.categories.dtype == object:
            categories = _typed(column.cat.categories.to_series(), f"{what} column {name!r}")
            if categories.dtype != object:
                typed[name] = column.cat.rename_categories(pd.Index(categories))
    return typed


def _typed(column: pd.Series[Any], what: str) -> pd.Series[Any]:
    kind = pd.api.types.infer_dtype(column, skipna=True)
    try:
        if kind in ("string", "empty"):
            return column.astype("category") if column.hasnans else column
        if kind == "boolean":
            return column.astype("boolean") if column.hasnans else column.astype(bool)
        if kind == "integer":
            return column.astype("Int64") if column.hasnans else pd.to_numeric(column)
        if kind in ("floating", "mixed-integer-float"):
            return pd.to_numeric(column)
    # Raised for integers that fit no integer type.
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{what} cannot be stored: {error}. {ADVICE}") from error
    raise InputError(
        f"{what} contains values of pandas type {kind!r}, which would be written as strings and lose their type. "
        + ADVICE
    )
