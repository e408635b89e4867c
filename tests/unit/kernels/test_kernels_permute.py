"""Keyed random generator and permutations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from dasksc.kernels import groups, permute
from tests.support import twins

pytestmark = pytest.mark.core

KEYS = st.integers(0, 2**64 - 1)
SIZES = [1, 2, 3, 5, 7, 8, 9, 63, 64, 65, 1023, 1024, 1025]


def network(n: int, number: int, positions: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Return the images of `positions` (default: all) under the Feistel network over ``range(n)``."""
    positions = np.arange(n, dtype=np.int64) if positions is None else positions
    out = np.empty(len(positions), dtype=np.int64)
    keys = np.random.SeedSequence(number).generate_state(permute.N_ROUNDS, np.uint64)
    half_bits = max(1, -(-(n - 1).bit_length() // 2))  # of a position in the smallest network
    permute.permuted_many(positions, n, np.empty(0, dtype=np.int64), half_bits, keys, out)
    return out


def test_bits_are_those_of_splitmix64() -> None:
    # The first outputs of the published generator seeded with 0, and with 1234567.
    zero = [int(permute.bits(np.uint64(0), i)) for i in range(3)]
    assert zero == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert int(permute.bits(np.uint64(1234567), 0)) == 6457827717110365317


@given(KEYS, st.integers(0, 2**40))
def test_twin_of_bits_and_streams(key: int, counter: int) -> None:
    assert int(permute.bits(np.uint64(key), counter)) == twins.bits(key, counter)
    assert permute.uniform(np.uint64(key), counter) == twins.uniform(key, counter)
    assert int(permute.stream(np.uint64(key), counter)) == twins.stream(key, counter)


@given(KEYS, st.integers(0, 2**40), st.integers(1, 2**32 - 1) | st.integers(1, 10))
def test_twin_of_below(key: int, counter: int, n: int) -> None:
    value = int(permute.below(np.uint64(key), counter, n))
    assert value == twins.below(key, counter, n)
    assert 0 <= value < n


@given(KEYS, st.integers(0, 200))
def test_twin_of_shuffle(key: int, n: int) -> None:
    out = np.empty(n, dtype=np.int64)
    permute.shuffle(np.uint64(key), out)
    assert out.tolist() == twins.shuffled(key, n)


@pytest.mark.parametrize("n", [*SIZES, 65_535, 65_537, 131_071, 131_073, 262_145])
def test_the_network_is_a_permutation(n: int) -> None:
    np.testing.assert_array_equal(np.sort(network(n, 7)), np.arange(n))


@pytest.mark.parametrize("n", [65_537, 2**17 - 1, 2**17 + 1, 10**7])
def test_the_network_sends_any_position_anywhere(n: int) -> None:
    # Images of the first, a middle and the last position under many keys, each in 50 equal bins.
    positions = np.array([0, n // 2, n - 1])
    images = np.array([network(n, number, positions) for number in range(5_000)])
    for column in images.T:
        assert stats.chisquare(np.bincount(column * 50 // n, minlength=50)).pvalue > twins.ERROR


@given(n=st.integers(0, 60), m=st.integers(1, 50), a=st.integers(0, 49), b=st.integers(-500, 500))
def test_floor_sums_are_those_of_every_term(n: int, m: int, a: int, b: int) -> None:
    assert groups.floor_sum(n, m, a % m, b) == sum((a % m * i + b) // m for i in range(n))


def test_floor_sums_of_many_batches_do_not_overflow() -> None:
    n = 10**9 + 7
    stride = 618_033_993
    # Every residue occurs once, so the sum is (stride * n(n-1)/2 minus the sum of all residues) / n.
    assert groups.floor_sum(n, n, stride, 0) == (stride * n * (n - 1) // 2 - n * (n - 1) // 2) // n


@given(n_rows=st.one_of(st.integers(1, 60), st.integers(500, 2000)), run_rows=st.integers(1, 9), key=KEYS)
def test_every_pass_draws_every_row_once(n_rows: int, run_rows: int, key: int) -> None:
    out = np.empty(3 * n_rows, dtype=np.int64)
    groups.drawn_of_class(0, n_rows, run_rows, np.uint64(key), out)
    for one in out.reshape(3, -1):
        np.testing.assert_array_equal(np.sort(one), np.arange(n_rows))


def order_of(key: int, n: int, block_size: int, first: int = 0, size: int | None = None, table: int = 64) -> Any:
    out = np.empty(n if size is None else size, dtype=np.int64)
    groups.fill_from_group(np.uint64(key), n, block_size, first, np.empty(table, dtype=np.int64), out)
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
    assert min(pvalues) > twins.ERROR / n
