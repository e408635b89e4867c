from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import six_steps


@pytest.fixture(scope="session", autouse=True)
def imported_libraries() -> None:
    """The first test that trains would import these, and be too slow for a core test."""
    for name in ("torch._dynamo", "torch.distributed.checkpoint.state_dict", "jsonargparse"):
        import_module(name)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Folder of a run."""
    return tmp_path / "run"


@pytest.fixture
def raw(training_atlas, folder) -> dict[str, Any]:
    """Configuration of a run of six steps."""
    return six_steps(training_atlas, folder)
