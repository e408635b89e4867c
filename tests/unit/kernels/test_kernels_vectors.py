"""Operations on neighboring elements, compared with NumPy."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dasksc.kernels.vectors import N_STEPS, n_below, n_sums_below, nonzero_bits, sum_of

pytestmark = pytest.mark.core

WORDS = arrays(np.uint32, N_STEPS + 3, elements=st.sampled_from([0, 1, 2, 7, 2**31, 2**32 - 1]))


@numba.njit
def bits_from(values, start):
    return nonzero_bits(values.ctypes.data, start, values)


@numba.njit
def all_from(values, start, value):
    at = values.ctypes.data
    return n_below(at, start, values, value), n_sums_below(at, start, values, value), sum_of(at, start, values)


@pytest.mark.parametrize("dtype", ["f4", "f8", "u1", "i2", "i4", "i8"])
def test_bits_are_set_where_elements_are_not_zero(dtype):
    values = np.random.default_rng(0).integers(0, 2, 70).astype(dtype)
    if dtype[0] == "f":
        values[:3] = np.nan, -0.0, -1.0
    for start in (0, 1, 6):
        expected = [bool(value != 0) for value in values[start : start + 64]]
        assert [int(bits_from(values, start)) >> k & 1 == 1 for k in range(64)] == expected


@given(values=WORDS, start=st.integers(0, 3), value=st.sampled_from([0, 1, 3, 2**31, 2**32 - 1]))
def test_steps_and_running_sums_are_counted_as_by_numpy(values, start, value):
    some = values[start : start + N_STEPS]
    sums = np.cumsum(some, dtype=np.uint32)
    expected = (some < value).sum(), (sums < value).sum(), sums[-1]
    assert all_from(values, start, np.uint32(value)) == expected
