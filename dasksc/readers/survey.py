"""Opening of ``.h5ad`` files as parts of a large atlas: few calls of HDF5, for the usual encodings only.

Lists of genes and categories that an earlier file had are recognised by a digest of their bytes, without creating
strings. The result equals that of `AnnDataStore`, to which files with other encodings are left.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any
from weakref import WeakValueDictionary

import h5py
import numpy as np
import pandas as pd
from anndata.io import read_elem
from h5py import h5a, h5d, h5f, h5g, h5l, h5o, h5p, h5s, h5t
from numpy.typing import NDArray

from dasksc.readers.arrays import Lazy
from dasksc.readers.interface import Store
from dasksc.readers.names import dtype_of_nullable, nameless_index
from dasksc.readers.options import OpenOptions
from dasksc.storage import Matrix
from dasksc.storage.arrays import logical_dtype
from dasksc.storage.files import LocalFile
from dasksc.storage.hdf5.direct import direct_array, packed_strings, split_strings
from dasksc.storage.hdf5.reader import BlockReader
from dasksc.storage.matrices import CSRMatrix, DenseMatrix
from dasksc.storage.remote.remote_file import RemoteFile
from dasksc.storage.uncompressed import PlainArray

# Elements that are larger are compared with the memory of the process first, by `AnnDataStore`.
_MOST_ROWS = 2**22
_GROUPS = ("layers", "obsm")

_nameless = lru_cache(nameless_index)
_type_of = lru_cache(partial(h5t.py_create, logical=True))
_type_of_names = lru_cache(dtype_of_nullable)
_STRING = h5py.string_dtype()
_STRING_IN_MEMORY = h5t.py_create(_STRING)
_genes: WeakValueDictionary[tuple[bytes, str, Any], pd.DataFrame] = WeakValueDictionary()
_categories: WeakValueDictionary[bytes, pd.Index[Any]] = WeakValueDictionary()


class _OtherEncodingError(Exception):
    """The file needs `AnnDataStore`."""


class SurveyStore(Store):
    """HDF5 file whose usual elements are read; errors of any kind mean that `AnnDataStore` must open it."""

    def __init__(self, file: str | RemoteFile, options: OpenOptions, reader: BlockReader | None = None) -> None:
        self.options = options
        self.bytes: NDArray[np.uint8] | None = None
        if isinstance(file, RemoteFile):
            self.file: LocalFile | RemoteFile = file
            if file.content is None:
                self.id = h5py.File(reader or BlockReader(file), "r").id
            else:
                self.bytes = np.frombuffer(file.content, dtype=np.uint8)
                self.id = h5f.open_file_image(file.content)
        else:
            self.file = LocalFile.of(file, options.mmap)
            self.id = h5f.open(os.fsencode(file), h5f.ACC_RDONLY)
            if self.file.use_mmap is not False:
                with open(file, "rb") as opened:
                    self.bytes = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
        if self.id.get_create_plist().get_userblock():
            raise _OtherEncodingError

    def keys(self) -> list[str]:
        """Return the keys of the elements that joined atlases have."""
        names = _members(self.id)
        has_raw = "raw" in names
        if "mod" in names or any(name.startswith("raw.") for name in names):
            raise _OtherEncodingError
        if has_raw and not {"X", "var"} <= set(_members(h5g.open(self.id, b"raw"))):
            raise _OtherEncodingError
        found = [name for name in names if name in ("obs", "var", "X")]
        for group in _GROUPS:
            if group in names:
                found += [f"{group}/{name}" for name in _members(h5g.open(self.id, group.encode()))]
        return [*found, "raw/X", "raw/var"] if has_raw else found

    def columns(self, name: str) -> list[str]:
        order = _attribute(h5g.open(self.id, name.encode()), b"column-order")
        return [name.decode() if isinstance(name, bytes) else str(name) for name in order]

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Read columns of obs; tables of genes have none."""
        table = h5g.open(self.id, name.encode())
        if name != "obs":
            return self._var(table)
        return self._obs(table, self.columns(name) if columns is None else columns)

    def matrix(self, key: str) -> Lazy:
        return Lazy(matrix=self._matrix(key))

    def _obs(self, table: h5g.GroupID, columns: Sequence[str]) -> pd.DataFrame:
        index_key = _text(table, b"_index")
        # Names with slashes could lead through links.
        if _text(table, b"encoding-version") != "0.2.0" or not {index_key, *columns} <= set(_members(table)):
            raise _OtherEncodingError
        names, dtype = self._names(table, index_key)
        n = _length(names)
        index = pd.Index(_texts(*self._packed(names)), dtype=dtype) if self.options.has_names else _nameless(n)
        if index_key != "_index" and self.options.has_names:
            index = index.rename(index_key)
        if not columns:
            return pd.DataFrame(index=index, columns=[])
        return pd.DataFrame({name: self._column(table, name, n) for name in columns}, index=index, copy=False)

    def _var(self, table: h5g.GroupID) -> pd.DataFrame:
        """Return a table without columns, the same object if an earlier file had the same names."""
        index_key = _text(table, b"_index")
        if index_key not in _members(table):
            raise _OtherEncodingError
        names, dtype = self._names(table, index_key)
        packed, sizes = self._packed(names)
        key = (_digest(packed, sizes), index_key, dtype)
        known = _genes.get(key)
        if known is None:
            index = pd.Index(_texts(packed, sizes), dtype=dtype, name=None if index_key == "_index" else index_key)
            known = _genes[key] = pd.DataFrame(index=index, columns=[])
        return known

    def _names(self, table: h5g.GroupID, key: str) -> tuple[h5d.DatasetID, Any]:
        """Return the stored names of a table, and their data type in pandas (None: that of a list of strings)."""
        item = h5o.open(table, key.encode())
        if isinstance(item, h5d.DatasetID):
            return self._dataset(table, key), None
        if set(_members(item)) != {"values", "mask"} or _read(self._dataset(item, "mask")).any():
            raise _OtherEncodingError
        attributes = ("encoding-type", "encoding-version", "na-value")
        return self._dataset(item, "values"), _type_of_names(*(_text(item, name.encode()) for name in attributes))

    def _column(self, table: h5g.GroupID, name: str, n: int) -> Any:
        item = h5o.open(table, name.encode())
        if isinstance(item, h5g.GroupID):
            parts = {part: self._dataset(item, part) for part in _members(item)}
            if set(parts) == {"values", "mask"}:
                return read_elem(h5py.Group(item))
            codes = parts["codes"]
            if _length(codes) != n:
                raise _OtherEncodingError
            dtype = self._categories(parts["categories"], is_ordered=bool(_attribute(item, b"ordered")))
            return pd.Categorical.from_codes(_read(codes), dtype=dtype)
        values = self._dataset(table, name)
        if _length(values) != n:
            raise _OtherEncodingError
        if values.dtype.kind in "biuf" and _text(values, b"encoding-type") == "array":
            return _read(values)
        return read_elem(h5py.Dataset(values))

    def _categories(self, values: h5d.DatasetID, *, is_ordered: bool) -> pd.CategoricalDtype:
        if values.dtype.kind in "biuf":
            return pd.CategoricalDtype(_read(values), ordered=is_ordered)
        packed, sizes = self._packed(values)
        digest = _digest(packed, sizes)
        known = _categories.get(digest)
        if known is None:
            known = _categories[digest] = pd.CategoricalDtype(_texts(packed, sizes)).categories
        return pd.CategoricalDtype(known, ordered=is_ordered)

    def _packed(self, strings: h5d.DatasetID) -> tuple[bytes, NDArray[np.int64]]:
        """Return strings, concatenated, and their sizes in bytes."""
        kind = h5py.check_string_dtype(strings.dtype)
        if kind is None or kind.length is not None:
            raise _OtherEncodingError
        n, offset = _length(strings), strings.get_offset()
        if self.bytes is not None and offset is not None and strings.get_storage_size() == 16 * n:
            found = packed_strings(self.bytes, offset, n)
            if found is not None:
                return found
        raw = _read(strings)
        return b"".join(raw), np.fromiter(map(len, raw), dtype=np.int64, count=n)

    def _matrix(self, key: str) -> Matrix:
        label = f"{self.file.path}:/{key}"
        item = h5o.open(self.id, key.encode())
        if h5a.exists(item, b"dasksc"):
            raise _OtherEncodingError
        encoding = _text(item, b"encoding-type")
        if isinstance(item, h5d.DatasetID) and encoding == "array" and item.rank == 2 and item.dtype.kind in "biuf":
            values = self._array(item, label)
            return DenseMatrix(label=label, values=values, dtype=logical_dtype(values.dtype))
        if encoding != "csr_matrix" or not isinstance(item, h5g.GroupID):
            raise _OtherEncodingError
        _members(item)
        n_obs, n_vars = map(int, _attribute(item, b"shape"))
        indptr, indices, data = (
            self._array(h5d.open(item, name.encode()), f"{label}/{name}") for name in ("indptr", "indices", "data")
        )
        dtype = logical_dtype(data.dtype)
        return CSRMatrix(label=label, shape=(n_obs, n_vars), indptr=indptr, indices=indices, data=data, dtype=dtype)

    def _array(self, dataset: h5d.DatasetID, label: str) -> Any:
        dtype, shape, offset = dataset.dtype, dataset.shape, dataset.get_offset()
        plain = dtype.kind in "iuf" and dtype.isnative and dtype != np.float16 and len(shape) == 1
        plist = _own(dataset) if offset is None else None
        if plain and (plist is None or not plist.get_nfilters()):
            firsts, offsets = [0], [offset]
            if plist is not None and plist.get_layout() == h5d.CHUNKED:
                found: list[Any] = []
                dataset.chunk_iter(found.append)
                firsts = [one.chunk_offset[0] for one in found if one.chunk_offset[0] < shape[0]]
                offsets = [one.byte_offset for one in found[: len(firsts)]]
                if firsts != list(range(0, shape[0], plist.get_chunk()[0])):
                    offsets = [None]
            if None not in offsets and dataset.get_type().equal(_type_of(dtype)):
                return PlainArray(
                    label=label,
                    shape=shape,
                    dtype=dtype,
                    file=self.file,
                    firsts=np.array(firsts, dtype=np.int64),
                    offsets=np.array(offsets, dtype=np.int64),
                    fill=dtype.type(0),
                )
        return direct_array(self.file, h5py.Dataset(dataset), label=label, is_checked=True)

    def _dataset(self, parent: Any, name: str) -> h5d.DatasetID:
        """Return a dataset whose values lie in this file."""
        dataset = h5d.open(parent, name.encode())
        if dataset.get_offset() is None:
            _own(dataset)
        return dataset


