"""Copies of matrices in a store, written shard by shard from rows of the input in a new order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.conversion.scanning import exactly, gather, pieces, summed
from dasksc.conversion.shards import ShardedArray, shard_writer
from dasksc.errors import CorruptDataError
from dasksc.output.elements import write_group
from dasksc.output.work_folder import atomic_array, mapped_array
from dasksc.storage import Matrix
from dasksc.storage.arrays import logical_dtype

__all__ = ["Copy", "copy_of"]

# About 90 cells of an atlas with 20,000 genes. Other readers decode whole chunks; dasksc decodes single Blosc blocks.
_CHUNK_VALUES = 2**17
_DENSE_CHUNK_BYTES = 2**18
_INDPTR_CHUNK = 2**16
# Maximum number of rows per piece, including empty rows.
_PIECE_ROWS = 2**18


def narrowest_count(dtype: np.dtype[Any], largest: float) -> np.dtype[Any]:
    """Return the narrowest unsigned type for counts up to `largest`, or `dtype` if no such type is narrower.

    `largest` is infinite if the values are not counts.
    """
    for count in (np.uint8, np.uint16, np.uint32):
        if largest <= np.iinfo(count).max and np.dtype(count).itemsize < dtype.itemsize:
            return np.dtype(count)
    return dtype


def wide_enough(dtype: np.dtype[Any], largest: float) -> np.dtype[Any]:
    """Return `dtype`, or an unsigned type for counts up to `largest` if these, sums of duplicates, exceed `dtype`."""
    if dtype.kind == "f" or largest <= (1 if dtype.kind == "b" else np.iinfo(dtype).max):
        return dtype
    return next((np.dtype(f"u{n}") for n in (1, 2, 4, 8) if largest <= np.iinfo(f"u{n}").max), dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Copy of a matrix in a Zarr group or array.

    Parameters
    ----------
    matrix, order
        Matrix to read, and a file with its row for each row of the copy.
    folder, arrays
        Folder of the copy, and its sharded arrays: column indices and values, or the values of a dense copy.
    indptr
        Array of the offsets of the rows, and a file with these; None for a dense copy.
    computed
        Data type to which readers convert the values, recorded as an attribute of the copy.
    piece_rows, piece_values
        Number of rows and of stored values in memory at a time.
    """

    matrix: Matrix
    order: Path
    folder: Path
    arrays: tuple[ShardedArray, ...]
    indptr: tuple[ShardedArray, Path] | None
    computed: np.dtype[Any]
    piece_rows: int
    piece_values: int

    @property
    def n_shards(self) -> int:
        """Number of shards, equal for all arrays."""
        return self.arrays[0].n_shards

    def is_done(self, k: int) -> bool:
        """Return True if shard `k` of every array has been written."""
        return all(array.path(k).exists() for array in self.arrays)

    @property
    def remaining_bytes(self) -> int:
        """Uncompressed size of the shards that have not been written."""
        remaining = sum(not self.is_done(k) for k in range(self.n_shards))
        return (
            sum(int(np.prod(array.shape)) * array.dtype.itemsize for array in self.arrays)
            * remaining
            // max(1, self.n_shards)
        )

    def __call__(self, k: int) -> None:
        """Write shard `k`."""
        with ExitStack() as stack:
            writers = [stack.enter_context(shard_writer(array, k)) for array in self.arrays]
            for first, last, wanted in self._pieces(k):
                for writer, values in zip(writers, self._values(first, last), strict=True):
                    writer.append(values[wanted])

    def _pieces(self, k: int) -> Iterator[tuple[int, int, slice]]:
        """Yield ranges of rows, and the part of their values that belongs to shard `k`."""
        start, stop = self.arrays[0].rows(k)
        if self.indptr is None:
            for first, last in pieces(start, stop, self.piece_rows):
                yield first, last, slice(None)
            return
        indptr = mapped_array(self.indptr[1])
        first = int(np.searchsorted(indptr, start, side="right")) - 1
        end = int(np.searchsorted(indptr, stop, side="left"))
        while first < end:
            at = int(indptr[first])
            last = int(np.searchsorted(indptr, at + self.piece_values, side="right")) - 1
            # The number of rows is also limited, since each row takes memory even if it is empty.
            last = min(max(last, first + 1), first + min(_PIECE_ROWS, self.piece_rows), end)
            # The first and the last row may extend into neighboring shards.
            yield first, last, slice(max(0, start - at), min(int(indptr[last]), stop) - at)
            first = last

    def _values(self, first: int, last: int) -> list[NDArray[Any]]:
        """Read the values of rows of the copy, one array for each of its arrays."""
        rows, positions = np.unique(mapped_array(self.order)[first:last], return_inverse=True)
        fetched, dtype = self.matrix.fetch(rows), self.arrays[-1].dtype
        if self.indptr is None:
            block = np.empty((last - first, self.matrix.shape[1]), dtype=dtype)
            fetched.gather(positions, out=block)
            return [block]
        stored = gather(fetched, positions, self.matrix.stored_dtype)
        assert isinstance(stored, tuple)
        offsets, indices, data = summed(stored, self.matrix.shape[1])
        expected = mapped_array(self.indptr[1])[first : last + 1]
        if not np.array_equal(offsets, expected - expected[0]):
            raise CorruptDataError(f"{self.matrix.label} changed while it was being read. Convert it again.")
        return [indices, exactly(data, dtype, f"{self.matrix.label}: a sum of duplicate entries")]

    def finish(self) -> None:
        """Write the offsets, and the metadata that makes the folder a matrix of AnnData."""
        computed = {"dtype": self.computed.name}
        if self.indptr is None:
            encoding = {"encoding-type": "array", "encoding-version": "0.2.0"}
            self.arrays[0].write_metadata({**encoding, "dasksc": computed})
            return
        array, path = self.indptr
        offsets = mapped_array(path)
        for k in range(array.n_shards):
            with shard_writer(array, k) as writer:
                for start, stop in pieces(*array.rows(k), _INDPTR_CHUNK):
                    writer.append(offsets[start:stop])
        for one in (*self.arrays, array):
            one.write_metadata({})
        encoding = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0"}
        write_group(self.folder, {**encoding, "shape": list(self.matrix.shape), "dasksc": computed})


