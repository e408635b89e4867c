"""Cache of blocks: bounded, shared by the processes of one user, checked, and always equal to the object's bytes."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dask
import numpy as np
import pytest

import dasksc
from dasksc.storage import Cache
from dasksc.storage.remote import remote_file as module
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.remote.remote_file import BLOCK_BYTES
from tests.support.data import batches, dense, make_adata, write_store
from tests.support.servers import HTTPServer, serving, touch_later

pytest.importorskip("obstore")

pytestmark = pytest.mark.programs

LIMIT = 16 * BLOCK_BYTES


class Object:
    """Stored object of random bytes that records the byte ranges requested from it."""

    def __init__(self, n_bytes: int, name: str = "object") -> None:
        self.data = np.random.default_rng(len(name)).bytes(n_bytes)
        self.identity = ObjectIdentity(path=f"s3://bucket/{name}", size=n_bytes, etag='"1"', modified="2026-01-01")
        self.requests: list[tuple[int, int]] = []

    def request(self, start: int, stop: int) -> memoryview:
        self.requests.append((start, stop))
        return memoryview(self.data)[start:stop]

    def read(self, cache: Cache, start: int, stop: int) -> None:
        got = cache.read("s3://b/a", self.identity, start, stop, request=self.request)
        assert bytes(got) == self.data[start:stop]


def cache_in(folder: Path) -> Cache:
    cache = Cache.of({"path": folder / "cache", "limit": LIMIT})
    assert cache is not None
    return cache


def files(folder: Path) -> list[Path]:
    """Return the files of the blocks in a cache, including those being written."""
    return [path for path in (folder / "cache").rglob("*") if path.is_file()]


@pytest.fixture(autouse=True)
def _like_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_written", {})
    monkeypatch.setattr(module, "_warned", set())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HTTPServer]:
    (tmp_path / "served").mkdir()
    with serving(tmp_path / "served") as server:
        yield server


@pytest.mark.parametrize("damaged", [lambda whole: whole[:900], lambda whole: whole + b"x", lambda whole: b""])
def test_an_incomplete_block_is_fetched_again(tmp_path: Path, damaged: Callable[[bytes], bytes]) -> None:
    thing, cache = Object(BLOCK_BYTES + 1000), cache_in(tmp_path)
    thing.read(cache, 0, len(thing.data))
    for path in files(tmp_path):
        path.write_bytes(damaged(path.read_bytes()))
    thing.requests.clear()
    for _ in range(2):
        thing.read(cache, 0, len(thing.data))
        assert len(thing.requests) == 2


def test_urls_that_differ_in_their_query_have_blocks_of_their_own(tmp_path: Path) -> None:
    things = {"https://host/a?id=1": Object(100), "https://host/a?id=2": Object(100, "other object")}
    for url, thing in things.items():
        assert bytes(cache_in(tmp_path).read(url, Object(100).identity, 0, 100, request=thing.request)) == thing.data


def test_cached_blocks_belong_to_their_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Object(1000).read(cache_in(tmp_path), 0, 1000)
    finally:
        os.umask(before)
    folder = tmp_path / "cache"
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}
    assert len(modes) == 3  # the folder, a subfolder and a block
    assert {path.name: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755, 0o711, 0o720])
def test_a_folder_that_others_have_access_to_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    folder, thing = tmp_path / "cache", Object(1000)
    folder.mkdir()
    folder.chmod(mode)
    for _ in range(3):
        thing.read(cache_in(tmp_path), 0, 1000)
    assert len(thing.requests) == 3
    assert not any(folder.iterdir())
    (record,) = caplog.records
    assert str(folder) in record.message
    assert f"mode {mode:03o}" in record.message
    folder.chmod(0o700)
    thing.read(cache_in(tmp_path), 0, 1000)
    thing.read(cache_in(tmp_path), 0, 1000)
    assert len(thing.requests) == 4


def test_the_folder_stays_below_its_limit_and_the_least_recently_used_blocks_go(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    things = [Object(BLOCK_BYTES, name=f"object{number}") for number in range(40)]
    things[0].read(cache, 0, 10)
    for age, thing in enumerate(things):
        thing.read(cache, 0, 10)
        for path in files(tmp_path):
            os.utime(path, (time.time() - 1000, path.stat().st_mtime - 100))
        things[0].read(cache, 0, 10)  # makes it the most recently used
        assert sum(path.stat().st_size for path in files(tmp_path)) <= LIMIT, age
    assert len(things[0].requests) == 1
    assert len(files(tmp_path)) > LIMIT // BLOCK_BYTES // 2


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    Object(1000).read(cache_in(tmp_path), 0, 1000)
    partial, own = tmp_path / "cache" / f"new-1-{'0' * 16}", tmp_path / "cache" / "file of the user"
    for path in (partial, own):
        path.write_bytes(bytes(1000))
        os.utime(path, (0, 0))
    module._written.clear()
    for number in range(200):
        Object(BLOCK_BYTES // 8, name=f"object{number}").read(cache_in(tmp_path), 0, BLOCK_BYTES // 8)
    assert (partial.exists(), own.exists()) == (False, True)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= LIMIT


def test_a_full_disk_costs_the_cache_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file, where a folder should be")
    thing, cache = Object(1000), cache_in(tmp_path)
    thing.read(cache, 0, 1000)
    thing.read(cache, 0, 1000)
    assert len(thing.requests) == 2
    assert "cannot be kept in the cache" in caplog.text


@pytest.mark.parametrize("format", ["h5ad", "zarr2", "zarr3"])
def test_a_second_epoch_reads_no_values_over_the_network(tmp_path: Path, server: HTTPServer, format: str) -> None:
    adata = make_adata(200, 30)
    path = write_store(adata, server.folder, format)
    with dask.config.set({"dasksc.cache": str(tmp_path / "cache")}):
        first = np.concatenate(batches(dasksc.open(f"{server.url}/{path.name}")))
        again = dasksc.open(f"{server.url}/{path.name}")
        batches(again)  # each array requests the list of its chunks once
        server.faults.requests.clear()
        second = np.concatenate(batches(again))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(np.sort(first, axis=0), np.sort(dense(adata.X), axis=0))
    # Requests for one byte check the versions of objects.
    assert {wanted for _, _, wanted in server.faults.requests} <= {"bytes=0-0"}


@pytest.mark.parametrize("format", ["h5ad", "zarr3"])
def test_a_replaced_atlas_is_read_anew(tmp_path: Path, server: HTTPServer, format: str) -> None:
    adata = make_adata(200, 30)
    path = write_store(adata, server.folder, format)
    cache = {"path": tmp_path / "cache", "limit": "1GiB"}
    assert sum(batch.sum() for batch in batches(dasksc.open(f"{server.url}/{path.name}", cache=cache))) == adata.X.sum()
    adata.X.data[:] = 1
    write_store(adata, server.folder, format)
    for file in [path, *path.rglob("*")]:
        touch_later(file)
    assert sum(batch.sum() for batch in batches(dasksc.open(f"{server.url}/{path.name}", cache=cache))) == adata.X.nnz
