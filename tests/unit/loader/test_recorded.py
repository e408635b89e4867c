"""Batches, states and public names, compared with those recorded in `tests/recorded/` by an earlier version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support import recorder
from tests.support.interface import interface
from tests.support.recorder import LAYOUTS, RECORDED, WAYS, Atlas, recorded

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Atlas]:
    with closing(Atlas(tmp_path_factory.mktemp("recorded"))) as atlas:
        for layout in LAYOUTS:
            atlas.path(layout, "converted.zarr")
        yield atlas


@pytest.mark.parametrize("way", WAYS)
def test_batches_are_those_recorded(way: str, atlas: Atlas) -> None:
    assert recorder.digest_of_way(way, atlas) == recorded()[way]


def test_other_results_are_those_recorded(atlas: Atlas) -> None:
    assert recorder.digest_of(recorder.other_results(atlas)) == recorded()["other results"]


def test_public_names_and_signatures_are_those_recorded() -> None:
    found, expected = interface().splitlines(), (RECORDED / "interface.txt").read_text().splitlines()
    assert (sorted(set(expected) - set(found)), sorted(set(found) - set(expected))) == ([], [])
    assert found == expected
