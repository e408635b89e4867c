"""Block cache shared by processes that are killed at random moments."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dasksc.storage.remote import cache as module
from dasksc.storage.remote.cache import BLOCK_BYTES
from tests.support.cached import LIMIT, Object, cache_in, files

pytest.importorskip("obstore")

pytestmark = pytest.mark.faults


@pytest.fixture(autouse=True)
def _nothing_written_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_written", {})


def _read_for_ever(folder: Path, started: Any, seed: int) -> None:
    cache, rng = cache_in(folder), np.random.default_rng(seed)
    things = [Object(BLOCK_BYTES // 8, name=f"object{number}") for number in range(200)]
    started.set()
    while True:
        things[rng.integers(200)].read(cache, 0, BLOCK_BYTES // 8)


def test_processes_that_share_a_cache_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    rng = np.random.default_rng(0)
    for round_ in range(5):
        started = [context.Event() for _ in range(2)]
        workers = [
            context.Process(target=_read_for_ever, args=(tmp_path, event, 10 * round_ + number))
            for number, event in enumerate(started)
        ]
        for worker in workers:
            worker.start()
        for event in started:
            assert event.wait(60)
        time.sleep(rng.random() * 0.3)
        for worker in workers:
            # A wrong value would have raised and ended the process.
            assert worker.is_alive()
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
    assert any(not path.name.startswith("new-") for path in files(tmp_path))
    partial = tmp_path / "cache" / "new-of-a-killed-process"
    partial.write_bytes(bytes(1000))
    for path in files(tmp_path):
        if path.name.startswith("new-"):
            os.utime(path, (0, 0))
    module._written.clear()
    for number in range(200):
        Object(BLOCK_BYTES // 8, name=f"object{number}").read(cache_in(tmp_path), 0, BLOCK_BYTES // 8)
    assert not [path for path in files(tmp_path) if path.name.startswith("new-")]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= LIMIT
