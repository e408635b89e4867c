"""AnnData and MuData in a group of HDF5 or Zarr, of any version of the format."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import h5py
import numpy as np
import pandas as pd
import zarr
from anndata.io import read_elem

from dasksc.errors import StorageError
from dasksc.readers.arrays import is_group, is_lazy_matrix
from dasksc.readers.interface import Store, StoredMatrix
from dasksc.readers.names import names_in_pieces, stored_names, stored_names_type
from dasksc.readers.options import OpenOptions
from dasksc.readers.tables import (
    ReadSizes,
    as_strings,
    column_order,
    decode_old_categories,
    entry_of_records,
    is_record_array,
    parts_of_table,
    read_table,
    table_of_records,
)
from dasksc.storage import RemoteLocation, is_url, open_matrix
from dasksc.storage.hdf5.reader import H5File, check_item
from dasksc.storage.opening import attribute, matrix_in
from dasksc.storage.remote.urls import ZARR_MARKERS
from dasksc.storage.zarr.reader import ZarrFile, is_zip, members_of

# Elements of AnnData; each of the groups has entries.
_SINGLE, _GROUPS = ("X", "obs", "var", "uns"), ("layers", "obsm", "obsp", "varm", "varp")
_HDF5_FILTERS = {1: "gzip", 2: "shuffle", 32000: "lzf", 32001: "blosc", 32004: "lz4", 32015: "zstd", 32026: "blosc2"}


class AnnDataStore(Store):
    """Atlas in a group of an open file or store; matrices and tables share the open file."""

    def __init__(
        self,
        path: str | RemoteLocation,
        file: H5File | ZarrFile,
        root: Any,
        options: OpenOptions,
        sizes: ReadSizes | None = None,
    ) -> None:
        self._path = path
        self._file = file
        self._root = root
        self._options = options
        self._sizes = ReadSizes(path) if sizes is None else sizes
        self.attributes = root.attrs

    def keys(self) -> list[str]:
        """Return the keys of the elements that AnnData knows."""
        root = self._root
        found = [name for name in _SINGLE if name in root]
        found += [f"{group}/{name}" for group in _GROUPS if group in root for name in _entries(root[group])]
        for name in ("X", "var", "varm"):
            stored = self._stored_raw(name)
            if stored is not None:
                found += [f"raw/varm/{key}" for key in _entries(stored)] if name == "varm" else [f"raw/{name}"]
        return found

    def columns(self, name: str) -> list[str]:
        return column_order(self._stored(name))

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Read the requested columns of a table, or the whole table if the encoding does not separate columns."""
        return self._table(name, columns, has_names=self._options.has_names or name != "obs")

    def _table(self, name: str, columns: Sequence[str] | None, *, has_names: bool) -> pd.DataFrame:
        stored = self._stored(name)
        self._sizes.check(name, parts_of_table(stored, columns, has_names=has_names))
        if is_record_array(stored):
            tables, _ = self._old
            table = tables[name] if name in tables else table_of_records(stored)
            return table.copy(deep=False)
        return read_table(stored, columns, self._path, has_names=has_names, mmap=self._options.mmap)

    def matrix(self, key: str) -> Any:
        """Open a matrix; read an element that is not a numeric matrix."""
        stored = self._stored(key)
        if isinstance(stored, np.ndarray) or not is_lazy_matrix(stored):
            return self._read(key, stored)
        path = self._path
        if isinstance(path, str) and isinstance(stored, h5py.HLObject):
            check_item(stored, path)
            holder = str(stored.file.filename)
            if holder != path:  # a link leads to another file
                return open_matrix(os.path.abspath(holder), stored.name, use_mmap=self._options.mmap)
        return matrix_in(self._file, stored.name)

    def value(self, key: str) -> Any:
        if key != "uns":
            return self._read(key, self._stored(key))
        self._sizes.check(key, [self._root["uns"]])
        return self._old[1] if is_record_array(self._root["obs"]) else self._uns()

    def names(self) -> Iterator[Sequence[str]]:
        """Read the names of the cells in pieces, if their encoding allows it."""
        pieces = stored_names(self._root["obs"], self._path)
        return names_in_pieces(self._table("obs", [], has_names=True).index) if pieces is None else pieces

    def names_type(self) -> tuple[str | None, Any] | None:
        """Return the type of the index of obs, if the names can be read in pieces."""
        stored = self._root["obs"]
        found = stored_names_type(stored, self._path)
        if found is not None:
            self._sizes.check("obs", parts_of_table(stored, [], has_names=True))
        return found

    def description(self) -> Iterator[StoredMatrix]:
        for key in self.keys():
            if key in ("X", "raw/X") or key.startswith(("layers/", "obsm/")):
                stored = self._stored(key)
                if not isinstance(stored, np.ndarray):
                    yield from described(key, stored)

    def close(self) -> None:
        """Close the file, which matrices open again where they read through the library."""
        if isinstance(self._file, H5File):
            self._file.close()

    def _stored(self, key: str) -> Any:
        """Return the element at a key, as the library represents it; an entry of a record array as an array."""
        group, _, name = key.rpartition("/")
        if group == "raw":
            return self._stored_raw(name)
        parent = self._stored_raw("varm") if group == "raw/varm" else self._root[group] if group else self._root
        return entry_of_records(parent, name) if is_record_array(parent) else parent[name]

    def _stored_raw(self, name: str) -> Any:
        """Return an element of raw, which AnnData before 0.7 stored next to X; None if there is none."""
        if "raw" not in self._root:
            return self._root.get(f"raw.{name}")
        raw = self._root["raw"]
        return raw[name] if not _is_null(raw) and name in raw else None

    def _read(self, key: str, stored: Any) -> Any:
        if isinstance(stored, np.ndarray):
            return stored
        if _is_null(stored):
            return None
        self._sizes.check(key, [stored])
        return read_elem(stored)

    def _uns(self) -> dict[str, Any]:
        stored = self._root.get("uns")
        return {} if stored is None or _is_null(stored) else {key: read_elem(stored[key]) for key in stored}

    @cached_property
    def _old(self) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
        """Tables and uns of AnnData before 0.7, which kept the labels of categoricals in uns."""
        uns = self._uns()
        held = [name for name in ("obs", "var") if is_record_array(self._root[name])]
        tables = [table_of_records(self._root[name]) for name in held]
        return dict(zip(held, decode_old_categories(tables, uns), strict=True)), uns


