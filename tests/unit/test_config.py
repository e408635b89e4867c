"""Defaults and precedence of settings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.programs import run

pytestmark = pytest.mark.programs


def test_earlier_settings_stay_and_a_context_entered_later_applies_within_it() -> None:
    script = """
import dask, dasksc
dask.config.set({"dasksc.gather-threads": 5, "temporary-directory": "/tmp/mine"})
dasksc.open
from dasksc import config
print(config.get("gather-threads"), dask.config.get("temporary-directory"), config.get("batches-ahead"))
with dask.config.set({"dasksc.gather-threads": 1}):
    print(config.get("gather-threads"))
print(config.get("gather-threads"))"""
    assert run([sys.executable, "-c", script]).split() == ["5", "/tmp/mine", "8", "1", "5"]


def test_the_environment_and_files_are_stronger_than_defaults(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("dasksc:\n  batches-ahead: 3\n  gather-threads: 7\n")
    script = "from dasksc import config; print(*map(config.get, ('batches-ahead', 'gather-threads', 'memory-limit')))"
    given = {"DASK_CONFIG": tmp_path, "DASK_DASKSC__GATHER_THREADS": "6", "DASK_DASKSC__MEMORY_LIMIT": "1GiB"}
    assert run([sys.executable, "-c", script], **given).split() == ["3", "6", "1GiB"]
