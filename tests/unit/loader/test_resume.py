"""Resuming in the middle of an epoch: unchanged, on other ranks, with other sizes."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dasksc import (
    BlockShuffling,
    BlockWeightedSampling,
    ClassBalancedSampling,
    FetchError,
    InputError,
    SamplingStrategy,
    Streaming,
    scDataset,
)
from tests.support.sets import Own

pytestmark = pytest.mark.core


LABELS = np.repeat([0, 1, 2], [60, 30, 13])
STRATEGIES = [
    Streaming(),
    Streaming(shuffle=True),
    BlockShuffling(4),
    BlockShuffling(4, drop_last=True),
    BlockWeightedSampling(4, weights=np.arange(103)),
    BlockWeightedSampling(4, weights=np.arange(103), total_size=40, replace=False),
    ClassBalancedSampling(LABELS, 4),
    Own(np.arange(103)[::-1]),
]


def dataset(n: int = 103, strategy: SamplingStrategy = STRATEGIES[2], batch_size: int = 5, **options) -> scDataset:
    options = {"fetch_factor": 3, "seed": 7, "scheduler": "synchronous", **options}
    return scDataset(np.arange(n), strategy, batch_size, **options)


def through_json(state):
    return json.loads(json.dumps(state))


def test_epochs_after_a_resumed_one_equal_those_of_an_uninterrupted_run():
    unbroken = dataset()
    epochs = [[batch.tolist() for batch in unbroken] for _ in range(3)]
    broken = dataset()
    iterator = iter(broken)
    list(islice(iterator, 4))
    again = dataset(seed=None)
    again.load_state_dict(through_json(broken.state_dict()))
    assert [[batch.tolist() for batch in again] for _ in range(3)] == [epochs[0][4:], *epochs[1:]]
    assert again.state_dict()["epoch"] == 3


@pytest.mark.parametrize("n_read", [0, 4])
def test_an_epoch_that_failed_before_its_first_batch_can_be_gone_on_with(n_read):
    def fail(data):
        raise OSError("the disk is away")

    whole = [batch.tolist() for batch in dataset()]
    state = None
    if n_read:
        one = dataset()
        assert len(list(islice(one, n_read))) == n_read
        state = one.state_dict()
    broken = dataset(fetch_transform=fail)
    if state is not None:
        broken.load_state_dict(state)
    with pytest.raises(FetchError):
        next(iter(broken))
    resumed = dataset()
    resumed.load_state_dict(through_json(broken.state_dict()))
    assert [batch.tolist() for batch in resumed] == whole[n_read:]


def test_loading_then_iter_then_set_epoch_then_next_keeps_the_place():
    # Lightning restores a loader in this order.
    one = dataset()
    iterator = iter(one)
    list(islice(iterator, 4))
    other = dataset()
    other.load_state_dict(one.state_dict())
    resumed = iter(other)
    other.set_epoch(0)
    assert next(resumed).tolist() == next(iterator).tolist()


def test_the_end_of_an_iterator_does_not_move_the_place_of_another():
    one = dataset()
    for _ in zip(one, one, strict=False):  # epochs 0 and 1
        pass
    again = dataset()
    again.load_state_dict(one.state_dict())
    assert list(again) == []  # epoch 1 is over
    assert len(list(again)) == len(one)
    assert again.stats()["epoch"] == one.plan().epoch == 2


def test_setting_another_epoch_after_loading_begins_that_epoch(caplog):
    one = dataset()
    list(islice(iter(one), 4))
    other = dataset()
    other.load_state_dict(one.state_dict())
    other.set_epoch(5)
    assert other.state_dict()["epoch"] == 5
    fresh = dataset().plan(5)
    assert [b.tolist() for b in other] == [fresh.batch_rows(i).tolist() for i in range(fresh.n_batches)]
    assert "not to epoch 5, which therefore starts from the beginning" in caplog.text


RANKS = st.integers(1, 4)
SIZES = st.fixed_dictionaries({"batch_size": st.sampled_from([5, 7, 16]), "fetch_factor": st.sampled_from([1, 2, 8])})


def ranks_of(world_size: int, state=None, **options) -> list[scDataset]:
    """Return the data sets of all ranks, resumed from `state`."""
    ranks = [dataset(rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    for rank in ranks:
        if state is not None:
            rank.load_state_dict(state)
    return ranks


def read(ranks: list[scDataset], n_steps: int | None = None) -> tuple[list[list[list[int]]], dict]:
    """Return each rank's next `n_steps` batches (None: all), and the state after them, equal on all ranks."""
    batches, states = [], []
    for rank in ranks:
        iterator = iter(rank)
        batches.append([batch.tolist() for batch in (iterator if n_steps is None else islice(iterator, n_steps))])
        states.append(through_json(rank.state_dict()))
        iterator.close()
    if n_steps is not None:
        assert states == states[:1] * len(ranks)
    return batches, states[0]


def drawn(one: scDataset) -> Counter[int]:
    plan = one.plan(0)
    return Counter(plan.sampler.draw(plan.seed, 0).rows(np.arange(plan.n_rows)).tolist())


def rows_in(batches: list[list[list[int]]]) -> Counter[int]:
    return Counter(row for rank in batches for batch in rank for row in batch)


