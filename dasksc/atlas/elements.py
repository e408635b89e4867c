"""Elements of a file or store: numeric matrices are opened lazily, and other elements are read."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dask.array as da
import h5py
import numpy as np
import scipy.sparse as sp
import zarr
from anndata.io import read_elem

from dasksc.atlas.legacy import entries_of_records, is_record_array
from dasksc.atlas.options import OpenOptions
from dasksc.errors import InputError
from dasksc.storage import Matrix, RemoteLocation, as_matrix, open_matrix
from dasksc.storage.safety.hdf5_links import check_item

__all__ = [
    "Unwrapped",
    "is_group",
    "is_lazy_matrix",
    "is_null",
    "lazy_element",
    "lazy_matrix",
    "read_mapping",
    "stored_matrix",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwrapped:
    """Matrix that will become a Dask array, with `token` as for `to_dask`."""

    matrix: Matrix
    token: str | None = None


def is_group(stored: Any) -> bool:
    """Return True if a stored element is a group of HDF5 or Zarr."""
    return isinstance(stored, h5py.Group | zarr.Group)


def is_null(stored: Any) -> bool:
    """Return True if a stored element represents None."""
    return bool(stored.attrs.get("encoding-type", "") == "null")


def is_lazy_matrix(stored: Any) -> bool:
    """Return True if a stored element is a matrix that is opened lazily."""
    encoding = stored.attrs.get("encoding-type", "")
    if isinstance(stored, h5py.Group | zarr.Group):
        return encoding in ("csr_matrix", "csc_matrix") or "h5sparse_format" in stored.attrs
    return encoding in ("array", "") and _is_numeric_matrix(stored)


def _is_numeric_matrix(array: Any) -> bool:
    return len(array.shape) == 2 and np.dtype(array.dtype).kind in "biuf"


def lazy_element(path: str | RemoteLocation, stored: Any, options: OpenOptions) -> Any:
    """Open a stored numeric matrix lazily, or read any other element."""
    if is_null(stored):
        return None
    return stored_matrix(_path_of(stored, path), stored.name, options) if is_lazy_matrix(stored) else read_elem(stored)


def read_mapping(parent: Any, name: str, read: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the entries of a group such as layers, converted by `read`; empty if there is no such group."""
    if name not in parent or is_null(parent[name]):
        return {}
    stored = parent[name]
    if is_record_array(stored):
        return entries_of_records(stored)
    return {key: read(stored[key]) for key in stored}


def lazy_matrix(array: Any, label: str, options: OpenOptions) -> Any:
    """Return an array as an `Unwrapped` matrix, not copied; return Dask arrays and non-numeric elements unchanged."""
    if isinstance(array, da.Array | Unwrapped):
        return array
    stored = getattr(array, "group", array)
    if isinstance(stored, h5py.Group) or (isinstance(stored, h5py.Dataset) and _is_numeric_matrix(stored)):
        return stored_matrix(os.path.abspath(stored.file.filename), stored.name, options)
    if isinstance(stored, zarr.Group) or (isinstance(stored, zarr.Array) and _is_numeric_matrix(stored)):
        root = getattr(stored.store, "root", None)
        if root is None:
            raise InputError(
                f"{label} is a Zarr array in {stored.store}, but the Zarr arrays of an AnnData must be in a local "
                "directory. Give dasksc.open the path or URL of the store instead"
            )
        return stored_matrix(os.path.abspath(root), stored.path, options)
    if sp.issparse(array) or (isinstance(array, np.ndarray) and _is_numeric_matrix(array)):
        # A random token: hashing an array in memory would cost a pass over it, and it may be modified in place.
        return Unwrapped(matrix=as_matrix(array, label), token=uuid.uuid4().hex)
    return array


def stored_matrix(path: str | RemoteLocation, key: str, options: OpenOptions) -> Unwrapped:
    """Open a matrix of a file or store lazily."""
    cache = options.remote_cache() if isinstance(path, RemoteLocation) else None
    return Unwrapped(matrix=open_matrix(path, key.strip("/"), use_mmap=options.mmap, cache=cache))


def _path_of(stored: Any, path: str | RemoteLocation) -> str | RemoteLocation:
    """Return the file of an element, which may differ from `path` if a link of HDF5 leads to another file."""
    if isinstance(path, RemoteLocation) or isinstance(stored, zarr.Group | zarr.Array):
        return path
    check_item(stored, path, folder=os.path.dirname(path))
    return os.path.abspath(str(stored.file.filename))
