"""Kernels of batches with a share of each class, compared with plain Python, and their guarantees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasksc.kernels import stratified as kernels

pytestmark = pytest.mark.core

KEYS = st.integers(0, 2**64 - 1)


@given(n=st.integers(0, 60), m=st.integers(1, 50), a=st.integers(0, 49), b=st.integers(-500, 500))
def test_floor_sums_are_those_of_every_term(n: int, m: int, a: int, b: int) -> None:
    assert kernels.floor_sum(n, m, a % m, b) == sum((a % m * i + b) // m for i in range(n))


def test_floor_sums_of_many_batches_do_not_overflow() -> None:
    n = 10**9 + 7
    stride = 618_033_993
    # Every residue occurs once, so the sum is (stride * n(n-1)/2 minus the sum of all residues) / n.
    assert kernels.floor_sum(n, n, stride, 0) == (stride * n * (n - 1) // 2 - n * (n - 1) // 2) // n


@given(n_rows=st.one_of(st.integers(1, 60), st.integers(500, 2000)), run_rows=st.integers(1, 9), key=KEYS)
def test_every_pass_draws_every_row_once(n_rows: int, run_rows: int, key: int) -> None:
    out = np.empty(3 * n_rows, dtype=np.int64)
    kernels.drawn_of_class(0, n_rows, run_rows, np.uint64(key), out)
    for one in out.reshape(3, -1):
        np.testing.assert_array_equal(np.sort(one), np.arange(n_rows))
