"""Functions applied to CSR blocks, whose results share the index arrays of the blocks."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from dasksc.pushdown.csr_functions import owned, without_copies

pytestmark = pytest.mark.core

scanpy_utils = pytest.importorskip("scanpy._utils", reason="scanpy is not installed")
scaled = scanpy_utils.axis_mul_or_truediv


def block(kind: Any = sp.csr_matrix, dtype: str = "float32") -> Any:
    return kind(sp.random(7, 11, 0.4, format="csr", random_state=0) * 9).astype(dtype)


def unordered() -> sp.csr_matrix:
    """Return a matrix with two values at one position and unsorted columns."""
    return sp.csr_matrix((np.arange(1, 6, dtype=np.float32), [3, 1, 3, 0, 0], [0, 3, 3, 5]), shape=(3, 5))


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(np.asarray(one.todense()), np.asarray(other.todense()))


@pytest.mark.parametrize("function", [np.log1p, np.sqrt, np.expm1, np.rint])
@pytest.mark.parametrize("kind", [sp.csr_matrix, sp.csr_array])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_functions_of_values_are_the_same_and_share_places(function: Any, kind: Any, dtype: str) -> None:
    x = block(kind, dtype)
    result = without_copies(function)(x)
    same(result, function(block(kind, dtype)))
    assert np.shares_memory(result.indices, x.indices)
    assert not np.shares_memory(result.data, x.data)
    same(x, block(kind, dtype))


def test_duplicates_are_summed_first() -> None:
    result = without_copies(np.log1p)(unordered())
    same(result, np.log1p(unordered()))
    assert result[0, 3] == np.log1p(np.float32(4))


@pytest.mark.parametrize("op", [operator.truediv, operator.mul])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("allow", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("make", [block, unordered])
def test_scaling_is_the_same_and_shares_places(op: Any, axis: int, allow: bool, dtype: str, make: Any) -> None:
    x, y = make().astype(dtype), make().astype(dtype)
    scaling = np.linspace(0, 3, x.shape[axis]).astype("float32")
    options = {"axis": axis, "op": op, "allow_divide_by_zero": allow}
    with np.errstate(all="ignore"):
        result = without_copies(scaled)(x, scaling, **options)
        same(result, scaled(y, scaling, **options))
    assert np.shares_memory(result.indices, x.indices) == y.has_canonical_format
    same(x, y)


@pytest.mark.parametrize("change", ["eliminate_zeros", "sort_indices"])
def test_shared_arrays_are_never_changed(change: str) -> None:
    x = block()
    x.data[:3] = 0
    expected = x.copy()
    result = without_copies(np.log1p)(x)
    if change == "sort_indices":
        result.has_sorted_indices = False
    with pytest.raises(ValueError, match="read-only"):
        getattr(result, change)()
    mine = owned(len, result)
    getattr(mine, change)()
    same(mine, np.log1p(expected))
    same(x, expected)
