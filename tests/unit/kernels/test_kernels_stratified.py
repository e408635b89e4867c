"""Kernels of batches with a share of each class, compared with plain Python, and their guarantees."""

from __future__ import annotations

from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasksc.kernels import stratified as kernels
from dasksc.kernels.permute import N_ROUNDS
from tests.support import twins

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


@given(
    first=st.integers(0, 5000),
    n_rows=st.one_of(st.integers(1, 50), st.integers(300, 3000)),
    run_rows=st.integers(1, 9),
    key=KEYS,
)
def test_draws_of_a_class_are_those_of_the_twin(first: int, n_rows: int, run_rows: int, key: int) -> None:
    out = np.empty(20, dtype=np.int64)
    kernels.drawn_of_class(first, n_rows, run_rows, np.uint64(key), out)
    assert out.tolist() == [
        twins.class_draw(first + i, n_rows, run_rows, key, kernels._TABLE_RUNS, N_ROUNDS) for i in range(20)
    ]


@given(n_rows=st.one_of(st.integers(1, 60), st.integers(500, 2000)), run_rows=st.integers(1, 9), key=KEYS)
def test_every_pass_draws_every_row_once(n_rows: int, run_rows: int, key: int) -> None:
    out = np.empty(3 * n_rows, dtype=np.int64)
    kernels.drawn_of_class(0, n_rows, run_rows, np.uint64(key), out)
    for one in out.reshape(3, -1):
        np.testing.assert_array_equal(np.sort(one), np.arange(n_rows))


@given(
    n_units=st.integers(1, 40),
    batch_rows=st.integers(1, 30),
    n_classes=st.integers(1, 12),
    group_units=st.integers(1, 7),
    seed=st.integers(0, 2**32 - 1),
)
def test_batches_are_those_of_the_twin(
    n_units: int, batch_rows: int, n_classes: int, group_units: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    quotas = rng.multinomial(n_units * batch_rows, rng.dirichlet(np.full(n_classes, 0.5)))
    sizes = rng.integers(1, 50, n_classes)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    members = rng.permutation(starts[-1]).astype(np.int32)
    stride = (
        next(one for one in rng.permutation(np.arange(1, 3 * n_units + 1)) if gcd(int(one), n_units) == 1) % n_units
    )
    shift, keys = int(rng.integers(0, n_units)), rng.integers(0, 2**64, 3, dtype=np.uint64)
    n_groups = -(-n_units // group_units)
    out = np.full((n_groups, group_units, batch_rows), -1, dtype=np.int64)
    order = rng.permutation(n_groups)
    kernels.stratified_rows(order, group_units, n_units, quotas, starts, members, 4, stride, shift, keys, out)
    out = out[np.argsort(order)]
    counts, groups = twins.stratified(quotas.tolist(), n_units, int(stride), shift, group_units)
    assert np.sum(counts, axis=0).tolist() == quotas.tolist()
    for g, draws in enumerate(groups):
        batches: list[list[int]] = [[] for _ in range(group_units)]
        for c, own in enumerate(draws):
            rows = [
                members[
                    starts[c]
                    + twins.class_draw(
                        *(one, int(sizes[c]), 4, twins.stream(int(keys[0]), c), kernels._TABLE_RUNS, N_ROUNDS)
                    )
                ]
                for one in own
            ]
            dealt = iter(twins.shuffled(twins.stream(twins.stream(int(keys[1]), g), c), len(own)))
            for u, batch in zip(range(g * group_units, n_units), batches, strict=False):
                batch += [rows[next(dealt)] for _ in range(counts[u][c])]
        for u, batch in enumerate(batches):
            number = g * group_units + u
            if number >= n_units:
                assert (out[g, u] == -1).all()
                continue
            shuffled = twins.shuffled(twins.stream(int(keys[2]), number), batch_rows)
            assert out[g, u].tolist() == [batch[i] for i in shuffled]
