"""Reading of obs and var, by column or as AnnData stored them before version 0.7, and a check of their sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import h5py
import numpy as np
import pandas as pd
import zarr
from anndata.io import read_elem
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError, StorageError
from dasksc.memory import memory_limit
from dasksc.readers.arrays import is_group
from dasksc.readers.names import nameless_index, read_names
from dasksc.storage import RemoteLocation, UseMmap
from dasksc.storage.hdf5.reader import check_filters, check_item
from dasksc.storage.opening import attribute

# Number of bytes by which a chunk may be larger than its array: a chunk is decoded at its full shape, even if the array
# is smaller. Total sizes up to this number are not compared with the memory.
_ROOM_BYTES = 2**30


def read_table(
    stored: Any, columns: Sequence[str] | None, path: str | RemoteLocation, *, has_names: bool, mmap: UseMmap
) -> pd.DataFrame:
    """Read a table; only `columns`, if the encoding stores columns separately."""
    version = attribute(stored.attrs, "encoding-version")
    if version != "0.2.0" and (columns is None or version == "0.1.0"):
        table = read_elem(stored)
        return table if has_names else table.set_axis(nameless_index(len(table)))
    index_key = attribute(stored.attrs, "_index")
    kept = column_order(stored) if columns is None else columns
    if has_names:
        index = read_names(stored[index_key], path, mmap=mmap)
    else:
        names = stored[index_key]
        if is_group(names):  # of categorical or nullable strings
            names = next(names[part] for part in ("codes", "values") if part in names)
        index = nameless_index(names.shape[0])
    table = pd.DataFrame({name: read_elem(stored[name]) for name in kept}, index=index, columns=kept)
    if index_key != "_index" and has_names:
        table.index.name = index_key
    return table


def parts_of_table(stored: Any, columns: Sequence[str] | None, *, has_names: bool) -> list[Any]:
    """Return the parts of a table to read: `columns` (None: all) and, if names are read, the index."""
    # If the table is read as a whole, the list holds only the table itself.
    is_whole = columns is None and has_names
    if is_whole or not is_group(stored) or attribute(stored.attrs, "encoding-version") == "0.1.0":
        return [stored]
    index_key = attribute(stored.attrs, "_index")
    wanted = set(stored if columns is None else columns) - {index_key} | ({index_key} if has_names else set())
    return [stored[name] for name in stored if name in wanted]


def column_order(stored: Any) -> list[str]:
    """Return the columns of a stored table, in order; the first field of a record array is the name."""
    if is_record_array(stored):
        return list(stored.dtype.names)[1:]
    return as_strings(stored.attrs["column-order"])


def as_strings(names: Iterable[Any]) -> list[str]:
    """Return names as strings, also those of a fixed size."""
    return [name.decode() if isinstance(name, bytes) else str(name) for name in names]


def is_record_array(stored: Any) -> bool:
    """Return True if a stored element is an array of records, the old layout of tables and mappings."""
    return isinstance(stored, h5py.Dataset | zarr.Array) and stored.dtype.names is not None


def table_of_records(stored: Any) -> pd.DataFrame:
    """Read obs or var from an array of records, one per row; the first field is the name."""
    records = stored[()]
    table = pd.DataFrame({name: _decoded(records[name]) for name in records.dtype.names})
    return table.set_index(table.columns[0])


def entry_of_records(stored: Any, field: str) -> NDArray[Any]:
    """Read an entry of obsm or varm from an array of records, one per row; each field is an entry."""
    array = np.ascontiguousarray(stored[()][field])
    return array[:, None] if array.ndim == 1 else array


def decode_old_categories(tables: list[pd.DataFrame], uns: dict[str, Any]) -> list[pd.DataFrame]:
    """Decode categoricals stored as codes in the table and ``"<name>_categories"`` in uns."""
    suffix = "_categories"
    for key in [key for key in uns if key.endswith(suffix)]:
        name, categories = key.removesuffix(suffix), np.atleast_1d(uns[key])
        for table in tables:
            if name in table and (table[name] < len(categories)).all():
                table[name] = pd.Categorical.from_codes(table[name].to_numpy(), categories)
                uns.pop(key, None)
    return tables


def _decoded(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8").astype(object)
    if values.dtype.kind == "O":
        return np.array([v.decode() if isinstance(v, bytes) else v for v in values], dtype=object)
    return values


class ReadSizes:
    """Declared sizes of the elements that are read from a file or store, compared with the memory of the process."""

    def __init__(self, path: str | RemoteLocation) -> None:
        self._path = path
        self._sizes: dict[str, int] = {}

    def check(self, name: str, items: Sequence[Any]) -> None:
        """Refuse an element that links outside the folder, or that exceeds memory with those checked before."""
        self._sizes[name] = sum(_nbytes(array) for item in items for array in _arrays_in(item, self._path))
        n_bytes, largest = sum(self._sizes.values()), max(self._sizes, key=self._sizes.__getitem__)
        if n_bytes > _ROOM_BYTES and n_bytes > (memory := memory_limit().n_bytes):
            raise StorageError(
                f"{self._path} has {n_bytes} bytes in the elements to read ({self._sizes[largest]} of them in "
                f"{largest}), but this process may use only {memory} bytes of memory. Read only the obs columns you "
                "need: obs=[...]. If you expected less data in this file, it is probably corrupt."
            )


def _arrays_in(stored: Any, path: str | RemoteLocation) -> Iterator[Any]:
    """Yield the arrays of a stored element, including those that permitted HDF5 links lead to."""
    if isinstance(stored, h5py.Group | h5py.Dataset) and not isinstance(path, RemoteLocation):
        check_item(stored, path)
    if not is_group(stored):
        if stored.chunks and math.prod(stored.chunks) * _item_bytes(stored) > _nbytes(stored) + _ROOM_BYTES:
            raise CorruptDataError(
                f"{path}:{stored.name} has shape {stored.shape} and is stored in chunks of {stored.chunks}, which are "
                "far too large for its shape. The file is corrupt; write it again from its source."
            )
        if isinstance(stored, h5py.Dataset):
            check_filters(stored, f"{path}:{stored.name}")
        yield stored
        return
    for name in stored:
        yield from _arrays_in(stored[name], path)


def _nbytes(array: Any) -> int:
    return math.prod(array.shape or ()) * _item_bytes(array)  # a null dataset of HDF5 has no shape


def _item_bytes(array: Any) -> int:
    return int(np.dtype(getattr(array.dtype, "numpy_dtype", array.dtype)).itemsize)
