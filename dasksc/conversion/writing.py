"""Copies of matrices in a store, written shard by shard from rows of the input in a new order."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from dasksc.conversion.scanning import gather, pieces
from dasksc.errors import CorruptDataError
from dasksc.output.shards import ShardedArray, ShardWriter, Shuffle, shard_writer
from dasksc.output.work_folder import atomic_array, mapped_array
from dasksc.storage import Matrix, RowBuffer
from dasksc.storage.arrays import logical_dtype

# About 90 cells of an atlas with 20,000 genes. Other readers decode whole chunks; dasksc decodes single Blosc blocks.
_CHUNK_VALUES = 2**17
_DENSE_CHUNK_BYTES = 2**18
_INDPTR_CHUNK = 2**16
# Maximum number of rows per piece, including empty rows.
_PIECE_ROWS = 2**18


def count_dtype(dtype: np.dtype[Any], largest: float, *, narrow: bool) -> np.dtype[Any]:
    """Return the narrowest unsigned type for counts up to `largest` (infinite: no counts), or `dtype` if it fits."""
    # Sums of duplicate entries may exceed the type of the input.
    fits = dtype.kind == "f" or largest <= (1 if dtype.kind == "b" else np.iinfo(dtype).max)
    count = next((np.dtype(f"u{n}") for n in (1, 2, 4, 8) if largest <= np.iinfo(f"u{n}").max), dtype)
    return count if not fits or (narrow and count.itemsize < dtype.itemsize) else dtype


class Copy:
    """Copy of a matrix in a store: row ``order[i]`` becomes row i; memory holds `piece_rows` rows or `piece_values`."""

    def __init__(
        self,
        matrix: Matrix,
        order: Path,
        *,
        rows: Path,
        folder: Path,
        is_expression: bool,
        narrow: bool,
        piece_rows: int,
        piece_values: int,
    ) -> None:
        self.matrix = matrix
        self.order = order
        self.piece_rows = piece_rows
        self.piece_values = piece_values
        self._folder = folder
        self._computed = logical_dtype(matrix.dtype)
        self._is_csr = matrix.layout == "csr"
        self._indptr = rows.with_name("indptr.npy")
        n_obs, n_vars = matrix.shape
        recorded = mapped_array(rows)
        largest = float(recorded["largest"].max(initial=0))
        dtype = count_dtype(matrix.stored_dtype, largest, narrow=narrow and is_expression and n_obs > 0)
        # Expression values repeat within a cell, and compress better without the byte-shuffle filter. Coordinates of
        # embeddings do not repeat.
        shuffle: Shuffle = "noshuffle" if dtype.kind == "f" and (self._is_csr or is_expression) else "shuffle"
        if not self._is_csr:
            chunk = max(1, _DENSE_CHUNK_BYTES // max(1, n_vars * dtype.itemsize))
            self._arrays = [ShardedArray(folder, matrix.shape, dtype, chunk, shuffle)]
            return
        if not self._indptr.exists():
            with atomic_array(self._indptr, np.int64, n_obs + 1) as out:
                _fill_indptr(out, recorded, mapped_array(order))
        n_values = int(mapped_array(self._indptr)[-1])
        offsets = np.dtype(np.int32 if not narrow and n_values <= np.iinfo(np.int32).max else np.int64)
        columns = count_dtype(np.dtype(np.int32), n_vars - 1, narrow=True) if narrow else offsets
        self._arrays = [
            ShardedArray(folder / "indices", (n_values,), columns, _CHUNK_VALUES),
            ShardedArray(folder / "data", (n_values,), dtype, _CHUNK_VALUES, shuffle),
        ]
        self._offsets = ShardedArray(folder / "indptr", (n_obs + 1,), offsets, _INDPTR_CHUNK)

    @property
    def n_shards(self) -> int:
        """Number of shards, equal for column indices and values."""
        return self._arrays[0].n_shards

    def is_done(self, k: int) -> bool:
        return all(array.path(k).exists() for array in self._arrays)

    @property
    def is_complete(self) -> bool:
        return all(map(self.is_done, range(self.n_shards)))

    def __call__(self, k: int) -> None:
        with ExitStack() as stack:
            writers = [stack.enter_context(shard_writer(array, k)) for array in self._arrays]
            start, stop = self._arrays[0].rows(k)
            if self._is_csr:
                self._copy_csr(writers[0], writers[1], start, stop)
                return
            for first, last in pieces(start, stop, self.piece_rows):
                block: Any = gather(*self._fetch(first, last), self._arrays[0].dtype)
                writers[0].append(block)

    def _fetch(self, first: int, last: int) -> tuple[RowBuffer, NDArray[np.int64]]:
        """Fetch rows of the copy; return them, and the position of each row among them."""
        rows, positions = np.unique(mapped_array(self.order)[first:last], return_inverse=True)
        return self.matrix.fetch(rows), positions

    def _copy_csr(self, indices_to: ShardWriter, data_to: ShardWriter, start: int, stop: int) -> None:
        indptr = mapped_array(self._indptr)
        first = int(np.searchsorted(indptr, start, side="right")) - 1
        end = int(np.searchsorted(indptr, stop, side="left"))
        while first < end:
            last = int(np.searchsorted(indptr, int(indptr[first]) + self.piece_values, side="right")) - 1
            # The number of rows is also limited, since each row takes memory even if it is empty.
            last = min(max(last, first + 1), first + min(_PIECE_ROWS, self.piece_rows), end)
            bounds = indptr[first : last + 1]
            fetched, positions = self._fetch(first, last)
            found, indices, data = fetched.gather_csr(positions, dtype=self._arrays[1].dtype)
            if not np.array_equal(found, bounds - bounds[0]):
                raise CorruptDataError(f"{self.matrix.label} changed while it was being read. Convert it again.")
            # The first and the last row may extend into neighboring shards.
            wanted = slice(max(0, start - int(bounds[0])), min(int(bounds[-1]), stop) - int(bounds[0]))
            indices_to.append(indices[wanted])
            data_to.append(data[wanted])
            first = last

    def finish(self) -> None:
        """Write the offsets, and the metadata that makes the folder a matrix of AnnData."""
        computed: dict[str, Any] = {"dasksc": {"dtype": self._computed.name}}
        if not self._is_csr:
            encoding = {"encoding-type": "array", "encoding-version": "0.2.0"}
            self._arrays[0].write_metadata(encoding | computed)
            return
        indptr = mapped_array(self._indptr)
        for k in range(self._offsets.n_shards):
            with shard_writer(self._offsets, k) as writer:
                for start, stop in pieces(*self._offsets.rows(k), _INDPTR_CHUNK):
                    writer.append(indptr[start:stop])
        for array in (*self._arrays, self._offsets):
            array.write_metadata({})
        attributes = computed | {"encoding-type": "csr_matrix", "encoding-version": "0.1.0"}
        attributes |= {"shape": list(self.matrix.shape)}
        zarr.open_group(self._folder, zarr_format=3, attributes=attributes)


def _fill_indptr(indptr: NDArray[np.int64], rows: NDArray[Any], order: NDArray[np.int64]) -> None:
    indptr[0] = 0
    for start, stop in pieces(0, len(order), _PIECE_ROWS):
        np.cumsum(rows["length"][order[start:stop]], out=indptr[start + 1 : stop + 1])
        indptr[start + 1 : stop + 1] += indptr[start]
