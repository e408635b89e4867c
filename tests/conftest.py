"""Fixtures for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import dask
import pytest
from hypothesis import settings

from dasksc import lazy

# How long an example takes says more of the machine than of the code.
settings.register_profile("dasksc", deadline=None)
settings.load_profile("dasksc")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets what it starts in the background ignore Ctrl-C, which the tests' own programs would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_settings() -> Iterator[None]:
    """Leave Dask's configuration, and what was warned of once, as the test found them."""
    warned = set(lazy._warned)
    with dask.config.set():
        yield
    lazy._warned.clear()
    lazy._warned.update(warned)
