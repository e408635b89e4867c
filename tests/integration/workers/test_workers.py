"""Epochs across DataLoader workers with every start method."""

from __future__ import annotations

import multiprocessing
import os
from itertools import chain, islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dasksc import BlockShuffling, FetchError, scDataset
from tests.support.data import make_adata, write_store

N_OBS = 203

pytestmark = [
    pytest.mark.programs,
    # The tests intentionally use more workers than cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_store(make_adata(N_OBS), tmp_path_factory.mktemp("atlas"), "h5ad")


def dataset(path, **options) -> scDataset:
    options = {"batch_size": 8, "fetch_factor": 2, "seed": 5, "obs": ["cell_type"], **options}
    return scDataset(path, BlockShuffling(4), **options)


def rows(batches) -> list[tuple[int, ...]]:
    return [tuple(batch.index.tolist()) for batch in batches]


@pytest.fixture(scope="module")
def epochs(path) -> list[list[tuple[int, ...]]]:
    """Return the batches of the first epochs, read without workers."""
    one = dataset(path)
    return [rows(one) for _ in range(3)]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning")
# Each layout is combined with workers and with none, and each prefetch factor with one layout.
@pytest.mark.parametrize(
    ("num_workers", "prefetch_factor", "layout"), [(0, None, "dense"), (0, None, "csr"), (2, 1, "csr"), (2, 8, "dense")]
)
def test_pinning_and_prefetching_change_no_batch(path, epochs, num_workers, prefetch_factor, layout):
    loader = DataLoader(
        dataset(path, layout=layout),
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pin_memory=True,
    )
    for epoch in epochs[:2]:
        batches = list(loader)
        assert len(batches) == len(loader)
        assert sorted(rows(batches)) == sorted(epoch)
        assert {type(batch).__name__ for batch in batches} == {"Batch"}
        assert all(batch.X.is_pinned() == torch.cuda.is_available() for batch in batches if layout == "dense")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_set_epoch_says_which_epoch_is_next(path, epochs, num_workers):
    one = dataset(path)
    loader = DataLoader(one, batch_size=None, num_workers=num_workers)
    one.set_epoch(2)
    assert sorted(rows(loader)) == sorted(epochs[2])
    one.set_epoch(0)
    assert sorted(rows(loader)) == sorted(epochs[0])
    assert sorted(rows(loader)) == sorted(epochs[1])


@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
def test_a_data_set_that_was_read_in_the_parent_does_not_hang_forked_workers(path, epochs, scheduler):
    one = dataset(path, scheduler=scheduler)
    assert rows(one) == epochs[0]
    half = iter(one)
    list(islice(half, 3))
    loader = DataLoader(one, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    assert sorted(rows(loader)) == sorted(epochs[2])
    assert len(list(half)) == len(one) - 3


@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_read_the_rest_of_an_epoch_that_the_main_process_began(path, epochs, num_workers):
    half, rest = dataset(path), dataset(path)
    begun = rows(islice(half, 5))
    rest.load_state_dict(half.state_dict())
    loader = DataLoader(rest, batch_size=None, num_workers=num_workers)
    assert sorted(begun + rows(loader)) == sorted(epochs[0])
    assert (rest.state_dict()["epoch"], sorted(rows(loader))) == (1, sorted(epochs[1]))
    rest.set_epoch(0)
    assert sorted(rows(loader)) == sorted(epochs[0])


def test_a_state_saved_after_workers_read_a_part_of_an_epoch_is_warned_about(path, caplog):
    one = dataset(path)
    loader = DataLoader(one, batch_size=None, num_workers=2)
    next(iter(loader))
    assert (one.state_dict()["epoch"], "a part of epoch 0" in caplog.text) == (1, True)
    caplog.clear()
    list(loader)
    assert (one.state_dict()["epoch"], caplog.text) == (2, "")


def _read_two_epochs(one, rank, persistent, found):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    loader = DataLoader(one, batch_size=None, num_workers=2, persistent_workers=persistent)
    epochs = [rows(loader) for _ in range(2)]
    assert {len(batches) for batches in epochs} == {len(loader)}
    found.put(epochs)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_ranks_times_workers_cover_every_epoch_once(path, start):
    one, context = dataset(path), multiprocessing.get_context(start)  # the ranks start afterwards
    found = context.SimpleQueue()
    ranks = [context.Process(target=_read_two_epochs, args=(one, rank, start == "spawn", found)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for epoch in zip(*(found.get() for _ in ranks), strict=True):
        everything = list(chain(*chain(*epoch)))
        assert set(everything) == set(range(N_OBS))
        assert len(everything) == N_OBS + dataset(path, rank=0, world_size=2).plan(0).n_padded
    for rank in ranks:
        rank.join()


def test_hooks_that_are_lambdas_reach_workers_that_each_epoch_spawns_anew(path, epochs):
    scale = 3
    one = scDataset(
        path,
        BlockShuffling(4),
        batch_size=8,
        fetch_factor=2,
        seed=5,
        fetch_transform=lambda adata: torch.from_numpy(adata.X.toarray()) * scale,
        batch_transform=lambda batch: batch.sum(dtype=torch.float64).item(),
    )
    loader = DataLoader(one, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    values = make_adata(N_OBS).X.toarray().astype(np.float64)
    for epoch in epochs[:2]:
        expected = [scale * values[list(batch)].sum() for batch in epoch]
        assert list(loader) == pytest.approx(expected, rel=1e-5)


def test_an_iteration_begun_before_a_fork_raises_in_the_child(path):
    def raises(iteration):
        with pytest.raises(FetchError):
            next(iteration)

    for one in (
        dataset(path),
        dataset(path, layout="csr"),
        scDataset(np.arange(N_OBS), BlockShuffling(4), 8, 2, seed=0),
    ):
        iteration = iter(one)
        next(iteration)
        child = multiprocessing.get_context("fork").Process(target=raises, args=(iteration,), daemon=True)
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert len(list(iteration)) == len(one) - 1
