"""Conversion of arguments to arrays that the kernels accept."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError

# Empty arrays, which stand for an absent lookup in kernel calls.
EMPTY_INTS: NDArray[np.int64] = np.empty(0, dtype=np.int64)
EMPTY_FLOATS: NDArray[np.float64] = np.empty(0, dtype=np.float64)

# Data types that the kernels do not support, and the types that they are converted to.
_KERNEL_DTYPES: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float16): np.dtype(np.float32),
    np.dtype(np.longdouble): np.dtype(np.float64),
}


def array_of(name: str, values: Any) -> NDArray[Any]:
    """Convert an argument to an array that the kernels accept: aligned and of native byte order."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()  # NumPy cannot convert a tensor that requires gradients or is on a GPU
    try:
        array = np.asanyarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name} cannot be converted to an array: {error}") from error
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        n_masked = int(np.ma.getmaskarray(array).sum())
        raise InputError(
            f"{name} has {n_masked} masked entries, which have no value; fill them, or remove them with indices="
        )
    array = np.asarray(array)
    native = array.dtype.newbyteorder("=")
    converted: NDArray[Any] = np.require(array, cast(Any, _KERNEL_DTYPES.get(native, native)), "A")
    return converted


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view, for which kernels are compiled once, whoever made the array."""
    view = array.view()
    view.flags.writeable = False
    return view
