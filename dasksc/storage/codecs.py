"""Codecs that decode stored chunks to elements, in compiled code that releases the GIL."""

from __future__ import annotations

import math
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import deflate
import google_crc32c
import numcodecs  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from dasksc.kernels.decoding import decode_lzf
from dasksc.storage.arrays import UnknownLayoutError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# Maximum number of bytes that codecs add, such as checksums and headers.
_SLACK_BYTES = 2**16
# Codecs of numcodecs that map bytes to bytes, or numbers to numbers of the same type.
_KNOWN = frozenset({"lz4", "shuffle", "crc32", "adler32", "fletcher32", "delta"})


class Codec(Protocol):
    """Step of a codec chain. Instances can be pickled, and called from several threads at once."""

    def decode(self, data: Any, n_bytes: int, into: NDArray[np.uint8] | None = None) -> Any:
        """Decode a buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deflate:
    """Deflate in the zlib format (the gzip filter of HDF5) or the gzip format."""

    wbits: int  # 15 for zlib, 31 for gzip

    def decode(self, data: Any, n_bytes: int, into: NDArray[np.uint8] | None = None) -> Any:
        """Decompress `data`, and verify the checksum."""
        # libdeflate is two to three times as fast as zlib, but it decodes only a single stream, whose maximum size must
        # be given.
        inflate = deflate.zlib_decompress if self.wbits == 15 else deflate.gzip_decompress
        try:
            inflated = inflate(data, n_bytes)
        except deflate.DeflateError:
            inflated = bytearray()
        if len(inflated) == n_bytes:
            return inflated
        return _all_members(data, n_bytes + _SLACK_BYTES, lambda: zlib.decompressobj(wbits=self.wbits))


def _all_members(data: Any, limit: int, decompressor: Callable[[], Any]) -> bytes:
    """Decompress consecutive gzip members or Zstandard frames, up to `limit` bytes."""
    decoded = []
    rest, n_remaining = data, limit
    while len(rest) and n_remaining > 0:
        member = decompressor()
        decoded.append(member.decompress(rest, n_remaining))
        n_remaining -= len(decoded[-1])
        if not member.eof and n_remaining > 0:
            raise ValueError("the compressed data of the chunk are truncated")
        rest = member.unused_data
    return b"".join(decoded)


@dataclass(frozen=True, slots=True)
class H5Lzf:
    """LZF filter of HDF5."""

    def decode(self, data: Any, n_bytes: int, into: NDArray[np.uint8] | None = None) -> Any:
        out = np.empty(n_bytes, dtype=np.uint8) if into is None else into
        n_decoded = decode_lzf(np.frombuffer(data, dtype=np.uint8), out)
        if n_decoded < 0:
            raise ValueError(f"the chunk cannot be decoded by LZF to {n_bytes} bytes")
        return out[:n_decoded]


@dataclass(frozen=True, slots=True)
class Zstd:
    """Zstandard frames."""

    def decode(self, data: Any, n_bytes: int, into: NDArray[np.uint8] | None = None) -> Any:
        """Decompress `data`, and verify the checksum if there is one."""
        size = zstd.get_frame_info(data).decompressed_size
        if not size:  # not in the header
            return _all_members(data, n_bytes + _SLACK_BYTES, zstd.ZstdDecompressor)
        if size > n_bytes + _SLACK_BYTES:
            raise ValueError(f"the chunk decodes to {size} bytes instead of {n_bytes}")
        return _ZSTD.decode(data, out=into if size == n_bytes else None)


_ZSTD = numcodecs.Zstd()


@dataclass(frozen=True, slots=True)
class Blosc:
    """Blosc chunks. `dasksc.kernels.decoding` decodes parts of them if C-Blosc exports its function."""

    def decode(self, data: Any, n_bytes: int, into: NDArray[np.uint8] | None = None) -> Any:
        view = memoryview(data).cast("B")
        if len(view) < 16:
            raise ValueError(f"the chunk has {len(view)} bytes, too few for Blosc")
        decoded, stored = int.from_bytes(view[4:8], "little"), int.from_bytes(view[12:16], "little")
        if decoded > n_bytes + _SLACK_BYTES or stored > len(view):
            raise ValueError(
                f"the Blosc header states {stored} compressed and {decoded} decoded bytes, but the chunk has "
                f"{len(view)} bytes and should decode to {n_bytes}"
            )
        return _BLOSC.decode(data, out=into if decoded == n_bytes else None)


_BLOSC = numcodecs.Blosc()


@dataclass(frozen=True, slots=True, kw_only=True)
class Numcodec:
    """Codec of numcodecs."""

    config: tuple[tuple[str, Any], ...]  # Configuration for ``numcodecs.get_codec``, as sorted pairs
    _codec: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_codec", numcodecs.get_codec(dict(self.config)))

    def decode(self, data: Any, n_bytes: int, into: NDArray[np.uint8] | None = None) -> Any:
        # LZ4 allocates the size that the data state.
        if dict(self.config)["id"] == "lz4":
            size = int.from_bytes(memoryview(data).cast("B")[:4], "little")
            if size > n_bytes + _SLACK_BYTES:
                raise ValueError(f"the chunk decodes to {size} bytes instead of {n_bytes}")
        return self._codec.decode(data)


@dataclass(frozen=True, slots=True)
class Crc32c:
    """CRC32C checksum in the last four bytes."""

    def decode(self, data: Any, n_bytes: int, into: NDArray[np.uint8] | None = None) -> Any:
        """Verify the checksum, and return `data` without it."""
        view = memoryview(data).cast("B")
        if len(view) < 4 or google_crc32c.value(bytes(view[:-4])) != int.from_bytes(view[-4:], "little"):
            raise ValueError("the CRC32C checksum does not match")
        return view[:-4]


def codec_of_config(config: dict[str, Any]) -> Codec:
    """Return the codec for a configuration of numcodecs."""
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
    """Codecs of an array, in the order of encoding."""

    codecs: tuple[Codec, ...]  # Codecs, one per step
    dtype: np.dtype[Any]  # Data type of the elements as stored, including byte order

    def decode(
        self,
        data: Any,
        *,
        shape: Sequence[int],
        skipped: int,
        rows: tuple[int, int],
        into: NDArray[np.uint8] | None = None,
    ) -> NDArray[Any]:
        """Decode rows [start, stop) of a chunk."""
        n_bytes = math.prod(shape) * self.dtype.itemsize
        row_bytes = n_bytes // shape[0]
        start, stop = rows[0] * row_bytes, rows[1] * row_bytes
        applied = [codec for i, codec in enumerate(self.codecs) if not skipped >> i & 1]
        for codec in reversed(applied[1:]):
            data = codec.decode(data, n_bytes)
        if applied:
            data = applied[0].decode(data, n_bytes, scratch(n_bytes) if into is None else into)
        whole = memoryview(data).cast("B")
        if len(whole) != n_bytes:
            raise ValueError(f"the chunk holds {len(whole)} bytes instead of {n_bytes}")
        return np.frombuffer(whole[start:stop], dtype=self.dtype).reshape((rows[1] - rows[0], *shape[1:]))


_THREAD = threading.local()


def scratch(n_bytes: int) -> NDArray[np.uint8]:
    """Return working memory of this thread, which is likely in the CPU cache, unlike newly allocated pages."""
    kept: NDArray[np.uint8] | None = getattr(_THREAD, "scratch", None)
    if kept is None or len(kept) < n_bytes:
        kept = _THREAD.scratch = np.empty(n_bytes, dtype=np.uint8)
    return kept[:n_bytes]
