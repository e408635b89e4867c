"""Rows of a matrix as blocks, their descriptions, and a pass over all rows that reads the input in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError, InputError
from dasksc.kernels import digest
from dasksc.kernels.csr import rows_ascend
from dasksc.output.work_folder import atomic_array, atomic_path, mapped_array
from dasksc.storage import ConcatenatedMatrix, Matrix, RowBuffer, open_matrix
from dasksc.storage.dtypes import holds_all, sum_dtype
from dasksc.storage.fetched_csr import CSRRowBuffer

__all__ = ["ROW", "Pass", "described", "exactly", "gather", "pieces", "summed", "verify_rows"]

ROW = np.dtype([("length", np.int64), ("sum", np.float64), ("digest", np.uint64), ("largest", np.float64)])
"""Description of a row: its number of stored values, their sum, digest (see `dasksc.kernels.digest`) and maximum."""

CSR = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]
Block = CSR | NDArray[Any]


def pieces(start: int, stop: int, n: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive ranges, of at most `n` elements each, that cover ``[start, stop)``."""
    for begin in range(start, stop, n):
        yield begin, min(begin + n, stop)


def gather(fetched: RowBuffer, positions: NDArray[np.int64], dtype: np.dtype[Any]) -> Block:
    """Copy rows: a dense block, or ``(indptr, indices, data)`` with columns as stored, perhaps unsorted or repeated."""
    if isinstance(fetched, CSRRowBuffer):
        return fetched.gather_stored(positions, dtype=dtype)
    block = np.empty((len(positions), fetched.shape[1]), dtype=dtype)
    fetched.gather(positions, out=block)
    return block


def summed(block: CSR, n_vars: int) -> CSR:
    """Sort the columns of CSR rows and sum repeated ones; the sums of integers have 64 bits."""
    indptr, indices, data = block
    every = np.arange(len(indptr) - 1, dtype=np.int64)
    starts = np.uint64(indices.ctypes.data) + np.uint64(indices.itemsize) * indptr[:-1].astype(np.uint64)
    if rows_ascend(every, np.diff(indptr), starts, indices[:0]):
        return block
    is_float = data.dtype.kind == "f"
    wide = np.promote_types(data.dtype, np.float64) if is_float else sum_dtype(data.dtype)
    matrix = sp.csr_matrix((data.astype(wide), indices, indptr), shape=(len(every), n_vars))
    matrix.sum_duplicates()
    sums = exactly(matrix.data, data.dtype, "a sum of duplicate entries") if is_float else matrix.data
    return matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32), sums


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


def described(block: Block, n_vars: int) -> NDArray[Any]:
    """Return the descriptions of the rows of a block, shape (n_rows,), of type `ROW`."""
    indptr, indices, data = summed(block, n_vars) if isinstance(block, tuple) else (None, None, block)
    n_rows = len(block) if indptr is None else len(indptr) - 1
    sums, digests, largest = np.empty(n_rows), np.empty(n_rows, dtype=np.uint64), np.empty(n_rows)
    # The kernels support neither of these types.
    data = data.view(np.uint8) if data.dtype == bool else data.astype(np.float32) if data.dtype == np.float16 else data
    rows = np.zeros(n_rows, dtype=ROW)
    if indptr is None:
        digest.digest_dense(data, sums, digests, largest)
    else:
        digest.digest_csr(indptr, indices, data, sums, digests, largest)
        rows["length"] = np.diff(indptr)
    rows["sum"], rows["digest"], rows["largest"] = sums, digests, largest
    return rows


