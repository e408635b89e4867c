"""Private or unstable parts of other libraries and of the interpreter.

Functions import the library that they are about when they are called. Parts of Dask are in `dasksc._compat.dask`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dasksc.errors import DaskscError

if TYPE_CHECKING:
    import pandas as pd


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Suspend automatic garbage collection."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# AnnData


def unified_dtypes(tables: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """Return the tables with the column data types that `anndata.concat` would give them."""
    from anndata._core.merge import unify_dtypes

    return list(unify_dtypes(tables))


def write_as_dask_array(kind: Any) -> None:
    """Let AnnData write a subclass of Dask's array, which it does not recognize, as such an array."""
    import dask.array as da
    from anndata._io.specs.registry import _REGISTRY

    for (group, written, modifiers), function in list(_REGISTRY.write.items()):
        first, *others = written if isinstance(written, tuple) else (written,)
        if first is da.Array:
            _REGISTRY.write[group, (kind, *others) if others else kind, modifiers] = function
    _REGISTRY.write_specs[kind] = _REGISTRY.write_specs[da.Array]


# fsspec: methods that all file systems share


def path_in(kind: Any, url: str) -> str:
    """Return the path that a file system class extracts from a URL."""
    return str(kind._strip_protocol(url))


def options_in_url(kind: Any, url: str) -> Mapping[str, Any]:
    """Return the options that a file system class extracts from a URL."""
    options: Mapping[str, Any] = kind._get_kwargs_from_urls(url)
    return options


# PyTorch


class UnsupportedVersionError(DaskscError, RuntimeError):
    """Error for a version of PyTorch that lacks something that dasksc uses."""


def check_training(version: str) -> None:
    """Check that a version of PyTorch trains correctly and can save checkpoints."""
    # Before 2.7, ``torch.distributed.checkpoint.save`` has no ``no_dist``, and FSDP fails on CPUs. In 2.7 and 2.8, two
    # ranks under FSDP on CPUs compute different losses than one process.
    if tuple(map(int, version.split(".")[:2])) < (2, 9):
        raise UnsupportedVersionError(
            f"torch {version} has no working FSDP checkpoints, which dasksc needs. Install torch 2.9 or later"
        )


# The C libraries in the wheels of numcodecs and deflate, which do not wrap these functions

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
    import numcodecs.blosc  # type: ignore[import-untyped]

    # The function of C-Blosc2 (3.3.5) cannot replace it: it returns wrong bytes for a range that is as long as a block
    # but spans two blocks.
    addresses = _addresses(numcodecs.blosc, "blosc_getitem")
    return None if addresses is None else addresses[0]


@cache
def zstd_addresses() -> tuple[np.uint64, ...] | None:
    """Return the addresses of `_ZSTD_FUNCTIONS`; None if one is missing."""
    import numcodecs.zstd  # type: ignore[import-untyped]

    return _addresses(numcodecs.zstd, *_ZSTD_FUNCTIONS)


@cache
def deflate_addresses(wbits: int) -> tuple[np.uint64, ...] | None:
    """Return the addresses of libdeflate for zlib (`wbits` = 15) or gzip (31) streams; None if one is missing."""
    import deflate._deflate

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
