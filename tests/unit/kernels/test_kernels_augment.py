"""Fewer counts and masked values: kernels against their twins, and their distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from dasksc.kernels import augment
from tests.support import twins

pytestmark = pytest.mark.core

ERROR = 1e-4  # that a test of a distribution fails by chance; keys are fixed, so it does once or never
NONE = np.empty(0, dtype=np.int32)
N_VARS = 70  # more than a word of the bitmaps
COUNTS = st.sampled_from([0, 0, 0, 1, 1, 1, 2, 3, 8, 9, 12, 64, 65, 100, 5000, 2**31, 2**40])
ROWS = st.lists(st.lists(COUNTS, min_size=N_VARS, max_size=N_VARS), max_size=3)


def as_csr(dense: np.ndarray[Any, Any]) -> tuple[Any, Any, Any]:
    matrix = sp.csr_matrix(dense)
    return matrix.indptr, matrix.indices, matrix.data


def fits(found: np.ndarray[Any, Any], distribution: Any) -> bool:
    """Whether whole numbers are distributed like this, in bins of 20 expected ones at least."""
    values = np.unique(found)
    ends = [int(values[0])]
    for value in values:
        if distribution.cdf(value) - distribution.cdf(ends[-1]) > 20 / len(found):
            ends.append(int(value))
    if distribution.sf(ends[-1]) * len(found) < 20:
        ends.pop()
    if distribution.cdf(ends[0]) * len(found) < 20:
        ends = ends[1:]
    observed = np.bincount(np.searchsorted(ends, found), minlength=len(ends) + 1)
    expected = np.diff(np.concatenate([[0], distribution.cdf(ends), [1]])) * len(found)
    return bool(stats.chisquare(observed, expected).pvalue > ERROR)


def downsampled(key: int, number: int, dense: np.ndarray[Any, Any], p: float, target: int) -> np.ndarray[Any, Any]:
    """The rows by both ways, which agree."""
    rows = np.arange(len(dense), dtype=np.int64) * 3
    out, n_vars = dense.copy(), dense.shape[1]
    assert augment.downsample(np.uint64(key), number, rows, NONE, NONE, out.reshape(-1), n_vars, p, target) == -1
    indptr, columns, values = as_csr(dense)
    assert augment.downsample(np.uint64(key), number, rows, indptr, columns, values, n_vars, p, target) == -1
    np.testing.assert_array_equal(sp.csr_matrix((values, columns, indptr), dense.shape).toarray(), out)
    return out


@given(cells=ROWS, key=st.integers(0, 2**64 - 1), p=st.sampled_from([1e-12, 0.01, 0.3, 0.5, 0.77, 1 - 1e-9, 1.0]))
def test_thinned_counts_are_those_of_the_twin(cells, key, p):
    dense = np.array(cells, dtype=np.int64).reshape(-1, N_VARS)
    out = downsampled(key, 7, dense, p, 0)
    keys = twins.row_keys(twins.stream(key, 7), [3 * i for i in range(len(dense))])
    for cell, row_key, found in zip(dense.tolist(), keys, out.tolist(), strict=True):
        assert found == twins.thinned(row_key, range(N_VARS), cell, p)


FEW = st.lists(st.lists(st.sampled_from([0, 0, 1, 2, 9, 40]), min_size=N_VARS, max_size=N_VARS), max_size=3)


@given(cells=FEW, key=st.integers(0, 2**64 - 1), target=st.sampled_from([1, 2, 10, 100, 500, 10**6]))
@example(cells=[[0] * N_VARS], key=1, target=1)
def test_samples_without_replacement_are_those_of_the_twin(cells, key, target):
    dense = np.array(cells, dtype=np.float32).reshape(-1, N_VARS)
    out = downsampled(key, 2**48, dense, 0.0, target)
    keys = twins.row_keys(twins.stream(key, 2**48), [3 * i for i in range(len(dense))])
    for cell, row_key, found in zip(dense.astype(int).tolist(), keys, out.astype(int).tolist(), strict=True):
        assert found == twins.sampled(row_key, range(N_VARS), cell, target)
        assert sum(found) == min(target, sum(cell))
        assert all(f <= c for f, c in zip(found, cell, strict=True))


@pytest.mark.parametrize(
    ("n", "p"),
    [
        (1, 0.3),
        (3, 0.5),
        (8, 0.9),
        (9, 0.1),
        (50, 0.02),
        (30, 0.5),
        (100, 0.3),
        (1000, 0.97),
        (10**6, 0.2),
        (10**6, 5e-6),
    ],
)
def test_thinned_counts_are_binomial(n, p):
    cells = np.full((4000, 5), n, dtype=np.int64)
    found = np.concatenate([downsampled(key, 0, cells, p, 0).ravel() for key in range(3)])
    assert found.min() >= 0
    assert found.max() <= n
    assert fits(found, stats.binom(n, p))


@pytest.mark.parametrize("target", [3, 40, 97])
def test_samples_are_hypergeometric(target):
    cell = np.array([1, 1, 4, 12, 30, 0, 52], dtype=np.int64)
    found = np.concatenate([downsampled(key, 0, np.tile(cell, (5000, 1)), 0.0, target) for key in range(3)])
    assert (found.sum(axis=1) == target).all()
    for gene in (1, 2, 3, 4, 6):
        assert fits(found[:, gene], stats.hypergeom(cell.sum(), cell[gene], target))
    # Genes compete for what is drawn, as independent ones would not.
    n = cell.sum()
    covariance = -target * (cell[4] / n) * (cell[6] / n) * (n - target) / (n - 1)
    assert np.cov(found[:, 4], found[:, 6])[0, 1] == pytest.approx(covariance, rel=0.15)


@given(cells=ROWS, key=st.integers(0, 2**64 - 1), p=st.sampled_from([0.0, 0.2, 0.9]))
def test_masked_values_are_those_of_the_twin(cells, key, p):
    dense = np.array(cells, dtype=np.float64).reshape(-1, N_VARS) / 3
    rows = np.arange(len(dense), dtype=np.int64)
    keys = twins.row_keys(twins.stream(key, 5), rows.tolist())
    expected = [
        [0.0 if (twins.bits(k, j) >> 11) < int(p * 2**53) else value for j, value in enumerate(cell)]
        for k, cell in zip(keys, dense.tolist(), strict=True)
    ]
    out = dense.copy()
    augment.mask(np.uint64(key), 5, rows, NONE, NONE, out.reshape(-1), N_VARS, p)
    assert out.tolist() == expected
    indptr, columns, values = as_csr(dense)
    augment.mask(np.uint64(key), 5, rows, indptr, columns, values, N_VARS, p)
    assert sp.csr_matrix((values, columns, indptr), dense.shape).toarray().tolist() == expected


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4"])
@pytest.mark.parametrize("bad", [-1, 0.5, np.nan, np.inf, 2.0**60])
def test_the_first_value_that_is_no_count_is_found(dtype, bad):
    if dtype == "i4" and bad != -1:
        pytest.skip("no such integer of 32 bits")
    dense = np.zeros((3, N_VARS), dtype=dtype)
    dense[1, 5], dense[1, 66], dense[2, 0] = 2, bad, bad
    rows = np.arange(3)
    indptr, columns, values = as_csr(dense)
    arguments = N_VARS, 0.5, 0
    assert augment.downsample(np.uint64(1), 0, rows, NONE, NONE, dense.reshape(-1), *arguments) == N_VARS + 66
    assert augment.downsample(np.uint64(1), 0, rows, indptr, columns, values, *arguments) == 1
