"""Candidate rows of a strategy: all rows, or those in ``indices``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.plan.arrays import EMPTY_INTS, array_of

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

    def entries(self, name: str, values: NDArray[Any], n_obs: int) -> tuple[NDArray[Any], _Int64s]:
        """Return `values` and a lookup of the candidates in them, in the form that the kernels expect."""
        if len(values) == n_obs:
            if self.array is None:
                return np.ascontiguousarray(values[self.start : self.start + self.n]), EMPTY_INTS
            return np.ascontiguousarray(values), self.array
        if len(values) == self.n:
            return np.ascontiguousarray(values) if self.given is None else values[self.given], EMPTY_INTS
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
