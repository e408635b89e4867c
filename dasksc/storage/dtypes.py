"""Data types in which values are held, summed and gathered."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.kernels import csr as kernels
from dasksc.storage.arrays import memory_dtype

__all__ = ["counts_dtype", "has_kernel_dtype", "holds_all", "kernel_target", "narrowest", "representable", "sum_dtype"]


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
    """Return an array to which the kernels can write values of the `source` type.

    The result is `out` itself, or a new array of the `source` type. A new array is needed if numba does not support
    the type of `out`, or if `out` has an integer type that cannot represent all values of the `source` type. For a
    float or boolean `out`, only the first condition matters, since floats round values and booleans record only whether
    values are nonzero.
    """
    return out if converts(source, out.dtype) else np.empty(out.shape, dtype=source)


def converts(source: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Return True if the kernels can write values of the `source` type as `dtype`; see `kernel_target`."""
    wraps = dtype.kind in "iu" and not np.can_cast(source, dtype, "safe")
    return not wraps and has_kernel_dtype(dtype)


def holds_all(values: NDArray[Any], out: NDArray[Any]) -> bool:
    """Return True if `out`, a cast of `values`, represents all of them, disregarding the rounding of floats."""
    if not values.size:
        return True
    if out.dtype.kind not in "iu":
        return bool(np.isfinite(out).all()) or bool(representable(values, out.dtype).all())
    limits = np.iinfo(out.dtype)
    # Unlike NumPy, Python compares an int with a float exactly; comparisons with NaN are False.
    in_range = limits.min <= values.min().item() and values.max().item() <= limits.max
    return in_range and (values.dtype.kind != "f" or bool((out == values).all()))


def representable(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.bool_]:
    """Return a mask of the values that `dtype`, an integer type or float16, represents, disregarding rounding."""
    if dtype.kind not in "iu":
        with np.errstate(over="ignore"):
            return np.asarray(~np.isfinite(values) | np.isfinite(values.astype(dtype)))
    limits = np.iinfo(dtype)
    in_range = np.array([limits.min <= value <= limits.max for value in values.ravel().tolist()]).reshape(values.shape)
    return np.asarray(in_range & (values == np.floor(values)) if values.dtype.kind == "f" else in_range)


def has_kernel_dtype(dtype: np.dtype[Any]) -> bool:
    """Return True if the kernels can write `dtype`."""
    return bool(memory_dtype(dtype) == dtype)
