"""What turns stored chunks into elements, outside the GIL, by libraries made for it."""

from __future__ import annotations

import bz2
import lzma
import math
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import deflate
import google_crc32c
import numcodecs  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from dasksc._compat.numcodecs import blosc_getitem_address
from dasksc.kernels.lzf import decode_lzf
from dasksc.storage.arrays import UnknownLayoutError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = [
    "Blosc",
    "Chain",
    "Codec",
    "Crc32c",
    "Deflate",
    "H5Lz4",
    "H5Lzf",
    "Numcodec",
    "Zstd",
    "blosc_getitem",
    "codec_of_config",
]

# What codecs may add to the bytes they are given: checksums, headers.
_SLACK_BYTES = 2**16
_CHECKED_BYTES = 2**18
# Larger results of a decompressor take fresh pages each time.
_PIECE_BYTES = 2**17
# Codecs of numcodecs that turn bytes into bytes, or numbers into numbers of the same type.
_KNOWN = frozenset({"lz4", "bz2", "lzma", "shuffle", "crc32", "adler32", "fletcher32", "delta"})


class Codec(Protocol):
    """One step of a chain. Pickles; may be called from several threads at once."""

    def decode(self, data: Any, n_bytes: int, into: NDArray[np.uint8] | None = None) -> Any:
        """Return what `data` decodes to, a buffer.

        Parameters
        ----------
        data
            A buffer; bytes as stored, or what the codec after this one made of them.
        n_bytes
            Size of the whole chunk's elements.
        into
            Memory of `n_bytes` that the result may be written to, where the codec can.

        Raises
        ------
        Exception
            Any kind; it means that `data` is corrupt.
        """


