"""Matrices over stored arrays: CSR, dense, and CSC, which is slow to read."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import scipy.sparse as sp
from dask.utils import format_bytes
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError, InputError, StorageError
from dasksc.kernels import csr as kernels
from dasksc.storage.arrays import (
    BrokenRunError,
    MemoryArray,
    RowPointers,
    StoredArray,
    memory_dtype,
    row_bytes,
)
from dasksc.storage.fetched_csr import CSRRowBuffer
from dasksc.storage.fetched_dense import DenseRowBuffer
from dasksc.storage.fetched_rows import Layout
from dasksc.storage.files import mapping
from dasksc.storage.matrix import FetchCost

logger = logging.getLogger("dasksc.storage")

# An indptr up to this size is read whole at the first fetch and kept in the process. If it is larger, each fetch reads
# only the parts that it needs, since the indptr of an atlas of 10^8 cells would cost every process 800 MB. The limit
# corresponds to 4 million cells with int64 offsets.
_INDPTR_KEPT_BYTES = 32 * 2**20
# Bytes for the row number, the length and the two addresses of a fetched row.
_ROW_BYTES = 32
_REWRITE = "The file is corrupt; write it again from its source."


class CSRMatrix:
    """CSR matrix over three stored arrays."""

    layout: Layout = "csr"

    def __init__(
        self,
        *,
        label: str,
        shape: tuple[int, int],
        indptr: StoredArray,
        indices: StoredArray,
        data: StoredArray,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        _check_csr(label, shape, indptr=indptr, indices=indices, data=data)
        self.label = label
        self.shape = shape
        self.stored_dtype: np.dtype[Any] = data.dtype
        self.dtype: np.dtype[Any] = data.dtype if dtype is None else dtype
        self.arrays: tuple[StoredArray, StoredArray, StoredArray] = indptr, indices, data
        self._kept_indptr: MemoryArray | None = None

    @property
    def cost(self) -> FetchCost:
        indptr, *of_values = self.arrays
        mean = of_values[0].shape[0] / max(1, self.shape[0])
        sizes = [mean * memory_dtype(array.dtype).itemsize for array in of_values]
        held = (size * array.held_share(mean) for size, array in zip(sizes, of_values, strict=True))
        offsets = indptr.shape[0] * indptr.dtype.itemsize
        return FetchCost(
            row=_ROW_BYTES + sum(sizes),
            held=_ROW_BYTES + sum(held),
            working=2 * _ROW_BYTES,
            fixed=max(array.working_bytes for array in self.arrays),
            kept=offsets if offsets <= _INDPTR_KEPT_BYTES else 0,
            chunk_rows=max(array.chunk_length for array in of_values) / max(1.0, mean),
            decoded_rows=max(array.decoded_length for array in of_values) / max(1.0, mean),
        )

    def fetch(self, rows: NDArray[np.int64]) -> CSRRowBuffer:
        rows = check_rows(self.label, self.shape[0], rows)
        starts, stops = self._bounds(rows)
        _, indices, data = self.arrays
        with _naming_rows(rows, starts, stops):
            data_runs, index_runs = data.locate(starts, stops), indices.locate(starts, stops)
        return CSRRowBuffer(
            label=self.label,
            rows=rows,
            n_vars=self.shape[1],
            dtype=self.dtype,
            lengths=stops - starts,
            data=data_runs,
            indices=index_runs,
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept_indptr": None}

    def __repr__(self) -> str:
        return f"<CSRMatrix {self.label} {self.shape[0]}x{self.shape[1]} {self.dtype}>"

    def _bounds(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the validated start and stop of each row in `data` and `indices`."""
        stored, _, data = self.arrays
        indptr: StoredArray = self._kept_indptr or stored
        with _naming_rows(rows, rows, rows + 2):
            n_bytes = stored.shape[0] * stored.dtype.itemsize
            if not isinstance(indptr, MemoryArray) and n_bytes <= _INDPTR_KEPT_BYTES:
                indptr = self._kept_indptr = _read_whole(stored)
            # The indptr has only eight bytes per row, so it is mapped even if the rows themselves are not.
            with mapping(True):
                reached = indptr.locate(rows, rows + 2)
        n_values = data.shape[0]
        starts, stops, wrong = row_bounds(reached, n_values, rows[1:] > rows[:-1])
        if wrong.any():
            i = int(np.argmax(wrong))
            raise CorruptDataError(
                f"{stored.label}: row {rows[i]} lies at [{starts[i]}, {stops[i]}), but offsets must not decrease and "
                f"must lie between 0 and the number of stored values, {n_values}. {_REWRITE}"
            )
        return starts, stops


