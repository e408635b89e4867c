"""Arguments as arrays that the kernels accept, and the candidate rows of a strategy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError

# Empty arrays, which stand for absent ones in kernel calls.
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


_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidate rows of a strategy: a range, or a sorted array."""

    n: int  # Number of candidates
    start: int = 0  # First row of a range
    array: _Int64s | None = None  # Row numbers in ascending order, shape (n,), int64; None for a range
    # Position of each candidate in the user's indices, shape (n,), int64; None if the indices were in ascending order.
    given: _Int64s | None = field(default=None, compare=False)

    @classmethod
    def of(cls, indices: Any, n_obs: int, *, name: str = "indices") -> Candidates:
        """Return candidates from None, a slice, a boolean mask, or row numbers in any order."""
        if indices is None:
            return cls(n=n_obs)
        if isinstance(indices, slice):
            try:
                span = range(*indices.indices(n_obs))
            except (TypeError, ValueError) as error:
                raise InputError(f"{name}={indices!r} is not a valid slice: {error}") from error
            if span.step == 1:
                return cls(n=len(span), start=span.start)
            indices = span
        if isinstance(indices, range):
            indices = np.arange(indices.start, indices.stop, indices.step)
        array = converted = index_array(indices, name=name)
        if array.dtype == np.bool_:
            if len(array) != n_obs:
                raise InputError(
                    f"{name} is a boolean mask of {len(array)} entries, but the collection has {n_obs} rows; give one "
                    "entry per row"
                )
            array = np.flatnonzero(array)
        given = None
        if np.any(array[1:] < array[:-1]):
            given = np.argsort(array, kind="stable")
            array = array[given]
        if len(array) and (array[0] < 0 or array[-1] >= n_obs):
            wrong = array[0] if array[0] < 0 else array[-1]
            raise InputError(f"{name} contain {wrong}, but the collection has rows 0 to {n_obs - 1}")
        if len(array) and int(array[-1]) - int(array[0]) == len(array) - 1 and np.all(array[1:] > array[:-1]):
            return cls(n=len(array), start=int(array[0]), given=given)
        # Copy if the array could change later. A new array, or a read-only one that owns its data, cannot.
        may_change = array is converted and (array.flags.writeable or not array.flags.owndata)
        rows = array.astype(np.int64, copy=may_change)
        rows.flags.writeable = False
        return cls(n=len(rows), array=rows, given=given)

    @property
    def selector(self) -> slice | _Int64s:
        """Index of the candidates in an array with one entry per row of the collection: a slice or row numbers."""
        return slice(self.start, self.start + self.n) if self.array is None else self.array

    def entries(self, name: str, values: NDArray[Any], n_obs: int) -> NDArray[Any]:
        """Return the entry of each candidate in `values`, in the form that the kernels expect."""
        if len(values) == n_obs:
            return np.ascontiguousarray(values[self.selector])
        if len(values) == self.n:
            return np.ascontiguousarray(values) if self.given is None else values[self.given]
        expected = f"{n_obs} (one per row)"
        if self.n != n_obs:
            expected += f" or {self.n} (one per entry of indices)"
        raise InputError(f"{name} has {len(values)} entries; expected {expected}")

    def rows(self, positions: _Int64s) -> _Int64s:
        """Return the row number of each candidate position."""
        # If the candidates are a range from row 0, these are `positions` themselves.
        if self.array is not None:
            return self.array[positions]
        return positions + self.start if self.start else positions


def index_array(indices: Any, *, name: str = "indices") -> NDArray[Any]:
    """Convert indices to an array of row numbers or a boolean mask; `name` is the argument in error messages."""
    array = array_of(name, indices)
    if array.ndim != 1:
        raise InputError(f"{name} must be one-dimensional; got shape {array.shape}")
    if len(array) == 0:
        return EMPTY_INTS
    if array.dtype.kind not in "iub":
        raise InputError(f"{name} must be row numbers, a slice or a boolean mask; got dtype {array.dtype}")
    return array
