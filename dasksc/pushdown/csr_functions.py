"""Functions that array code often applies to CSR blocks, called so that they copy no column numbers.

SciPy and scanpy give each of their results index arrays of its own, which takes as long as what they compute: of
normalised and logarithmised batches, a fifth of the processor time (benchmarks/README.md has the figures). Here
the result shares those of the argument, read-only from then on. Other functions are given arrays of their own instead
of these, since they may change them in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from dasksc._compat.scanpy import SCALE_ROWS
from dasksc._compat.scipy import copy_flags, is_canonical_known
from dasksc.kernels.csr import ascends

__all__ = ["OF_VALUES", "is_canonical", "is_csr", "owned", "with_values", "without_copies"]

# Those that SciPy has as methods of the same name, by which NumPy calls them.
OF_VALUES = frozenset(
    [
        np.arcsin,
        np.arcsinh,
        np.arctan,
        np.arctanh,
        np.deg2rad,
        np.expm1,
        np.log1p,
        np.rad2deg,
        np.rint,
        np.sin,
        np.sinh,
        np.sqrt,
        np.tan,
        np.tanh,
    ]
)


def without_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what gives the same results as `function` and shares index arrays, or `function` itself."""
    if isinstance(function, np.ufunc):
        return _elementwise(function) if function in OF_VALUES else function
    name = (getattr(function, "__module__", None), getattr(function, "__qualname__", None))
    return _scaled_rows(function) if name == SCALE_ROWS else function


def owned(function: object, value: Any) -> Any:
    """Return `value`, with index arrays of its own if it shares them and `function` might change them."""
    if isinstance(function, _Elementwise | _ScaledRows) or not is_csr(value):
        return value
    if value.indices.flags.writeable and value.indptr.flags.writeable:
        return value
    return _like(value, value.data, value.indices.copy(), value.indptr.copy())


class _Elementwise:
    """A ufunc of the values."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        # SciPy adds up values at the same place first, as it must.
        if args or kwargs or not is_csr(block) or not is_canonical(block):
            return self._ufunc(owned(self._ufunc, block), *args, **kwargs)
        return with_values(block, self._ufunc(block.data))


# One of each: tasks with the same function in them are found to be alike.
_elementwise = functools.cache(_Elementwise)


class _ScaledRows:
    """scanpy's ``axis_mul_or_truediv``, which shares index arrays if it may overwrite its argument."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        # Of arrays, which it has no way of its own for, it makes dense ones.
        if not isinstance(block, sp.csr_matrix) or not is_canonical(block) or kwargs.get("out") is not None:
            return self._function(owned(self._function, block), *args, **kwargs)
        # What is overwritten is which values this one has, not the values.
        like = with_values(block, block.data)
        return self._function(like, *args, **{**kwargs, "out": like})


_scaled_rows = functools.cache(_ScaledRows)


def is_csr(block: Any) -> bool:
    """Whether a block is one of SciPy's two kinds of CSR."""
    return isinstance(block, sp.csr_matrix | sp.csr_array)


def is_canonical(block: Any) -> bool:
    """What SciPy's `has_canonical_format` says, in less time."""
    indptr, indices = block.indptr, block.indices
    if not is_canonical_known(block) and indptr.flags.c_contiguous and indices.flags.c_contiguous:
        block.has_canonical_format = ascends(
            indptr_at=np.uint64(indptr.ctypes.data),
            indices_at=np.uint64(indices.ctypes.data),
            n_rows=len(indptr) - 1,
            like_indptr=np.empty(0, indptr.dtype),
            like_indices=np.empty(0, indices.dtype),
        )
    return bool(block.has_canonical_format)


def with_values(block: Any, values: NDArray[Any]) -> Any:
    """A block with the places of another, which neither may change from now on."""
    for shared in (block.indices, block.indptr):
        shared.flags.writeable = False
    return _like(block, values, block.indices, block.indptr)


def _like(block: Any, values: NDArray[Any], indices: NDArray[Any], indptr: NDArray[Any]) -> Any:
    result = type(block)((values, indices, indptr), shape=block.shape, copy=False)
    # To find that out again would take a pass over the column numbers.
    copy_flags(block, result)
    return result
