"""All recorded batches and states; `test_recorded.py` checks some of them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.support.recorder import FACTORS, Atlas, differences, recorded, resumed

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("way", FACTORS["way"])
def test_all_batches_are_those_recorded(way: str, tmp_path: Path) -> None:
    with closing(Atlas(tmp_path)) as atlas:
        assert differences("all other cases", way, atlas) == {}


def test_all_recorded_states_are_taken_again_and_resumed_with_the_batches_recorded(tmp_path: Path) -> None:
    with closing(Atlas(tmp_path)) as atlas:
        for one in recorded("states.json")["cases"]:
            assert resumed(one, atlas) == (one["state"], one["rest"]), one["case"]