class PartialCodec(Codec, Protocol):
    """A codec that need not decode the whole of a chunk to give a part of it."""

    def decode_part(self, data: Any, n_bytes: int, start: int, stop: int, into: NDArray[np.uint8]) -> Any:
        """Return bytes [start, stop) of what `data` decodes to; `into` is memory of `n_bytes` to work in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deflate:
    """zlib (HDF5's gzip filter) or gzip.

    Parameters
    ----------
    wbits
        15 for zlib, 31 for gzip.
    """

    wbits: int

    def decode(self, data: Any, n_bytes: int, into: NDArray[np.uint8] | None = None) -> Any:
        """Return `data` inflated; its checksum is verified."""
        # libdeflate takes half to a third of zlib's time, and one member of at most the size it is given.
        inflate = deflate.zlib_decompress if self.wbits == 15 else deflate.gzip_decompress
        try:
            inflated = inflate(data, n_bytes)
        except deflate.DeflateError:
            inflated = bytearray()
        if len(inflated) == n_bytes:
            return inflated
        return _all_members(data, n_bytes + _SLACK_BYTES, lambda: zlib.decompressobj(wbits=self.wbits))


def _all_members(data: Any, limit: int, decompressor: Callable[[], Any]) -> bytes:
    """Return what members (of gzip) or frames (of Zstandard), one after the other, decode to, up to `limit` bytes."""
    decoded = []
    rest, left = data, limit
    while len(rest) and left > 0:
        member = decompressor()
        decoded.append(member.decompress(rest, left))
        left -= len(decoded[-1])
        if not member.eof and left > 0:
            raise ValueError("it ends before its last byte")
        rest = member.unused_data
    return b"".join(decoded)


@dataclass(frozen=True, slots=True)
class H5Lzf:
    """The LZF filter of HDF5."""

    def decode(self, data: Any, n_bytes: int, into: NDArray[np.uint8] | None = None) -> Any:
        """Return `data` decoded."""
        out = np.empty(n_bytes, dtype=np.uint8) if into is None else into
        n_decoded = decode_lzf(np.frombuffer(data, dtype=np.uint8), out)
        if n_decoded < 0:
            raise ValueError(f"it is no LZF of {n_bytes} bytes")
        return out[:n_decoded]


@dataclass(frozen=True, slots=True)
class Zstd:
    """Zstandard frames. A part is had by decoding no further than it reaches."""

    def decode(self, data: Any, n_bytes: int, into: NDArray[np.uint8] | None = None) -> Any:
        """Return `data` decoded; its checksum is verified, if it has one."""
        size = _zstd_size(memoryview(data).cast("B"))
        if size is None:
            # It may be anything.
            return _all_members(data, n_bytes + _SLACK_BYTES, zstd.ZstdDecompressor)
        if size > n_bytes + _SLACK_BYTES:
            raise ValueError(f"it decodes to {size} bytes, where {n_bytes} belong")
        return _ZSTD.decode(data, out=into if size == n_bytes else None)

    def decode_part(self, data: Any, n_bytes: int, start: int, stop: int, into: NDArray[np.uint8]) -> Any:
        """Return bytes [start, stop) of the frame."""
        view = memoryview(data).cast("B")
        # A checksum is of the whole.
        if stop == n_bytes or _zstd_size(view) != n_bytes or view[4] & _HAS_CHECKSUM:
            return _part_of(memoryview(self.decode(data, n_bytes, into)).cast("B"), n_bytes, start, stop)
        frame, done = zstd.ZstdDecompressor(), 0
        while done < stop:
            # It keeps what it has not decoded yet.
            piece = frame.decompress(b"" if done else view, min(_PIECE_BYTES, stop - done))
            if not piece:
                raise ValueError(f"it ends after {done} bytes, where {stop} belong")
            into.data[done : done + len(piece)] = piece
            done += len(piece)
        return into[start:stop]


_HAS_CHECKSUM = 0x04  # in the byte after the magic number of a Zstandard frame
_ZSTD = numcodecs.Zstd()


def _zstd_size(frame: memoryview) -> int | None:
    """Return what the header of a Zstandard frame says of the size of its content (RFC 8878, 3.1.1.1)."""
    if len(frame) < 18 or bytes(frame[:4]) != b"\x28\xb5\x2f\xfd":
        return None
    descriptor = frame[4]
    is_single = bool(descriptor & 0x20)
    start = 5 + (not is_single) + (0, 1, 2, 4)[descriptor & 3]
    n_bytes = (1 if is_single else 0, 2, 4, 8)[descriptor >> 6]
    size = int.from_bytes(frame[start : start + n_bytes], "little")
    return None if n_bytes == 0 else size + 256 if n_bytes == 2 else size


@dataclass(frozen=True, slots=True)
class Blosc:
    """Blosc chunks. Where `blosc_getitem` is there, `dasksc.kernels.blosc` decodes parts of them."""

    def decode(self, data: Any, n_bytes: int, into: NDArray[np.uint8] | None = None) -> Any:
        """Return `data` decoded."""
        view = memoryview(data).cast("B")
        if len(view) < 16:
            raise ValueError(f"it has {len(view)} bytes, too few for Blosc")
        decoded, stored = int.from_bytes(view[4:8], "little"), int.from_bytes(view[12:16], "little")
        if decoded != n_bytes or stored > len(view):
            raise ValueError(f"Blosc's header says {stored} bytes that decode to {decoded}; {n_bytes} belong there")
        return _BLOSC.decode(data, out=into)


_BLOSC = numcodecs.Blosc()


@cache
def blosc_getitem() -> int | None:
    """Return the address of C-Blosc's ``blosc_getitem``, which decodes some items of a chunk; None without it."""
    return blosc_getitem_address()


@dataclass(frozen=True, slots=True, kw_only=True)
class Numcodec:
    """A codec of numcodecs.

    Parameters
    ----------
    config
        As ``numcodecs.get_codec`` takes it, as sorted pairs.
    """

    config: tuple[tuple[str, Any], ...]
    _codec: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_codec", numcodecs.get_codec(dict(self.config)))

    def decode(self, data: Any, n_bytes: int, into: NDArray[np.uint8] | None = None) -> Any:
        """Return `data` decoded, no further than is wanted."""
        limit, config = n_bytes + _SLACK_BYTES, dict(self.config)
        match config["id"]:
            case "bz2":
                decoded = bz2.BZ2Decompressor().decompress(bytes(data), limit)
            case "lzma":
                format, filters = config.get("format", lzma.FORMAT_XZ), config.get("filters")
                raw = filters if format == lzma.FORMAT_RAW else None
                decoded = lzma.LZMADecompressor(format=format, filters=raw).decompress(bytes(data), limit)
            case "lz4":
                size = int.from_bytes(memoryview(data).cast("B")[:4], "little")
                if size > limit:
                    raise ValueError(f"it decodes to {size} bytes, where {n_bytes} belong")
                decoded = self._codec.decode(data)
            case _:
                return self._codec.decode(data)
        if len(decoded) >= limit:
            raise ValueError(f"it decodes to more than the {n_bytes} bytes that belong there")
        return decoded


@dataclass(frozen=True, slots=True)
class Crc32c:
    """Four bytes after the data, by which it is verified."""

    def decode(self, data: Any, n_bytes: int, into: NDArray[np.uint8] | None = None) -> Any:
        """Return `data` without its checksum."""
        view = memoryview(data).cast("B")
        checksum = 0
        # The library takes bytes only: one piece at a time, so that no whole chunk is copied.
        for at in range(0, len(view) - 4, _CHECKED_BYTES):
            checksum = google_crc32c.extend(checksum, bytes(view[at : min(at + _CHECKED_BYTES, len(view) - 4)]))
        if len(view) < 4 or checksum != int.from_bytes(view[-4:], "little"):
            raise ValueError("its CRC32C checksum does not match")
        return view[:-4]


@dataclass(frozen=True, slots=True)
class H5Lz4:
    """The LZ4 filter of HDF5: a header, then blocks of which each has its length before it."""

    def decode(self, data: Any, n_bytes: int, into: NDArray[np.uint8] | None = None) -> Any:
        """Return the blocks decoded."""
        view = memoryview(data).cast("B")
        total = int.from_bytes(view[:8], "big")
        block = int.from_bytes(view[8:12], "big")
        if total != n_bytes or block <= 0:
            raise ValueError(f"its LZ4 header says {total} bytes in blocks of {block}")
        out = np.empty(total, dtype=np.uint8) if into is None else into
        at = 12
        for start in range(0, total, block):
            n = min(block, total - start)
            size = int.from_bytes(view[at : at + 4], "big")
            stored = view[at + 4 : at + 4 + size]
            at += 4 + size
            if size == n:  # it did not get smaller
                out[start : start + n] = np.frombuffer(stored, dtype=np.uint8)
            else:
                # numcodecs expects the length in front, as its own encoder writes it.
                framed = n.to_bytes(4, "little") + bytes(stored)
                out[start : start + n] = np.frombuffer(_LZ4.decode(framed), dtype=np.uint8)
        return out


_LZ4 = numcodecs.LZ4()


def codec_of_config(config: dict[str, Any]) -> Codec:
    """Return the codec that numcodecs calls by this configuration.

    Raises
    ------
    UnknownLayoutError
        If it is not one that is known to turn bytes into bytes.
    """
    match name := config.get("id"):
        case "zlib":
            return Deflate(wbits=15)
        case "gzip":
            return Deflate(wbits=31)
        case "zstd":
            return Zstd()
        case "blosc":
            return Blosc()
        case "crc32c":
            return Crc32c()
    if name not in _KNOWN:
        raise UnknownLayoutError(f"the codec {name!r} is not known")
    try:
        return Numcodec(config=tuple(sorted(config.items())))
    except (TypeError, ValueError, ImportError) as error:
        raise UnknownLayoutError(f"the codec {name!r} cannot be used here: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The codecs of an array, in the order in which a chunk was encoded.

    Parameters
    ----------
    codecs
        One for each step.
    dtype
        Type of the elements as stored, byte order included.
    """

    codecs: tuple[Codec, ...]
    dtype: np.dtype[Any]

    def decode(
        self,
        data: Any,
        *,
        shape: Sequence[int],
        skipped: int,
        rows: tuple[int, int],
        into: NDArray[np.uint8] | None = None,
    ) -> NDArray[Any]:
        """Return rows [start, stop) of a chunk's elements.

        Parameters
        ----------
        data
            The chunk as stored, a buffer.
        shape
            Its shape.
        skipped
            Bit i is set where codec i was not applied to this chunk (HDF5's filter mask).
        rows
            Those wanted.
        into
            Where all of the chunk's bytes may be written to. Otherwise it is memory of this thread, and the
            result is valid until the thread decodes again.

        Raises
        ------
        ValueError
            If it decodes to another number of bytes; codecs raise errors of their own as well.
        """
        n_bytes = math.prod(shape) * self.dtype.itemsize
        row_bytes = n_bytes // shape[0]
        start, stop = rows[0] * row_bytes, rows[1] * row_bytes
        applied = [codec for i, codec in enumerate(self.codecs) if not skipped >> i & 1]
        for codec in reversed(applied[1:]):
            data = codec.decode(data, n_bytes)
        if not applied:
            flat = _part_of(memoryview(data).cast("B"), n_bytes, start, stop)
        else:
            if into is None:
                into = _scratch(n_bytes)
            last: Any = applied[0]
            if stop - start < n_bytes and hasattr(last, "decode_part"):
                flat = last.decode_part(data, n_bytes, start, stop, into)
            else:
                flat = _part_of(memoryview(last.decode(data, n_bytes, into)).cast("B"), n_bytes, start, stop)
        return np.frombuffer(flat, dtype=self.dtype).reshape((rows[1] - rows[0], *shape[1:]))


def _part_of(whole: memoryview, n_bytes: int, start: int, stop: int) -> memoryview:
    if len(whole) != n_bytes:
        raise ValueError(f"it holds {len(whole)} bytes, where {n_bytes} belong")
    return whole[start:stop]


_THREAD = threading.local()


def _scratch(n_bytes: int) -> NDArray[np.uint8]:
    """Return memory that this thread has in its caches already, rather than fresh pages for every chunk."""
    scratch: NDArray[np.uint8] | None = getattr(_THREAD, "scratch", None)
    if scratch is None or len(scratch) < n_bytes:
        scratch = _THREAD.scratch = np.empty(n_bytes, dtype=np.uint8)
    return scratch[:n_bytes]
