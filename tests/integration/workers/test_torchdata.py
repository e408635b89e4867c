"""Tests of torchdata's StatefulDataLoader: states at every step, with and without DataLoader workers."""

from __future__ import annotations

import copy
from itertools import islice

import numpy as np
import pytest

from dasksc import BlockShuffling, InputError, scDataset

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

N_OBS = 103

pytestmark = [
    pytest.mark.programs,
    # torchdata itself emits warnings with newer versions of torch.
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated:UserWarning"),
    # The tests intentionally use more workers than cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


def loader(num_workers: int = 0, **options) -> StatefulDataLoader:
    names = {"persistent_workers", "multiprocessing_context", "prefetch_factor"}
    of_loader = {name: options.pop(name) for name in names & options.keys()}
    options = {"batch_size": 5, "fetch_factor": 3, "seed": 7, "scheduler": "synchronous", **options}
    dataset = scDataset(np.arange(N_OBS), BlockShuffling(4), **options)
    return StatefulDataLoader(dataset, batch_size=None, num_workers=num_workers, **of_loader)


def rows(batches) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def unbroken(num_workers: int, **options) -> list[list[list[int]]]:
    """Return the batches of three epochs."""
    one = loader(num_workers, **options)
    return [rows(one) for _ in range(3)]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_every_state_resumes_with_the_next_batch_and_the_following_epochs(num_workers):
    epochs = unbroken(num_workers)
    assert [len(epoch) for epoch in epochs] == [21, 21, 21]
    assert len({str(sorted(epoch)) for epoch in epochs}) == 3
    for step in range(1, 21) if num_workers == 0 else (1, 2, 13, 19, 20):
        before = loader(num_workers)
        iterator = iter(before)
        head = rows(islice(iterator, step))
        state = copy.deepcopy(before.state_dict())
        after = loader(num_workers)
        after.load_state_dict(state)
        assert [head + rows(after), rows(after), rows(after)] == epochs, step


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_state_of_an_epochs_end_begins_the_next(num_workers, persistent):
    epochs = unbroken(num_workers)
    before = loader(num_workers, persistent_workers=persistent)
    assert rows(before) == epochs[0]
    state = copy.deepcopy(before.state_dict())
    after = loader(num_workers, persistent_workers=persistent)
    after.load_state_dict(state)
    assert [rows(after), rows(after)] == epochs[1:]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_state_after_an_epoch_that_was_left_early_is_of_the_next(num_workers):
    before, after = loader(num_workers, persistent_workers=True), loader(num_workers)
    rows(islice(before, 4))
    head = rows(islice(before, 1))
    state = copy.deepcopy(before.state_dict())
    after.load_state_dict(state)
    assert head + rows(after) == unbroken(num_workers)[1]


def test_another_world_size_is_refused_with_workers_and_accepted_without():
    state = {}
    for num_workers in (0, 2):
        before = loader(num_workers, rank=0, world_size=2)
        rows(islice(iter(before), 4))
        state[num_workers] = copy.deepcopy(before.state_dict())
    after = loader(0, rank=0, world_size=1)
    after.load_state_dict(state[0])
    assert len([row for batch in rows(after) for row in batch]) == N_OBS - 2 * 4 * 5
    after = loader(2, rank=0, world_size=1)
    after.load_state_dict(state[2])
    with pytest.raises(InputError, match="can be resumed only with the same world size"):
        rows(after)
