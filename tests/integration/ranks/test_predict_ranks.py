"""Predictions of real ranks under torchrun; ``test_predict_faults.py`` has more of them, FSDP, and kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.predictions import assert_ranks_write_the_plain_loop, write_atlas

pytestmark = [pytest.mark.core, pytest.mark.xdist_group("ddp")]


def test_two_ranks_of_a_group_write_what_the_plain_loop_yields(tmp_path: Path) -> None:
    assert_ranks_write_the_plain_loop(write_atlas(tmp_path), tmp_path / "emb.zarr", 2, "ddp")