def _own(dataset: h5d.DatasetID) -> h5p.PropDCID:
    """Return the properties of a dataset, whose values must lie in its file."""
    plist = dataset.get_create_plist()
    if plist.get_layout() not in (h5d.CHUNKED, h5d.CONTIGUOUS) or plist.get_external_count():
        raise _OtherEncodingError
    return plist


def _members(group: h5g.GroupID) -> list[str]:
    """Return the names in a group, whose links must not lead elsewhere."""
    found: dict[bytes, int] = {}
    group.links.iterate(lambda name, link: found.update({name: link.type}), info=True)
    if any(kind != h5l.TYPE_HARD for kind in found.values()):
        raise _OtherEncodingError
    return [name.decode() for name in found]


def _attribute(item: Any, name: bytes) -> Any:
    attribute = h5a.open(item, name)
    value = np.empty(attribute.shape, dtype=attribute.dtype)
    attribute.read(value)
    return value[()]


def _text(item: Any, name: bytes) -> str:
    """Return an attribute that is a string of variable length; for others, an error is raised."""
    value = np.empty((), dtype=_STRING)
    h5a.open(item, name).read(value, _STRING_IN_MEMORY)
    return str(value.item().decode())


def _length(dataset: h5d.DatasetID) -> int:
    shape = dataset.shape
    if len(shape) != 1 or shape[0] > _MOST_ROWS:
        raise _OtherEncodingError
    return int(shape[0])


def _read(dataset: h5d.DatasetID) -> NDArray[Any]:
    values = np.empty(dataset.shape, dtype=dataset.dtype)
    if values.size:
        dataset.read(h5s.ALL, h5s.ALL, values)
    return values


def _digest(packed: bytes, sizes: NDArray[np.int64]) -> bytes:
    return hashlib.blake2b(sizes.tobytes() + packed, digest_size=16).digest()


def _texts(packed: bytes, sizes: NDArray[np.int64]) -> NDArray[Any]:
    return np.array(split_strings(packed, sizes), dtype=object)
