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


def where_of(rows: list[list[int]], values: NDArray[Any], indices: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return the lengths and addresses of rows that are contiguous in memory."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    starts = (np.cumsum(lengths) - lengths).astype(np.uint64)
    return (lengths, *(np.uint64(address(part)) + starts * np.uint64(part.itemsize) for part in (values, indices)))


@given(
    rows=st.lists(st.lists(st.integers(0, 199), max_size=150), min_size=1, max_size=6),
    order=st.permutations(range(200)),
    n_kept=st.integers(1, 200),
    types=st.sampled_from([("float32", "float32"), ("uint8", "int64")]),
)
def test_merged_rows_ascend_and_hold_the_sums(
    rows: list[list[int]], order: list[int], n_kept: int, types: tuple[str, str]
) -> None:
    stored, summed = types
    rng = np.random.default_rng(0)
    indices = np.array([column for row in rows for column in row], dtype=np.int32)
    values = (rng.random(len(indices)) * 256).astype(stored)
    lookup = np.full(200, -1, dtype=np.int32)
    lookup[order[:n_kept]] = np.arange(n_kept)
    n_values = int((lookup[indices] >= 0).sum())
    indptr, got, data = garbage((len(rows) + 1,), "int64"), garbage((n_values,), "int32"), garbage((n_values,), summed)
    tables = np.zeros(len(rows), np.int32), lookup[None]
    to = indptr, got, data, np.empty(n_kept, summed), values[:0], indices[:0]
    assert kernels.merge_columns_csr(np.arange(len(rows)), *where_of(rows, values, indices), *tables, *to) == -1
    remaining = iter(values)
    for row, start, stop in zip(rows, indptr[:-1], indptr[1:], strict=True):
        sums: dict[int, Any] = {}
        for column, value in zip(row, remaining, strict=False):
            if lookup[column] >= 0:
                value = np.dtype(summed).type(value)
                sums[lookup[column]] = sums[lookup[column]] + value if lookup[column] in sums else value
        assert got[start:stop].tolist() == sorted(sums)
        np.testing.assert_array_equal(data[start:stop], [sums[column] for column in sorted(sums)])


@pytest.mark.parametrize("n_vars", [N_VARS, 300])
def test_rows_of_several_matrices_are_gathered_each_by_its_own_map(n_vars: int) -> None:
    rng = np.random.default_rng(2)
    n, widths, kept = 12, np.array([n_vars, n_vars - 10]), n_vars - 5
    maps = rng.integers(0, 2, n).astype(np.int32)
    dense = rng.integers(0, 4, (n, n_vars)).astype("f4")
    dense[maps == 1, widths[1] :] = 0
    lookups = np.full((2, n_vars), -2, dtype=np.int32)
    for lookup, width in zip(lookups, widths, strict=True):
        lookup[:width] = np.where(rng.random(width) < 0.6, -1, 0)
        lookup[:width][lookup[:width] == 0] = rng.permutation(kept)[: (lookup[:width] == 0).sum()]
    assert {-2, -1} < set(lookups.ravel().tolist())
    twin = np.zeros((n, kept), "f4")
    for i, lookup in enumerate(lookups[maps]):
        twin[i, lookup[lookup >= 0]] = dense[i, lookup >= 0]
    csr = sp.csr_array(dense)
    lengths, starts = np.diff(csr.indptr).astype(np.int64), csr.indptr[:-1].astype(np.uint64)
    where = (lengths, address(csr.data) + starts * np.uint64(4), address(csr.indices) + starts * np.uint64(4))
    positions = rng.permutation(n)
    out = garbage((n, kept), "float32")
    assert (
        kernels.scatter_columns(positions, *where, maps, lookups, True, out, csr.data[:0], csr.indices[:0], True) == -1
    )
    np.testing.assert_array_equal(out, twin[positions])
    counts = garbage((n,), "int64")
    assert kernels.count_columns(positions, lengths, where[2], maps, lookups, counts, csr.indices[:0]) == -1
    indptr = np.concatenate(([0], np.cumsum(counts)))
    indices, data = garbage((indptr[-1],), "int32"), garbage((indptr[-1],), "float32")
    to = (indptr[:-1], indices, data, csr.data[:0], csr.indices[:0], True)
    assert kernels.copy_columns_csr(positions, *where, maps, lookups, True, *to) == -1
    np.testing.assert_array_equal(sp.csr_array((data, indices, indptr), shape=(n, kept)).toarray(), twin[positions])

    # The column exists only in the other matrix, not in the matrix of this row.
    row = int(np.flatnonzero((maps == 1) & (lengths > 0))[0])
    csr.indices[csr.indptr[row]] = widths[1]
    assert (
        kernels.scatter_columns(np.array([row]), *where, maps, lookups, True, out, csr.data[:0], csr.indices[:0], True)
        == row
    )
    assert kernels.copy_columns_csr(np.array([row]), *where, maps, lookups, True, *to) == row

    sources = np.full((2, kept), -1)
    for source, lookup in zip(sources, lookups, strict=True):
        source[lookup[lookup >= 0]] = np.flatnonzero(lookup >= 0)
    rows_at = (address(dense) + np.arange(n) * 4 * n_vars).astype(np.uint64)
    missing = np.array([np.nan], "f4")
    kernels.copy_columns(positions, rows_at, maps, sources, out, missing, dense[:0, 0])
    for i, row in enumerate(positions):
        source = sources[maps[row]]
        np.testing.assert_array_equal(out[i], np.where(source < 0, np.nan, dense[row, source]))


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


def test_stitched_runs_equal_those_of_the_array_the_extents_stand_for() -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(0, 255, 200).astype(np.uint8)
    row_bytes, fill = 4, np.array([9, 8], dtype=np.uint8)
    # Extents are in any order in the file; the third was never written.
    firsts, ends, offsets = np.array([0, 5, 6, 13]), np.array([5, 6, 13, 20]), np.array([103, 7, -1, 40])
    pieces = [
        np.tile(fill, (end - first) * 2) if at < 0 else source[at : at + (end - first) * row_bytes]
        for first, end, at in zip(firsts, ends, offsets, strict=True)
    ]
    array = np.concatenate(pieces).reshape(20, row_bytes)
    starts, stops = np.array([0, 3, 3, 4, 9, 12]), np.array([20, 3, 8, 14, 12, 20])
    twin = np.concatenate([array[start:stop] for start, stop in zip(starts, stops, strict=True)]).ravel()
    out = np.empty(len(twin), dtype=np.uint8)
    extents = np.searchsorted(firsts, starts, side="right") - 1
    kernels.stitch(starts, stops, extents, firsts, ends, offsets, row_bytes, source, fill, out)
    np.testing.assert_array_equal(out, twin)


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
