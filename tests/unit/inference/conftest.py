"""Fixture of an atlas of many small units."""

from __future__ import annotations

from pathlib import Path

import pytest

from dasksc.inference import store
from dasksc.output import shards
from tests.support.data import make_adata


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the unit size to 16 rows, so that the atlas has 13 units."""
    monkeypatch.setattr(store, "_LEAST_ROWS", 16)
    monkeypatch.setattr(store, "_MOST_ROWS", 16)
    monkeypatch.setattr(shards, "sync", lambda file: None)


@pytest.fixture
def atlas(tmp_path: Path) -> Path:
    path = tmp_path / "atlas.h5ad"
    make_adata(203, 17).write_h5ad(path)
    return path
