"""Kernels of weighted and balanced draws, compared with plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from dasksc.kernels import draw
from dasksc.kernels.groups import deal_by_quota
from dasksc.kernels.synthetic import fill_alias_table
from tests.support import twins

pytestmark = pytest.mark.core

SEGMENT_LEVELS = 6
SEGMENT = 1 << SEGMENT_LEVELS
# The package passes read-only arrays, for which the kernels are compiled once.
EMPTY = np.frombuffer(b"", np.float64)

Source = tuple[NDArray[Any], NDArray[np.float64]]


def source_of(kind: str, n: int) -> tuple[Source, NDArray[np.float64]]:
    """Return the two arrays from which the kernels compute weights, and the expected weights."""
    rng = np.random.default_rng(n)
    weights = rng.integers(0, 4, n).astype(np.float32)
    weights[n // 2] = 7
    codes = rng.integers(-1, 3, n).astype(np.int8)
    codes[n // 2] = 2
    table = np.array([0.0, 1.5, 0.0, 4.0])
    for array in (weights, codes, table):
        array.flags.writeable = False
    return {
        "equal": lambda: ((EMPTY, EMPTY), np.ones(n)),
        "weights": lambda: ((weights, EMPTY), weights.astype(float)),
        "codes": lambda: ((codes, table), table[codes + 1]),
    }[kind]()


KINDS = ["equal", "weights", "codes"]
N = [1, 63, 64, 65, 1000]


def tree_of(source: Source, n: int) -> NDArray[np.float64]:
    n_segments = -(-n // SEGMENT)
    n_leaves = 1 << (n_segments - 1).bit_length()
    tree = np.zeros(2 * n_leaves)
    assert draw.segment_sums(n, SEGMENT, *source, tree[n_leaves : n_leaves + n_segments]) == -1
    draw.sum_up(tree)
    return tree


def drawn_by(shares: NDArray[np.float64], source: Source, n: int) -> NDArray[np.int64]:
    tree, out = tree_of(source, n), np.empty(len(shares), dtype=np.int64)
    draw.drawn_singly(shares, tree, len(tree).bit_length() - 2, SEGMENT_LEVELS, n, *source, out)
    return out


@pytest.mark.parametrize("n", [1, 64, 65, 1000, 10**9])
@pytest.mark.parametrize("p", [1e-9, 0.02, 0.3, 0.5, 0.999])
def test_binomials_have_their_distribution(n: int, p: float) -> None:
    heads = np.array([draw.binomial(np.uint64(key * 7919), n, p) for key in range(6000)])
    assert heads.min() >= 0
    assert heads.max() <= n
    law = stats.binom(n, p)
    assert twins.follows(heads, law)
    sigma = law.std() / np.sqrt(len(heads))
    if law.std() > 1:
        assert abs(heads.mean() - law.mean()) < stats.norm.isf(twins.ERROR / 2) * sigma


@pytest.mark.parametrize("n", N)
@pytest.mark.parametrize("kind", KINDS)
def test_twin_of_single_draws(kind: str, n: int) -> None:
    source, weights = source_of(kind, n)
    shares = np.empty(500)
    draw.uniforms(np.arange(500), np.uint64(5), shares)
    rows = drawn_by(shares, source, n)
    # Inversion: each draw selects the row whose interval of the cumulative weights contains it.
    ends = np.cumsum(weights)
    numbers = np.array([twins.uniform(5, i) for i in range(500)]) * ends[-1]
    np.testing.assert_array_equal(rows, np.searchsorted(ends, numbers, side="right"))
    # Ascending numbers select ascending rows.
    assert np.all(np.diff(drawn_by(np.sort(shares), source, n)) >= 0)


@pytest.mark.parametrize("kind", KINDS)
def test_twin_of_gumbel_keys(kind: str) -> None:
    source, weights = source_of(kind, 200)
    candidates = np.arange(0, 200, 3)
    out = np.empty(len(candidates))
    draw.gumbel_keys(candidates, *source, np.uint64(9), out)
    np.testing.assert_allclose(out, np.array(gumbel_twins(weights, 9))[candidates], rtol=1e-12)


def gumbel_twins(weights: NDArray[np.float64], key: int) -> list[float]:
    return [
        math.log(weight) - math.log(-math.log1p(-twins.uniform(key, i))) if weight else -math.inf
        for i, weight in enumerate(weights)
    ]


@given(codes=st.lists(st.integers(-1, 3), min_size=1, max_size=80), key=st.integers(0, 2**64 - 1), data=st.data())
def test_twin_of_quotas(codes: list[int], key: int, data: st.DataObject) -> None:
    counts = [codes.count(c) for c in range(4)]
    quotas = [data.draw(st.integers(0, count)) for count in counts]
    expected, remaining, wanted = [], counts.copy(), quotas.copy()
    for i, code in enumerate(codes):
        if code < 0:
            continue
        if wanted[code] and twins.below(key, i, remaining[code]) < wanted[code]:
            expected.append(i)
            wanted[code] -= 1
        remaining[code] -= 1
    parts = np.ones(len(codes), dtype=np.int8)
    both = np.stack([quotas, np.subtract(counts, quotas)], axis=1)
    deal_by_quota(np.array(codes, dtype=np.int8), both, np.uint64(key), parts)
    assert np.flatnonzero(parts == 0).tolist() == expected


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60))
def test_an_alias_table_holds_the_distribution_it_was_filled_with(weights: list[float]) -> None:
    share, n = np.array(weights) / np.sum(weights), len(weights)
    keep, other = np.empty(n, np.uint32), np.empty(n, np.int32)
    fill_alias_table(share * n, keep, other)
    assert ((other >= 0) & (other < n)).all()
    kept = (keep.astype(np.float64) + 1) / 2**32
    np.testing.assert_allclose((np.bincount(other, 1 - kept, minlength=n) + kept) / n, share, atol=1e-8)
