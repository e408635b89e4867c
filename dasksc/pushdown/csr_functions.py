"""Common functions of CSR blocks that do not copy the index arrays.

SciPy and scanpy copy the index arrays into each result. The copies take as long as the arithmetic itself. They account
for a fifth of the total processor time of normalized and log-transformed batches (benchmarks/README.md). Here, the
result shares the index arrays of the argument, which become read-only. Other functions receive copies of shared index
arrays, since they may modify them in place.
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

# Ufuncs that SciPy implements as methods of the same name, which NumPy dispatches to.
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
    """Return an equivalent of `function` whose results share index arrays, or `function` itself if there is none."""
    if isinstance(function, np.ufunc):
        return _elementwise(function) if function in OF_VALUES else function
    name = (getattr(function, "__module__", None), getattr(function, "__qualname__", None))
    return _scaled_rows(function) if name == SCALE_ROWS else function


def owned(function: object, value: Any) -> Any:
    """Return `value`, with copied index arrays if its own are shared and `function` might modify them."""
    if isinstance(function, _Elementwise | _ScaledRows) or not is_csr(value):
        return value
    if value.indices.flags.writeable and value.indptr.flags.writeable:
        return value
    return _like(value, value.data, value.indices.copy(), value.indptr.copy())


class _Elementwise:
    """Ufunc applied to the stored values of a CSR block."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        # SciPy handles non-canonical blocks: it adds up duplicate entries before it applies the ufunc.
        if args or kwargs or not is_csr(block) or not is_canonical(block):
            return self._ufunc(owned(self._ufunc, block), *args, **kwargs)
        return with_values(block, self._ufunc(block.data))


# One object per function, since tasks are compared by the identity of their functions.
_elementwise = functools.cache(_Elementwise)


class _ScaledRows:
    """scanpy's ``axis_mul_or_truediv``, called in place on a new block that shares the original's index arrays."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        # scanpy has no implementation for csr_array and returns a dense array for it.
        if not isinstance(block, sp.csr_matrix) or not is_canonical(block) or kwargs.get("out") is not None:
            return self._function(owned(self._function, block), *args, **kwargs)
        # scanpy replaces the data attribute of `like`; it does not write into the values of `block`.
        like = with_values(block, block.data)
        return self._function(like, *args, **{**kwargs, "out": like})


_scaled_rows = functools.cache(_ScaledRows)


def is_csr(block: Any) -> bool:
    """Return True if a block is a ``csr_matrix`` or a ``csr_array``."""
    return isinstance(block, sp.csr_matrix | sp.csr_array)


def is_canonical(block: Any) -> bool:
    """Return the value of SciPy's `has_canonical_format`, computed by a faster kernel."""
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
    """Return a block with new values that shares the index arrays of `block`, which become read-only."""
    for shared in (block.indices, block.indptr):
        shared.flags.writeable = False
    return _like(block, values, block.indices, block.indptr)


def _like(block: Any, values: NDArray[Any], indices: NDArray[Any], indptr: NDArray[Any]) -> Any:
    result = type(block)((values, indices, indptr), shape=block.shape, copy=False)
    # Checking the canonical format again would take a pass over the column indices.
    copy_flags(block, result)
    return result
