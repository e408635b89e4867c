"""Sharded Zarr v3 arrays, written shard by shard in bounded memory; zarr-python writes their metadata.

A shard is one file of chunks, compressed separately or not at all, with an index of the chunks at its end. The
codec and its options were chosen by the measurements in ``benchmarks/README.md``: the output of LZ4HC is smaller than
that of LZ4, and faster to decode, because it consists of fewer pieces to copy; every epoch benefits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import google_crc32c
import numpy as np
import zarr
from numcodecs import blosc  # type: ignore[import-untyped]
from numpy.typing import NDArray
from zarr.codecs import BloscCodec

from dasksc.output.work_folder import atomic_path, sync

Shuffle = Literal["noshuffle", "shuffle"]

_CODEC: Literal["lz4hc"] = "lz4hc"
_LEVEL = 4
_SHUFFLES = {"noshuffle": 0, "shuffle": 1}
# Requested size of a Blosc block, the smallest unit of decoding. Runs of cells begin and end anywhere in a block, so
# small blocks waste less. C-Blosc multiplies the requested size by the number of bytes per value, and raises the result
# to at least 64 KiB. Values of up to four bytes therefore get blocks of 64 KiB.
_BLOCK_BYTES = 16 * 2**10
# Index entry of a chunk that was not written.
_ABSENT = (2**64 - 1, 2**64 - 1)
_USUAL_SHARDS = 16
_SHARD_VALUES = 2**26


@dataclass(frozen=True, slots=True)
class ShardedArray:
    """Array of one or two dimensions whose chunks and shards are as wide as the array; `shuffle` None: uncompressed."""

    folder: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int
    shuffle: Shuffle | None = "shuffle"
    given_shard_rows: int | None = None

    @property
    def shard_rows(self) -> int:
        """Rows per shard: whole chunks, in at most 16 shards unless these would have too many values."""
        if self.given_shard_rows is not None:
            return self.given_shard_rows
        most = _SHARD_VALUES // max(1, math.prod(self.shape[1:])) // self.chunk_rows
        return self.chunk_rows * max(1, min(-(-self.shape[0] // (self.chunk_rows * _USUAL_SHARDS)), most))

    @property
    def n_shards(self) -> int:
        return -(-self.shape[0] // self.shard_rows) if math.prod(self.shape) else 0

    def rows(self, k: int) -> tuple[int, int]:
        return k * self.shard_rows, min((k + 1) * self.shard_rows, self.shape[0])

    def path(self, k: int) -> Path:
        """Return the file of shard `k`, which is complete if it exists."""
        return self.folder.joinpath("c", str(k), *["0"] * (len(self.shape) - 1))

    def write_metadata(self, attributes: dict[str, Any]) -> None:
        """Make the folder a Zarr array; shards in it are kept."""
        # Zarr does not allow empty chunks, which an array without columns would have.
        across = [max(1, length) for length in self.shape[1:]]
        codec = None
        if self.shuffle is not None:
            codec = BloscCodec(
                typesize=self.dtype.itemsize, cname=_CODEC, clevel=_LEVEL, shuffle=self.shuffle, blocksize=_BLOCK_BYTES
            )
        (self.folder / "zarr.json").unlink(missing_ok=True)  # of a process that was killed
        zarr.create_array(
            self.folder,
            shape=self.shape,
            dtype=self.dtype,
            chunks=(self.chunk_rows, *across),
            shards=(self.shard_rows, *across),
            compressors=codec,
            fill_value=0,
            attributes=attributes,
        )


class ShardWriter:
    """Sequential writer of the rows of a shard to an open file."""

    def __init__(self, array: ShardedArray, file: BinaryIO) -> None:
        self._array = array
        self._file = file
        self._chunk = np.zeros((array.chunk_rows, *array.shape[1:]), dtype=array.dtype.newbyteorder("<"))
        self._n_held = self._n_bytes = 0
        self._chunks: list[tuple[int, int]] = []  # offsets and sizes

    def append(self, rows: NDArray[Any]) -> None:
        """Append rows, which are cast to the type of the array."""
        while len(rows):
            n = min(len(rows), len(self._chunk) - self._n_held)
            self._chunk[self._n_held : self._n_held + n] = rows[:n]
            self._n_held += n
            rows = rows[n:]
            if self._n_held == len(self._chunk):
                self._write_chunk(self._chunk)

    def _write_chunk(self, chunk: NDArray[Any]) -> None:
        encoded: Any = chunk.reshape(-1).view(np.uint8)
        if self._array.shuffle is not None:
            shuffle = _SHUFFLES[self._array.shuffle]
            encoded = blosc.compress(chunk, _CODEC.encode(), _LEVEL, shuffle, _BLOCK_BYTES)
        self._file.write(encoded)
        self._chunks.append((self._n_bytes, len(encoded)))
        self._n_bytes += len(encoded)
        self._n_held = 0

    def finish(self) -> None:
        if self._n_held:
            self._chunk[self._n_held :] = 0  # Zarr stores edge chunks with their full shape
            self._write_chunk(self._chunk)
        n_absent = self._array.shard_rows // self._array.chunk_rows - len(self._chunks)
        index: bytes = np.array(self._chunks + [_ABSENT] * n_absent, dtype="<u8").tobytes()
        checksum: int = google_crc32c.value(index)
        self._file.write(index + checksum.to_bytes(4, "little"))
        sync(self._file)


@contextmanager
def shard_writer(array: ShardedArray, k: int) -> Iterator[ShardWriter]:
    """Yield the writer of shard `k`, whose file appears when all rows have been written."""
    with atomic_path(array.path(k)) as path, path.open("wb") as file:
        writer = ShardWriter(array, file)
        yield writer
        writer.finish()
