"""Tables and other elements of a store, except matrices with one row per cell."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
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

__all__ = ["check_obs", "check_tables", "write_tables"]

_LOST = "The disk or memory may be failing. The written data are removed; convert again."
# Number of names that are reordered and written at a time.
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
    """Write a table with one row per cell in a new order; memory holds a column, or a piece of the names, at a time."""
    empty = table.iloc[:0]
    write_elem(parent, name, empty if names is None else empty.set_axis(names.take(order[:0])))
    group = cast(zarr.Group, parent[name])
    for column, values in table.items():
        write_elem(group, str(column), values.iloc[order].values)
    index: Any = table.index if names is None else names
    key = str(group.attrs["_index"])
    write_elem(group, key, index.take(order[:_PIECE_ROWS]).values)
    element: Any = group[key]
    # AnnData stores a nullable type as a group of two arrays.
    is_group = isinstance(element, zarr.Group)
    arrays: Any = {"values": np.asarray, "mask": pd.isna} if is_group else {"": np.asarray}
    for part, values_of in arrays.items():
        stored = element[part] if part else element
        stored.resize((len(order),))
        for start, stop in pieces(_PIECE_ROWS, len(order), _PIECE_ROWS):
            stored[start:stop] = values_of(index.take(order[start:stop]).values)


def check_obs(expected: pd.DataFrame, store: Path, order: NDArray[np.int64], names: StagedNames | None) -> None:
    """Compare the written obs with that of the input; raise `CorruptDataError` if it differs or cannot be read."""
    try:
        with as_anndata_writes():
            written = cast(zarr.Group, zarr.open_group(store, mode="r")["obs"])
            index = str(written.attrs["_index"])
            columns: list[tuple[Any, Any]] = list(expected.items())
            columns += [(index, expected.index.to_series())] if names is None else []
            differing = [
                str(name)
                for name, values in columns
                if not _equal(read_elem(written[str(name)]), values.iloc[order].values)
            ]
            if names is not None and not (_are_written(written[index], names, order) and names.match_input()):
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


def _are_written(element: Any, names: StagedNames, order: NDArray[np.int64]) -> bool:
    stored: Any = element if isinstance(element, zarr.Array) else element["values"]
    return stored.shape == order.shape and all(
        _equal(np.asarray(stored[start:stop]), names.take(order[start:stop]).values)
        for start, stop in pieces(0, len(order), _PIECE_ROWS)
    )


def _equal(written: Any, expected: Any) -> bool:
    """Return True if two columns have the same values, whose types may differ."""
    if isinstance(expected, pd.Categorical):
        same_labels = np.array_equal(written.categories, expected.categories)
        return same_labels and np.array_equal(written.codes, expected.codes)
    known = ~pd.isna(expected)
    return np.array_equal(~pd.isna(written), known) and np.array_equal(
        np.asarray(written[known]).astype(object), np.asarray(expected[known]).astype(object)
    )
