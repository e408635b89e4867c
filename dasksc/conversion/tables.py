"""Tables and other elements of a store, except matrices with one row per cell."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import zarr
from anndata.io import read_elem, write_elem
from numpy.typing import NDArray
from zarr.storage import MemoryStore

from dasksc.atlas.inputs import atlas_inputs
from dasksc.atlas.stored import path_names
from dasksc.conversion.contents import ADVICE, Contents
from dasksc.conversion.scanning import pieces
from dasksc.errors import CorruptDataError, InputError
from dasksc.output.work_folder import as_anndata_writes, atomic_array, atomic_path, mapped_array
from dasksc.readers.names import any_equal
from dasksc.readers.options import OpenOptions, where_of
from dasksc.readers.registry import opened
from dasksc.storage import caused_by_data
from dasksc.storage.hdf5.direct import strings_at

_LOST = "The disk or memory may be failing. The written data are removed; convert again."
# Number of rows of a column that are reordered and written at a time.
_PIECE_ROWS = 2**20


@dataclass(slots=True, kw_only=True)
class StagedNames:
    """Names of the cells of files and stores; memory holds a piece of them."""

    paths: tuple[str, ...]  # in the order of their cells
    options: OpenOptions
    name: str | None  # of the index that `open` returns
    dtype: Any  # of this index
    folder: Path
    rows: NDArray[np.int64] | None = None  # the cells to convert, ascending; None for all

    @classmethod
    def of(cls, data: Any, options: OpenOptions, folder: Path) -> StagedNames | None:
        """Return the names of one or several atlases, or None if they can only be read as a whole."""
        # Names cannot be read in pieces if they are in an AnnData, in files of old formats or of other programs, or in
        # several files whose names have different types.
        parts = atlas_inputs(data, options.storage_options)
        given = [data] if parts is None else [one for _, one in parts]
        if not all(isinstance(one, str | os.PathLike) for one in given):
            return None
        paths = tuple(map(os.fspath, given))
        types = set()
        for path in paths:
            with opened(where_of(path, options), options) as store:
                types.add(None if store.modalities() else store.names_type())
        found = types.pop() if len(types) == 1 else None
        return (
            None if found is None else cls(paths=paths, options=options, name=found[0], dtype=found[1], folder=folder)
        )

    def write(self, n: int) -> bool:
        """Write the files with all `n` names; return True if two names have the same hash."""
        hashes = np.empty(n, dtype=np.int64)
        start = n_bytes = 0
        with (
            atomic_array(self.folder / "offsets.npy", np.int64, n + 1) as offsets,
            atomic_path(self.folder / "text") as path,
            path.open("wb") as file,
        ):
            for names in self._pieces():
                stop = start + len(names)
                encoded = [name.encode("utf-8", "surrogateescape") for name in names]
                hashes[start:stop] = np.fromiter(map(hash, names), dtype=np.int64, count=len(names))
                offsets[start + 1 : stop + 1] = n_bytes + np.cumsum(list(map(len, encoded)), dtype=np.int64)
                start, n_bytes = stop, n_bytes + file.write(b"".join(encoded))
        return any_equal(hashes)

    def take(self, rows: NDArray[np.int64]) -> Any:
        return self.index(rows).array

    def index(self, rows: NDArray[np.int64]) -> pd.Index[Any]:
        """Return the names of rows in any order, as an index of the type that `dasksc.open` returns."""
        offsets = mapped_array(self.folder / "offsets.npy")
        starts = offsets[rows]
        # An empty file cannot be mapped.
        text = np.memmap(self.folder / "text", mode="r") if offsets[-1] else np.empty(0, dtype=np.uint8)
        return self._index(strings_at(np.asarray(text), starts, offsets[rows + 1] - starts))

    def _index(self, names: Sequence[str]) -> pd.Index[Any]:
        return pd.Index(names, name=self.name, dtype=self.dtype)

    def match_input(self) -> bool:
        """Read the names of the input again; return True if the files hold the same names."""
        start = 0
        for names in self._pieces():
            if self.take(np.arange(start, start + len(names))).tolist() != names:
                return False
            start += len(names)
        return True

    def first(self) -> pd.Index[Any]:
        """Return an index with the first name to convert, empty if there are no cells."""
        return self._index(next(filter(None, self._pieces()), [])[:1])

    def _pieces(self) -> Iterator[list[str]]:
        start = 0
        for names in (piece for path in self.paths for piece in path_names(path, self.options)):
            stop = start + len(names)
            if self.rows is None:
                yield names
            else:
                first, end = np.searchsorted(self.rows, [start, stop])
                yield [names[row] for row in (self.rows[first:end] - start).tolist()]
            start = stop


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
        encodings = {"layers": "dict", "obsm": "dict", "obsp": "dict", "": "anndata"}
        encodings |= {"raw": "raw"} if "raw/var" in contents.others else {}
        for group, encoding in encodings.items():
            attributes: dict[str, Any] = {"encoding-type": encoding, "encoding-version": "0.1.0"}
            zarr.open_group(store / group, zarr_format=3, attributes=attributes)
        zarr.open_group(store, zarr_format=3).attrs["dasksc"] = dict(how)
        zarr.consolidate_metadata(store)


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
