"""Data types in which values are held, summed and gathered."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.kernels import csr as kernels
from dasksc.kernels.intrinsics import rounded
from dasksc.storage.arrays import memory_dtype

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
"""Data type of arrays with the bits of bfloat16, which NumPy lacks; storage only writes it."""

# Bits of infinity in the types to which the kernels round.
_INFINITY = {BFLOAT16: np.uint16(0x7F80), np.dtype(np.float16): np.uint16(0x7C00)}


def text_of(dtype: np.dtype[Any] | None) -> str:
    """Return the name of a data type of batches, for messages."""
    return "bfloat16" if dtype == BFLOAT16 else str(dtype)


def cast(values: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
    """Copy `values` into `out`, and return `out`; for bfloat16, return its values as float32."""
    if out.dtype != BFLOAT16:
        out[...] = values
        return out
    bits, at = out.view(np.uint16), np.array([values.ctypes.data], dtype=np.uint64)
    kernels.copy_rows(np.zeros(1, dtype=np.int64), at, bits.reshape(1, -1), rounded(values, "bfloat16"))
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrowest(dtype: np.dtype[Any], n_vars: int) -> np.dtype[Any]:
    """Return uint16 if it is smaller than `dtype` and can index `n_vars` columns, otherwise `dtype`."""
    two_bytes = np.dtype(np.uint16)
    return two_bytes if n_vars <= 2**16 and dtype.itemsize > two_bytes.itemsize else dtype


def counts_dtype(values: NDArray[Any]) -> np.dtype[Any]:
    """Return an unsigned type of one or two bytes that represents `values` exactly, or their own type if none does."""
    if values.dtype.kind not in "iuf" or values.dtype.itemsize not in (2, 4, 8) or not has_kernel_dtype(values.dtype):
        return values.dtype
    n_bytes = kernels.count_bytes(values, values.view(f"u{values.dtype.itemsize}"))
    return np.dtype(f"u{n_bytes}") if 0 < n_bytes < values.dtype.itemsize else values.dtype


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the data type in which values of `dtype` are summed: 64 bits for integers, `dtype` for floats."""
    if dtype.kind == "f":
        return dtype
    return np.dtype(np.int64 if dtype.kind == "i" else np.uint64)


def kernel_target(out: NDArray[Any], source: np.dtype[Any]) -> NDArray[Any]:
    """Return an array to which the kernels can write values of the `source` type."""
    # The result is `out` itself, or a new array of the `source` type. A new array is needed if numba does not support
    # the type of `out`, or if `out` has an integer type that cannot represent all values of the `source` type. It is
    # also needed for 64-bit integers and a float `out`, since integers that float64 rounds are refused. Otherwise, only
    # the first condition matters for a float or boolean `out`: floats round values, and booleans record only whether
    # values are nonzero. The kernels round to bfloat16, but do not check the values, so a new array is returned.
    return out if converts(source, out.dtype) else np.empty(out.shape, dtype=source)


def converts(source: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Return True if the kernels can write values of the `source` type as `dtype`; see `kernel_target`."""
    wraps = dtype.kind in "iu" and not np.can_cast(source, dtype, "safe")
    return not wraps and not may_round(source, dtype) and has_kernel_dtype(dtype)


def can_round(source: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Return True if the kernels can round values of the `source` type to `dtype`, of two bytes, as `cast` does."""
    if dtype == np.float16:  # NumPy rounds to it once, so float32 must represent the values
        return source != dtype and np.can_cast(source, np.float32)
    return dtype == BFLOAT16 and not may_round(source, dtype)


def written(out: NDArray[Any], like: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], np.uint16 | None]:
    """Return `out` and `like` as the kernels take them and, if they round, the bits that `out` must not hold."""
    infinity = _INFINITY.get(out.dtype)
    return (out, like, None) if infinity is None else (out.view(np.uint16), rounded(like, text_of(out.dtype)), infinity)


def may_round(source: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Return True if `source` is a 64-bit integer type and `dtype` a float type."""
    return source.kind in "iu" and source.itemsize == 8 and (dtype.kind == "f" or dtype == BFLOAT16)


def holds_all(values: NDArray[Any], out: NDArray[Any]) -> bool:
    """Return True if `out`, a cast of `values`, represents all of them."""
    # The rounding of floats is disregarded, and that of integers that float64 represents.
    if not values.size:
        return True
    if may_round(values.dtype, out.dtype) and not _fit_float64(values).all():
        return False
    if out.dtype.kind not in "iu":
        return bool(np.isfinite(out).all()) or bool(representable(values, out).all())
    limits = np.iinfo(out.dtype)
    # Unlike NumPy, Python compares an int with a float exactly; comparisons with NaN are False.
    in_range = limits.min <= values.min().item() and values.max().item() <= limits.max
    return in_range and (values.dtype.kind != "f" or bool((out == values).all()))


def representable(values: NDArray[Any], out: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the values that `out`, a cast to an integer or float type, represents, as `holds_all` does."""
    if out.dtype.kind not in "iu":
        finite = np.asarray(~np.isfinite(values) | np.isfinite(out))
        return finite & _fit_float64(values) if may_round(values.dtype, out.dtype) else finite
    limits = np.iinfo(out.dtype)
    in_range = np.array([limits.min <= value <= limits.max for value in values.ravel().tolist()]).reshape(values.shape)
    return np.asarray(in_range & (values == np.floor(values)) if values.dtype.kind == "f" else in_range)


def _fit_float64(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the integers that float64 represents: all their bits fit into 53 neighboring bits."""
    sizes = np.abs(values).astype(np.uint64)
    lowest = sizes & (~sizes + np.uint64(1))
    return np.asarray(sizes // np.maximum(lowest, np.uint64(1)) <= np.uint64(2**53))


def has_kernel_dtype(dtype: np.dtype[Any]) -> bool:
    """Return True if the kernels can write `dtype`."""
    return dtype != BFLOAT16 and bool(memory_dtype(dtype) == dtype)
