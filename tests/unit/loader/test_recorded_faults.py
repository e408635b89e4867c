"""All recorded batches and states; `test_recorded.py` checks some of them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.support.recorder import FACTORS, Atlas, differences

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("way", FACTORS["way"])
def test_all_batches_are_those_recorded(way: str, tmp_path: Path) -> None:
    with closing(Atlas(tmp_path)) as atlas:
        assert differences("all other cases", way, atlas) == {}
