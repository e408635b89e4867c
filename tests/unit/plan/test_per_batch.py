"""Batches with a share of every class, on any number of ranks, resumed at any step."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import dasksc
from dasksc import ClassBalancedSampling, EpochPlan
from dasksc.errors import InputError
from dasksc.plan.deal import ConsumedSegment
from dasksc.plan.labels import largest_remainders, shares_of

pytestmark = pytest.mark.core

SIZES = np.array([700, 200, 60, 0, 37, 3])
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(6), SIZES))
N = len(LABELS)


def plan_of(labels: NDArray[np.int64] = LABELS, *, options: Any = None, **sizes: Any) -> EpochPlan:
    strategy = ClassBalancedSampling(labels, 4, per_batch=True, **(options or {}))
    return EpochPlan(sampler=strategy.bind(len(labels), lambda name: None), **sizes)


def batches_of(plan: EpochPlan, n: int | None = None) -> list[NDArray[np.int64]]:
    return [plan.batch_rows(i) for i in range(plan.n_batches)][:n]


def ranks_of(plan: EpochPlan) -> list[EpochPlan]:
    return [plan.of_rank(rank) for rank in range(plan.world_size)]


def as_set(batches: list[NDArray[np.int64]]) -> Counter[tuple[int, ...]]:
    """Return the multiset of batches, ignoring the order of their rows."""
    return Counter(tuple(sorted(batch.tolist())) for batch in batches)


def units_of(plan: EpochPlan) -> Counter[tuple[int, ...]]:
    rows = plan._draw.rows(np.arange(plan.n_rows, dtype=np.int64))
    return as_set(list(rows.reshape(-1, plan.batch_size)))


SIZED = {
    "batch_size": st.integers(1, 40),
    "fetch_factor": st.integers(1, 20),
    "world_size": st.integers(1, 7),
    "seed": st.integers(0, 2**64 - 1),
    "drop_last": st.booleans(),
    "equal_ranks": st.booleans(),
    "options": st.sampled_from(
        [
            {},
            {"smoothing": 1.0},
            {"temperature": 2.0},
            {"class_weights": {0: 5.0}},
            {"smoothing": 1.0, "replace": False},
        ]
    ),
}


@given(**SIZED)
def test_every_batch_of_every_rank_has_its_share_of_each_class_and_the_epoch_exactly(
    options: dict[str, Any], **sizes: Any
) -> None:
    plan = plan_of(options=options, **sizes)
    factors = np.ones(6)
    factors[0] = options.get("class_weights", {}).get(0, 1.0)
    strength = {name: options[name] for name in ("smoothing", "temperature") if name in options}
    share = shares_of(SIZES, factors, **strength)
    n_batches = N // sizes["batch_size"]
    exact = share * sizes["batch_size"]
    quotas = largest_remainders(share, n_batches * sizes["batch_size"])
    found: Counter[tuple[int, ...]] = Counter()
    for rank in ranks_of(plan):
        batches = batches_of(rank)
        assert all(len(batch) == sizes["batch_size"] for batch in batches)
        for batch in batches:
            counts = np.bincount(LABELS[batch], minlength=6)
            assert (counts >= np.floor(exact - 1e-9)).all()
            assert (counts <= np.ceil(exact + 1e-9)).all()
        assert rank.n_rank_rows == sizes["batch_size"] * len(batches)
        found += as_set(batches)
    if sizes["equal_ranks"]:
        assert len({rank.n_batches for rank in ranks_of(plan)}) == 1
    drawn = np.zeros(6, dtype=np.int64)
    for rows in units_of(plan).elements():
        drawn += np.bincount(LABELS[list(rows)], minlength=6)
    assert drawn.tolist() == quotas.tolist()
    n_padded, n_dropped = plan.n_padded // sizes["batch_size"], plan.n_dropped // sizes["batch_size"]
    assert found.total() == n_batches + n_padded - n_dropped
    missing, more = units_of(plan) - found, found - units_of(plan)
    assert (missing.total(), more.total()) == (n_dropped, n_padded)
    assert n_padded < sizes["world_size"]
    assert n_dropped < sizes["world_size"]
    assert sum(rank.n_rank_padded for rank in ranks_of(plan)) == plan.n_padded


@given(
    worlds=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    factors=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    shares=st.lists(st.floats(0, 1), min_size=4, max_size=4),
    batch_size=st.integers(5, 40),
    equal_ranks=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_an_epoch_left_and_resumed_anywhere_by_other_ranks_yields_the_same_batches(
    worlds: list[int], factors: list[int], shares: list[float], batch_size: int, equal_ranks: bool, seed: int
) -> None:
    consumed: tuple[ConsumedSegment, ...] = ()
    found: Counter[tuple[int, ...]] = Counter()
    for i, world_size in enumerate(worlds):
        sizes = {"batch_size": batch_size, "fetch_factor": factors[i], "world_size": world_size}
        ranks = ranks_of(plan_of(seed=seed, equal_ranks=equal_ranks, consumed=consumed, **sizes))
        is_last = i == len(worlds) - 1
        n = None if is_last else int(shares[i] * min(rank.n_batches for rank in ranks))
        for rank in ranks:
            found += as_set(batches_of(rank, n))
        if n is not None:
            consumed = (*consumed, ConsumedSegment(n_batches=n, **sizes))
    units = units_of(plan_of(seed=seed, batch_size=batch_size))
    assert not units - found
    # Ranks that stop in the middle may also have repeated a batch: at most one per rank and segment.
    assert (found - units).total() <= sum(world - 1 for world in worlds)
    if not equal_ranks:
        assert found == units


def test_no_row_is_favoured_by_its_place() -> None:
    # Each of 2000 epochs draws some of the 37 rows of a class. Over all epochs, the rows are drawn equally often, to
    # within five standard deviations.
    plan = plan_of(
        options={"smoothing": 1.0, "replace": False, "class_weights": {0: 0.4}, "total_size": 360}, batch_size=24
    )
    quota = int(plan.sampler.quotas[4])  # type: ignore[attr-defined]
    assert 10 < quota < 30
    counts = np.zeros(N)
    for epoch in range(2000):
        counts += np.bincount(plan.sampler.draw(0, epoch).rows(np.arange(plan.n_rows)), minlength=N)
    own, share = counts[LABELS == 4], quota / 37
    assert own.sum() == 2000 * quota
    assert (abs(own - 2000 * share) < 5 * np.sqrt(2000 * share * (1 - share))).all()


def test_a_data_set_reports_its_shares_and_refuses_to_resume_with_other_batches() -> None:
    adata = AnnData(np.arange(N, dtype=np.float32)[:, None])
    adata.obs["kind"] = LABELS.astype(str)

    def made(batch_size: int = 30) -> dasksc.scDataset:
        strategy = ClassBalancedSampling(label_key="kind", per_batch=True, temperature=3.0)
        return dasksc.scDataset(adata, strategy, batch_size, 4, seed=3, scheduler="synchronous")

    dataset = made()
    share = shares_of(SIZES, np.ones(6), temperature=3.0)
    with closing(iter(dataset)) as batches:
        next(batches)
        state = dataset.state_dict()
    with pytest.raises(InputError, match="ClassBalancedSampling"):
        made(15).load_state_dict(state)
    drawn = {one.name: one.drawn for one in dasksc.check(dataset, 2).classes}
    assert drawn["0"] == pytest.approx(share[0], abs=1 / 990)


def test_sizes_that_make_no_whole_batches_are_refused() -> None:
    with pytest.raises(InputError, match="total_size=100.*batch_size=30.*90"):
        plan_of(options={"total_size": 100}, batch_size=30)
    with pytest.raises(InputError, match="15.*batch_size=30"):
        plan_of(options={"replace": False}, batch_size=30)


def test_a_batch_that_cuts_a_unit_is_refused() -> None:
    plan = plan_of(batch_size=30)
    with pytest.raises(InputError, match="batch_size=45.*30"):
        EpochPlan(sampler=plan.sampler, batch_size=45)
    double = EpochPlan(sampler=plan.sampler, batch_size=60)
    halves = [batch[start : start + 30] for batch in batches_of(double) for start in range(0, len(batch), 30)]
    assert as_set(halves) == units_of(plan)
