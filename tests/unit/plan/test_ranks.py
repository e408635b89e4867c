"""Ranks in one process: their shared state, agreement, detection of each other's faults, and resuming."""

from __future__ import annotations

import json
import logging
from collections import Counter
from itertools import chain, islice
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from dasksc import BlockShuffling, ClassBalancedSampling, InputError, RankMismatchError, World, scDataset
from dasksc.plan.ranks import Agreement
from tests.support.ranks import on_ranks, rank_of

pytestmark = pytest.mark.core

N_OBS = 103
RANKS = st.integers(1, 4)


def raised(outcomes: list[object]) -> RankMismatchError:
    (error,) = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert isinstance(error, RankMismatchError)
    return error


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        ({"data": np.arange(104)}, {"n_obs": ("103", "104")}),
        ({"strategy": BlockShuffling(4, drop_last=True)}, {"drop_last of the strategy": ("False", "True")}),
        (
            {"strategy": ClassBalancedSampling(np.arange(N_OBS) % 3, 4)},
            {
                "strategy": ("BlockShuffling", "ClassBalancedSampling"),
                "labels": ("not set", "ndarray(shape=(103,), dtype=int64)"),
            },
        ),
        ({"batch_size": 6}, {"batch_size": ("5", "6")}),
        ({"fetch_factor": 3}, {"fetch_factor": ("2", "3")}),
        ({"seed": 4}, {"seed": ("3", "4")}),
        ({"drop_last": True}, {"drop_last": ("False", "True")}),
        ({"equal_ranks": False}, {"equal_ranks": ("True", "False")}),
    ],
)
def test_ranks_that_read_different_data_stop_before_the_first_batch_and_say_which_rank_has_which_value(
    change, differing
):
    def act(rank, store):
        return [len(batch) for batch in rank_of(rank, 2, store, **(change if rank else {}))]

    text = str(raised(on_ranks(2, act)))
    assert text.startswith(("ranks 0 and 1 read", "ranks 1 and 0 read"))
    for name, (first, second) in differing.items():
        assert f" {name} is {first} on rank 0 and {second} on rank 1" in text or (
            f" {name} is {second} on rank 1 and {first} on rank 0" in text
        )
    if "strategy" not in differing:  # different strategies also differ in other arguments
        assert text.count(" on rank 0") == len(differing)


def test_ranks_in_different_epochs_stop_before_the_first_batch():
    both = Barrier(2)

    def act(rank, store):
        one = rank_of(rank, 2, store)
        one.set_epoch(5 * rank)
        if rank:
            both.wait()
            return list(one)
        batches = list(one)
        both.wait()
        return batches

    error = raised(on_ranks(2, act))
    assert "rank 0 reads epoch 0 and rank 1 reads epoch 5" in str(error)


def test_ranks_at_different_places_of_an_epoch_stop_before_the_first_batch():
    alone = rank_of(0, 1, HashStore())
    next(iter(alone))
    state, both = alone.state_dict(), Barrier(2)

    def act(rank, store):
        one = rank_of(rank, 2, store)
        if rank:
            one.load_state_dict(state)
            both.wait()
            return list(one)
        next(batches := iter(one))
        both.wait()
        return list(batches)

    assert "position" in str(raised(on_ranks(2, act)))


@pytest.mark.parametrize(("n_batches", "expected"), [(3, "stopped it after 3"), (None, "read it to the end")])
def test_a_rank_that_stops_at_another_batch_causes_one_warning(n_batches, expected, caplog):
    both = Barrier(2)

    def act(rank, store):
        batches = iter(rank_of(rank, 2, store))
        next(batches)
        next(batches)
        both.wait()  # neither rank has left yet
        if rank == 0:
            batches.close()
        both.wait()
        list(islice(batches, None if n_batches is None else n_batches - 2))
        batches.close()

    caplog.set_level(logging.WARNING, "dasksc.world")
    assert on_ranks(2, act) == [None, None]
    (warning,) = caplog.messages
    assert warning.startswith(f"rank 0 stopped iteration 0 over this data set after 2 batches; rank 1 {expected}")


def test_groups_do_not_read_each_others_keys_in_the_store():
    def act(rank, store):
        one = rank_of(rank % 2, 2, store, group=f"group {rank // 2}")
        one.set_epoch(rank // 2)
        return [batch.tolist() for batch in one]

    first, second, *others = on_ranks(4, act)
    for pair in ((first, second), tuple(others)):
        assert set(chain(*chain(*pair))) == set(range(N_OBS))
    assert first != others[0]


@pytest.mark.parametrize("size", [1, 2])  # a group of one rank has tensor-parallel peers
def test_all_groups_of_a_size_agree_on_the_seed_of_each_data_set(size):
    def act(rank, store):
        world = World(rank % size, size, group=f"group {rank // size}")
        if rank == 0:
            Agreement(world, store).seed(99, "a data set that other ranks do not make")
        return [Agreement(world, store).seed(10 * rank + i, "kind") for i in range(2)]

    seeds = on_ranks(4, act)
    assert len({tuple(of_rank) for of_rank in seeds}) == 1
    assert seeds[0][0] != seeds[0][1]


def test_a_world_of_one_compares_nothing():
    store = HashStore()
    assert len(list(rank_of(0, 1, store))) == 21
    assert store.num_keys() == 0
    with pytest.raises(InputError, match="seed"):
        Agreement(World(0, 1), store).seed(1, "kind")


@given(before=RANKS, after=RANKS, n_steps=st.integers(0, 5))
def test_other_ranks_resume_an_epoch_and_begin_the_next_together(before, after, n_steps):
    def stop(rank, store):
        one = rank_of(rank, before, store)
        batches = iter(one)
        head = [batch.tolist() for batch in islice(batches, n_steps)]
        return head, json.dumps(one.state_dict())

    heads, states = zip(*on_ranks(before, stop), strict=True)
    assert len(set(states)) == 1

    def resume(rank, store):
        one = rank_of(rank, after, store, batch_size=4, seed=None if after == 1 else 3)
        one.load_state_dict(json.loads(states[0]))
        return [[batch.tolist() for batch in one] for _ in range(2)]

    tails, epochs = zip(*on_ranks(after, resume), strict=True)
    seen = Counter(chain(*chain(*heads), *chain(*tails)))
    assert set(seen) == set(range(N_OBS))
    assert seen.total() - N_OBS < before + after
    fresh = [
        scDataset(np.arange(N_OBS), BlockShuffling(4), 4, 2, seed=3, rank=r, world_size=after) for r in range(after)
    ]
    for one, batches in zip(fresh, epochs, strict=True):
        one.set_epoch(1)
        assert [batch.tolist() for batch in one] == batches
