"""Data sets of a Lightning run without Lightning: arguments, and a batch size that changes."""

from __future__ import annotations

import numpy as np
import pytest

import dasksc
from dasksc import WrongTypeError
from dasksc.integrations.data_module import DataModule
from tests.support.data import make_adata

pytestmark = pytest.mark.core

N_OBS = 30


@pytest.fixture(scope="module")
def adata():
    return make_adata(N_OBS)


def rows_of(loader) -> list[list[int]]:
    return [batch.index.tolist() for batch in loader]


@pytest.mark.parametrize("name", ["layuot", "rank", "world_size"])
def test_an_unknown_argument_is_refused_at_once(adata, name):
    with pytest.raises(WrongTypeError, match=f"{name}="):
        DataModule(adata, 8, train="shuffle", **{name: 1})


def test_a_new_batch_size_applies_from_the_next_request_of_a_loader(adata):
    data = DataModule(adata, 8, train="shuffle", validate="stream", obs=["cell_type"])
    data.setup("fit")
    first, seed = rows_of(data.train_dataloader()), data.datasets["train"].seed
    data.batch_size = 12
    loader = data.train_dataloader()
    assert [len(batch) for batch in rows_of(data.val_dataloader())] == [12, 12, 6]
    assert data.state_dict()["position"] == 0
    batches = iter(loader)
    second = [next(batches).index.tolist()]
    state = data.state_dict()
    assert state["position"] == 1
    second += rows_of(batches)
    expected = dasksc.scDataset(adata, "shuffle", 12, obs=["cell_type"], seed=seed)
    expected.set_epoch(1)
    assert len(loader) == 3
    assert second == rows_of(expected)
    assert sorted(np.concatenate(first)) == sorted(np.concatenate(second)) == list(range(N_OBS))
    again = DataModule(adata, 12, train="shuffle", obs=["cell_type"])
    again.load_state_dict(state)
    again.setup("fit")
    assert rows_of(again.train_dataloader()) == second[1:]
