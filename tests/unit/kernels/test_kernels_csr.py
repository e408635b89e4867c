from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dasksc.kernels import csr as kernels

pytestmark = pytest.mark.core


def garbage(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Return an output array filled with a marker value, which reveals elements that were not written."""
    return np.full(shape, 77).astype(dtype)


@pytest.mark.parametrize("order", ["ascending", "descending", "mixed"])
@pytest.mark.parametrize("n_vars", [1, 2047, 2048, 2049, 6000])
def test_long_rows_are_cleared_whatever_the_order_of_their_columns(n_vars: int, order: str) -> None:
    rng = np.random.default_rng(5)
    csr = sp.random(20, n_vars, density=0.02, format="csr", dtype=np.float32, random_state=rng)
    indices, data = csr.indices.copy(), csr.data.copy()
    for start, stop in pairwise(csr.indptr):
        within = {"ascending": slice(None), "descending": slice(None, None, -1), "mixed": rng.permutation(stop - start)}
        indices[start:stop], data[start:stop] = (part[start:stop][within[order]] for part in (csr.indices, csr.data))
    starts = csr.indptr[:-1].astype(np.uint64)
    data_at, indices_at = (np.uint64(part.ctypes.data) + starts * np.uint64(4) for part in (data, indices))
    out = garbage((20, n_vars), "float32")
    bad = kernels.scatter_rows(
        np.arange(20),
        np.diff(csr.indptr).astype(np.int64),
        data_at,
        indices_at,
        n_vars,
        out,
        data[:0],
        indices[:0],
        True,
    )
    assert bad == -1
    np.testing.assert_array_equal(out, csr.toarray())


@pytest.mark.parametrize("n_vars", [0, 1, 63, 64, 65, 127, 128, 200])
@pytest.mark.parametrize("dtype", ["u1", "f4"])
def test_rows_of_any_width_are_squeezed(n_vars: int, dtype: str) -> None:
    rng = np.random.default_rng(n_vars)
    dense = rng.integers(0, 3, (3, n_vars)).astype(dtype)  # rows with odd widths are not aligned to vectors
    expected = sp.csr_matrix(dense)
    indptr, indices, data = garbage((4,), "int64"), garbage((expected.nnz,), "int32"), garbage((expected.nnz,), dtype)
    assert kernels.squeeze(dense, indptr, indices, data) == expected.nnz
    np.testing.assert_array_equal(indptr, expected.indptr)
    np.testing.assert_array_equal(indices, expected.indices)
    np.testing.assert_array_equal(data, expected.data)


@given(
    st.lists(
        st.one_of(
            st.integers(0, 300),
            st.integers(65_000, 66_000),
            st.sampled_from([-1, 2**31, 2**32, 2**32 + 7, -(2**31), 2**40]),
            st.sampled_from([0.5, -0.0, math.nan, math.inf, -math.inf, 255.5, 3e38]),
        ),
        max_size=12,
    ),
    st.sampled_from(["float32", "float64", "int32", "uint64"]),
    st.sampled_from([0, 4090]),
)
def test_counts_are_told_from_other_values(values: list[float], dtype: str, n_before: int) -> None:
    with np.errstate(all="ignore"):
        array = np.array([*[1] * n_before, *values]).astype(dtype)
    bits = array.view(f"u{array.itemsize}")

    def holds(narrow: str) -> bool:
        with np.errstate(all="ignore"):
            held = array.astype(narrow)
            return bool((held == array).all() and not np.signbit(array).any())

    assert kernels.count_bytes(array, bits) == (1 if holds("u1") else 2 if holds("u2") else 0)
