"""Batches, states and public names, compared with those recorded in `tests/recorded/` by an earlier version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support import recorder
from tests.support.interface import interface
from tests.support.recorder import FACTORS, RECORDED, UNIT_WAYS, Atlas, recorded

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Atlas]:
    with closing(Atlas(tmp_path_factory.mktemp("recorded"))) as atlas:
        yield atlas


@pytest.mark.parametrize("way", FACTORS["way"])
def test_batches_are_those_recorded(way: str, atlas: Atlas) -> None:
    assert recorder.differences("some cases", way, atlas) == {}


@pytest.mark.parametrize("way", UNIT_WAYS)
def test_batches_of_sets_and_shares_are_those_recorded(way: str, atlas: Atlas) -> None:
    assert recorder.differences("units", way, atlas) == {}


def test_other_results_are_those_recorded(atlas: Atlas) -> None:
    assert recorder.other_results(atlas) == recorded("batches.json")["other results"]


def test_every_case_is_recorded_and_some_have_all_pairs_of_values() -> None:
    every = {case.name: case for case in recorder.cases()}
    some = recorded("batches.json")["some cases"]
    assert every.keys() == some.keys() | recorded("batches.json")["all other cases"].keys()
    met = set().union(*(recorder.pairs_of(every[name]) for name in some))
    n_values = [len(values) for values in FACTORS.values()]
    n_pairs = (sum(n_values) ** 2 - sum(n * n for n in n_values)) // 2
    assert len(met) == n_pairs - len(FACTORS["strategy"]) * len(FACTORS["way"])
    for factor in ("strategy", "way"):
        starts = {(getattr(case, factor), case.world_size, case.start) for case in every.values()}
        assert len(starts) == len(FACTORS[factor]) * len(FACTORS["world_size"]) * len(FACTORS["start"])


def test_every_case_of_sets_and_shares_is_recorded() -> None:
    assert [case.name for case in recorder.cases_of_units()] == [*recorded("batches.json")["units"]]


def test_public_names_and_signatures_are_those_recorded() -> None:
    found, expected = interface().splitlines(), (RECORDED / "interface.txt").read_text().splitlines()
    assert (sorted(set(expected) - set(found)), sorted(set(found) - set(expected))) == ([], [])
    assert found == expected
