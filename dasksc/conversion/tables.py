"""Tables and other elements of a store, except matrices with one row per cell.

AnnData writes these elements to a temporary folder. They are moved into place once the matrices are complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import anndata
import dask.array as da
import numpy as np
import pandas as pd
import zarr
from anndata.io import read_elem, write_elem
from numpy.typing import NDArray
from zarr.storage import MemoryStore

from dasksc.conversion.names import StagedNames
from dasksc.conversion.scanning import pieces
from dasksc.errors import CorruptDataError, InputError
from dasksc.output.elements import as_anndata_writes, write_group
from dasksc.storage import caused_by_data

__all__ = ["check_obs", "check_tables", "write_tables"]

# Number of rows of a column that are reordered and written at a time.
_PIECE_ROWS = 2**20
_ADVICE = (
    "Open the atlas, convert the values to one type that AnnData writes (strings with .astype(str), numbers, booleans "
    "or categories) or delete them, and pass the opened atlas to dasksc.convert."
)


def storable(table: pd.DataFrame, what: str) -> pd.DataFrame:
    """Convert the object columns of a table to data types that AnnData writes without changing values.

    AnnData writes any Python object as a string: ``"nan"`` for a missing value, ``"1"`` for 1. Strings with missing
    values therefore become categories, and numbers and booleans become columns of their type.
    """
    typed = table.copy(deep=False)
    for name, column in table.items():
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
        raise InputError(f"{what} cannot be stored: {error}. {_ADVICE}") from error
    raise InputError(
        f"{what} contains values of pandas type {kind!r}, which would be written as strings and lose their type. "
        + _ADVICE
    )


def check_tables(adata: anndata.AnnData, names: StagedNames | None) -> None:
    """Check that AnnData can write the tables and uns, by writing uns and one row of each table to memory."""
    with as_anndata_writes():
        for path, element, has_cells in _elements(adata):
            if isinstance(element, pd.DataFrame):
                element = element.iloc[:1]
                if has_cells and names is not None:
                    element = element.set_axis(names.first())
            elif path != "uns":
                continue
            try:
                write_elem(zarr.open_group(MemoryStore(), mode="w", zarr_format=3), path.replace("/", " "), element)
            # AnnData and the libraries that it writes with may raise any exception.
            except Exception as error:
                if not caused_by_data(error):
                    raise
                # AnnData's note names the column.
                what = ". ".join([str(error), *getattr(error, "__notes__", ())])
                raise InputError(f"{path} cannot be written by AnnData: {what}. {_ADVICE}") from error


def write_tables(
    adata: anndata.AnnData,
    folder: Path,
    store: Path,
    order: NDArray[np.int64],
    how: Mapping[str, Any],
    names: StagedNames | None,
) -> None:
    """Write the tables and other elements (obs and obsm in the new row order), and then the metadata of the store.

    Parameters
    ----------
    adata
        Input with Dask arrays, as returned by `dasksc.open`.
    folder
        Temporary folder for elements before they are moved into the store. Its existing contents are removed.
    store
        Path of the store, which contains the matrices.
    order
        Row of `adata` for each row of the store, shape (n_obs,), int64.
    how
        Description of the order, stored as an attribute for ``dasksc info``.
    names
        Names of the cells if `adata` was opened without them, otherwise None.
    """
    shutil.rmtree(folder, ignore_errors=True)
    with as_anndata_writes():
        written = zarr.open_group(folder, mode="w", zarr_format=3)
        for i, (path, element, has_cells) in enumerate(_elements(adata)):
            if has_cells and isinstance(element, pd.DataFrame):
                _write_in_order(written, str(i), element, order, names)
            else:
                write_elem(written, str(i), element[order] if has_cells else element)
            shutil.rmtree(store / path, ignore_errors=True)
            (store / path).parent.mkdir(parents=True, exist_ok=True)
            os.rename(folder / str(i), store / path)
        for group in ("layers", "obsm", "obsp"):
            write_group(store / group, {"encoding-type": "dict", "encoding-version": "0.1.0"})
        if adata.raw is not None:
            write_group(store / "raw", {"encoding-type": "raw", "encoding-version": "0.1.0"})
        write_group(store, {"encoding-type": "anndata", "encoding-version": "0.1.0", "dasksc": dict(how)})
        zarr.consolidate_metadata(str(store))


def _write_in_order(
    parent: zarr.Group, name: str, table: pd.DataFrame, order: NDArray[np.int64], names: StagedNames | None
) -> None:
    """Write a table with one row per cell in a new order; memory holds one piece of a column at a time."""
    first = table.iloc[order[:_PIECE_ROWS]]
    write_elem(parent, name, first if names is None else first.set_axis(names.index(order[:_PIECE_ROWS])))
    if len(order) <= _PIECE_ROWS:
        return
    group = cast(zarr.Group, parent[name])
    for column, values in _columns(table, group, names):
        for stored, rows_of in _arrays(group[column], values):
            stored.resize((len(order),))
            for start, stop in pieces(_PIECE_ROWS, len(order), _PIECE_ROWS):
                stored[start:stop] = rows_of(order[start:stop])


def _columns(table: pd.DataFrame, group: zarr.Group, names: StagedNames | None) -> Iterator[tuple[str, Any]]:
    """Yield the columns of a table and finally its index, each with its name in the group that AnnData writes."""
    for column, values in table.items():
        yield str(column), values.array
    yield str(group.attrs["_index"]), table.index.array if names is None else names


def _arrays(stored: Any, values: Any) -> list[tuple[zarr.Array[Any], Callable[[NDArray[np.int64]], NDArray[Any]]]]:
    """Return the stored arrays of a column, each with a function that returns its values for given rows."""
    encoding = str(stored.attrs["encoding-type"])
    if encoding == "categorical":
        return [(stored["codes"], values.codes.take)]
    if encoding.startswith("nullable-"):
        is_text = isinstance(values.dtype, pd.StringDtype)
        dtype, missing = (object, "") if is_text else (values.dtype.numpy_dtype, 0)
        return [
            (stored["mask"], lambda rows: np.asarray(values.take(rows).isna())),
            (stored["values"], lambda rows: values.take(rows).to_numpy(dtype=dtype, na_value=missing)),
        ]
    return [(stored, lambda rows: np.asarray(values.take(rows)))]


def _elements(adata: anndata.AnnData) -> Iterator[tuple[str, Any, bool]]:
    """Yield the key in the store and the value of each element, and True if it has one row per cell."""
    yield "obs", storable(adata.obs, "obs"), True
    yield "var", storable(adata.var, "var"), False
    for name in ("uns", "varm", "varp"):
        yield name, dict(getattr(adata, name)), False
    for name, element in adata.obsm.items():
        if isinstance(element, pd.DataFrame):
            yield f"obsm/{name}", storable(element, f"obsm/{name}"), True
        elif not isinstance(element, da.Array):
            yield f"obsm/{name}", element, True
    if adata.raw is not None:
        yield "raw/var", storable(adata.raw.var, "raw/var"), False
        yield "raw/varm", dict(adata.raw.varm), False


def check_obs(adata: anndata.AnnData, store: Path, order: NDArray[np.int64], names: StagedNames | None) -> None:
    """Compare the written obs with the obs of the input; raise `CorruptDataError` if it differs or cannot be read."""
    expected = storable(adata.obs, "obs")
    try:
        with as_anndata_writes():
            written = cast(zarr.Group, zarr.open_group(store, mode="r")["obs"])
            columns = list(_columns(expected, written, names))
            differing = [name for name, values in columns if not _is_written(written[name], values, order)]
            index = columns[-1][0]
            if names is not None and index not in differing and not names.match_input():
                differing.append(index)
            if list(cast(list[str], written.attrs["column-order"])) != list(expected.columns):
                differing.append("its columns")
    # The libraries may raise any exception on damaged metadata.
    except Exception as error:
        if not caused_by_data(error):
            raise
        what, cause = f"cannot be read back ({type(error).__name__}: {error})", error
    else:
        if not differing:
            return
        named = ", ".join("the names of the cells" if name == index else name for name in differing)
        what, cause = f"differs from the input in {named}", None
    raise CorruptDataError(
        f"{store}: obs {what}. The disk or memory may be failing. The written data are removed; convert again."
    ) from cause


def _is_written(stored: Any, values: Any, order: NDArray[np.int64]) -> bool:
    """Return True if a stored column equals `values` in the new order."""
    if isinstance(values, pd.Categorical):
        categories = np.asarray(read_elem(stored["categories"]))
        if not _equal(categories, values.categories.to_numpy()):
            return False
    return all(
        array.shape == order.shape
        and all(
            _equal(np.asarray(array[start:stop]), rows_of(order[start:stop]))
            for start, stop in pieces(0, len(order), _PIECE_ROWS)
        )
        for array, rows_of in _arrays(stored, values)
    )


def _equal(written: NDArray[Any], expected: NDArray[Any]) -> bool:
    if written.dtype.kind == "T":  # strings as Zarr reads them
        written = written.astype(object)
    return np.array_equal(written, expected, equal_nan=expected.dtype.kind in "fc")
