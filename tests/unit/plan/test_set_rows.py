"""Sets of scattered rows and rare groups, and their padding on ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasksc.kernels import sets as kernels
from tests.support import twins
from tests.support.sets import CONTROL, bound, plan_of, screen, sets_of

pytestmark = pytest.mark.core

SIZE = 6


@given(
    seed=st.integers(0, 50),
    n=st.integers(200, 600),
    is_sorted=st.booleans(),
    replace=st.booleans(),
    match=st.sampled_from([None, ["line", "batch"]]),
    n_controls=st.integers(1, 2),
    n_rare=st.integers(1, SIZE - 1),
)
def test_sets_of_scattered_rows_are_of_whole_groups_and_match(
    seed: int, n: int, is_sorted: bool, replace: bool, match: list[str] | None, n_controls: int, n_rare: int
) -> None:
    obs = screen(n, is_sorted=is_sorted, seed=seed)
    rng = np.random.default_rng(seed)
    indices = np.sort(rng.choice(n, 3 * n // 4, replace=False))
    # One group of HepG2, the first cell line, has too few selected rows for a set.
    is_rare = ((obs.line == "HepG2") & (obs.gene == "A")).to_numpy()
    indices = np.setdiff1d(indices, np.flatnonzero(is_rare)[n_rare:])
    agree = ["line"] if match is None else match
    sampler = bound(
        obs,
        ["line", "gene"],
        SIZE,
        control=CONTROL,
        match=match,
        n_controls=n_controls,
        replace=replace,
        indices=rng.permutation(indices),
        incomplete="drop",
        unmatched="drop",
    )
    own = obs.iloc[indices]
    matched = set(own[own.gene == "ctrl"].set_index(agree).index)
    targets = own[(own.gene != "ctrl") & own.set_index(agree).index.isin(matched)]
    counts = targets.groupby(["line", "gene"], observed=True).size()
    expected = counts[counts >= SIZE]
    assert list(sampler.table.itertuples(index=False, name=None)) == list(expected.index)
    assert sampler.accounts.n_cells == expected.sum()
    assert sampler.accounts.n_short_groups == (counts < SIZE).sum()
    assert sampler.n_sets == (-(-expected.sum() // SIZE) if replace else (expected // SIZE).sum())
    allowed = set(targets.index)
    by = agree[0] if len(agree) == 1 else agree  # a single column gives keys that are values, not tuples
    pools = {key: set(rows) for key, rows in own[own.gene == "ctrl"].groupby(by, observed=True).groups.items()}
    for group, rows, controls in sets_of(plan_of(sampler)):
        assert set(rows) <= allowed
        assert set(obs.loc[list(rows), ["line", "gene"]].itertuples(index=False, name=None)) == {expected.index[group]}
        assert len(set(rows)) == SIZE
        for i, row in enumerate(rows):
            key = tuple(obs.loc[row, agree]) if len(agree) > 1 else obs.loc[row, agree[0]]
            assert set(controls[i * n_controls : (i + 1) * n_controls]) <= pools[key]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_padding_of_each_rank_is_a_set(world_size: int) -> None:
    sampler = bound(screen(), "gene", 8, control=CONTROL, n_sets=world_size * 7 + 1)
    plan = plan_of(sampler, world_size=world_size)
    of_ranks = [plan.of_rank(rank).n_rank_padded for rank in range(world_size)]
    assert sorted(of_ranks) == [0] + [8] * (world_size - 1)
    assert sum(of_ranks) == plan.n_padded == 8 * (world_size - 1)


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**40), max_size=20))
def test_twin_of_set_keys(key: int, numbers: list[int]) -> None:
    out = np.empty(len(numbers), dtype=np.uint64)
    kernels.set_keys(np.uint64(key), np.array(numbers, dtype=np.int64), out)
    assert out.tolist() == [twins.stream(key, number) for number in numbers]
