"""Waiting for events in other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

WAIT_S = 60.0  # only a failing test waits this long


def eventually(condition: Callable[[], Any]) -> Any:
    """Wait until `condition` is true; return its last value."""
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return value
