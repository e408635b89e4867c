"""Plans of epochs: the rows that every rank reads, for any sizes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

import dasksc
from dasksc import EpochPlan
from dasksc.plan import labels as mixing
from dasksc.plan.binding import bind
from dasksc.plan.deal import BlockOrder
from tests.support.sets import Own
from tests.support.twins import ERROR

pytestmark = pytest.mark.core


class Shuffled(dasksc.SamplingStrategy):
    def get_len(self, data_collection: Any) -> int:
        return len(data_collection)

    def get_indices(self, data_collection: Any, seed: int | None = None, rng: Any = None) -> NDArray[np.int64]:
        return np.random.default_rng(seed).permutation(len(data_collection))


def strategy_of(name: str, n: int, block_size: int) -> dasksc.SamplingStrategy:
    return {
        "streaming": lambda: dasksc.Streaming(),
        "streaming shuffled": lambda: dasksc.Streaming(shuffle=True),
        "blocks": lambda: dasksc.BlockShuffling(block_size),
        "blocks without the short one": lambda: dasksc.BlockShuffling(block_size, drop_last=True),
        "blocks of a subset": lambda: dasksc.BlockShuffling(block_size, indices=slice(None, None, 3)),
        "weighted": lambda: dasksc.BlockWeightedSampling(block_size, weights=1.0 + np.arange(n) % 3),
        "weighted, no replacement": lambda: dasksc.BlockWeightedSampling(
            block_size, weights=1.0 + np.arange(n) % 3, total_size=max(1, n // 2), replace=False
        ),
        "balanced": lambda: dasksc.ClassBalancedSampling(np.arange(n) % 3, block_size),
        "balanced batches": lambda: dasksc.ClassBalancedSampling(np.arange(n) % 3, block_size, per_batch=True),
        "balanced, no replacement": lambda: dasksc.ClassBalancedSampling(np.arange(n) % 3, block_size, replace=False),
        "user": lambda: Own(np.arange(n)[::-2]),
        "user shuffled": Shuffled,
    }[name]()


WITHOUT_ROWS = ["streaming", "streaming shuffled", "blocks", "blocks without the short one", "user", "user shuffled"]
ALL = [
    *WITHOUT_ROWS,
    "blocks of a subset",
    "weighted",
    "weighted, no replacement",
    "balanced",
    "balanced, no replacement",
]


def plan_of(strategy: dasksc.SamplingStrategy, n: int, **options: Any) -> EpochPlan:
    return EpochPlan(sampler=bind(strategy, range(n), n, lambda key: None), **{"batch_size": 4, **options})


def ranks_of(plan: EpochPlan) -> list[EpochPlan]:
    return [plan.of_rank(rank) for rank in range(plan.world_size)]


def batches_of(plan: EpochPlan) -> list[NDArray[np.int64]]:
    fetches = [plan.fetch(k) for k in range(plan.n_fetches)]
    return [fetch.rows[fetch.batch(i)] for fetch in fetches for i in range(fetch.n_batches)]


def yielded_by(plan: EpochPlan) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, dtype=np.int64), *batches_of(plan)])


def drawn_in(plan: EpochPlan) -> NDArray[np.int64]:
    return plan.sampler.draw(plan.seed, plan.epoch).rows(np.arange(plan.n_rows, dtype=np.int64))


SIZES = {
    "name": st.sampled_from(ALL),
    "n": st.integers(1, 400),
    "world_size": st.integers(1, 9),
    "block_size": st.integers(1, 20),
    "batch_size": st.integers(1, 20),
    "fetch_factor": st.integers(1, 6),
    "drop_last": st.booleans(),
    "equal_ranks": st.booleans(),
    "seed": st.integers(0, 2**64 - 1),
    "epoch": st.integers(0, 2**32 - 1),
}


@given(**SIZES)
def test_every_row_of_an_epoch_comes_once_but_for_those_counted(
    name: str, n: int, block_size: int, **sizes: Any
) -> None:
    plan = plan_of(strategy_of(name, n, block_size), n, **sizes)
    ranks = ranks_of(plan)
    rows = [yielded_by(rank) for rank in ranks]
    times = np.bincount(np.concatenate(rows), minlength=n)
    drawn = np.bincount(drawn_in(plan), minlength=n)
    assert drawn.sum() == plan.n_rows

    assert np.maximum(times - drawn, 0).sum() == plan.n_padded
    assert np.maximum(drawn - times, 0).sum() == plan.n_dropped
    assert plan.n_padded < plan.world_size
    assert sum(rank.n_rank_padded for rank in ranks) == plan.n_padded
    n_undealt = plan.n_dropped - sum(rank.n_rank_dropped for rank in ranks)
    assert 0 <= n_undealt < plan.world_size if plan.drop_last and plan.equal_ranks else n_undealt == 0
    if not plan.drop_last:
        assert plan.n_dropped == 0
    if not plan.equal_ranks or plan.drop_last:
        assert plan.n_padded == 0
    if plan.drop_last:
        # Each rank drops less than a batch; in addition, fewer than `world_size` rows are dropped to make ranks equal.
        assert plan.n_dropped < plan.world_size * plan.batch_size + plan.world_size


@given(**SIZES)
def test_batches_have_the_number_and_sizes_of_the_plan(name: str, n: int, block_size: int, **sizes: Any) -> None:
    ranks = ranks_of(plan_of(strategy_of(name, n, block_size), n, **sizes))
    lengths = [[len(batch) for batch in batches_of(rank)] for rank in ranks]
    for rank, of_rank in zip(ranks, lengths, strict=True):
        assert len(of_rank) == rank.n_batches
        assert sum(of_rank) == rank.n_rank_rows
        assert all(length == rank.batch_size for length in of_rank[:-1])
        if of_rank:
            assert of_rank[-1] == rank.batch_size if rank.drop_last else 1 <= of_rank[-1] <= rank.batch_size
    if sizes["equal_ranks"]:
        assert all(of_rank == lengths[0] for of_rank in lengths)
    else:
        counts = [rank.n_batches for rank in ranks]
        assert max(counts) - min(counts) <= 1
        if not sizes["drop_last"]:
            totals = [rank.n_rank_rows for rank in ranks]
            assert max(totals) - min(totals) <= 1


@given(**SIZES | {"name": st.sampled_from([*ALL, "balanced batches"])})
def test_any_fetch_is_the_same_when_computed_alone_elsewhere(name: str, n: int, block_size: int, **sizes: Any) -> None:
    for rank in range(sizes["world_size"]):
        here = plan_of(strategy_of(name, n, block_size), n, rank=rank, **sizes)
        for k in reversed(range(here.n_fetches)):
            fetch = here.fetch(k)
            alone = plan_of(strategy_of(name, n, block_size), n, rank=rank, **sizes).fetch(k)
            np.testing.assert_array_equal(alone.rows, fetch.rows)
            np.testing.assert_array_equal(alone.order, fetch.order)
            assert np.all(np.diff(fetch.rows) >= 0)
            assert len(np.unique(fetch.order)) == len(fetch.order) <= len(fetch.rows)
            assert len(fetch.rows) <= here.fetch_rows
        batches = batches_of(here)
        for i in {0, here.n_batches // 2, here.n_batches - 1} if batches else ():
            np.testing.assert_array_equal(here.batch_rows(i), batches[i])
        np.testing.assert_array_equal(yielded_by(pickle.loads(pickle.dumps(here))), yielded_by(here))


@pytest.mark.parametrize(
    ("n", "strategy", "sizes"),
    [
        (70, dasksc.BlockShuffling(4), {"batch_size": 8, "fetch_factor": 1}),
        (70, dasksc.BlockShuffling(4), {"batch_size": 8, "fetch_factor": 1, "world_size": 2}),
        (70, dasksc.BlockShuffling(4, drop_last=True), {"batch_size": 8, "fetch_factor": 2}),
        (70, dasksc.BlockShuffling(4, drop_last=True), {"batch_size": 2, "drop_last": False}),
    ],
)
def test_drop_last_leaves_every_row_out_as_often_as_any_other(
    n: int, strategy: dasksc.SamplingStrategy, sizes: dict[str, Any]
) -> None:
    n_epochs = 400
    seen = np.zeros(n)
    for epoch in range(n_epochs):
        plan = plan_of(strategy, n, epoch=epoch, seed=1, **{"drop_last": True, **sizes})
        for rank in ranks_of(plan):
            seen[yielded_by(rank)] += 1
    left_out = n_epochs - seen
    share = left_out.mean() / n_epochs
    assert share > 0.02
    z = stats.norm.isf(ERROR / 2 / n)
    assert np.abs(left_out / n_epochs - share).max() <= z * np.sqrt(share * (1 - share) / n_epochs)


@pytest.mark.parametrize("name", WITHOUT_ROWS)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("equal_ranks", [False, True])
def test_an_epoch_without_rows_has_no_batches(name: str, drop_last: bool, equal_ranks: bool) -> None:
    plan = plan_of(strategy_of(name, 0, 4), 0, world_size=3, drop_last=drop_last, equal_ranks=equal_ranks)
    assert (plan.n_rows, plan.n_batches, plan.n_fetches, plan.n_padded, plan.n_dropped) == (0, 0, 0, 0, 0)
    with pytest.raises(IndexError, match="fetch 0.*0"):
        plan.fetch(0)


def test_fetches_and_batches_outside_the_plan_are_refused() -> None:
    plan = plan_of(dasksc.BlockShuffling(), 100, batch_size=10, fetch_factor=2)
    for k in (-1, 5):
        with pytest.raises(IndexError, match=f"{k}"):
            plan.fetch(k)
    for i in (-1, 10):
        with pytest.raises(IndexError, match=f"{i}.*10"):
            plan.batch_rows(i)


def test_full_blocks_stay_whole() -> None:
    block_size, n, world_size = 8, 1003, 3
    order = BlockOrder.shuffled(n // block_size, seed=0, epoch=0).at(np.arange(n // block_size))
    n_rounds = n // block_size // world_size
    for rank in ranks_of(plan_of(dasksc.BlockShuffling(block_size), n, world_size=world_size)):
        rows = set(yielded_by(rank).tolist())
        for block in order[rank.rank : n_rounds * world_size : world_size]:
            assert set(range(block * block_size, (block + 1) * block_size)) <= rows


def test_no_row_is_always_early_or_late() -> None:
    # Rows of the short block (here rows 8 to 10) are also yielded anywhere in the epoch.
    firsts = []
    for epoch in range(1000):
        rows = yielded_by(plan_of(dasksc.BlockShuffling(4), 11, batch_size=1, fetch_factor=1, epoch=epoch))
        firsts.append(int(np.flatnonzero(rows == 10)[0]))
    # The short block comes before, between or after the two full blocks.
    assert stats.chisquare(np.bincount(np.searchsorted([3, 7], firsts), minlength=3)).pvalue > ERROR


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("streaming", "user")])
def test_epochs_and_seeds_differ_and_come_again(name: str) -> None:
    n = 300
    ways = [(0, 0), (0, 1), (1, 0), (1, 1), (2**64 - 1, 0), (0, 2**32 - 1)]
    plans = [plan_of(strategy_of(name, n, 4), n, seed=seed, epoch=epoch) for seed, epoch in ways]
    sequences = [tuple(yielded_by(plan).tolist()) for plan in plans]
    assert len(set(sequences)) == len(ways)
    assert len(set(plans)) == len(ways)
    again = plan_of(strategy_of(name, n, 4), n, seed=0, epoch=1)
    assert tuple(yielded_by(again).tolist()) == sequences[1]
    assert again == plans[1]


def test_the_digest_covers_every_rank_and_all_sizes() -> None:
    plan = plan_of(dasksc.BlockShuffling(4), 100, world_size=3)
    assert {rank.digest() for rank in ranks_of(plan)} == {plan.digest()}
    others = [
        plan_of(dasksc.BlockShuffling(5), 100, world_size=3),
        plan_of(dasksc.BlockShuffling(4), 101, world_size=3),
        plan_of(dasksc.BlockShuffling(4, indices=np.arange(0, 200, 2)), 200, world_size=3),
        plan_of(dasksc.BlockShuffling(4), 100, world_size=2),
        plan_of(dasksc.BlockShuffling(4), 100, world_size=3, batch_size=5),
        plan_of(dasksc.BlockShuffling(4), 100, world_size=3, fetch_factor=5),
        plan_of(dasksc.BlockShuffling(4), 100, world_size=3, drop_last=True),
        plan_of(dasksc.BlockShuffling(4), 100, world_size=3, equal_ranks=False),
    ]
    assert plan.digest() not in {other.digest() for other in others}


@pytest.mark.parametrize(
    "strategy",
    [
        dasksc.BlockShuffling(1),
        dasksc.CellSets("gene", 8, n_sets=10**12),
        dasksc.BlockWeightedSampling(1, total_size=10**12),
        dasksc.ClassBalancedSampling(label_key="gene", per_batch=True, total_size=8 * (2**31 - 1)),
        dasksc.ClassBalancedSampling(label_key="gene", total_size=2**62),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_epochs_of_more_than_2_to_the_32_rounds_are_planned(strategy: dasksc.SamplingStrategy) -> None:
    genes = pd.Categorical(list("abcd") * 20)
    n_obs = 10**10 if isinstance(strategy, dasksc.BlockShuffling) else len(genes)
    sampler = bind(strategy, None, n_obs, lambda _: genes)
    plan = dasksc.EpochPlan(sampler=sampler, batch_size=8, fetch_factor=2, seed=0)
    for k in (0, plan.n_fetches // 3, plan.n_fetches // 2, plan.n_fetches - 1):
        rows = plan.fetch(k).rows
        assert 0 <= rows.min() <= rows.max() < n_obs


def batches_of_64(strategy: dasksc.SamplingStrategy, n: int, fetch_factor: int = 4) -> dasksc.EpochPlan:
    sampler = bind(strategy, range(n), n, lambda key: None)
    return dasksc.EpochPlan(sampler=sampler, batch_size=64, fetch_factor=fetch_factor)


def test_entropy_is_that_of_the_labels_of_each_batch() -> None:
    batches = [np.array([0, 0, 1, 1]), np.array([0, 1, 2, 3]), np.array([2, 2, 2, 2, -1])]
    measured = mixing.diversity_of(batches, 4)
    assert measured.mean == pytest.approx((1 + 2 + 0) / 3)
    assert measured.spread == pytest.approx(np.std([1, 2, 0]))
    assert measured.n_batches == 3


def test_single_rows_mix_ideally_and_large_blocks_do_not() -> None:
    labels = np.arange(20_000) // 1000
    single = batches_of_64(dasksc.BlockShuffling(1), 20_000).diversity(labels)
    blocks = batches_of_64(dasksc.BlockShuffling(64), 20_000).diversity(labels)
    stream = batches_of_64(dasksc.Streaming(), 20_000).diversity(labels)
    assert single.share == pytest.approx(1, abs=0.01)
    assert stream.mean < blocks.mean < single.mean
    assert single.spread == pytest.approx(single.ideal_spread, rel=0.3)
    longer = batches_of_64(dasksc.BlockShuffling(64), 20_000, fetch_factor=32).diversity(labels)
    assert blocks.mean < longer.mean <= longer.ideal_mean + 0.05