@settings(max_examples=settings.default.max_examples // 3)  # each example reads many epochs
@given(
    strategy=st.sampled_from(STRATEGIES), drop_last=st.booleans(), equal_ranks=st.booleans(), world=RANKS, size=SIZES
)
def test_from_every_step_the_same_ranks_read_the_rest_of_the_same_epoch(strategy, drop_last, equal_ranks, world, size):
    options = {"strategy": strategy, "drop_last": drop_last, "equal_ranks": equal_ranks, **size}
    unbroken, _ = read(ranks_of(world, **options))
    for step in range(min(map(len, unbroken)) + 1):
        head, state = read(ranks_of(world, **options), step)
        ranks = ranks_of(world, state, **options)
        assert [len(rank) for rank in ranks] == [len(batches) for batches in unbroken]
        tail, _ = read(ranks)
        assert [first + rest for first, rest in zip(head, tail, strict=True)] == unbroken


@given(
    strategy=st.sampled_from(STRATEGIES),
    drop_last=st.booleans(),
    equal_ranks=st.booleans(),
    worlds=st.tuples(RANKS, RANKS).filter(lambda worlds: worlds[0] != worlds[1]),
    sizes=st.tuples(SIZES, SIZES),
)
def test_from_every_step_other_ranks_cover_the_rest_of_the_epoch(strategy, drop_last, equal_ranks, worlds, sizes):
    options = {"strategy": strategy, "drop_last": drop_last, "equal_ranks": equal_ranks}
    before = [rank.plan(0) for rank in ranks_of(worlds[0], **options, **sizes[0])]
    whole = drawn(dataset(**options))
    for step in range(min(plan.n_batches for plan in before) + 1):
        head, state = read(ranks_of(worlds[0], **options, **sizes[0]), step)
        ranks = ranks_of(worlds[1], state, **options, **sizes[1])
        tail, _ = read(ranks)
        if equal_ranks:
            assert len({tuple(map(len, batches)) for batches in tail}) == 1
        seen, accounts = rows_in(head) + rows_in(tail), [rank.stats() for rank in ranks]
        assert [one["n_rows"] for one in accounts] == [sum(map(len, batches)) for batches in tail]
        after = accounts[0]
        # The ranks before resuming may stop before they yield all of their padding, so they repeat at most
        # `before[0].n_padded` rows.
        assert 0 <= (seen - whole).total() - after["n_padded"] <= before[0].n_padded
        n_dropped = after["n_dropped"] + (before[0].n_dropped if step else 0)
        assert (whole - seen).total() == n_dropped
        if not drop_last:
            assert n_dropped == 0


@given(data=st.data())
def test_an_epoch_can_be_stopped_three_times_and_resumed_elsewhere(data):
    strategy = data.draw(st.sampled_from(STRATEGIES), label="strategy")
    options = {"strategy": strategy, "equal_ranks": data.draw(st.booleans(), label="equal_ranks")}
    whole, seen, state, n_padded = drawn(dataset(**options)), Counter[int](), None, 0
    for segment in range(4):
        world, size = data.draw(RANKS, label="world_size"), data.draw(SIZES, label="sizes")
        ranks = ranks_of(world, state, **options, **size)
        n_steps = None if segment == 3 else data.draw(st.integers(0, 3), label="n_steps")
        if n_steps is not None:
            # No rank can yield more batches than it has.
            n_left = [sum(1 for _ in rank) for rank in ranks_of(world, state, **options, **size)]
            n_steps = min([n_steps, *n_left])
        batches, state = read(ranks, n_steps)
        seen += rows_in(batches)
        n_padded += ranks[0].stats()["n_padded"]
    assert not whole - seen
    assert (seen - whole).total() <= n_padded
    assert (state["epoch"], state["consumed"]) == (1, [])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n": 104}, "n_obs.*104.*103"),
        ({"strategy": BlockShuffling(5)}, "block_size"),
        ({"strategy": BlockShuffling(4, drop_last=True)}, "drop_last.*strategy"),
        ({"strategy": BlockShuffling(4, indices=np.arange(9))}, "indices.*ndarray.*dtype=int64"),
        ({"strategy": Streaming()}, "strategy.*BlockShuffling"),
        ({"seed": 8}, "seed"),
        ({"drop_last": True}, "drop_last"),
        ({"equal_ranks": False}, "equal_ranks"),
    ],
)
def test_a_state_of_something_else_is_refused_and_what_differs_is_named(change, named):
    state = dataset().state_dict()
    with pytest.raises(InputError, match=named):
        dataset(**change).load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"a": 1}, "a", None])
def test_what_is_no_state_is_refused(state):
    given = re.escape(repr(state))
    with pytest.raises(InputError, match=rf"{given}.*dataset.state_dict\(\)"):
        dataset().load_state_dict(state)


def test_what_is_wrong_in_a_state_is_refused():
    good = through_json(dataset().state_dict())
    for name, wrong in (
        ("epoch", None),
        ("epoch", -1),
        ("epoch", 2.5),
        ("seed", "five"),
        ("seed", 0.5),
        ("fingerprint", ["n_obs"]),
        ("consumed", 3),
        ("consumed", [[1, 2]]),
        ("consumed", [[0, 8, 2, 1]]),
    ):
        with pytest.raises(InputError, match="did not come from scDataset.state_dict"):
            dataset().load_state_dict({**good, name: wrong})
        lacking = {key: value for key, value in good.items() if key != name}
        with pytest.raises(InputError, match=f"'{name}'"):
            dataset().load_state_dict(lacking)
