"""Descriptions of the rows of a matrix, computed in one pass, for planning and verifying its copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError, InputError
from dasksc.kernels import digest
from dasksc.kernels.csr import rows_ascend
from dasksc.output.work_folder import atomic_array, mapped_array
from dasksc.storage import Matrix, RowBuffer, open_matrix
from dasksc.storage.dtypes import holds_all, sum_dtype
from dasksc.storage.fetched_csr import CSRRowBuffer

__all__ = ["ROW", "Scan", "Verification", "described", "exactly", "gather_canonical", "pieces"]

ROW = np.dtype([("length", np.int64), ("sum", np.float64), ("digest", np.uint64), ("largest", np.float64)])
"""Description of a row: its number of stored values, their sum, digest (see `dasksc.kernels.digest`) and maximum."""


def described(fetched: RowBuffer, positions: NDArray[np.int64], *, dtype: np.dtype[Any] | None = None) -> NDArray[Any]:
    """Describe rows of a fetch.

    Parameters
    ----------
    fetched
        Fetched rows.
    positions
        Positions of the rows in `fetched`, shape (n_rows,), int64.
    dtype
        Data type of the values as stored. Default: that of `fetched`.

    Returns
    -------
    NDArray
        Descriptions of the rows, shape (n_rows,), of type `ROW`.
    """
    dtype = fetched.dtype if dtype is None else dtype
    n_rows = len(positions)
    sums, digests, largest = np.empty(n_rows), np.empty(n_rows, dtype=np.uint64), np.empty(n_rows)
    rows = np.zeros(n_rows, dtype=ROW)
    if fetched.layout == "csr":
        indptr, indices, data = gather_canonical(fetched, positions, dtype=dtype)
        digest.digest_csr(indptr, indices, _plain(data), sums, digests, largest)
        rows["length"] = np.diff(indptr)
    else:
        block = np.empty((n_rows, fetched.shape[1]), dtype=dtype)
        fetched.gather(positions, out=block)
        digest.digest_dense(_plain(block), sums, digests, largest)
    rows["sum"], rows["digest"], rows["largest"] = sums, digests, largest
    return rows


def gather_canonical(
    fetched: RowBuffer, positions: NDArray[np.int64], *, dtype: np.dtype[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
    """Return CSR rows as `RowBuffer.gather_csr` does, with duplicate entries summed.

    Sums of integers have 64 bits, since the stored type `dtype` may be too narrow for them.
    """
    assert isinstance(fetched, CSRRowBuffer)
    indptr, indices, data = fetched.gather_stored(positions, dtype=dtype)
    every = np.arange(len(positions), dtype=np.int64)
    starts = np.uint64(indices.ctypes.data) + np.uint64(indices.itemsize) * indptr[:-1].astype(np.uint64)
    if rows_ascend(every, np.diff(indptr), starts, indices[:0]):
        return indptr, indices, data
    wide = sum_dtype(np.promote_types(dtype, np.float64) if dtype.kind == "f" else dtype)
    block = sp.csr_matrix((data.astype(wide), indices, indptr), shape=(len(positions), fetched.shape[1]))
    block.sum_duplicates()
    sums = exactly(block.data, dtype, "a sum of duplicate entries") if dtype.kind == "f" else block.data
    return block.indptr.astype(np.int64), block.indices.astype(np.int32), sums


def exactly(values: NDArray[Any], dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    """Convert values to another data type; raise `InputError` if the type cannot represent them exactly."""
    if values.dtype == dtype:
        return values
    with np.errstate(all="ignore"):
        result = values.astype(dtype)
    if not holds_all(values, result):
        raise InputError(
            f"{what} cannot be represented in {dtype}, the data type of the input. Store the input in a wider type: "
            "adata.X = adata.X.astype('float64')."
        )
    return result


def _plain(values: NDArray[Any]) -> NDArray[Any]:
    """Convert values to a data type that the kernels support."""
    if values.dtype == bool:
        return values.view(np.uint8)
    return values.astype(np.float32) if values.dtype == np.float16 else values


def pieces(start: int, stop: int, n: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive ranges, of at most `n` elements each, that cover ``[start, stop)``."""
    for begin in range(start, stop, n):
        yield begin, min(begin + n, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Tasks that describe the rows of a matrix, with one output file per task.

    Parameters
    ----------
    matrix
        Input matrix.
    folder
        Folder of the files.
    task_rows, piece_rows
        Number of rows per task, and number of rows in memory at a time.
    """

    matrix: Matrix
    folder: Path
    task_rows: int
    piece_rows: int

    @property
    def n_tasks(self) -> int:
        """Number of tasks."""
        return -(-self.matrix.shape[0] // self.task_rows)

    def rows(self, k: int) -> tuple[int, int]:
        """Return the range ``[start, stop)`` of the rows of task `k`."""
        return k * self.task_rows, min((k + 1) * self.task_rows, self.matrix.shape[0])

    def is_done(self, k: int) -> bool:
        """Return True if the file of task `k` exists."""
        return self._path(k).exists()

    def _path(self, k: int) -> Path:
        return self.folder / f"{k}.npy"

    def __call__(self, k: int) -> None:
        """Run task `k`."""
        found = []
        for start, stop in pieces(*self.rows(k), self.piece_rows):
            wanted = np.arange(start, stop, dtype=np.int64)
            found.append(described(self.matrix.fetch(wanted), wanted - start, dtype=self.matrix.stored_dtype))
        with atomic_array(self._path(k), ROW, sum(map(len, found))) as out:
            np.concatenate(found, out=out)

    def collect(self) -> Path:
        """Concatenate the results of all tasks in a file with one `ROW` per input row; return its path."""
        whole = self.folder / "rows.npy"
        if not whole.exists():
            with atomic_array(whole, ROW, self.matrix.shape[0]) as rows:
                for k in range(self.n_tasks):
                    start, stop = self.rows(k)
                    rows[start:stop] = mapped_array(self._path(k))
        return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Tasks that compare a written matrix with the descriptions of the input rows.

    Parameters
    ----------
    store, key
        Store and key of the matrix.
    rows, order
        Paths of two files: the descriptions of the input rows, and the input row number of each row of the matrix.
    task_rows, piece_rows
        Number of rows per task, and number of rows in memory at a time.
    n_obs
        Number of rows in the matrix.
    """

    store: Path
    key: str
    rows: Path
    order: Path
    task_rows: int
    piece_rows: int
    n_obs: int

    @property
    def n_tasks(self) -> int:
        """Number of tasks."""
        return -(-self.n_obs // self.task_rows)

    def is_done(self, k: int) -> bool:
        """Return False, since no record of finished comparisons is kept."""
        return False

    def __call__(self, k: int) -> None:
        """Run task `k`."""
        matrix = open_matrix(self.store, self.key)
        recorded, order = mapped_array(self.rows), mapped_array(self.order)
        for start, stop in pieces(k * self.task_rows, min((k + 1) * self.task_rows, self.n_obs), self.piece_rows):
            wanted = np.arange(start, stop, dtype=np.int64)
            found = described(matrix.fetch(wanted), wanted - start, dtype=matrix.stored_dtype)
            expected = recorded[order[start:stop]]
            for name, what in (("length", "length"), ("sum", "sum"), ("digest", "checksum")):
                # Bits are compared, since a sum that is NaN does not equal itself.
                differs = np.flatnonzero(found[name].view(np.uint64) != expected[name].view(np.uint64))
                if len(differs):
                    i = int(differs[0])
                    raise CorruptDataError(
                        f"{self.store}:/{self.key}: row {start + i} has {what} {found[name][i]}, but its "
                        f"source, row {order[start + i]} of the input, has {expected[name][i]} "
                        f"({len(differs)} rows differ, all between {start} and {stop - 1}). The disk or memory may be "
                        "failing. The written data are removed; convert again."
                    )
