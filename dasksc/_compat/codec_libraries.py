"""Functions of the C libraries in the wheels of numcodecs and deflate, which these do not wrap."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import deflate._deflate
import numcodecs.blosc  # type: ignore[import-untyped]
import numcodecs.zstd  # type: ignore[import-untyped]
import numpy as np

# Functions that decode a Zstandard frame block by block, in the order in which `dasksc.kernels.decoding` expects them.
_ZSTD_FUNCTIONS = (
    "ZSTD_createDCtx",
    "ZSTD_freeDCtx",
    "ZSTD_getFrameContentSize",
    "ZSTD_decompressBegin",
    "ZSTD_nextSrcSizeToDecompress",
    "ZSTD_decompressContinue",
)


@cache
def blosc_getitem_address() -> np.uint64 | None:
    """Return the address of C-Blosc's ``blosc_getitem``, which decodes a range of items of a chunk; None if missing."""
    # The function of C-Blosc2 (3.3.5) cannot replace it: it returns wrong bytes for a range that is as long as a block
    # but spans two blocks.
    addresses = _addresses(numcodecs.blosc, "blosc_getitem")
    return None if addresses is None else addresses[0]


@cache
def zstd_addresses() -> tuple[np.uint64, ...] | None:
    """Return the addresses of `_ZSTD_FUNCTIONS`; None if one is missing."""
    return _addresses(numcodecs.zstd, *_ZSTD_FUNCTIONS)


@cache
def deflate_addresses(wbits: int) -> tuple[np.uint64, ...] | None:
    """Return the addresses of libdeflate for zlib (`wbits` = 15) or gzip (31) streams; None if one is missing."""
    decompress = "libdeflate_zlib_decompress" if wbits == 15 else "libdeflate_gzip_decompress"
    return _addresses(deflate._deflate, "libdeflate_alloc_decompressor", "libdeflate_free_decompressor", decompress)


def _addresses(module: Any, *names: str) -> tuple[np.uint64, ...] | None:
    # The wheels for Linux and macOS export the functions, and other builds link to a C library that exports them.
    try:
        library = ctypes.CDLL(module.__file__)
        functions = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in names]
    except (OSError, AttributeError):  # built in or in a zip file; a build that does not export the functions
        return None
    return tuple(np.uint64(function.value or 0) for function in functions)
