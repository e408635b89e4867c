"""Accelerate: data sets are passed as they are; a DataLoader around one is dealt out once more."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest

from tests.support.data import make_adata, write_store
from tests.support.programs import torchrun

pytest.importorskip("accelerate")

pytestmark = pytest.mark.programs

N_OBS = 60


def ranks(case: str, tmp_path: Path) -> list[dict[str, list[list[int]]]]:
    path = write_store(make_adata(N_OBS), tmp_path, "h5ad")
    torchrun(2, "accelerated.py", case, path, tmp_path)
    return [json.loads((tmp_path / f"{case}-{rank}.json").read_text()) for rank in range(2)]


def test_a_data_set_that_is_not_prepared_is_shared_once_and_its_state_saved_with_the_rest(tmp_path):
    both = ranks("unprepared", tmp_path)
    assert sorted(chain(*chain(*(rank["seen"] for rank in both)))) == list(range(N_OBS))
    assert [len(rank["seen"]) for rank in both] == [4, 4]
    assert [rank["rest"] for rank in both] == [rank["seen"][2:] for rank in both]


def test_preparing_the_data_set_itself_leaves_it_as_it_is(tmp_path):
    both = ranks("prepared", tmp_path)
    assert sorted(chain(*chain(*(rank["seen"] for rank in both)))) == list(range(N_OBS))


def test_a_prepared_loader_loses_cells_as_the_documentation_warns(tmp_path):
    # If this fails, Accelerate has learnt better: take the warning out of docs/trainers.md.
    both = ranks("dispatched", tmp_path)
    assert set(chain(*chain(*(rank["seen"] for rank in both)))) < set(range(N_OBS))
