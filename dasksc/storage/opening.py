"""Opening of matrices, from a path and a key or from an array in memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import h5py
import numpy as np
import scipy.sparse as sp
import zarr

from dasksc.errors import CorruptDataError, DaskscError, InputError, MissingKeyError, MissingPathError, StorageError
from dasksc.storage.arrays import MemoryArray, StoredArray, UnknownLayoutError, caused_by_data, logical_dtype
from dasksc.storage.files import LocalFile, UseMmap
from dasksc.storage.hdf5.direct import direct_array
from dasksc.storage.hdf5.reader import H5Array, H5File
from dasksc.storage.matrices import CSCMatrix, CSRMatrix, DenseMatrix, csr_in_memory
from dasksc.storage.matrix import Matrix
from dasksc.storage.remote.remote_file import Cache, RemoteFile
from dasksc.storage.remote.urls import RemoteLocation
from dasksc.storage.zarr.direct import local_array, remote_array
from dasksc.storage.zarr.reader import ZarrArray, ZarrFile, is_zip

logger = logging.getLogger("dasksc.storage")


def open_matrix(
    path: str | os.PathLike[str] | RemoteLocation, key: str, *, use_mmap: UseMmap = "auto", cache: Cache | None = None
) -> Matrix:
    """Open one matrix of an AnnData file without reading its values."""
    if not isinstance(path, RemoteLocation):
        path = os.path.abspath(os.fspath(path))
        if not os.path.exists(path):
            raise MissingPathError(f"there is nothing at {path}")
    with _naming_errors(path, key):
        if path.is_zarr() if isinstance(path, RemoteLocation) else os.path.isdir(path) or is_zip(path):
            return matrix_in(ZarrFile(path, use_mmap=use_mmap, cache=cache), key)
        return matrix_in(hdf5_file(path, use_mmap=use_mmap, cache=cache), key)


def hdf5_file(path: str | RemoteLocation, *, use_mmap: UseMmap, cache: Cache | None) -> H5File:
    """Return the HDF5 file at a path or URL."""
    if isinstance(path, RemoteLocation):
        if path.key.endswith(".zip"):
            raise InputError(
                f"{path} is a zip file behind a URL, and zipped stores are read from local files only. Download it, "
                f"or unpack it on the server and open {str(path).removesuffix('.zip')}"
            )
        return H5File(RemoteFile.of(path, cache=cache))
    if not h5py.is_hdf5(path):
        raise StorageError(
            f"{path} is not an HDF5 file, and not a directory either. Give an .h5ad file or a Zarr directory."
        )
    return H5File(LocalFile.of(path, use_mmap))


def attribute(attributes: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return an attribute; text of a fixed size, which programs in Julia and R write, as a string."""
    value = attributes.get(name, default)
    return value.decode() if isinstance(value, bytes) else value


def matrix_in(file: H5File | ZarrFile, key: str, *, attributes: Mapping[str, Any] | None = None) -> Matrix:
    """Open one matrix of an open file whose links have been checked; `attributes` replace those of its group."""
    with _naming_errors(file.path, key):
        key = key.strip("/")
        root = file.root()
        if key not in root:
            raise MissingKeyError(f"{file.path} has no {key!r}")
        item, label = root[key], f"{file.path}:/{key}"
        given: Mapping[str, Any] = item.attrs if attributes is None else attributes
        if isinstance(item, h5py.Dataset | zarr.Array):
            values = _array_at(file, key)
            return DenseMatrix(label=label, values=values, dtype=_logical(values.dtype, given, label))
        # AnnData before 0.7 wrote attributes named h5sparse_*.
        encoding = attribute(given, "encoding-type", attribute(given, "h5sparse_format"))
        shape = given.get("shape", given.get("h5sparse_shape"))
        if encoding not in ("csr_matrix", "csc_matrix", "csr", "csc") or shape is None:
            raise InputError(
                f"{label} is not a matrix: it is a group with encoding {encoding!r} that holds {sorted(item)}. "
                "Dense arrays and CSR or CSC matrices can be read."
            )
        if absent := {"indptr", "indices", "data"}.difference(item):
            raise CorruptDataError(
                f"{label} is a {encoding} without its {' and '.join(sorted(absent))}. The file is corrupt; "
                "write it again from its source."
            )
        n_obs, n_vars = (int(length) for length in shape)
        indptr, indices, data = (_array_at(file, f"{key}/{name}") for name in ("indptr", "indices", "data"))
        dtype = _logical(data.dtype, given, label)
        kind = CSRMatrix if encoding.startswith("csr") else CSCMatrix
        return kind(label=label, shape=(n_obs, n_vars), indptr=indptr, indices=indices, data=data, dtype=dtype)