def copy_of(
    matrix: Matrix, key: str, rows: Path, order: Path, store: Path, *, narrow: bool, piece_rows: int, piece_values: int
) -> Copy:
    """Return the copy of a matrix to write, with data types chosen from the descriptions of its rows in a file."""
    recorded, folder = mapped_array(rows), store / key
    n_obs, n_vars = matrix.shape
    largest = float(recorded["largest"].max(initial=0))
    dtype = wide_enough(matrix.stored_dtype, largest)
    is_expression = not key.startswith("obsm/")
    if narrow and is_expression and n_obs:
        dtype = narrowest_count(dtype, largest)
    is_csr = matrix.layout == "csr"
    # Expression values repeat within a cell, and compress better without the byte-shuffle filter. Coordinates of
    # embeddings do not repeat.
    shuffle: Any = "noshuffle" if dtype.kind == "f" and (is_csr or is_expression) else "shuffle"
    indptr = None
    if is_csr:
        path = rows.with_name(rows.stem + "-indptr.npy")
        if not path.exists():
            with atomic_array(path, np.int64, n_obs + 1) as out:
                _fill_indptr(out, recorded, mapped_array(order))
        n_values = int(mapped_array(path)[-1])
        offsets = np.dtype(np.int32 if not narrow and n_values <= np.iinfo(np.int32).max else np.int64)
        columns = narrowest_count(np.dtype(np.int32), n_vars - 1) if narrow else offsets
        values = {"shape": (n_values,), "chunk_rows": _CHUNK_VALUES}
        arrays: tuple[ShardedArray, ...] = (
            ShardedArray(folder=folder / "indices", dtype=columns, **values),
            ShardedArray(folder=folder / "data", dtype=dtype, shuffle=shuffle, **values),
        )
        shape, chunk = (n_obs + 1,), _INDPTR_CHUNK
        indptr = ShardedArray(folder=folder / "indptr", shape=shape, dtype=offsets, chunk_rows=chunk), path
    else:
        chunk = max(1, _DENSE_CHUNK_BYTES // max(1, n_vars * dtype.itemsize))
        arrays = (ShardedArray(folder=folder, shape=(n_obs, n_vars), dtype=dtype, chunk_rows=chunk, shuffle=shuffle),)
    return Copy(
        matrix=matrix,
        order=order,
        folder=folder,
        arrays=arrays,
        indptr=indptr,
        computed=logical_dtype(matrix.dtype),
        piece_rows=piece_rows,
        piece_values=piece_values,
    )


def _fill_indptr(indptr: NDArray[np.int64], rows: NDArray[Any], order: NDArray[np.int64]) -> None:
    """Compute the offset of each row of the output."""
    indptr[0] = 0
    for start, stop in pieces(0, len(order), _PIECE_ROWS):
        np.cumsum(rows["length"][order[start:stop]], out=indptr[start + 1 : stop + 1])
        indptr[start + 1 : stop + 1] += indptr[start]
