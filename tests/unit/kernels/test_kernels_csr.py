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

N_VARS = 37

# Pairs of the stored dtype and the requested dtype.
VALUE_DTYPES = [
    ("float32", "float32"),
    ("uint8", "float32"),
]
INDEX_DTYPES = ["int64", "uint16"]


def address(array: NDArray[Any]) -> int:
    return array.ctypes.data


class Rows:
    """CSR rows as addresses, the matrix that they represent, and an order in which to gather them."""

    def __init__(self, *, data_dtype: str = "float32", index_dtype: str = "int32", n_rows: int = 23) -> None:
        rng = np.random.default_rng(0)
        matrix = sp.random_array((n_rows, N_VARS), density=0.3, rng=rng, format="csr")
        matrix.data = rng.integers(1, 100, matrix.nnz).astype(data_dtype)
        self.matrix = matrix
        self.data = matrix.data
        self.indices = matrix.indices.astype(index_dtype)
        for array in (self.data, self.indices):
            array.flags.writeable = False
        starts = matrix.indptr[:-1].astype(np.int64)
        self.lengths = np.diff(matrix.indptr).astype(np.int64)
        self.data_at = (address(self.data) + starts * self.data.itemsize).astype(np.uint64)
        self.indices_at = (address(self.indices) + starts * self.indices.itemsize).astype(np.uint64)
        self.positions = rng.integers(0, n_rows, 2 * n_rows)
        self.likes = (np.empty(0, self.data.dtype), np.empty(0, self.indices.dtype))

    @property
    def expected(self) -> NDArray[Any]:
        return self.matrix.toarray()[self.positions]


def garbage(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Return an output array filled with a marker value, which reveals elements that were not written."""
    return np.full(shape, 77).astype(dtype)


@pytest.mark.parametrize(("stored", "wanted"), VALUE_DTYPES)
def test_scattered_rows_equal_the_dense_matrix(stored: str, wanted: str) -> None:
    rows = Rows(data_dtype=stored)
    out = garbage((len(rows.positions), N_VARS), wanted)
    bad = kernels.scatter_rows(
        rows.positions, rows.lengths, rows.data_at, rows.indices_at, N_VARS, out, *rows.likes, True
    )
    assert bad == -1
    np.testing.assert_array_equal(out, rows.expected.astype(wanted))


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


@pytest.mark.parametrize(
    ("stored", "wanted", "index_dtype"),
    [(*values, "int32") for values in VALUE_DTYPES] + [("float32", "float32", indices) for indices in INDEX_DTYPES],
)
def test_copied_csr_rows_equal_those_scipy_takes(stored: str, wanted: str, index_dtype: str) -> None:
    rows = Rows(data_dtype=stored, index_dtype=index_dtype)
    twin = rows.matrix[rows.positions]
    indices, data = garbage((twin.nnz,), "int32"), garbage((twin.nnz,), wanted)
    bad = kernels.copy_rows_csr(
        rows.positions,
        rows.lengths,
        rows.data_at,
        rows.indices_at,
        N_VARS,
        twin.indptr[:-1].astype(np.int64),
        indices,
        data,
        *rows.likes,
        True,
    )
    assert bad == -1
    np.testing.assert_array_equal(indices, twin.indices)
    np.testing.assert_array_equal(data, twin.data.astype(wanted))


@pytest.mark.parametrize("wrong", [-1, N_VARS, 2**31 - 1])
def test_a_column_outside_the_matrix_ends_every_kernel_with_its_row(wrong: int) -> None:
    rows = Rows()
    culprit = 5
    assert rows.lengths[culprit]
    indices = rows.indices.copy()
    indices[rows.matrix.indptr[culprit + 1] - 1] = wrong
    indices_at = rows.indices_at - np.uint64(address(rows.indices)) + np.uint64(address(indices))
    positions = np.arange(len(rows.lengths))
    n = len(positions)
    everything = np.empty(int(rows.lengths.sum()), "int32"), np.empty(int(rows.lengths.sum()), "float32")
    indptr = rows.matrix.indptr[:-1].astype(np.int64)
    lookup = np.zeros(n, np.int32), np.arange(N_VARS, dtype=np.int32)[None]
    where = (positions, rows.lengths, rows.data_at, indices_at)
    assert kernels.scatter_rows(*where, N_VARS, np.empty((n, N_VARS), "f4"), *rows.likes, True) == culprit
    for drops in (True, False):
        assert (
            kernels.scatter_columns(*where, *lookup, drops, np.empty((n, N_VARS), "f4"), *rows.likes, True) == culprit
        )
        assert kernels.copy_columns_csr(*where, *lookup, drops, indptr, *everything, *rows.likes, True) == culprit
    assert kernels.copy_rows_csr(*where, N_VARS, indptr, *everything, *rows.likes, True) == culprit
    merge = indptr.copy(), *everything, np.empty(N_VARS, "f4")
    assert kernels.merge_columns_csr(*where, *lookup, *merge, *rows.likes) == culprit
    counts = np.empty(n, "int64")
    assert kernels.count_columns(positions, rows.lengths, indices_at, *lookup, counts, rows.likes[1]) == culprit


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
