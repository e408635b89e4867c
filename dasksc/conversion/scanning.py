"""Rows of a matrix as blocks, their descriptions, and a pass over all rows that reads the input in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError, InputError, StorageError
from dasksc.kernels import statistics
from dasksc.output.work_folder import atomic_array, atomic_path, mapped_array
from dasksc.storage import ConcatenatedMatrix, Matrix, RowBuffer
from dasksc.storage.arrays import logical_dtype, memory_dtype
from dasksc.storage.dtypes import narrowest
from dasksc.storage.files import LocalFile
from dasksc.storage.matrices import CSRMatrix, DenseMatrix
from dasksc.storage.uncompressed import PlainArray

ROW = np.dtype([("length", np.int64), ("sum", np.float64), ("digest", np.uint64), ("largest", np.float64)])
"""Description of a row: number of stored values, their sum, digest (see `dasksc.kernels.statistics`) and maximum."""

Block = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]] | NDArray[Any]


def pieces(start: int, stop: int, n: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive ranges, of at most `n` elements each, that cover ``[start, stop)``."""
    for begin in range(start, stop, n):
        yield begin, min(begin + n, stop)


def gather(fetched: RowBuffer, positions: NDArray[np.int64], dtype: np.dtype[Any]) -> Block:
    """Copy rows as a dense or CSR block, in 64-bit integers if sums of repeated columns exceed an integer `dtype`."""
    if fetched.layout == "dense":
        block = np.empty((len(positions), fetched.shape[1]), dtype=dtype)
        fetched.gather(positions, out=block)
        return block
    try:
        return fetched.gather_csr(positions, dtype=dtype)
    except (InputError, StorageError):
        if dtype.kind == "f":
            raise
        return fetched.gather_csr(positions, dtype=np.dtype(np.uint64 if dtype == np.uint64 else np.int64))


def exact_dtype(matrix: Matrix) -> np.dtype[Any]:
    """Return a data type for exact copies of the stored values; booleans become integers, whose duplicates add up."""
    return np.dtype(np.uint8) if matrix.stored_dtype.kind == "b" else memory_dtype(matrix.stored_dtype)


def described(block: Block) -> NDArray[Any]:
    """Return the descriptions of the rows of a block, shape (n_rows,), of type `ROW`."""
    lengths = np.diff(block[0]) if isinstance(block, tuple) else np.zeros(len(block), dtype=np.int64)
    rows = np.empty(len(lengths), dtype=ROW)
    out = [np.empty(len(rows), dtype=ROW[name]) for name in ("sum", "digest", "largest")]
    if isinstance(block, tuple):
        statistics.digest_csr(*block, *out)
    else:
        statistics.digest_dense(block, *out)
    rows["length"], rows["sum"], rows["digest"], rows["largest"] = lengths, *out
    return rows


def described_range(matrix: Matrix, start: int, stop: int) -> NDArray[Any]:
    """Read and describe consecutive rows of a matrix."""
    rows = np.arange(start, stop, dtype=np.int64)
    return described(gather(matrix.fetch(rows), rows - start, exact_dtype(matrix)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Parts of a pass that describes all rows and, if they are slow to read out of order, copies them in that order."""

    matrix: Matrix
    folder: Path
    parts: list[tuple[int, int]]
    piece_rows: int
    # The position of each row in the output; None if the input is fast to read out of order. A range of output rows is
    # a contiguous range in the sorted copy of every part, and takes one read per part.
    places: Path | None

    def is_done(self, k: int) -> bool:
        return (self.folder / f"{k}-rows.npy").exists()

    def __call__(self, k: int) -> None:
        """Read part `k`, and write its descriptions and its sorted copy."""
        start, stop = self.parts[k]
        found = np.empty(stop - start, dtype=ROW)
        if self.places is None:
            for first, last in pieces(start, stop, self.piece_rows):
                found[first - start : last - start] = described_range(self.matrix, first, last)
        else:
            ranked = np.argsort(mapped_array(self.places)[start:stop])
            fetched = self.matrix.fetch(np.arange(start, stop, dtype=np.int64))
            block = gather(fetched, ranked, exact_dtype(self.matrix))
            self._write(k, block)
            found[ranked] = described(block)
        with atomic_array(self.folder / f"{k}-rows.npy", ROW, len(found)) as out:
            out[:] = found

    def collect(self, path: Path) -> None:
        """Write the descriptions of all rows to one file."""
        with atomic_array(path, ROW, self.matrix.shape[0]) as out:
            for k, part in enumerate(self.parts):
                out[slice(*part)] = mapped_array(self.folder / f"{k}-rows.npy")

    def staged(self) -> tuple[Matrix, Path]:
        """Return the sorted copies as one matrix, and a file with the row of that matrix for each output row."""
        assert self.places is not None
        places, order = mapped_array(self.places), self.folder / "order.npy"
        with atomic_array(order, np.int64, len(places)) as out:
            for start, stop in self.parts:
                out[np.sort(places[start:stop])] = np.arange(start, stop)
        parts = [self._copy_of(k) for k in range(len(self.parts))]
        return ConcatenatedMatrix(label=f"{self.matrix.label}, staged", parts=parts, maps=None), order

    def _write(self, k: int, block: Block) -> None:
        """Write the sorted copy of part `k` as ``.npy`` files, which can be memory-mapped."""
        arrays: dict[str, NDArray[Any]]
        if isinstance(block, tuple):
            indptr, indices, data = block
            narrow = narrowest(indices.dtype, self.matrix.shape[1])
            arrays = {"indptr": indptr, "indices": indices.astype(narrow, copy=False), "data": data}
        else:
            arrays = {"values": block}
        for name, array in arrays.items():
            with atomic_path(self.folder / f"{k}-{name}.npy") as path:
                np.save(path, array)

    def _copy_of(self, k: int) -> Matrix:
        start, stop = self.parts[k]
        names = ("indptr", "indices", "data") if self.matrix.layout == "csr" else ("values",)
        *indices, data = (_stored(self.folder / f"{k}-{name}.npy") for name in names)
        label, dtype = f"{self.matrix.label}, part {k}", logical_dtype(data.dtype)
        if not indices:
            return DenseMatrix(label=label, values=data, dtype=dtype)
        shape = stop - start, self.matrix.shape[1]
        return CSRMatrix(label=label, shape=shape, indptr=indices[0], indices=indices[1], data=data, dtype=dtype)


def _stored(path: Path) -> PlainArray:
    """Return the array in a ``.npy`` file."""
    array = mapped_array(path)
    return PlainArray(
        label=str(path),
        shape=array.shape,
        dtype=array.dtype,
        file=LocalFile.of(str(path), "auto"),
        firsts=np.zeros(1, dtype=np.int64),
        offsets=np.array([array.offset], dtype=np.int64),
        fill=array.dtype.type(0),
    )


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
