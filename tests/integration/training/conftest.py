from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.training import six_steps


@pytest.fixture
def folder(tmp_path) -> Path:
    """Folder of a run."""
    return tmp_path / "run"


@pytest.fixture
def raw(training_atlas, folder) -> dict[str, Any]:
    """Configuration of a run of six steps."""
    return six_steps(training_atlas, folder)
