"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import dask
import pytest

from dasksc import lazy


@pytest.fixture(autouse=True)
def _own_settings() -> Iterator[None]:
    """Leave Dask's configuration, and what was warned of once, as the test found them."""
    warned = set(lazy._warned)
    with dask.config.set():
        yield
    lazy._warned.clear()
    lazy._warned.update(warned)
