"""Arguments as arrays that kernels take."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError

__all__ = ["EMPTY_FLOATS", "EMPTY_INTS", "array_of"]

EMPTY_INTS: NDArray[np.int64] = np.empty(0, dtype=np.int64)
EMPTY_FLOATS: NDArray[np.float64] = np.empty(0, dtype=np.float64)
# What kernels are given where there is nothing to look up.

_TAKEN_AS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float16): np.dtype(np.float32),
    np.dtype(np.longdouble): np.dtype(np.float64),
}
# Types that kernels do not take, and those that they are converted to.


def array_of(name: str, values: Any) -> NDArray[Any]:
    """Return an argument as an array that kernels take: aligned and of native byte order.

    Parameters
    ----------
    name
        What errors call it.
    values
        Anything that NumPy makes an array of, or a tensor. Copied only where kernels need another type.

    Raises
    ------
    InputError
        If NumPy makes no array of its type or values, or entries are masked.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu()  # NumPy takes no tensor that requires gradients or is on a GPU
    try:
        array = np.asanyarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name} cannot be made an array: {error}") from error
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        n_masked = int(np.ma.getmaskarray(array).sum())
        raise InputError(f"{name} has {n_masked} masked entries, which have no value; leave them out")
    array = np.asarray(array)
    native = array.dtype.newbyteorder("=")
    taken: NDArray[Any] = np.require(array, cast(Any, _TAKEN_AS.get(native, native)), "A")
    return taken
