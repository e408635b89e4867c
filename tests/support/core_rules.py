"""Pytest plugin for the core tier: its tests run in this process and are quick.

A core test that starts a process, binds a socket or takes more than `LIMIT_S` fails. Only the tests in `SMOKES`, which
use real parts, are exempt.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

__all__ = ["LIMIT_S", "SMOKES"]

LIMIT_S = 2.0
SMOKES = "tests/integration/test_smokes.py"

# Audit events of CPython: https://docs.python.org/3/library/audit_events.html
_OUTSIDE = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "socket.bind"}
_running: str | None = None
_left: list[str] = []


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _running is not None and event in _OUTSIDE:
        _left.append(f"{event} {args[:2]}")


sys.addaudithook(_watch)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _running
    if item.get_closest_marker("core") is None or item.nodeid.startswith(SMOKES):
        return (yield)
    _running = item.nodeid
    _left.clear()
    try:
        return (yield)
    finally:
        _running = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    start = time.process_time()
    result = yield
    if _running is not None:
        if _left:
            pytest.fail(f"a core test must stay in its process: {_left}", pytrace=False)
        if (used := time.process_time() - start) > LIMIT_S:
            pytest.fail(f"a core test must take less than {LIMIT_S} s, not {used:.1f} s of CPU time", pytrace=False)
    return result
