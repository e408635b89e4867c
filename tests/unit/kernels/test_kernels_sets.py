"""Kernels of sets: grouping of rows and keyed draws from a group, compared with plain Python.

Statistical tests use fixed keys; `ERROR` is the probability that a perfect generator fails one of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from dasksc.kernels import permute, sets
from tests.support import twins

pytestmark = pytest.mark.core

ERROR = 1e-4
KEYS = st.integers(0, 2**64 - 1)
NOTHING = np.empty(0, dtype=np.int64)


def order_of(key: int, n: int, block_size: int, first: int = 0, size: int | None = None, table: int = 64) -> Any:
    out = np.empty(n if size is None else size, dtype=np.int64)
    sets.fill_from_group(np.uint64(key), n, block_size, first, np.empty(table, dtype=np.int64), out)
    return out


def shuffled_forward(key: int, n: int) -> list[int]:
    """Shuffle ``range(n)`` by Fisher-Yates from the front, so that the first entries do not depend on later ones."""
    out = list(range(n))
    for i in range(n):
        j = i + twins.below(key, i, n - i)
        out[i], out[j] = out[j], out[i]
    return out


def order_twin(key: int, n: int, block_size: int, table: int) -> list[int]:
    block = min(block_size, n)
    n_full, short = divmod(n, block)
    turn = twins.below(key, 0, n)
    own = twins.stream(key, 2)
    if n_full <= table:
        blocks = shuffled_forward(own, n_full)
    else:
        half_bits = 1
        while 4**half_bits < n_full:
            half_bits += 1
        round_keys = [twins.stream(own, i) for i in range(permute.N_ROUNDS)]
        blocks = [twins.permuted(i, n_full, half_bits, round_keys) for i in range(n_full)]
    cells = [block * b + i for b in blocks for i in range(block)]
    place = twins.below(key, 1, n_full + 1) * block
    cells[place:place] = range(n - short, n)
    return [(cell + turn) % n for cell in cells]


@given(KEYS, st.integers(1, 300), st.integers(1, 40), st.sampled_from([4, 64, 512]))
def test_twin_of_the_order_of_a_group(key: int, n: int, block_size: int, table: int) -> None:
    assert order_of(key, n, block_size, table=table).tolist() == order_twin(key, n, block_size, table)


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


@pytest.mark.parametrize("dtype", ["i1", "u2", "i4", "i8"])
@pytest.mark.parametrize("is_looked_up", [False, True])
def test_twin_of_combined_codes(dtype: str, is_looked_up: bool) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0 if dtype == "u2" else -1, 5, 50).astype(dtype)
    lookup = np.sort(rng.integers(0, 50, 30)) if is_looked_up else NOTHING
    before = rng.integers(-1, 7, 30 if is_looked_up else 50).astype(np.int32)
    out = before.copy()
    sets.combine_codes(codes, lookup, 5, out)
    own = codes[lookup] if is_looked_up else codes
    expected = np.where((before < 0) | (own.astype(int) < 0), -1, before * 5 + own.astype(int))
    np.testing.assert_array_equal(out, expected)


@given(st.lists(st.integers(-1, 6), max_size=60))
def test_twin_of_grouping(codes: list[int]) -> None:
    array = np.array(codes, dtype=np.int32)
    counts, firsts = np.zeros(7, dtype=np.int64), np.zeros(7, dtype=np.int64)
    n_missing, n_runs = sets.count_groups(array, counts, firsts)
    assert n_missing == codes.count(-1)
    assert n_runs == sum(code >= 0 and (i == 0 or codes[i - 1] != code) for i, code in enumerate(codes))
    np.testing.assert_array_equal(counts, [codes.count(code) for code in range(7)])
    members = np.empty(counts.sum(), dtype=np.int32)
    sets.list_members(array, np.cumsum(counts) - counts, members)
    np.testing.assert_array_equal(members, [i for code in range(7) for i in range(len(codes)) if codes[i] == code])
    for code in np.flatnonzero(counts):
        first = firsts[code]
        assert codes[first] == code
        assert first == 0 or codes[first - 1] != code


@given(KEYS, st.lists(st.floats(0, 100), min_size=1, max_size=20).filter(lambda weights: sum(weights) > 0))
def test_twin_of_drawing_groups(key: int, weights: list[float]) -> None:
    cumulative = np.cumsum(weights)
    positions = np.arange(50, dtype=np.int64)
    out = np.empty(50, dtype=np.int64)
    sets.draw_groups(np.uint64(key), positions, cumulative, out)
    shares = np.array([twins.uniform(key, int(i)) for i in positions]) * cumulative[-1]
    last = int(np.searchsorted(cumulative, cumulative[-1]))
    np.testing.assert_array_equal(out, np.minimum(np.searchsorted(cumulative, shares, side="right"), last))
    assert all(weights[group] > 0 for group in out)


def fill(groups: list[int], keys: list[int], firsts: list[int], counts: NDArray[np.int64], size: int) -> Any:
    starts = np.cumsum(counts) - counts
    out = np.empty(len(groups) * size, dtype=np.int64)
    sets.fill_sets(
        np.array(groups, dtype=np.int64),
        np.array(keys, dtype=np.uint64),
        np.array(firsts, dtype=np.int64),
        starts,
        counts,
        4,
        size,
        np.empty(64, dtype=np.int64),
        out,
    )
    return out.reshape(-1, size)


@given(st.lists(st.tuples(st.integers(0, 2), KEYS, st.integers(0, 30)), min_size=1, max_size=6), st.integers(1, 12))
def test_twin_of_sets(drawn: list[tuple[int, int, int]], size: int) -> None:
    counts = np.array([3, 10, 31])
    found = fill(*(list(part) for part in zip(*drawn, strict=True)), counts, size)
    starts = np.cumsum(counts) - counts
    for (group, key, first), members in zip(drawn, found, strict=True):
        n = int(counts[group])
        order = order_twin(key, n, 4, 64)
        expected = np.empty(size, dtype=np.int64)
        places = twins.shuffled(twins.stream(twins.stream(key, 3), first), size)
        for i, place in enumerate(places):
            expected[place] = starts[group] + order[(first + i) % n]
        np.testing.assert_array_equal(members, expected)


@given(KEYS, st.lists(st.integers(0, 2), min_size=6, max_size=6), st.integers(1, 3))
def test_twin_of_controls(key: int, pools: list[int], n_controls: int) -> None:
    counts = np.array([2, 9, 40])
    starts = np.cumsum(counts) - counts
    out = np.empty(6 * n_controls, dtype=np.int64)
    sets.fill_controls(
        np.array([key], dtype=np.uint64),
        np.array(pools, dtype=np.int64),
        starts,
        counts,
        4,
        n_controls,
        6,
        np.empty(64, dtype=np.int64),
        out,
    )
    expected = np.empty((6, n_controls), dtype=np.int64)
    for pool in set(pools):
        rows = [i for i, one in enumerate(pools) if one == pool]
        own = twins.stream(key, pool)
        order = order_twin(own, int(counts[pool]), 4, 64)
        n_drawn = len(rows) * n_controls
        places = twins.shuffled(twins.stream(own, 3), n_drawn)
        drawn = [starts[pool] + order[place % counts[pool]] for place in places]
        expected[rows] = np.reshape(drawn, (len(rows), n_controls))
    np.testing.assert_array_equal(out, expected.ravel())
