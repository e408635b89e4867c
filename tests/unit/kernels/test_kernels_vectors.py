"""Operations on neighboring elements, compared with NumPy."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dasksc.kernels.vectors import (
    N_STEPS,
    descent_bits,
    hash_columns,
    hashed,
    n_below,
    n_sums_below,
    nonzero_bits,
    sum_of,
    thin_small,
)

pytestmark = pytest.mark.core

HIGHEST = 2**32 - 1
WORDS = arrays(np.uint32, N_STEPS + 3, elements=st.sampled_from([0, 1, 2, 7, 2**31, HIGHEST]))


@numba.njit
def bits_from(values, start):
    return nonzero_bits(values.ctypes.data, start, values)


@numba.njit
def descents_from(values, start):
    return descent_bits(values.ctypes.data, start, values)


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


@pytest.mark.parametrize("dtype", ["u1", "u2", "i1", "i4", "u4", "i8", "u8"])
def test_bits_are_set_where_elements_do_not_ascend(dtype):
    info = np.iinfo(dtype)
    values = np.random.default_rng(0).integers(info.min, info.max, 71, dtype=dtype, endpoint=True)
    values[10:14] = info.min, info.max, info.max, info.min
    for start in (0, 1, 6):
        expected = (values[start : start + 64] >= values[start + 1 : start + 65]).tolist()
        assert [int(descents_from(values, start)) >> k & 1 == 1 for k in range(64)] == expected


@given(values=WORDS, start=st.integers(0, 3), value=st.sampled_from([0, 1, 3, 2**31, 2**32 - 1]))
def test_steps_and_running_sums_are_counted_as_by_numpy(values, start, value):
    some = values[start : start + N_STEPS]
    sums = np.cumsum(some, dtype=np.uint32)
    expected = (some < value).sum(), (sums < value).sum(), sums[-1]
    assert all_from(values, start, np.uint32(value)) == expected


# --- Hashes -----------------------------------------------------------------------------------------


@numba.njit
def hash_of(x):
    return hashed(np.uint32(x))


@numba.njit
def hashes_from(columns, start, factor, offset, words):
    hash_columns(columns.ctypes.data, words.ctypes.data, start, columns, np.uint32(factor), np.uint32(offset))


def triple32(x):
    """Return the hash triple32 of 32 bits."""
    x ^= x >> 17
    x = x * 0xED5AD4BB & HIGHEST
    x ^= x >> 11
    x = x * 0xAC4C1B51 & HIGHEST
    x ^= x >> 15
    x = x * 0x31848BAB & HIGHEST
    return x ^ x >> 14


@given(st.integers(0, HIGHEST) | st.sampled_from([0, 1, 2**31, HIGHEST]))
def test_hashes_are_those_of_python(x):
    assert hash_of(x) == triple32(x)


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"])
@given(data=st.data(), start=st.integers(0, 3), factor=st.integers(0, HIGHEST), offset=st.sampled_from([0, 5, HIGHEST]))
def test_columns_of_every_integer_type_are_hashed_and_no_others(dtype, data, start, factor, offset):
    highest = min(int(np.iinfo(dtype).max), HIGHEST)
    numbers = st.integers(0, highest) | st.sampled_from([0, 1, highest])
    columns = data.draw(arrays(dtype, N_STEPS + 3, elements=numbers))
    words = np.full(N_STEPS + 3, 77, np.uint32)
    hashes_from(columns, start, factor, offset, words)
    expected = [77] * len(words)
    for k in range(start, start + N_STEPS):
        expected[k] = triple32((int(columns[k]) * factor + offset) & HIGHEST)
    assert words.tolist() == expected


# --- Small counts -----------------------------------------------------------------------------------

# Argument `steps` of `thin_small`: one step for the value 1, two for the value 2 and three for the value 3.
STEPS = (1000, 500, 2000, 300, 1500, 4000)


@numba.njit
def thinned_from(values, words, start, steps):
    return thin_small(values.ctypes.data, words.ctypes.data, start, values, steps)


def thinned(value, word, steps):
    """Return the result of `thin_small` for one value, and True if the value is not thinned."""
    # Values below 3 have fewer than three steps; the kernel fills in the missing ones with the highest word.
    own = {0: [], 1: steps[:1], 2: steps[1:3], 3: steps[3:]}.get(float(value))
    if own is None or word in own or (len(own) < 3 and word == HIGHEST):
        return value, True
    return sum(word >= step for step in own), False


@pytest.mark.parametrize("dtype", ["u1", "i4", "i8", "f4", "f8"])
@given(data=st.data(), start=st.integers(0, 3), has_others=st.booleans())
def test_small_counts_are_thinned_as_by_python_and_others_stay(dtype, data, start, has_others):
    others = [4, 5, 100] + [-1, -3] * (dtype != "u1") + [0.5, 2.5, -0.0, np.nan, np.inf] * (dtype[0] == "f")
    others += [2**32 + 1, 2**40] * (dtype == "i8")
    near = sorted({step + more for step in STEPS for more in (-1, 0, 1)} | {0, 2**31, HIGHEST - 1, HIGHEST})
    n = 64 + 3
    values = data.draw(arrays(dtype, n, elements=st.sampled_from([0, 1, 2, 3] + others * has_others)))
    words = data.draw(arrays(np.uint32, n, elements=st.sampled_from(near)))
    changed, unchanged = values.copy(), words.copy()
    bits = int(thinned_from(changed, words, start, tuple(map(np.uint32, STEPS))))
    expected, remains = values.copy(), []
    for k in range(start, start + 64):
        expected[k], is_left = thinned(values[k], int(words[k]), STEPS)
        remains.append(is_left)
    np.testing.assert_array_equal(changed, expected)
    np.testing.assert_array_equal(words, unchanged)
    assert [bits >> k & 1 == 1 for k in range(64)] == remains
