"""Writing of the matrices of a store, shard by shard, from rows of the input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.conversion.scanning import exactly, gather_canonical, pieces
from dasksc.errors import CorruptDataError
from dasksc.output.elements import write_group
from dasksc.output.shards import ShardedArray, ShardWriter, Shuffle
from dasksc.output.work_folder import mapped_array
from dasksc.storage import Matrix, RowBuffer

__all__ = ["CSRCopy", "Copy", "DenseCopy", "narrowest_count", "wide_enough"]

# About 90 cells of an atlas with 20,000 genes. Other readers decode whole chunks; dasksc decodes single Blosc blocks.
_CHUNK_VALUES = 2**17
_DENSE_CHUNK_BYTES = 2**18
_USUAL_SHARDS = 16
_SHARD_VALUES = 2**26
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
    """Return `dtype`, or the narrowest unsigned type for counts up to `largest` if `dtype` cannot represent them.

    Sums of duplicate entries, which have the same row and column, can exceed the range of `dtype`.
    """
    if dtype.kind == "f" or largest <= (1 if dtype.kind == "b" else np.iinfo(dtype).max):
        return dtype
    return next((np.dtype(f"u{n}") for n in (1, 2, 4, 8) if largest <= np.iinfo(f"u{n}").max), dtype)


def shard_rows_for(n_rows: int, chunk_rows: int, most: int) -> int:
    """Return the number of rows per shard, a multiple of `chunk_rows`.

    It is the smallest multiple that results in at most 16 shards. If this exceeds `most`, it is the largest multiple up
    to `most`.
    """
    return chunk_rows * max(1, min(-(-n_rows // (chunk_rows * _USUAL_SHARDS)), most // chunk_rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class CSRCopy:
    """Tasks that copy a CSR matrix to a store, one task per shard.

    Parameters
    ----------
    matrix
        Input matrix.
    order
        File with the row of `matrix` for each row of the copy.
    indptr
        File with the offset of each row of the copy.
    folder
        Folder of the copy, a Zarr group.
    dtype
        Data type of the stored values.
    computed
        Data type to which readers convert the values for computation, recorded as an attribute of the copy.
    narrow
        If True, column indices take one or two bytes where possible. If False, they have the data type of the
        offsets, as in SciPy.
    n_values
        Number of stored values.
    piece_values
        Number of values in memory at a time.
    """

    matrix: Matrix
    order: Path
    indptr: Path
    folder: Path
    dtype: np.dtype[Any]
    computed: np.dtype[Any]
    narrow: bool
    n_values: int
    piece_values: int

    @property
    def arrays(self) -> dict[str, ShardedArray]:
        """Sharded arrays of the copy, by name."""
        columns = narrowest_count(np.dtype(np.int32), self.matrix.shape[1] - 1) if self.narrow else self._offsets
        shard = shard_rows_for(self.n_values, _CHUNK_VALUES, _SHARD_VALUES)
        return {
            name: ShardedArray(
                shape=(self.n_values,),
                dtype=dtype,
                chunk_rows=_CHUNK_VALUES,
                shard_rows=shard,
                shuffle="noshuffle" if dtype.kind == "f" else "shuffle",
            )
            for name, dtype in (("indices", columns), ("data", self.dtype))
        }

    @property
    def _offsets(self) -> np.dtype[Any]:
        """Data type of the offsets."""
        small = not self.narrow and self.n_values <= np.iinfo(np.int32).max
        return np.dtype(np.int32 if small else np.int64)

    @property
    def n_tasks(self) -> int:
        """Number of shards."""
        return self.arrays["data"].n_shards

    def is_done(self, k: int) -> bool:
        """Return True if shard `k` has been written."""
        return all(array.path(self.folder / name, k).exists() for name, array in self.arrays.items())

    def __call__(self, k: int) -> int:
        """Write shard `k`; return its size in bytes."""
        arrays = self.arrays
        indptr, order = mapped_array(self.indptr), mapped_array(self.order)
        start, stop = arrays["data"].rows(k)
        with (
            ShardWriter(arrays["indices"], self.folder / "indices", k) as indices_to,
            ShardWriter(arrays["data"], self.folder / "data", k) as data_to,
        ):
            for first, last in rows_of_values(indptr, start, stop, self.piece_values):
                bounds = indptr[first : last + 1]
                fetched, positions = fetch_any(self.matrix, order[first:last])
                found, indices, data = gather_canonical(fetched, positions, dtype=self.matrix.stored_dtype)
                data = exactly(data, self.dtype, f"{self.matrix.label}: a sum of duplicate entries")
                if not np.array_equal(found, bounds - bounds[0]):
                    raise CorruptDataError(f"{self.matrix.label} changed while it was being read. Convert it again.")
                # The first and the last row may extend into neighboring shards.
                wanted = slice(max(0, start - int(bounds[0])), min(int(bounds[-1]), stop) - int(bounds[0]))
                indices_to.append(indices[wanted])
                data_to.append(data[wanted])
        return indices_to.n_bytes + data_to.n_bytes

    def finish(self) -> None:
        """Write the offsets, and the metadata that makes the folder a CSR matrix."""
        indptr = mapped_array(self.indptr)
        shard = shard_rows_for(len(indptr), _INDPTR_CHUNK, _SHARD_VALUES)
        array = ShardedArray(shape=indptr.shape, dtype=self._offsets, chunk_rows=_INDPTR_CHUNK, shard_rows=shard)
        for k in range(array.n_shards):
            with ShardWriter(array, self.folder / "indptr", k) as to:
                for start, stop in pieces(*array.rows(k), _INDPTR_CHUNK):
                    to.append(indptr[start:stop])
        for name, one in {**self.arrays, "indptr": array}.items():
            one.write_metadata(self.folder / name, {})
        write_group(
            self.folder,
            {
                "encoding-type": "csr_matrix",
                "encoding-version": "0.1.0",
                "shape": list(self.matrix.shape),
                "dasksc": {"dtype": self.computed.name},
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseCopy:
    """Tasks that copy a dense matrix to a store, one task per shard.

    Parameters
    ----------
    matrix, order, folder, dtype, computed
        As for `CSRCopy`.
    shuffle
        As for `ShardedArray`.
    piece_rows
        Number of rows in memory at a time.
    """

    matrix: Matrix
    order: Path
    folder: Path
    dtype: np.dtype[Any]
    computed: np.dtype[Any]
    shuffle: Shuffle
    piece_rows: int

    @property
    def array(self) -> ShardedArray:
        """Sharded array of the copy."""
        row_bytes = max(1, self.matrix.shape[1] * self.dtype.itemsize)
        chunk = max(1, _DENSE_CHUNK_BYTES // row_bytes)
        most = max(1, _SHARD_VALUES // max(1, self.matrix.shape[1]))
        return ShardedArray(
            shape=self.matrix.shape,
            dtype=self.dtype,
            chunk_rows=chunk,
            shard_rows=shard_rows_for(self.matrix.shape[0], chunk, most),
            shuffle=self.shuffle,
        )

    @property
    def n_tasks(self) -> int:
        """Number of shards."""
        return self.array.n_shards

    def is_done(self, k: int) -> bool:
        """Return True if shard `k` has been written."""
        return self.array.path(self.folder, k).exists()

    def __call__(self, k: int) -> int:
        """Write shard `k`; return its size in bytes."""
        array = self.array
        order = mapped_array(self.order)
        with ShardWriter(array, self.folder, k) as to:
            for start, stop in pieces(*array.rows(k), self.piece_rows):
                fetched, positions = fetch_any(self.matrix, order[start:stop])
                block = np.empty((stop - start, array.shape[1]), dtype=self.dtype)
                fetched.gather(positions, out=block)
                to.append(block)
        return to.n_bytes

    def finish(self) -> None:
        """Write the metadata that makes the folder an array."""
        encoding = {"encoding-type": "array", "encoding-version": "0.2.0"}
        self.array.write_metadata(self.folder, {**encoding, "dasksc": {"dtype": self.computed.name}})


Copy = CSRCopy | DenseCopy


def fetch_any(matrix: Matrix, rows: NDArray[np.int64]) -> tuple[RowBuffer, NDArray[np.int64]]:
    """Fetch rows in any order; return the fetched rows and the position of each requested row in them."""
    ascending, positions = np.unique(rows, return_inverse=True)
    return matrix.fetch(ascending), positions


def rows_of_values(indptr: NDArray[np.int64], start: int, stop: int, piece_values: int) -> Iterator[tuple[int, int]]:
    """Split the rows that contain values ``[start, stop)`` into pieces of about `piece_values` values.

    A piece has at least one row. The number of rows in a piece is also limited, since each row takes memory even if it
    is empty.
    """
    first = int(np.searchsorted(indptr, start, side="right")) - 1
    end = int(np.searchsorted(indptr, stop, side="left"))
    while first < end:
        last = int(np.searchsorted(indptr, int(indptr[first]) + piece_values, side="right")) - 1
        last = min(max(last, first + 1), first + _PIECE_ROWS, end)
        yield first, last
        first = last
