"""Memory and resources that DataLoader workers leave behind in the main process when they end."""

from __future__ import annotations

import os

import pytest
from torch.utils.data import DataLoader

from dasksc import BlockShuffling, scDataset
from dasksc.memory.limits import own_bytes

pytestmark = pytest.mark.faults


def test_many_epochs_of_short_lived_workers_are_all_different_and_keep_nothing(atlas_of):
    n_obs = 101
    one = scDataset(atlas_of(n_obs, 40), BlockShuffling(4), 4, 2, seed=5, obs=["cell_type"])
    loader = DataLoader(one, batch_size=None, num_workers=2)
    epochs, n_files, held = set(), [], []
    for _ in range(30):
        batches = [tuple(batch.index.tolist()) for batch in loader]
        assert sorted(row for batch in batches for row in batch) == list(range(n_obs))
        epochs.add(tuple(batches))
        n_files.append(len(os.listdir("/proc/self/fd")))
        held.append(own_bytes())
    assert len(epochs) == 30
    # Workers that are still ending may hold pipes for a while, whereas a leak persists.
    assert min(n_files[20:]) <= min(n_files[5:15])
    # A leak in every epoch would accumulate over fifteen epochs. 3 MiB are 200 KiB per epoch, about as much as the
    # pipes and queues of one worker.
    assert min(held[20:]) - min(held[5:15]) < 3 * 2**20
