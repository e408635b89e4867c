"""Limits on the decompressed size of stored bytes, checked before a library allocates memory for them.

For most codecs, headers and block lengths give an upper bound. For the others, the bytes are decompressed in pieces
that are discarded.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

from dasksc.storage.arrays import caused_by_data

__all__ = ["DEFLATE_RATIO", "LZF_RATIO", "ROOM_BYTES", "DECOMPRESSED_SIZES", "check_decompressed_size"]

# Number of bytes by which the decompressed size may exceed the expected size. Data that cannot exceed the expected size
# by more than this number need no closer inspection.
ROOM_BYTES = 2**25

# Maximum expansion: in deflate, two bits may represent 258 bytes; in LZF, three bytes may represent 264.
DEFLATE_RATIO = 1032
LZF_RATIO = 88

_PIECE_BYTES = 2**20
_ZSTD_MAGIC, _ZSTD_SKIPPED_MAGIC = 0xFD2FB528, 0x184D2A50
_ZSTD_BLOCK_BYTES = 2**17


def check_decompressed_size(codec: str, data: Any, *, at_most: int) -> None:
    """Raise an error if stored bytes may decompress to more than a limit."""
    view = memoryview(data).cast("B")
    sizes = DECOMPRESSED_SIZES[codec](view, at_most)
    total = 0
    while total <= at_most:
        try:
            total += next(sizes)
        except Exception as error:  # includes StopIteration
            if not caused_by_data(error):
                raise
            return
    raise ValueError(f"its {len(view)} bytes decode ({codec}) to more than the expected {at_most}")


# Each generator yields sizes whose sum is an upper bound of the decompressed size. It may yield nothing if the size
# cannot exceed the limit.
def _gzip(view: memoryview, at_most: int) -> Iterator[int]:
    """Yield the sizes of pieces as read by the `gzip` module, which accepts padding and headers that zlib rejects."""
    if DEFLATE_RATIO * len(view) <= at_most:
        return
    with gzip.GzipFile(fileobj=io.BytesIO(view)) as stream:
        while piece := stream.read(_PIECE_BYTES):
            yield len(piece)


def _zlib(view: memoryview, at_most: int) -> Iterator[int]:
    if DEFLATE_RATIO * len(view) <= at_most:
        return
    rest, stream = bytes(view), zlib.decompressobj()
    while rest and not stream.eof:
        yield len(stream.decompress(rest, _PIECE_BYTES))
        rest = stream.unconsumed_tail


def _streamed(make: Callable[[], Any]) -> Callable[[memoryview, int], Iterator[int]]:
    def sizes(view: memoryview, at_most: int) -> Iterator[int]:
        rest = bytes(view)
        while rest:
            stream = make()
            while not stream.eof and (rest or not stream.needs_input):
                yield len(stream.decompress(rest, _PIECE_BYTES))
                rest = b""
            rest = stream.unused_data

    return sizes


def _zstd(view: memoryview, at_most: int) -> Iterator[int]:
    """Yield upper bounds from the headers of Zstandard frames and blocks (RFC 8878, 3.1.1)."""
    at = 0
    while at < len(view):
        magic = _little(view, at, 4)
        if magic & 0xFFFFFFF0 == _ZSTD_SKIPPED_MAGIC:
            at += 8 + _little(view, at + 4, 4)
            continue
        if magic != _ZSTD_MAGIC:
            return
        descriptor = _little(view, at + 4, 1)
        is_single, has_checksum = bool(descriptor & 0x20), bool(descriptor & 0x04)
        at += 5 + (not is_single) + (0, 1, 2, 4)[descriptor & 3]
        n_length = (1 if is_single else 0, 2, 4, 8)[descriptor >> 6]
        if n_length:  # decoders allocate the size in the header, and write no more
            yield _little(view, at, n_length) + 256 * (n_length == 2)
        at += n_length
        is_last = False
        while not is_last:
            header = _little(view, at, 3)
            is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
            if not n_length:
                yield _ZSTD_BLOCK_BYTES if kind == 2 else size
            at += 3 + (1 if kind == 1 else size)
        at += 4 * has_checksum


def _lzf(view: memoryview, at_most: int) -> Iterator[int]:
    if LZF_RATIO * len(view) <= at_most:
        return
    data, at, total = bytes(view), 0, 0
    while at < len(data) - 1:
        code = data[at]
        if code < 32:  # a literal run: code + 1 bytes follow
            total += code + 1
            at += code + 2
        elif code < 224:
            total += (code >> 5) + 2
            at += 2
        else:
            total += data[at + 1] + 9
            at += 3
    yield total


def _stated(at: int, n_bytes: int, order: Literal["little", "big"]) -> Callable[[memoryview, int], Iterator[int]]:
    def sizes(view: memoryview, at_most: int) -> Iterator[int]:
        yield int.from_bytes(view[at : at + n_bytes], order)

    return sizes


def _little(view: memoryview, at: int, n_bytes: int) -> int:
    if at + n_bytes > len(view):
        raise ValueError(f"it ends after {len(view)} bytes, within a header")
    return int.from_bytes(view[at : at + n_bytes], "little")


DECOMPRESSED_SIZES: dict[str, Callable[[memoryview, int], Iterator[int]]] = {
    "gzip": _gzip,
    "zlib": _zlib,
    "bz2": _streamed(bz2.BZ2Decompressor),
    "lzma": _streamed(lzma.LZMADecompressor),
    "zstd": _zstd,
    "blosc": _stated(4, 4, "little"),
    "lz4": _stated(0, 4, "little"),
    # Data from the HDF5 filters of these names start with the decompressed size.
    "h5-lz4": _stated(0, 8, "big"),
    "h5-bitshuffle": _stated(0, 8, "big"),
    "h5-lzf": _lzf,
}
