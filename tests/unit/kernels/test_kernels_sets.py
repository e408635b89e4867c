"""Kernels of sets: grouping of rows and keyed draws from a group, compared with plain Python.

Statistical tests use fixed keys; `ERROR` is the probability that a perfect generator fails one of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dasksc.kernels import sets
from tests.support import twins

pytestmark = pytest.mark.core

ERROR = 1e-4
KEYS = st.integers(0, 2**64 - 1)


def order_of(key: int, n: int, block_size: int, first: int = 0, size: int | None = None, table: int = 64) -> Any:
    out = np.empty(n if size is None else size, dtype=np.int64)
    sets.fill_from_group(np.uint64(key), n, block_size, first, np.empty(table, dtype=np.int64), out)
    return out


@given(KEYS, st.integers(1, 60), st.integers(1, 9), st.integers(0, 200), st.integers(1, 150))
def test_a_range_of_an_order_begins_anew_at_its_end(key: int, n: int, block_size: int, first: int, size: int) -> None:
    whole = order_of(key, n, block_size)
    expected = whole[np.arange(first, first + size) % n]
    np.testing.assert_array_equal(order_of(key, n, block_size, first, size), expected)


@pytest.mark.parametrize(("n", "block_size", "table"), [(21, 8, 64), (40, 3, 64), (37, 1, 4), (50, 64, 64)])
def test_every_cell_is_as_likely_at_every_place(n: int, block_size: int, table: int) -> None:
    counts = np.zeros((n, n))
    for number in range(20_000):
        key = twins.stream(12345, number)
        counts[np.arange(n), order_of(key, n, block_size, table=table)] += 1
    # Positions within one order are not independent, so each is tested separately.
    pvalues = [stats.chisquare(place).pvalue for place in counts]
    assert min(pvalues) > ERROR / n
