"""Tables and other elements of a store, except matrices with one row per cell."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import zarr
from anndata.io import read_elem, write_elem
from numpy.typing import NDArray
from zarr.storage import MemoryStore

from dasksc.conversion.contents import ADVICE, Contents
from dasksc.conversion.names import StagedNames
from dasksc.conversion.scanning import pieces
from dasksc.errors import CorruptDataError, InputError
from dasksc.output.elements import as_anndata_writes, write_group
from dasksc.storage import caused_by_data

_LOST = "The disk or memory may be failing. The written data are removed; convert again."
# Number of rows of a column that are reordered and written at a time.
_PIECE_ROWS = 2**20


def check_tables(contents: Contents, names: StagedNames | None) -> None:
    """Check that AnnData can write the tables and uns, by writing uns and one row of each table to memory."""
    with as_anndata_writes():
        for key, element in (contents.cells | contents.others).items():
            if isinstance(element, pd.DataFrame):
                element = element.iloc[:1]
                if key in contents.cells and names is not None:
                    element = element.set_axis(names.first())
            elif key != "uns":
                continue
            try:
                write_elem(zarr.open_group(MemoryStore(), mode="w", zarr_format=3), key.replace("/", " "), element)
            # AnnData and the libraries that it writes with may raise any exception.
            except Exception as error:
                if not caused_by_data(error):
                    raise
                # AnnData's note names the column.
                what = ". ".join([str(error), *getattr(error, "__notes__", ())])
                raise InputError(f"{key} cannot be written by AnnData: {what}. {ADVICE}") from error


def write_tables(
    contents: Contents,
    folder: Path,
    store: Path,
    order: NDArray[np.int64],
    how: Mapping[str, Any],
    names: StagedNames | None,
) -> None:
    """Write everything but the matrices, by way of `folder`, then the metadata; `how` describes `order`."""
    shutil.rmtree(folder, ignore_errors=True)
    with as_anndata_writes():
        written = zarr.open_group(folder, mode="w", zarr_format=3)
        for i, (key, element) in enumerate((contents.cells | contents.others).items()):
            if key not in contents.cells:
                write_elem(written, str(i), element)
            elif isinstance(element, pd.DataFrame):
                _write_in_order(written, str(i), element, order, names)
            else:
                write_elem(written, str(i), element[order])
            shutil.rmtree(store / key, ignore_errors=True)
            (store / key).parent.mkdir(parents=True, exist_ok=True)
            os.rename(folder / str(i), store / key)
        for group in ("layers", "obsm", "obsp"):
            write_group(store / group, {"encoding-type": "dict", "encoding-version": "0.1.0"})
        if "raw/var" in contents.others:
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


def check_obs(expected: pd.DataFrame, store: Path, order: NDArray[np.int64], names: StagedNames | None) -> None:
    """Compare the written obs with that of the input; raise `CorruptDataError` if it differs or cannot be read."""
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
        raise CorruptDataError(
            f"{store}: obs cannot be read back ({type(error).__name__}: {error}). {_LOST}"
        ) from error
    if differing:
        named = ", ".join("the names of the cells" if name == index else name for name in differing)
        raise CorruptDataError(f"{store}: obs differs from the input in {named}. {_LOST}")


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
