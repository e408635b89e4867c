"""Block cache in which a process left a partial file when it was killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dasksc.storage.remote import cache as module
from dasksc.storage.remote.cache import BLOCK_BYTES
from tests.support.cached import LIMIT, Object, cache_in, files

pytest.importorskip("obstore")

pytestmark = pytest.mark.core


def test_what_a_killed_process_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_written", {})
    Object(1000).read(cache_in(tmp_path), 0, 1000)
    partial = tmp_path / "cache" / "new-of-a-killed-process"
    partial.write_bytes(bytes(1000))
    os.utime(partial, (0, 0))
    module._written.clear()
    for number in range(200):
        Object(BLOCK_BYTES // 8, name=f"object{number}").read(cache_in(tmp_path), 0, BLOCK_BYTES // 8)
    assert not partial.exists()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= LIMIT
