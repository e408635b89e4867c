"""Accounts of an epoch: rows seen, repeated and left out, per rank, with and without DataLoader workers."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from torch.utils.data import DataLoader

from dasksc import BlockShuffling, scDataset

N_OBS = 103

pytestmark = [
    pytest.mark.programs,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning"),
]


def dataset(strategy=None, **options) -> scDataset:
    options = {"batch_size": 5, "fetch_factor": 2, "seed": 3, "scheduler": "synchronous", **options}
    return scDataset(np.arange(N_OBS), strategy or BlockShuffling(4), **options)


def loaded(one: scDataset, num_workers: int) -> DataLoader:
    return DataLoader(one, batch_size=None, num_workers=num_workers)


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


# Every pair of values of any two of the four parameters.
@pytest.mark.parametrize(
    ("world_size", "num_workers", "equal_ranks", "drop_last"),
    [
        *((1, 0, False, False), (1, 1, True, True), (1, 3, True, False)),
        *((2, 0, True, True), (2, 1, False, False), (2, 3, False, True)),
        *((4, 0, False, True), (4, 1, True, False), (4, 3, False, False)),
    ],
)
def test_seen_repeated_and_left_out_add_up_to_the_epoch(log, world_size, equal_ranks, drop_last, num_workers):
    seen: Counter[int] = Counter()
    stats = []
    for rank in range(world_size):
        one = dataset(rank=rank, world_size=world_size, equal_ranks=equal_ranks, drop_last=drop_last)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Length of IterableDataset")
            batches = list(loaded(one, num_workers))
        stats.append(one.stats())
        assert stats[-1]["n_batches"] == stats[-1]["n_rank_batches"] == len(batches) == len(one)
        assert stats[-1]["n_rows"] == sum(map(len, batches))
        assert (stats[-1]["epoch"], stats[-1]["rank"], stats[-1]["world_size"]) == (0, rank, world_size)
        for batch in batches:
            seen.update(batch.tolist())
    total = stats[0]
    assert sum(one["n_rows"] for one in stats) == N_OBS + total["n_padded"] - total["n_dropped"]
    assert sum(seen.values()) - len(seen) == total["n_padded"] == sum(one["n_rank_padded"] for one in stats)
    assert N_OBS - len(seen) == total["n_dropped"]
    n_undealt = total["n_dropped"] - sum(one["n_rank_dropped"] for one in stats)
    assert n_undealt == (N_OBS % world_size if equal_ranks and drop_last else 0)
    if equal_ranks:
        assert len({one["n_rows"] for one in stats}) == 1
    # One line per epoch and rank, whichever process reads.
    assert [line.split(";")[0] for line in log()] == [
        f"epoch 0, rank {one['rank']} of {world_size}: {one['n_rows']} rows in {one['n_batches']} batches, "
        f"{one['n_rank_padded']} padded, {one['n_rank_dropped']} dropped "
        f"({total['n_padded']} and {total['n_dropped']} over all ranks)"
        for one in stats
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_that_stops_early_is_counted_but_not_logged_as_complete(log, num_workers):
    one = dataset()
    for _ in islice(loaded(one, num_workers), 2):
        pass
    assert log() == []
    if num_workers == 0:
        assert (one.stats()["n_batches"], one.stats()["n_rows"]) == (2, 10)
    list(loaded(one, num_workers))
    (line,) = log()
    assert line.startswith("epoch 1, rank 0 of 1: 103 rows in 21 batches, 0 padded, 0 dropped")
    assert one.stats()["epoch"] == 1
