"""Stored objects that record the byte ranges requested from them, and a cache for their blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dasksc.storage import Cache
from dasksc.storage.remote.cache import BLOCK_BYTES
from dasksc.storage.remote.client import ObjectIdentity

LIMIT = 16 * BLOCK_BYTES


class Object:
    """Object of random bytes that records the byte ranges requested from it."""

    def __init__(self, n_bytes: int, *, name: str = "object", etag: str | None = '"1"') -> None:
        self.data = np.random.default_rng(len(name)).bytes(n_bytes)
        self.identity = ObjectIdentity(path=f"s3://bucket/{name}", size=n_bytes, etag=etag, modified="2026-01-01")
        self.requests: list[tuple[int, int]] = []

    def request(self, start: int, stop: int) -> memoryview:
        self.requests.append((start, stop))
        return memoryview(self.data)[start:stop]

    def read(self, cache: Cache, start: int, stop: int) -> None:
        got = cache.read(self.identity, start, stop, request=self.request)
        assert bytes(got) == self.data[start:stop]


def cache_in(folder: Path, limit: int = LIMIT) -> Cache:
    cache = Cache.of({"path": folder / "cache", "limit": limit})
    assert cache is not None
    return cache


def files(folder: Path) -> list[Path]:
    """Return the files of the blocks in a cache, including those being written."""
    return [path for path in (folder / "cache").rglob("*") if path.is_file()]
