"""What turns stored chunks into elements, outside the GIL, by libraries made for it."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import google_crc32c
import numcodecs  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from dasksc.storage.arrays import UnknownLayoutError

try:
    from isal import isal_zlib as zlib
except ImportError:  # the same interface, a third of the speed
    import zlib  # type: ignore[no-redef]

__all__ = ["Chain", "Codec", "Crc32c", "Deflate", "H5Lz4", "Numcodec", "codec_of_config"]

# Codecs of numcodecs that turn bytes into bytes, or numbers into numbers of the same type.
_KNOWN = frozenset({"blosc", "zstd", "lz4", "bz2", "lzma", "shuffle", "crc32", "adler32", "fletcher32", "delta"})


class Codec(Protocol):
    """One step of a chain. Pickles; may be called from several threads at once."""

    def decode(self, data: Any, n_bytes: int) -> Any:
        """Return what `data` decodes to; `n_bytes` is the size of the whole chunk's elements.

        Both are buffers; what is returned is valid until this thread decodes again. Any exception means
        that `data` is corrupt.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Deflate:
    """zlib (HDF5's gzip filter) or gzip.

    Parameters
    ----------
    wbits
        15 for zlib, 31 for gzip.
    """

    wbits: int

    def decode(self, data: Any, n_bytes: int) -> Any:
        """Return `data` inflated; its checksum is verified."""
        return zlib.decompress(data, wbits=self.wbits, bufsize=n_bytes)


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

    def decode(self, data: Any, n_bytes: int) -> Any:
        """Return `data` decoded."""
        if self._codec.codec_id != "blosc" or _blosc_bytes(data) != n_bytes:
            return self._codec.decode(data)
        # Memory that this thread has in its caches already, rather than fresh pages for every chunk.
        scratch = getattr(_THREAD, "scratch", None)
        if scratch is None or len(scratch) != n_bytes or data is scratch:
            scratch = _THREAD.scratch = np.empty(n_bytes, dtype=np.uint8)
        return self._codec.decode(data, out=scratch)


_THREAD = threading.local()


def _blosc_bytes(data: Any) -> int:
    """Return how many bytes a Blosc chunk says it decodes to."""
    return int.from_bytes(memoryview(data)[4:8], "little")


@dataclass(frozen=True, slots=True)
class Crc32c:
    """Four bytes after the data, by which it is verified."""

    def decode(self, data: Any, n_bytes: int) -> Any:
        """Return `data` without its checksum."""
        view = memoryview(data).cast("B")
        if google_crc32c.value(bytes(view[:-4])) != int.from_bytes(view[-4:], "little"):
            raise ValueError("its CRC32C checksum does not match")
        return view[:-4]


@dataclass(frozen=True, slots=True)
class H5Lz4:
    """The LZ4 filter of HDF5: a header, then blocks of which each has its length before it."""

    def decode(self, data: Any, n_bytes: int) -> Any:
        """Return the blocks decoded."""
        view = memoryview(data).cast("B")
        total = int.from_bytes(view[:8], "big")
        block = int.from_bytes(view[8:12], "big")
        if total != n_bytes or block <= 0:
            raise ValueError(f"its LZ4 header says {total} bytes in blocks of {block}")
        out = np.empty(total, dtype=np.uint8)
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
    name = config.get("id")
    if name == "zlib":
        return Deflate(wbits=15)
    if name == "gzip":
        return Deflate(wbits=31)
    if name == "crc32c":
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

    def decode(self, data: Any, *, shape: Sequence[int], skipped: int) -> NDArray[Any]:
        """Return the elements of a chunk.

        Parameters
        ----------
        data
            The chunk as stored, a buffer.
        shape
            Its shape.
        skipped
            Bit i is set where codec i was not applied to this chunk (HDF5's filter mask).

        Raises
        ------
        ValueError
            If it decodes to another number of bytes; codecs raise errors of their own as well.
        """
        n_bytes = math.prod(shape) * self.dtype.itemsize
        for i in reversed(range(len(self.codecs))):
            if not skipped >> i & 1:
                data = self.codecs[i].decode(data, n_bytes)
        flat = np.frombuffer(data, dtype=np.uint8)
        if len(flat) != n_bytes:
            raise ValueError(f"it holds {len(flat)} bytes, where {n_bytes} belong")
        return flat.view(self.dtype).reshape(shape)
