"""Chunked arrays: a fetch decodes each chunk once and keeps the requested rows."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dasksc._compat import blosc_getitem_address, deflate_addresses, zstd_addresses
from dasksc.errors import CorruptDataError
from dasksc.kernels import decoding
from dasksc.storage import buffers
from dasksc.storage.arrays import (
    BrokenRunError,
    RowPointers,
    StoredArray,
    caused_by_data,
    cut,
    memory_dtype,
    merge,
    places_in,
    reading,
    thread_times,
)
from dasksc.storage.codecs import Blosc, Chain, Deflate, Zstd, scratch
from dasksc.storage.files import LocalFile
from dasksc.storage.remote.remote_file import RemoteFile

# Width from which rows of chunks narrower than the array are copied one by one; each needs 100 bytes.
_LEAST_WIDTH_BYTES = 2**10

# Row of the chunk grid, start and stop of each piece, as `cut` returns them.
_Pieces: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MappedChunks:
    """Stored chunks in memory-mapped files."""

    at: NDArray[np.uint64]  # Address of each chunk, shape (n_chunks,), uint64; 0 for a chunk that was never written
    sizes: NDArray[np.int64]  # Size of each chunk in bytes, shape (n_chunks,), int64
    owner: Any  # Object that keeps the map alive


class ChunkSource:
    """Stored chunks of an array, numbered in row-major order of the grid. Instances can be pickled."""

    working_bytes = 0  # Memory for stored chunks during a fetch, beyond the chunk being decoded

    @abstractmethod
    def require_unchanged(self) -> None:
        """Raise `CorruptDataError` if the file has been replaced since it was opened."""

    @abstractmethod
    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[Any, int]]:
        """Yield the bytes of each chunk (None if it was never written) and a bit mask of its skipped codecs."""
        # `numbers` are ascending. The bytes are valid until the next chunk is requested.

    def mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks] | None:
        """Yield the chunks in memory-mapped groups."""
        # The result is None if the chunks cannot be mapped, or if one of them skipped a codec, since all mapped chunks
        # are decoded alike.
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkTable:
    """Locations of chunks in a file, by row-major number."""

    # offsets, sizes: Offset and size of each chunk in bytes, shape (n_chunks,), int64; the offset is -1 for a chunk
    # that was never written.
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    skipped: NDArray[np.uint32]  # Bit mask of the filters that each chunk skipped, shape (n_chunks,), uint32


class TableChunks(ChunkSource):
    """Chunks of one file, located by a table."""

    def __init__(self, file: LocalFile | RemoteFile, table: ChunkTable) -> None:
        if (end := (table.offsets + table.sizes).max(initial=0)) > file.identity.size:
            raise CorruptDataError(
                f"{file.path} is truncated: a chunk ends at byte {end}, but the file has {file.identity.size} bytes. "
                "Copy or download it again."
            )
        self.working_bytes = file.working_bytes
        self._file = file
        self._offsets = table.offsets
        # The table is pickled with every task, so it must be small. HDF5 chunks are below 4 GiB, and few skip a filter.
        self._sizes = table.sizes.astype(np.uint32)
        self._skipped = table.skipped if table.skipped.any() else None

    def require_unchanged(self) -> None:
        self._file.require_unchanged()

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[Any, int]]:
        offsets, sizes = self._offsets[numbers], self._sizes[numbers].astype(np.int64)
        skips = np.zeros(len(numbers), dtype=np.uint32) if self._skipped is None else self._skipped[numbers]
        written = offsets >= 0
        chunks = self._file.ranges(offsets[written], sizes[written])
        for is_written, skipped in zip(written.tolist(), skips.tolist(), strict=True):
            yield (next(chunks), skipped) if is_written else (None, 0)

    def mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks] | None:
        """Yield all chunks as one group; see `ChunkSource.mapped`."""
        if not self._file.is_mapped or (self._skipped is not None and self._skipped[numbers].any()):
            return None
        assert isinstance(self._file, LocalFile)
        sizes = self._sizes[numbers].astype(np.int64)
        at, owner = self._file.mapped_ranges(self._offsets[numbers], sizes)
        return iter([MappedChunks(at=at, sizes=sizes, owner=owner)])


class ChunkedArray(StoredArray):
    """Array of encoded chunks."""

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
        self.chunk_length = chunk_shape[0]
        # Only blocks of chunks of Blosc are decoded.
        self.decoded_length = 0 if chain.codecs == (Blosc(),) else chunk_shape[0]
        self._chunk_shape = chunk_shape
        self._chain = chain
        self._source = source
        self._fill = fill

    @property
    def working_bytes(self) -> int:
        """Memory for four copies of a chunk (stored, decoded, and two in between) and for reading ahead, in bytes."""
        return 4 * math.prod(self._chunk_shape) * self._chain.dtype.itemsize + self._source.working_bytes

    def locate(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> RowPointers:
        """Decode the chunks that the runs touch, and keep the requested parts."""
        self._source.require_unchanged()
        run_starts, run_stops = merge(starts, stops)
        n_columns = self.shape[1] if len(self.shape) == 2 else 1
        block = buffers.empty((int((run_stops - run_starts).sum()), n_columns), memory_dtype(self.dtype))
        if block.size:
            pieces = cut(run_starts, run_stops, chunk=self._chunk_shape[0])
            if not self._fill_mapped(block, pieces):
                self._fill_block(block, pieces)
        at = places_in(starts, stops, run_starts, run_stops)
        return RowPointers.in_block(block, at, at + stops - starts)

    def _fill_mapped(self, block: NDArray[Any], pieces: _Pieces) -> bool:
        """Fill `block` with one kernel call per group; return False if `_fill_block` must fill it or report errors."""
        functions: Any
        match self._chain.codecs:
            case (Blosc(),):
                decode, functions = decoding.decode_blosc, blosc_getitem_address()
            case (Zstd(),):
                decode, functions = decoding.decode_pieces, zstd_addresses()
            case (Deflate() as codec,):
                decode, functions = decoding.decode_pieces, deflate_addresses(codec.wbits)
            case _:
                return False
        width = self._width * block.itemsize
        is_narrow = block.shape[1] > self._width
        if functions is None or block.dtype != self._chain.dtype or (is_narrow and width < _LEAST_WIDTH_BYTES):
            return False
        if block.shape[1] < self._width:  # the end of each row of a chunk is unused
            return False
        chunks_of, starts, sizes, to = (self._pieces_across if is_narrow else self._pieces_along)(block, pieces)
        numbers, chunk_of = np.unique(chunks_of, return_inverse=True)
        chunk_bytes = self._chunk_shape[0] * width
        out = block.reshape(-1).view(np.uint8)
        spent = thread_times()
        before = 0
        try:
            with reading():
                groups = self._source.mapped(numbers)
                group = None if groups is None else next(groups, None)
            if groups is None:
                return False
            while group is not None:
                after = before + len(group.at)
                here = slice(*np.searchsorted(chunk_of, [before, after]).tolist())
                chunks = chunk_of[here] - before
                written = group.at[chunks] != 0
                for begin, size in zip(to[here][~written].tolist(), sizes[here][~written].tolist(), strict=True):
                    out[begin : begin + size].view(block.dtype)[:] = self._fill
                of_group = chunks, starts[here], (starts + sizes)[here], to[here]
                given = (piece[written] for piece in of_group)
                begun = perf_counter()
                bad = decode(functions, group.at, group.sizes, chunk_bytes, *given, scratch(chunk_bytes), out)
                spent.decode_s += perf_counter() - begun
                if bad >= 0:
                    return False
                before = after
                with reading():
                    group = next(groups, None)
        # `_fill_block` reads chunk by chunk, so it meets the error again and reports the chunk.
        except (CorruptDataError, OSError):
            return False
        return True

    def _pieces_along(self, block: NDArray[Any], pieces: _Pieces) -> tuple[NDArray[np.int64], ...]:
        """Return the chunk of each piece, its first byte and size there, and its place in a block as wide as chunks."""
        rows, starts, stops = pieces
        stride = block.strides[0]
        sizes = (stops - starts) * stride
        return rows, (starts - rows * self._chunk_shape[0]) * stride, sizes, np.cumsum(sizes) - sizes

    def _pieces_across(self, block: NDArray[Any], pieces: _Pieces) -> tuple[NDArray[np.int64], ...]:
        """Return pieces as `_pieces_along` does, of a block wider than chunks; each has a part of one row."""
        rows, starts, stops = pieces
        lengths = stops - starts
        width = self._width * block.itemsize
        lefts = np.arange(0, block.strides[0], width)
        first = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        number = np.arange(len(block))
        chunks = (np.repeat(rows, lengths)[:, None] * len(lefts) + np.arange(len(lefts))).reshape(-1)
        order = np.argsort(chunks, kind="stable")
        row, across = np.divmod(order, len(lefts))
        places = (first + number)[row] % self._chunk_shape[0] * width
        sizes = np.minimum(width, block.strides[0] - lefts)[across]
        return chunks[order], places, sizes, row * block.strides[0] + lefts[across]

    @property
    def _width(self) -> int:
        return self._chunk_shape[1] if len(self.shape) == 2 else 1

    def _fill_block(self, block: NDArray[Any], pieces: _Pieces) -> None:
        """Fill `block` with consecutive pieces, each from one row of the chunk grid."""
        rows, piece_starts, piece_stops = pieces
        width = self._width
        lengths = piece_stops - piece_starts
        to = np.cumsum(lengths) - lengths
        lows = piece_starts - rows * self._chunk_shape[0]
        places = np.stack((lows, lows + lengths, to, to + lengths), axis=1).tolist()
        grid_rows, firsts = np.unique(rows, return_index=True)
        groups = np.append(firsts, len(rows)).tolist()
        n_across = -(-block.shape[1] // width)
        numbers = (grid_rows[:, None] * n_across + np.arange(n_across)).ravel()
        shape = (self._chunk_shape[0], width)
        # A chunk that is requested whole is decoded directly into the block.
        in_place = block.shape[1] == width and block.dtype == self._chain.dtype
        stored = self._source.read(numbers)
        spent = thread_times()
        for i in range(len(numbers)):
            row, across = divmod(i, n_across)
            wanted = places[groups[row] : groups[row + 1]]
            low, high, begin, end = wanted[0]
            place = block[begin:end] if in_place and high - low == shape[0] else None
            low, high = wanted[0][0], wanted[-1][1]
            left = across * width
            right = min(left + width, block.shape[1])
            try:
                begun = perf_counter()
                data, skipped = next(stored)
                got = perf_counter()
                spent.read_s += got - begun
                if data is None:
                    chunk = None
                else:
                    into = None if place is None else place.reshape(-1).view(np.uint8)
                    chunk = self._chain.decode(data, shape=shape, skipped=skipped, rows=(low, high), into=into)
                    spent.decode_s += perf_counter() - got
            # Codecs may raise any exception: zlib.error, RuntimeError, ValueError.
            except Exception as error:
                if not caused_by_data(error):
                    raise
                start = int(grid_rows[row]) * self._chunk_shape[0]
                raise BrokenRunError(self.label, start, start + self._chunk_shape[0], str(error)) from error
            if chunk is None:
                for _, _, begin, end in wanted:
                    block[begin:end, left:right] = self._fill
            elif place is None or not np.may_share_memory(chunk, place):
                for first, last, begin, end in wanted:
                    block[begin:end, left:right] = chunk[first - low : last - low, : right - left]
