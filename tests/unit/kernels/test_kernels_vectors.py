"""Operations on neighboring elements, compared with NumPy."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from dasksc.kernels.vectors import descent_bits, nonzero_bits

pytestmark = pytest.mark.core


@numba.njit
def bits_from(values, start):
    return nonzero_bits(values.ctypes.data, start, values)


@numba.njit
def descents_from(values, start):
    return descent_bits(values.ctypes.data, start, values)


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