def described_range(matrix: Matrix, start: int, stop: int) -> NDArray[Any]:
    """Read and describe consecutive rows of a matrix."""
    rows = np.arange(start, stop, dtype=np.int64)
    return described(gather(matrix.fetch(rows), rows - start, matrix.stored_dtype), matrix.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Parts of a pass that describes all rows, and keeps a sorted copy of them if they are slow to read out of order.

    Reading a single row of a compressed file requires decoding a whole chunk. In a file larger than memory, it requires
    a disk seek. Each part of such input is therefore also written to an uncompressed file, with its rows sorted by
    their position in the output (`places`; None for other input). A range of output rows is then a contiguous range in
    every file, and takes one read per file.
    """

    matrix: Matrix
    folder: Path
    part_rows: int
    piece_rows: int
    places: Path | None

    @property
    def n_parts(self) -> int:
        """Number of parts."""
        return -(-self.matrix.shape[0] // self.part_rows)

    def rows(self, k: int) -> tuple[int, int]:
        """Return the range of the rows of part `k`."""
        return k * self.part_rows, min((k + 1) * self.part_rows, self.matrix.shape[0])

    def is_done(self, k: int) -> bool:
        """Return True if part `k` has been written."""
        return (self.folder / f"{k}.npy").exists()

    def __call__(self, k: int) -> None:
        """Read part `k`, and write its descriptions and its sorted copy."""
        start, stop = self.rows(k)
        found = np.empty(stop - start, dtype=ROW)
        if self.places is None:
            for first, last in pieces(start, stop, self.piece_rows):
                found[first - start : last - start] = described_range(self.matrix, first, last)
        else:
            ranked = np.argsort(mapped_array(self.places)[start:stop])
            fetched = self.matrix.fetch(np.arange(start, stop, dtype=np.int64))
            block = gather(fetched, ranked, self.matrix.stored_dtype)
            with atomic_path(self.folder / f"{k}.h5") as path, h5py.File(path, "w") as file:
                _write_block(file, block, fetched.shape)
            found[ranked] = described(block, fetched.shape[1])
        with atomic_array(self.folder / f"{k}.npy", ROW, len(found)) as out:
            out[:] = found

    def collect(self, path: Path) -> None:
        """Write the descriptions of all rows to one file."""
        with atomic_array(path, ROW, self.matrix.shape[0]) as out:
            for k in range(self.n_parts):
                out[slice(*self.rows(k))] = mapped_array(self.folder / f"{k}.npy")

    def staged(self) -> tuple[Matrix, Path]:
        """Return the sorted copies as one matrix, and a file with the row of that matrix for each output row."""
        assert self.places is not None
        places, order = mapped_array(self.places), self.folder / "order.npy"
        with atomic_array(order, np.int64, len(places)) as out:
            for k in range(self.n_parts):
                start, stop = self.rows(k)
                out[np.sort(places[start:stop])] = np.arange(start, stop)
        parts = [open_matrix(self.folder / f"{k}.h5", "X") for k in range(self.n_parts)]
        return ConcatenatedMatrix(label=f"{self.matrix.label}, staged", parts=parts, maps=None), order


def _write_block(file: h5py.File, block: Block, shape: tuple[int, int]) -> None:
    """Write a matrix in AnnData's format, uncompressed and contiguous, so that it can be memory-mapped."""
    if not isinstance(block, tuple):
        file["X"] = block
        return
    indptr, indices, data = block
    group = file.create_group("X")
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": shape})
    group["indptr"] = indptr
    # Repeated columns are summed when the copy is read, since their sums may need a wider type.
    group["indices"] = indices.astype(np.uint16) if shape[1] <= 2**16 else indices
    group["data"] = data


def verify_rows(
    matrix: Matrix, recorded: NDArray[Any], order: NDArray[np.int64], start: int, stop: int, piece_rows: int
) -> None:
    """Raise `CorruptDataError` if rows of a written matrix differ from their descriptions when the input was read."""
    for first, last in pieces(start, stop, piece_rows):
        found, expected = described_range(matrix, first, last), recorded[order[first:last]]
        for name, what in (("length", "length"), ("sum", "sum"), ("digest", "checksum")):
            # Bits are compared, since a sum that is NaN does not equal itself.
            differs = np.flatnonzero(found[name].view(np.uint64) != expected[name].view(np.uint64))
            if len(differs):
                i = int(differs[0])
                raise CorruptDataError(
                    f"{matrix.label}: row {first + i} has {what} {found[name][i]}, but its source, row "
                    f"{order[first + i]} of the input, has {expected[name][i]} ({len(differs)} rows differ, all "
                    f"between {first} and {last - 1}). The disk or memory may be failing. The written data are "
                    "removed; convert again."
                )
