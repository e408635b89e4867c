"""Accounts of an epoch: rows seen, repeated and left out, per rank, with and without DataLoader workers."""

from __future__ import annotations

import logging
from itertools import islice

import numpy as np
import pytest
from torch.utils.data import DataLoader

from dasksc import BlockShuffling, scDataset

pytestmark = [
    pytest.mark.programs,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning"),
]


@pytest.fixture
def log(tmp_path):
    """Function that returns the lines logged at the end of epochs; forked workers write to the same file."""
    handler = logging.FileHandler(tmp_path / "log")
    logger = logging.getLogger("dasksc.loader")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("epoch ")]
    logger.removeHandler(handler)
    handler.close()
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_that_stops_early_is_counted_but_not_logged_as_complete(log, num_workers):
    one = scDataset(np.arange(103), BlockShuffling(4), 5, 2, seed=3, scheduler="synchronous")
    loader = DataLoader(one, batch_size=None, num_workers=num_workers)
    for _ in islice(loader, 2):
        pass
    assert log() == []
    if num_workers == 0:
        assert (one.stats()["n_batches"], one.stats()["n_rows"]) == (2, 10)
    list(loader)
    (line,) = log()
    assert line.startswith("epoch 1, rank 0 of 1: 103 rows in 21 batches, 0 padded, 0 dropped")
    assert one.stats()["epoch"] == 1