def row_bounds(
    indptr: RowPointers, n_values: NDArray[np.int64] | int, is_later: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return the start and stop of rows from pairs of offsets, and a mask of the impossible ones."""
    # `is_later[i]` is True if row i + 1 lies behind row i in the same matrix.
    pairs = np.empty((len(indptr.at), 2), dtype=np.int64)
    kernels.copy_rows(np.arange(len(pairs)), indptr.at, pairs, indptr.like)
    starts, stops = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
    wrong = (starts < 0) | (stops < starts) | (stops > n_values)
    wrong[1:] |= (starts[1:] < stops[:-1]) & is_later
    return starts, stops, wrong


class DenseMatrix:
    """Dense matrix over an array stored in row-major order."""

    layout: Layout = "dense"

    def __init__(self, *, label: str, values: StoredArray, dtype: np.dtype[Any] | None = None) -> None:
        if len(values.shape) != 2:
            raise InputError(f"{label} has shape {values.shape}; a matrix of cells by columns is needed")
        self.label = label
        self.shape: tuple[int, int] = (values.shape[0], values.shape[1])
        self.stored_dtype: np.dtype[Any] = values.dtype
        self.dtype: np.dtype[Any] = values.dtype if dtype is None else dtype
        self.arrays = (values,)

    @property
    def cost(self) -> FetchCost:
        values = self.arrays[0]
        stride = row_bytes(values)
        return FetchCost(
            row=max(1, stride),
            held=_ROW_BYTES + stride * values.held_share(1),
            fixed=values.working_bytes,
            chunk_rows=values.chunk_length,
            decoded_rows=values.decoded_length,
        )

    def fetch(self, rows: NDArray[np.int64]) -> DenseRowBuffer:
        rows = check_rows(self.label, self.shape[0], rows)
        with _naming_rows(rows, rows, rows + 1):
            values = self.arrays[0].locate(rows, rows + 1)
        return DenseRowBuffer(label=self.label, rows=rows, n_vars=self.shape[1], dtype=self.dtype, values=values)

    def __repr__(self) -> str:
        return f"<DenseMatrix {self.label} {self.shape[0]}x{self.shape[1]} {self.dtype}>"


class CSCMatrix:
    """CSC matrix on disk. Rows cannot be read one by one, so the first fetch reads the whole matrix."""

    layout: Layout = "csr"

    def __init__(self, *, label: str, shape: tuple[int, int], **arrays: Any) -> None:
        self._by_columns = CSRMatrix(label=label, shape=shape[::-1], **arrays)
        self.label = label
        self.shape = shape
        self.stored_dtype = self._by_columns.stored_dtype
        self.dtype = self._by_columns.dtype
        self.arrays = self._by_columns.arrays
        self._rows: CSRMatrix | None = None
        self._locks: dict[int, threading.Lock] = {}
        logger.warning(
            "%s is stored by columns (CSC), so its rows cannot be read one by one: the first fetch of every "
            "process reads all of it and keeps it as CSR, which takes %s of memory (three times as much "
            "during the conversion). Store it by rows once: dasksc convert %s NEW.zarr",
            label,
            format_bytes(self._n_bytes),
            label.rpartition(":/")[0] or "OLD.h5ad",
        )

    @property
    def _n_bytes(self) -> int:
        return self.arrays[2].shape[0] * (self.stored_dtype.itemsize + np.dtype(np.int32).itemsize)

    @property
    def cost(self) -> FetchCost:
        """Memory that a fetch takes: the size of the whole matrix, or three times that size during the conversion."""
        n_bytes = self._n_bytes
        row = _ROW_BYTES + n_bytes / max(1, self.shape[0])
        return FetchCost(row=row, held=_ROW_BYTES, working=2 * _ROW_BYTES, fixed=2 * n_bytes, kept=n_bytes)

    def fetch(self, rows: NDArray[np.int64]) -> CSRRowBuffer:
        """Fetch rows; the first call reads the whole matrix."""
        # Each process has its own lock, since a lock inherited by a fork may stay locked forever.
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            if self._rows is None:
                self._rows = self._by_rows()
        return self._rows.fetch(rows)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rows": None, "_locks": {}}

    def __repr__(self) -> str:
        return f"<CSCMatrix {self.label} {self.shape[0]}x{self.shape[1]} {self.dtype}>"

    def _by_rows(self) -> CSRMatrix:
        fetched = self._by_columns.fetch(np.arange(self.shape[1], dtype=np.int64))
        # Values keep their narrow stored type. Repeated columns are summed when rows are gathered, as for any matrix.
        indptr, indices, data = fetched.converted(memory_dtype(self.stored_dtype), np.dtype(np.int32)).block
        by_rows = sp.csc_array((data, indices, indptr), shape=self.shape).tocsr()
        return csr_in_memory(by_rows, self.label, dtype=self.dtype)


def csr_in_memory(array: Any, label: str, *, dtype: np.dtype[Any] | None = None) -> CSRMatrix:
    """Wrap a SciPy CSR matrix or array as a `CSRMatrix` with `dtype` for computation, without copying."""
    n_obs, n_vars = array.shape
    return CSRMatrix(
        label=label,
        shape=(int(n_obs), int(n_vars)),
        indptr=MemoryArray(array.indptr, f"{label}/indptr"),
        indices=MemoryArray(array.indices, f"{label}/indices"),
        data=MemoryArray(array.data, f"{label}/data"),
        dtype=dtype,
    )


def _check_csr(
    label: str, shape: tuple[int, int], *, indptr: StoredArray, indices: StoredArray, data: StoredArray
) -> None:
    """Raise an error if the shapes or data types of the arrays do not fit a CSR matrix of this shape."""
    if indptr.shape != (shape[0] + 1,):
        raise CorruptDataError(
            f"{indptr.label} has shape {indptr.shape}; a matrix of {shape[0]} rows needs ({shape[0] + 1},). {_REWRITE}"
        )
    if len(data.shape) != 1 or data.shape != indices.shape:
        raise CorruptDataError(
            f"{label}: data has shape {data.shape} but indices has shape {indices.shape}; both must have the same "
            f"length. {_REWRITE}"
        )
    for array in (indptr, indices):
        if array.dtype.kind not in "iu":
            raise CorruptDataError(f"{array.label} holds {array.dtype}; integers are needed. {_REWRITE}")
    if shape[1] > np.iinfo(np.int32).max:
        raise InputError(f"{label} has {shape[1]} columns; at most 2**31 - 1 are supported")


def check_rows(label: str, n_obs: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `rows` as int64; raise `InputError` unless they are integers that ascend within [0, n_obs)."""
    rows = np.asarray(rows)
    if rows.ndim != 1 or (rows.dtype.kind not in "iu" and rows.size):
        raise InputError(f"{label}: rows must be a one-dimensional integer array; got {rows!r}")
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    if len(rows) and (rows[0] < 0 or rows[-1] >= n_obs or (rows[1:] < rows[:-1]).any()):
        raise InputError(f"{label}: rows must ascend within [0, {n_obs}); got {rows}")
    return rows


@contextmanager
def _naming_rows(rows: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Iterator[None]:
    """Raise an error that names `rows`, whose runs are ``[starts[i], stops[i])``, for a run that cannot be read."""
    try:
        yield
    except BrokenRunError as error:
        # If a store did not respond, the data may be intact, so the error is not a `CorruptDataError`.
        cause = error.__cause__
        kind = StorageError if type(cause) is StorageError else CorruptDataError
        broken = rows[(stops > error.start) & (starts < error.stop)]
        first, last = (broken[0], broken[-1]) if len(broken) else (error.start, error.stop - 1)
        which = f"row {first}" if first == last else f"rows {first} to {last}"
        # No remedy is added if the cause is an `OSError`. This includes `StorageError`, whose message already states a
        # remedy.
        remedy = "" if isinstance(cause, OSError) else ". Copy or download the data again, or write them again"
        raise kind(f"{error.label}: {which} cannot be read: {error.reason}{remedy}") from error


def _read_whole(array: StoredArray) -> MemoryArray:
    n = array.shape[0]
    reached = array.locate(np.array([0], dtype=np.int64), np.array([n], dtype=np.int64))
    whole = np.empty((1, n), dtype=reached.dtype)
    kernels.copy_rows(np.zeros(1, dtype=np.int64), reached.at, whole, reached.like)
    return MemoryArray(whole[0], array.label)
