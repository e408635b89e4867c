"""Opening of local ``.h5ad`` files as parts of a large atlas: few calls of HDF5, for the usual encodings only.

One walk over the links of a file finds its elements. Lists of genes and categories that an earlier file had are
recognised by a digest of their bytes, without creating strings. The result equals that of `AnnDataStore`, to which
files with other encodings are left.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import h5py
import numpy as np
import pandas as pd
from anndata.io import read_elem
from h5py import h5a, h5d, h5f, h5g, h5l, h5o, h5s, h5t
from numpy.typing import NDArray

from dasksc.kernels import strings as kernels
from dasksc.readers.arrays import Lazy
from dasksc.readers.names import nameless_index
from dasksc.readers.options import OpenOptions
from dasksc.storage import Matrix
from dasksc.storage.arrays import UnknownLayoutError, caused_by_data, logical_dtype
from dasksc.storage.file_identity import FileIdentity
from dasksc.storage.files import LocalFile, can_map
from dasksc.storage.hdf5.layout import direct_array
from dasksc.storage.hdf5.strings import strings_at
from dasksc.storage.matrices import CSRMatrix, DenseMatrix
from dasksc.storage.uncompressed import PlainArray

__all__ = ["Survey", "surveyed"]

# Elements that are larger are compared with the memory of the process first, by `AnnDataStore`.
_MOST_ROWS = 2**22
_GROUPS = ("layers", "obsm")

# A folder is on one file system, unless its files are links.
_can_map = lru_cache(can_map)
_nameless = lru_cache(nameless_index)
_lists: WeakValueDictionary[bytes, pd.Index[Any]] = WeakValueDictionary()
_dtypes: WeakValueDictionary[tuple[bytes, bool], pd.CategoricalDtype] = WeakValueDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Elements of a file that joined atlases have; tables of genes have no columns."""

    obs: pd.DataFrame
    columns: Sequence[str]  # All columns of obs
    var: pd.DataFrame
    matrices: dict[str, Lazy] = field(default_factory=dict)  # X, raw/X, and entries of layers and obsm, by key
    raw_var: pd.DataFrame | None = None


class _OtherEncodingError(Exception):
    """The file needs `AnnDataStore`."""


def surveyed(path: str, obs: Sequence[str] | None, options: OpenOptions) -> Survey | None:
    """Open a local HDF5 file, which may lack columns; None if it needs `AnnDataStore`, which also reports errors."""
    try:
        return _File(path, options).survey(obs)
    except (_OtherEncodingError, UnknownLayoutError):
        return None
    except Exception as error:
        if not caused_by_data(error):
            raise
        return None