def _is_null(stored: Any) -> bool:
    """Return True if a stored element represents None."""
    return bool(attribute(stored.attrs, "encoding-type") == "null")


def _entries(stored: Any) -> list[str]:
    if is_record_array(stored):
        return list(stored.dtype.names)
    return [] if _is_null(stored) else list(stored)


def described(key: str, stored: Any) -> Iterator[StoredMatrix]:
    """Yield the storage of an element if it is a matrix."""
    if isinstance(stored, h5py.Dataset | zarr.Array):
        if len(stored.shape) == 2:
            yield _described(key, "dense", [stored])
    elif "data" in stored and "indices" in stored:
        encoding = str(attribute(stored.attrs, "encoding-type", attribute(stored.attrs, "h5sparse_format", "csr")))
        arrays = [stored[name] for name in ("data", "indices", "indptr")]
        yield _described(key, encoding.removesuffix("_matrix"), arrays)


def _described(key: str, encoding: str, arrays: Sequence[Any]) -> StoredMatrix:
    values = arrays[0]
    return StoredMatrix(
        key=key,
        encoding=encoding,
        dtype=str(values.dtype),
        indices_dtype=str(arrays[1].dtype) if len(arrays) > 1 else None,
        chunks=values.chunks,
        shards=getattr(values, "shards", None),
        codec=codec_of(values),
        nbytes=sum(int(np.prod(array.shape)) * array.dtype.itemsize for array in arrays),
        stored_bytes=_stored_bytes(arrays),
    )


def _stored_bytes(arrays: Iterable[Any]) -> int | None:
    try:
        return sum(
            array.id.get_storage_size() if isinstance(array, h5py.Dataset) else int(array.nbytes_stored())
            for array in arrays
        )
    except StorageError:  # A web server cannot list the contents of a store.
        return None


def codec_of(array: h5py.Dataset | zarr.Array[Any]) -> str | None:
    """Return the names of the filters and compressors of an array's chunks; None if there are none."""
    if isinstance(array, h5py.Dataset):
        pipeline = array.id.get_create_plist()
        filters = [pipeline.get_filter(i) for i in range(pipeline.get_nfilters())]
        names = [_HDF5_FILTERS.get(number, text.decode() or f"filter {number}") for number, _, _, text in filters]
    else:
        names = [_codec_name(codec) for codec in (*array.filters, *array.compressors)]
    return ", ".join(names) or None


def _codec_name(codec: Any) -> str:
    cname = getattr(codec, "cname", None)
    name = getattr(codec, "codec_id", None) or type(codec).__name__.removesuffix("Codec").lower()
    return str(name) if cname is None else f"{name} {getattr(cname, 'value', cname)}"


class MuDataStore(AnnDataStore):
    """A MuData: its own obs and obsm, and its modalities."""

    @classmethod
    def holds(cls, root: Any) -> bool:
        """Return True if the root group of a file or store is that of a MuData."""
        return "mod" in root and is_group(root["mod"])

    @cached_property
    def _modalities(self) -> dict[str, AnnDataStore]:
        stored = self._root["mod"]
        order = as_strings(stored.attrs.get("mod-order", sorted(stored)))
        return {name: AnnDataStore(self._path, self._file, stored[name], self._options, self._sizes) for name in order}

    def modalities(self) -> Mapping[str, Store]:
        return self._modalities

    def keys(self) -> list[str]:
        """Return obs and the entries of obsm."""
        # An entry of obsm with the name of a modality is a mask of the cells of that modality.
        masks = {f"obsm/{name}" for name in self._modalities}
        keys = super().keys()
        return [key for key in keys if key == "obs" or (key.startswith("obsm/") and key not in masks)]

    def description(self) -> Iterator[StoredMatrix]:
        for name, store in self._modalities.items():
            yield from (replace(one, key=f"{name}/{one.key}") for one in store.description())


def holds_modalities(path: str) -> bool:
    """Return True if a path is that of a MuData: an ``.h5mu`` file, or a local Zarr store with modalities."""
    # The store may be zipped. A URL is recognized by its suffix only; a store at a URL is checked when it is opened.
    location = RemoteLocation.of(path) if is_url(path) else None
    if location is not None and location.local is None:
        return location.key.endswith(".h5mu")
    local = path if location is None or location.local is None else location.local
    if is_zip(local):
        return any(one.filename.startswith("mod/") for one in members_of(local))
    return local.endswith(".h5mu") or (
        os.path.isdir(os.path.join(local, "mod")) and any(os.path.exists(os.path.join(local, m)) for m in ZARR_MARKERS)
    )
