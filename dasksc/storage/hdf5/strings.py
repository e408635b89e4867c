"""Strings of variable length in HDF5 files whose bytes are in memory, read without creating an object for each.

HDF5 stores variable-length strings in global heap collections, and datasets hold references to them. The layouts
follow the HDF5 File Format Specification, version 3.0 (sections III.E and VIII.B). Other layouts are left to h5py.
"""

from __future__ import annotations

import numpy as np
from h5py import h5d
from numpy.typing import NDArray

from dasksc.kernels import strings as kernels

__all__ = ["packed_strings", "split_strings", "strings_at"]

_REFERENCE_BYTES = 16


def packed_strings(strings: h5d.DatasetID, data: NDArray[np.uint8]) -> tuple[NDArray[np.int64], bytes] | None:
    """Return the sizes of strings in the file with the bytes `data`, and all strings; None if h5py must read them."""
    n, offset = strings.shape[0], strings.get_offset()
    if offset is None or strings.get_storage_size() != _REFERENCE_BYTES * n:
        return None
    references = data[offset : offset + _REFERENCE_BYTES * n]
    starts, sizes = np.empty((2, n), dtype=np.int64)
    if len(references) < _REFERENCE_BYTES * n:
        return None
    if kernels.locate_strings(references.reshape(n, _REFERENCE_BYTES), data, starts, sizes) >= 0:
        return None
    return sizes, _packed_at(data, starts, sizes)


def strings_at(data: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[str]:
    """Return the strings in given byte ranges."""
    return split_strings(_packed_at(data, starts, sizes), sizes)


def _packed_at(data: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> bytes:
    packed = np.empty(int(sizes.sum()), dtype=np.uint8)
    kernels.copy_strings(data, starts, sizes, packed)
    return packed.tobytes()


def split_strings(packed: bytes, sizes: NDArray[np.int64]) -> list[str]:
    """Return strings of given sizes in bytes; surrogates stand for bytes that are not UTF-8."""
    ends = np.cumsum(sizes)
    places = zip((ends - sizes).tolist(), ends.tolist(), strict=True)
    if packed.isascii():
        text = packed.decode("ascii")
        return [text[start:end] for start, end in places]
    return [packed[start:end].decode("utf-8", "surrogateescape") for start, end in places]
