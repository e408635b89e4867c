"""Hooks that raise: the error names the batch or fetch and its rows, and the data set stays usable."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch.utils.data

from dasksc import BlockShuffling, FetchError, Streaming, scDataset
from tests.support.data import make_adata, write_store

N_OBS = 203

pytestmark = [
    pytest.mark.core,
    pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_store(make_adata(N_OBS), tmp_path_factory.mktemp("atlas"), "h5ad")


@pytest.fixture(autouse=True)
def _workers_end_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorten the interval (5 s by default) at which PyTorch's DataLoader and its workers check each other's status."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.05)
    yield
    gc.collect()  # collect the loader, which the error references


def rows_of_batch(one: scDataset, i: int) -> list[int]:
    return one.plan(0).batch_rows(i).tolist()


@pytest.mark.parametrize("hook", ["batch_callback", "batch_transform"])
def test_a_hook_that_raises_is_reported_with_its_batch_and_rows(hook):
    def broken(batch, positions=None):
        batch = batch if positions is None else batch[positions]
        if 77 in batch:
            raise ZeroDivisionError("mine")
        return batch

    one = scDataset(np.arange(100), BlockShuffling(4), 8, 2, seed=0, **{hook: broken})
    wrong = next(i for i in range(len(one)) if 77 in rows_of_batch(one, i))
    rows = ", ".join(map(str, rows_of_batch(one, wrong)))
    with pytest.raises(ZeroDivisionError) as caught:
        list(one)
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert f"in batch {wrong} of 13 (epoch 0, rank 0 of 1), rows {rows}" in message


@pytest.mark.parametrize("hook", ["fetch_callback", "fetch_transform"])
def test_a_hook_that_raises_while_fetching_is_reported_with_its_fetch_and_rows(path, hook):
    def broken(data, rows=None):
        raise ZeroDivisionError("mine")

    one = scDataset(path, Streaming(), 8, 2, seed=0, **{hook: broken})
    with pytest.raises(FetchError, match="13.*epoch.*16") as caught:
        list(one)
    assert "ZeroDivisionError: mine" in str(caught.value)


def test_after_a_hook_has_raised_the_data_set_goes_on_with_the_next_epoch():
    fails = [True]

    def sometimes(batch):
        if fails[0] and 50 in batch:
            raise ZeroDivisionError("mine")
        return batch

    one = scDataset(np.arange(100), BlockShuffling(4), 8, 2, seed=0, batch_transform=sometimes)
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError):
        list(one)
    assert set(threading.enumerate()) <= before
    fails[0] = False
    assert sorted(np.concatenate(list(one)).tolist()) == list(range(100))
    assert one.stats()["epoch"] == 1
