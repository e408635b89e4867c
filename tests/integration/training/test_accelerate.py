"""Data sets with Accelerate, which leaves them unchanged, but would shard the batches of a DataLoader a second time."""

from __future__ import annotations

import json
from itertools import chain

import pytest

from tests.support.data import make_adata, write_store
from tests.support.programs import torchrun

pytest.importorskip("accelerate")

pytestmark = [pytest.mark.programs, pytest.mark.xdist_group("accelerate")]

N_OBS = 60


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, dict[str, list[list[int]]]]]:
    """Return the rows that each of two ranks read, by case."""
    folder = tmp_path_factory.mktemp("accelerated")
    torchrun(2, "accelerated.py", write_store(make_adata(N_OBS), folder, "h5ad"), folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def rows(both: list[dict[str, list[list[int]]]]) -> list[int]:
    return sorted(chain(*chain(*(rank["seen"] for rank in both))))


def test_a_data_set_that_is_not_prepared_is_shared_once_and_its_state_saved_with_the_rest(found):
    both = [rank["unprepared"] for rank in found]
    assert rows(both) == list(range(N_OBS))
    assert [len(rank["seen"]) for rank in both] == [4, 4]
    assert [rank["rest"] for rank in both] == [rank["seen"][2:] for rank in both]


def test_preparing_the_data_set_itself_leaves_it_as_it_is(found):
    assert rows([rank["prepared"] for rank in found]) == list(range(N_OBS))


def test_a_prepared_loader_which_would_lose_cells_is_refused_on_every_rank(found):
    for rank in found:
        assert set(rank["refused"].values()) == {"InputError"}, rank
