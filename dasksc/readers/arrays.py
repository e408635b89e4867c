"""Matrices that are read row by row: array objects of any kind, and rows that another library reads."""

from __future__ import annotations

import os
import uuid
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import dask.array as da
import h5py
import numpy as np
import scipy.sparse as sp
import zarr
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.readers.options import OpenOptions
from dasksc.storage import Layout, Matrix, RowBuffer, as_matrix, open_matrix
from dasksc.storage.fetched_csr import CSRBlock, CSRRowBuffer
from dasksc.storage.fetched_dense import DenseRowBuffer
from dasksc.storage.matrices import check_rows
from dasksc.storage.opening import attribute

Block = CSRBlock | NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lazy:
    """Matrix that will become a Dask array, with `token` as for `dasksc.pushdown.to_dask`."""

    matrix: Matrix
    token: str | None = None


def is_group(stored: Any) -> bool:
    """Return True if a stored element is a group of HDF5 or Zarr."""
    return isinstance(stored, h5py.Group | zarr.Group)


def is_lazy_matrix(stored: Any) -> bool:
    """Return True if an element that AnnData stored is a matrix that is opened lazily."""
    encoding = attribute(stored.attrs, "encoding-type", "")
    if is_group(stored):
        return encoding in ("csr_matrix", "csc_matrix") or "h5sparse_format" in stored.attrs
    return encoding in ("array", "") and _is_numeric_matrix(stored)


def _is_numeric_matrix(array: Any) -> bool:
    return len(array.shape) == 2 and np.dtype(array.dtype).kind in "biuf"


def lazily(array: Any, label: str, options: OpenOptions) -> Any:
    """Return an array as a `Lazy` matrix, not copied; return Dask arrays and non-numeric elements unchanged."""
    if isinstance(array, da.Array | Lazy):
        return array
    if hasattr(array, "fetch") and hasattr(array, "stored_dtype"):
        return Lazy(matrix=array)
    stored = getattr(array, "group", array)
    if isinstance(stored, h5py.Group) or (isinstance(stored, h5py.Dataset) and _is_numeric_matrix(stored)):
        path = os.path.abspath(stored.file.filename)
        return Lazy(matrix=open_matrix(path, stored.name, use_mmap=options.mmap))
    if isinstance(stored, zarr.Group) or (isinstance(stored, zarr.Array) and _is_numeric_matrix(stored)):
        root = getattr(stored.store, "root", None)
        if root is None:
            raise InputError(
                f"{label} is a Zarr array in {stored.store}, but the Zarr arrays of an AnnData must be in a local "
                "directory. Give dasksc.open the path or URL of the store instead"
            )
        return Lazy(matrix=open_matrix(os.path.abspath(root), stored.path, use_mmap=options.mmap))
    if sp.issparse(array) or (isinstance(array, np.ndarray) and _is_numeric_matrix(array)):
        # A random token: hashing an array in memory would cost a pass over it, and it may be modified in place.
        return Lazy(matrix=as_matrix(array, label), token=uuid.uuid4().hex)
    return array


class RowsMatrix:
    """Matrix whose subclasses read ascending, distinct rows as a block: a dense array, or a CSR triple."""

    label: str
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    stored_dtype: np.dtype[Any]
    layout: Layout

    def fetch(self, rows: NDArray[np.int64]) -> RowBuffer:
        rows = check_rows(self.label, self.shape[0], rows)
        distinct, positions = np.unique(rows, return_inverse=True)
        block = self._read(distinct)
        if not isinstance(block, tuple):
            block = block if len(distinct) == len(rows) else block[positions]
            return DenseRowBuffer.of_block(self.label, rows, self.dtype, block)
        if len(distinct) < len(rows):
            fetched = CSRRowBuffer.of_block(self.label, distinct, self.shape[1], self.dtype, block)
            block = fetched.gather_csr(positions, dtype=block[2].dtype, any_order=True)
        return CSRRowBuffer.of_block(self.label, rows, self.shape[1], self.dtype, block)

    @abstractmethod
    def _read(self, rows: NDArray[np.int64]) -> Block:
        """Read ascending, distinct rows."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label} {self.shape[0]}x{self.shape[1]} {self.dtype}>"
