"""Pytest plugin for the core tier, whose tests are quick and stay in this process.

A core test fails if it starts a process, binds a socket, or uses more than `LIMIT_S` of CPU time, longer on a machine
that is slow or busy. Tests that compile kernels are timed only once the cache has them. Property tests with more
examples (`make test-faults`) are not core tests. The modules in `SMOKES` use real parts and are exempt.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import urllib3  # noqa: F401, it binds a socket when it is first imported
from numba.core import event

import dasksc.conversion
import dasksc.inference
import dasksc.loader  # noqa: F401, the first test would import them

LIMIT_S = 2.0
_REFERENCE_S = 0.063  # of `_slowness`, on the machine for which the limit was set
SMOKES = (
    "tests/integration/test_smokes.py",  # DataLoader workers, S3, a killed conversion, two ranks, Dask workers
    "tests/integration/ranks/test_ddp.py",  # torchrun
    "tests/integration/cluster/test_loader_page.py",  # a browser
    "tests/unit/loader/test_recorded.py",  # a digest of many epochs, which is never recorded anew
)
# Audit events of CPython.
_OUTSIDE = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "socket.bind"}
_watched: list[str] | None = None  # events of the running test


def _watch(name: str, args: tuple[Any, ...]) -> None:
    if _watched is not None and name in _OUTSIDE:
        _watched.append(f"{name} {args[1] if name == 'subprocess.Popen' else ''}".strip())


sys.addaudithook(_watch)


def _slowness() -> float:
    """Return how many times as much CPU time Python takes now as on that machine, at least 1."""
    start = time.process_time()
    sum(i * i for i in range(1_000_000))
    return max(1.0, (time.process_time() - start) / _REFERENCE_S)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    global _watched
    has_more_examples = item.config.getoption("--hypothesis-profile") == "thorough"
    if has_more_examples or item.get_closest_marker("core") is None or item.nodeid.startswith(SMOKES):
        return (yield)
    events = _watched = []
    compiling, start = event.TimingListener(), time.process_time()
    try:
        with event.install_listener("numba:compile", compiling):
            result = yield
    finally:
        _watched = None
    used_s = time.process_time() - start
    assert not events, f"a core test stays in its process, or its module is in SMOKES: {events}"
    if used_s > LIMIT_S and not compiling.done:
        limit_s = LIMIT_S * max(_slowness() for _ in range(3))
        assert used_s <= limit_s, f"a core test uses at most {limit_s:.1f} s of CPU time here, not {used_s:.1f} s"
    return result