def _array_at(file: H5File | ZarrFile, name: str) -> StoredArray:
    """Return an array that is read directly if its layout is supported, otherwise through h5py or zarr-python."""
    label = f"{file.path}:/{name}"
    try:
        if isinstance(file, H5File):
            return direct_array(file.file, file.root()[name], label=label)
        if isinstance(file.path, RemoteLocation):
            return remote_array(file.path.below(name), label=label, cache=file.cache)
        if is_zip(file.path):
            raise UnknownLayoutError("it lies in a zip file")
        return local_array(os.path.join(file.path, name), label=label, use_mmap=file.use_mmap)
    except UnknownLayoutError as reason:
        array = H5Array(file, name) if isinstance(file, H5File) else ZarrArray(file, name)
        library = "h5py" if isinstance(file, H5File) else "zarr-python"
        logger.info("%s is read through %s, which is slower: %s", label, library, reason)
        return array


@contextmanager
def _naming_errors(path: str | RemoteLocation, key: str) -> Iterator[None]:
    try:
        yield
    except DaskscError:
        raise
    # On damaged metadata, h5py and zarr-python raise RuntimeError, KeyError, UnicodeDecodeError or TypeError.
    except Exception as error:
        if not caused_by_data(error):
            error.add_note(f"The error occurred while {key!r} of {path} was opened.")
            raise
        if isinstance(error, OSError) and error.errno is not None:
            raise StorageError(f"{path} cannot be read: {error}") from error
        raise CorruptDataError(
            f"{path}: the metadata of {key!r} cannot be read ({type(error).__name__}: {error}). The file is "
            "corrupt; copy or download it again, or write it again from its source."
        ) from error


def as_matrix(array: Any, label: str) -> Matrix:
    """Wrap an array in memory as a matrix."""
    if np.ma.is_masked(array):
        raise InputError(f"{label} has masked values; replace them: adata.X = adata.X.filled(0)")
    if not sp.issparse(array):
        array = np.asarray(array)
    if len(array.shape) != 2:
        raise InputError(f"{label} has shape {array.shape}; a matrix of cells by columns is needed")
    _check_numeric(array.dtype, label)
    if not sp.issparse(array):
        return DenseMatrix(label=label, values=MemoryArray(array, label))
    if array.format != "csr":
        logger.warning(
            "%s is stored as %s and is converted to CSR so that its rows can be read", label, array.format.upper()
        )
        array = array.tocsr()
    return csr_in_memory(array, label)


def _logical(stored: np.dtype[Any], attributes: Mapping[str, Any], label: str) -> np.dtype[Any]:
    """Return the data type for computation on values of type `stored`."""
    # A store written by `dasksc.convert` records the data type of its input, which takes precedence.
    _check_numeric(stored, label)
    if "dasksc" not in attributes:
        return logical_dtype(stored)
    converted = np.dtype(attributes["dasksc"]["dtype"])
    _check_numeric(converted, label)
    # The attribute must not select a type that cannot represent the stored values.
    return logical_dtype(np.promote_types(stored, converted))


def _check_numeric(dtype: np.dtype[Any], label: str) -> None:
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise InputError(f"{label} holds {dtype}; booleans, integers and floats of up to 64 bits can be read")
