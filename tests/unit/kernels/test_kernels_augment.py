"""Kernels that thin counts and mask values: their distributions, and equality with pure-Python counterparts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dasksc.kernels import augment
from tests.support import twins

pytestmark = pytest.mark.core

N_VARS = 70  # more than one word of the bitmaps
COUNTS = st.sampled_from([0, 0, 0, 1, 1, 1, 2, 3, 8, 9, 16, 17, 64, 65, 100, 5000, 2**31, 2**40])
ROWS = st.lists(st.lists(COUNTS, min_size=N_VARS, max_size=N_VARS), max_size=3)


def as_csr(dense: np.ndarray[Any, Any]) -> tuple[Any, Any, Any]:
    matrix = sp.csr_matrix(dense)
    return matrix.indptr.astype(np.int64), matrix.indices, matrix.data


def change(key: int, number: int, rows: Any, csr: tuple[Any, Any, Any], p: float, target: int) -> int:
    """Thin CSR rows or, if `p` is 0, sample them; return the position of the first invalid value, or -1."""
    if p == 0:
        return augment.sample(np.uint64(key), number, rows, *csr, target)
    return augment.downsample(np.uint64(key), number, rows, *csr, p, *augment.tables_of(p))


def downsampled(key: int, number: int, dense: np.ndarray[Any, Any], p: float, target: int) -> np.ndarray[Any, Any]:
    rows = np.arange(len(dense), dtype=np.int64) * 3
    indptr, columns, values = as_csr(dense)
    assert change(key, number, rows, (indptr, columns, values), p, target) == -1
    return sp.csr_matrix((values, columns, indptr), dense.shape).toarray()


def test_a_sample_of_half_of_very_many_counts_is_drawn_at_once():
    cell = np.full((1, N_VARS), 2.0**46)
    found = downsampled(0, 0, cell, 0.0, N_VARS * 2**45)
    assert found.sum() == N_VARS * 2**45
    np.testing.assert_allclose(found, 2**45, rtol=1e-6)


def test_a_row_of_more_counts_than_a_float_can_count_is_found():
    dense = np.full((2, N_VARS), 1.0)
    dense[1, 3:5] = 2**53
    rows = np.arange(2)
    assert change(1, 0, rows, as_csr(dense), 0.0, 60) == N_VARS + 3


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
    cells = np.full((4000, 5), float(n))
    found = np.concatenate([downsampled(key, 0, cells, p, 0).ravel() for key in range(3)])
    assert found.min() >= 0
    assert found.max() <= n
    assert twins.follows(found, stats.binom(n, p))


@pytest.mark.parametrize("target", [3, 40, 97])
def test_samples_are_hypergeometric(target):
    cell = np.array([1, 1, 4, 12, 30, 0, 52], dtype=np.float64)
    found = np.concatenate([downsampled(key, 0, np.tile(cell, (5000, 1)), 0.0, target) for key in range(3)])
    assert (found.sum(axis=1) == target).all()
    for gene in (1, 2, 3, 4, 6):
        assert twins.follows(found[:, gene], stats.hypergeom(cell.sum(), cell[gene], target))
    # Counts of genes are negatively correlated, because the total per cell is fixed.
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
    indptr, columns, values = as_csr(dense)
    augment.mask(np.uint64(key), 5, rows, indptr, columns, values, p)
    assert sp.csr_matrix((values, columns, indptr), dense.shape).toarray().tolist() == expected
