"""Arrays in chunks that must be decoded: each chunk once a fetch, only the wanted rows kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError
from dasksc.storage.arrays import BrokenRunError, memory_dtype, row_bytes
from dasksc.storage.codecs import Chain
from dasksc.storage.files import LocalFile
from dasksc.storage.reach import Reached
from dasksc.storage.runs import cut, locate, merge

__all__ = ["ChunkSource", "ChunkedArray", "TableChunks"]


class ChunkSource(Protocol):
    """The stored chunks of an array, numbered in row-major order of the grid. Pickles."""

    def check(self) -> None:
        """Refuse to go on if what was opened has been replaced."""

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[Any, int]]:
        """Yield each chunk's bytes, None if it was never written, and which codecs it skipped (a bit each).

        `numbers` ascend. Bytes are valid until the next chunk is asked for.
        """


class TableChunks:
    """Chunks of one file, at places that a table gives.

    Parameters
    ----------
    file
        The file.
    offsets, sizes
        Place of each chunk in bytes, shape (n_chunks,), int64; offset -1 if it was never written.
    skipped
        Which codecs each chunk skipped, shape (n_chunks,), uint32.

    Raises
    ------
    CorruptDataError
        If a chunk ends beyond the file.
    """

    def __init__(
        self, file: LocalFile, *, offsets: NDArray[np.int64], sizes: NDArray[np.int64], skipped: NDArray[np.uint32]
    ) -> None:
        if (offsets + sizes).max(initial=0) > file.identity.size:
            raise CorruptDataError(
                f"{file.path} is truncated: a chunk ends at byte {(offsets + sizes).max()} of {file.identity.size}. "
                "Copy or download it again."
            )
        self._file = file
        self._offsets = offsets
        # The table travels with every task: bytes count. HDF5 chunks are below 4 GiB, and few skip a filter.
        self._sizes = sizes.astype(np.uint32)
        self._skipped = skipped if skipped.any() else None

    def check(self) -> None:
        """Refuse a file that was replaced."""
        self._file.check()

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[Any, int]]:
        """Yield the chunks; see `ChunkSource.read`."""
        offsets, sizes = self._offsets[numbers], self._sizes[numbers].astype(np.int64)
        skips = np.zeros(len(numbers), dtype=np.uint32) if self._skipped is None else self._skipped[numbers]
        order = np.argsort(offsets, kind="stable")
        written = order[offsets[order] >= 0]
        self._file.advise(offsets[written], sizes[written])
        buffer = memoryview(bytearray(int(sizes.max(initial=0))))
        places = zip(offsets.tolist(), sizes.tolist(), skips.tolist(), strict=True)
        for offset, size, skipped in places:
            if offset < 0:
                yield None, 0
            else:
                into = buffer[:size]
                self._file.read(offset, into)
                yield into, skipped


class ChunkedArray:
    """An array of encoded chunks.

    Parameters
    ----------
    label
        What to call it in errors.
    shape
        One or two lengths.
    chunk_shape
        Lengths of a chunk, as many as `shape` has; chunks at the edges are stored whole.
    chain
        How chunks are decoded.
    source
        Where they are.
    fill
        What is read where no chunk was written.
    """

    def __init__(
        self,
        *,
        label: str,
        shape: tuple[int, ...],
        chunk_shape: tuple[int, ...],
        chain: Chain,
        source: ChunkSource,
        fill: Any,
    ) -> None:
        self.label = label
        self.shape = shape
        self.dtype = chain.dtype.newbyteorder("=")
        self._chunk_shape = chunk_shape
        self._chain = chain
        self._source = source
        self._fill = fill

    def reach(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Reached:
        """Decode the chunks that the runs touch, and keep of each what was asked for."""
        self._source.check()
        length = self._chunk_shape[0]
        stride = row_bytes(self)
        run_starts, run_stops = merge(starts, stops, gap=0, chunk=1)
        n_columns = self.shape[1] if len(self.shape) == 2 else 1
        width = self._chunk_shape[1] if len(self.shape) == 2 else 1
        block = np.empty((int((run_stops - run_starts).sum()), n_columns), dtype=memory_dtype(self.dtype))
        if block.size:
            rows, piece_starts, piece_stops = cut(run_starts, run_stops, chunk=length)
            self._fill_block(block, rows, piece_starts, piece_stops, width=width)
        return Reached.inside(
            (block,),
            dtype=block.dtype,
            which=0,
            offsets=locate(starts, stops, run_starts, run_stops) * stride,
            sizes=(stops - starts) * stride,
            held_bytes=block.nbytes,
        )

    def _fill_block(
        self,
        block: NDArray[Any],
        rows: NDArray[np.int64],
        piece_starts: NDArray[np.int64],
        piece_stops: NDArray[np.int64],
        *,
        width: int,
    ) -> None:
        """Fill `block` with pieces, one after the other, each in one row of chunks of the grid."""
        lengths = piece_stops - piece_starts
        to = np.cumsum(lengths) - lengths
        lows = piece_starts - rows * self._chunk_shape[0]
        pieces = np.stack((lows, lows + lengths, to, to + lengths), axis=1).tolist()
        grid_rows, firsts = np.unique(rows, return_index=True)
        groups = np.append(firsts, len(rows)).tolist()
        n_across = -(-block.shape[1] // width)
        numbers = (grid_rows[:, None] * n_across + np.arange(n_across)).ravel()
        shape = (self._chunk_shape[0], width)
        stored = self._source.read(numbers)
        for i in range(len(numbers)):
            row, across = divmod(i, n_across)
            left = across * width
            right = min(left + width, block.shape[1])
            try:
                data, skipped = next(stored)
                chunk = None if data is None else self._chain.decode(data, shape=shape, skipped=skipped)
            # Codecs raise whatever they like: zlib.error, RuntimeError, ValueError.
            except Exception as error:
                start = int(grid_rows[row]) * self._chunk_shape[0]
                raise BrokenRunError(self.label, start, start + self._chunk_shape[0], str(error)) from error
            for low, high, begin, end in pieces[groups[row] : groups[row + 1]]:
                block[begin:end, left:right] = self._fill if chunk is None else chunk[low:high, : right - left]