class _File:
    def __init__(self, path: str, options: OpenOptions) -> None:
        self.path = path
        self.options = options
        self.local = LocalFile(FileIdentity.of(path))
        self.can_map = _can_map(os.path.dirname(path))
        self.id = h5f.open(os.fsencode(path), h5f.ACC_RDONLY)
        self.names: dict[str, None] = {}

        def look(name: bytes, link: Any) -> bool | None:
            self.names[name.decode()] = None
            return None if link.type == h5l.TYPE_HARD else True

        # Links may lead to other files.
        if self.id.links.visit(look, info=True):
            raise _OtherEncodingError
        if self.id.get_create_plist().get_userblock():
            raise _OtherEncodingError
        self.bytes: NDArray[np.uint8] | None = None
        if self.can_map and options.mmap is not False:
            with open(path, "rb") as file:
                self.bytes = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)

    def survey(self, wanted: Sequence[str] | None) -> Survey:
        names = self.names
        if "obs" not in names or "var" not in names or "mod" in names or any(name.startswith("raw.") for name in names):
            raise _OtherEncodingError
        table = self._group("obs")
        columns = _strings(_attribute(table, b"column-order"))
        obs = self._table("obs", table, columns if wanted is None else [name for name in wanted if name in columns])
        found = [name for name in names if name == "X" or (name.partition("/")[0] in _GROUPS and name.count("/") == 1)]
        raw_var = None
        if "raw" in names:
            if "raw/X" not in names or "raw/var" not in names:
                raise _OtherEncodingError
            found.append("raw/X")
            raw_var = self._table("raw/var", self._group("raw/var"), [])
        return Survey(
            obs=obs,
            columns=columns,
            var=self._table("var", self._group("var"), []),
            matrices={name: Lazy(matrix=self._matrix(name)) for name in found},
            raw_var=raw_var,
        )

    # --- Tables -------------------------------------------------------------------------------------------

    def _table(self, key: str, table: h5g.GroupID, columns: Sequence[str]) -> pd.DataFrame:
        if key == "obs" and _attribute(table, b"encoding-version") != "0.2.0":
            raise _OtherEncodingError
        index_key = str(_attribute(table, b"_index"))
        names = self._dataset(table, index_key)
        n = _length(names)
        read = {name: self._column(key, table, name, n) for name in columns}
        if key != "obs":
            index = self._list(names)
        elif self.options.has_names:
            index = pd.Index(self._strings(names)[1])
        else:
            index = _nameless(n)
        result = pd.DataFrame(read, index=index, columns=list(columns), copy=False)
        if index_key != "_index" and (key != "obs" or self.options.has_names):
            result.index = result.index.rename(index_key)
        return result

    def _column(self, key: str, table: h5g.GroupID, name: str, n: int) -> Any:
        text = name.encode()
        if f"{key}/{name}/codes" in self.names:
            group = h5g.open(table, text)
            codes = self._dataset(group, "codes")
            values = self._dataset(group, "categories")
            if _length(codes) != n:
                raise _OtherEncodingError
            dtype = self._categories(values, is_ordered=bool(_attribute(group, b"ordered")))
            return pd.Categorical.from_codes(_read(codes), dtype=dtype)
        if f"{key}/{name}/" in self.names or not isinstance(item := h5o.open(table, text), h5d.DatasetID):
            return read_elem(h5py.Group(table)[name])
        values = self._dataset(table, name)
        if _length(values) != n:
            raise _OtherEncodingError
        if _attribute(values, b"encoding-type") == "array" and values.dtype.kind in "biuf":
            return _read(values)
        return read_elem(h5py.Dataset(item))

    def _categories(self, values: h5d.DatasetID, *, is_ordered: bool) -> pd.CategoricalDtype:
        if values.dtype.kind != "O":
            return pd.CategoricalDtype(_read(values), ordered=is_ordered)
        digest, names = self._strings(values)
        known = _dtypes.get((digest, is_ordered))
        if known is None:
            known = _dtypes[digest, is_ordered] = pd.CategoricalDtype(names, ordered=is_ordered)
        return known

    def _list(self, names: h5d.DatasetID) -> pd.Index[Any]:
        """Return names of genes, as the same object if an earlier file had the same names."""
        self._check_strings(names)
        places = self._places(names)
        digest, read = self._strings(names) if places is None else (_digest(places[1], places[2]), None)
        known = _lists.get(digest)
        if known is None:
            if places is not None:
                assert self.bytes is not None
                read = np.array(strings_at(self.bytes, *places[:2]), dtype=object)
            known = _lists[digest] = pd.Index(read)
        return known

    def _places(self, names: h5d.DatasetID) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None:
        """Return starts, sizes and concatenated bytes of strings; None if the file is not mapped."""
        offset = names.get_offset()
        n = _length(names)
        if self.bytes is None or offset is None or names.get_storage_size() != 16 * n:
            return None
        references = self.bytes[offset : offset + 16 * n]
        starts, sizes = np.empty((2, n), dtype=np.int64)
        if (
            len(references) < 16 * n
            or kernels.locate_strings(references.reshape(n, 16), self.bytes, starts, sizes) >= 0
        ):
            return None
        packed = np.empty(int(sizes.sum()), dtype=np.uint8)
        kernels.copy_strings(self.bytes, starts, sizes, packed)
        return starts, sizes, packed

    def _check_strings(self, dataset: h5d.DatasetID) -> None:
        kind = h5py.check_string_dtype(dataset.dtype)
        if kind is None or kind.length is not None:
            raise _OtherEncodingError

    def _strings(self, dataset: h5d.DatasetID) -> tuple[bytes, NDArray[Any]]:
        """Return a digest of strings, and the strings."""
        self._check_strings(dataset)
        raw = _read(dataset)
        sizes = np.fromiter(map(len, raw), dtype=np.int64, count=len(raw))
        packed = b"".join(raw)
        return _digest(sizes, packed), np.array([one.decode("utf-8", "surrogateescape") for one in raw], dtype=object)

    # --- Matrices -----------------------------------------------------------------------------------------

    def _matrix(self, key: str) -> Matrix:
        label = f"{self.path}:/{key}"
        item = h5o.open(self.id, key.encode())
        if h5a.exists(item, b"dasksc"):
            raise _OtherEncodingError
        encoding = _attribute(item, b"encoding-type")
        if isinstance(item, h5d.DatasetID) and encoding == "array" and item.rank == 2 and item.dtype.kind in "biuf":
            values = self._array(item, label)
            return DenseMatrix(label=label, values=values, dtype=logical_dtype(values.dtype))
        if encoding != "csr_matrix" or not isinstance(item, h5g.GroupID):
            raise _OtherEncodingError
        n_obs, n_vars = map(int, _attribute(item, b"shape"))
        indptr, indices, data = (
            self._array(self._dataset(item, name), f"{label}/{name}") for name in ("indptr", "indices", "data")
        )
        dtype = logical_dtype(data.dtype)
        return CSRMatrix(label=label, shape=(n_obs, n_vars), indptr=indptr, indices=indices, data=data, dtype=dtype)

    def _array(self, dataset: h5d.DatasetID, label: str) -> Any:
        use_mmap = self.options.mmap if self.can_map else False
        dtype = dataset.dtype
        plain = dtype.kind in "iuf" and dtype.isnative and dtype != np.float16
        plist = dataset.get_create_plist()
        if plain and not plist.get_nfilters() and dataset.rank == 1:
            n = dataset.shape[0]
            if plist.get_layout() == h5d.CONTIGUOUS:
                firsts, offsets = [0], [dataset.get_offset()]
            else:
                found: list[Any] = []
                dataset.chunk_iter(found.append)
                firsts = [one.chunk_offset[0] for one in found if one.chunk_offset[0] < n]
                offsets = [one.byte_offset for one in found[: len(firsts)]]
                length = plist.get_chunk()[0]
                if firsts != list(range(0, n, length)):
                    offsets = [None]
            if None not in offsets and dataset.get_type().equal(h5t.py_create(dtype, logical=True)):
                return PlainArray(
                    label=label,
                    shape=(n,),
                    dtype=dtype,
                    file=self.local,
                    firsts=np.array(firsts, dtype=np.int64),
                    offsets=np.array(offsets, dtype=np.int64),
                    fill=dtype.type(0),
                    use_mmap=use_mmap,
                )
        return direct_array(self.local, h5py.Dataset(dataset), label=label, use_mmap=use_mmap, is_checked=True)

    def _group(self, key: str) -> h5g.GroupID:
        return h5g.open(self.id, key.encode())

    def _dataset(self, parent: Any, name: str) -> h5d.DatasetID:
        """Return a dataset whose values lie in this file."""
        dataset = h5d.open(parent, name.encode())
        plist = dataset.get_create_plist()
        if plist.get_layout() not in (h5d.CHUNKED, h5d.CONTIGUOUS) or plist.get_external_count():
            raise _OtherEncodingError
        return dataset


def _attribute(item: Any, name: bytes) -> Any:
    """Return an attribute of an object of HDF5; None if there is none."""
    if not h5a.exists(item, name):
        return None
    attribute = h5a.open(item, name)
    value = np.empty(attribute.shape, dtype=attribute.dtype)
    attribute.read(value)
    return value[()] if attribute.shape else _text(value[()])


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _strings(values: Any) -> list[str]:
    return [str(_text(value)) for value in values]


def _length(dataset: h5d.DatasetID) -> int:
    if dataset.rank != 1 or dataset.shape[0] > _MOST_ROWS:
        raise _OtherEncodingError
    return int(dataset.shape[0])


def _read(dataset: h5d.DatasetID) -> NDArray[Any]:
    values = np.empty(dataset.shape, dtype=dataset.dtype)
    if values.size:
        dataset.read(h5s.ALL, h5s.ALL, values)
    return values


def _digest(sizes: NDArray[np.int64], packed: Any) -> bytes:
    digest = hashlib.blake2b(sizes.tobytes(), digest_size=16)
    digest.update(packed)
    return digest.digest()
