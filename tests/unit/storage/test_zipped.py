"""Zarr stores in zip files, read in place and compared with the unzipped directory."""

from __future__ import annotations

import logging
import struct
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import google_crc32c
import numpy as np
import pytest
import zarr

import dasksc
from dasksc.errors import CorruptDataError, StorageError
from dasksc.pushdown import matrix_of
from dasksc.storage import open_matrix
from dasksc.storage.zarr import reader
from tests.support.data import batches, dense, make_adata, same, write_store, zip_of
from tests.support.hostile import bounded

pytestmark = pytest.mark.core


@contextmanager
def only_direct() -> Iterator[None]:
    """Fail if values are read through zarr-python."""
    with mock.patch.object(reader.ZarrArray, "reader", side_effect=AssertionError("read through zarr-python")):
        yield


@pytest.mark.parametrize(("format", "mmap"), [("zarr2", True), ("zarr3", False)])
def test_a_zipped_store_opens_as_its_directory(tmp_path: Path, format: str, mmap: Any) -> None:
    adata = make_adata()
    adata.raw = adata
    store = write_store(adata, tmp_path, format)
    archive = zip_of(store)
    with only_direct():
        same(dasksc.open(archive, mmap=mmap), dasksc.open(store, mmap=mmap))
        raw = dasksc.open(archive, raw=True)
    np.testing.assert_array_equal(dense(raw.X.compute()), dense(dasksc.open(store, raw=True).X.compute()))


def test_compressed_members_are_read_through_zarr_python(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = write_store(make_adata(), tmp_path, "zarr3")
    caplog.set_level(logging.INFO, "dasksc.storage")
    archive = zip_of(store, method=zipfile.ZIP_DEFLATED)
    same(dasksc.open(archive), dasksc.open(store))
    assert "X/data is read through zarr-python, which is slower: its members are compressed" in caplog.text
    for ours, theirs in zip(batches(archive), batches(store), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_last_of_several_members_of_one_name_counts(tmp_path: Path) -> None:
    archive = zip_of(write_store(make_adata(), tmp_path, "zarr3"))
    with zipfile.ZipFile(archive) as file:
        metadata = file.read("X/indptr/zarr.json")
        name = next(name for name in file.namelist() if name.startswith("layers/") and "/c/" in name)
        content = file.read(name)
    before = dense(dasksc.open(archive).X.compute())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(archive, "a") as file:
            file.writestr("X/indptr/zarr.json", metadata.replace(b"int32", b"int64"))
            file.writestr(name, content)
            file.writestr("X/indptr/zarr.json", metadata)
    np.testing.assert_array_equal(dense(dasksc.open(archive).X.compute()), before)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return zip_of(write_store(make_adata(), tmp_path, "zarr3"))


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999])
def test_a_truncated_archive_is_refused(archive: Path, kept: float) -> None:
    content = archive.read_bytes()
    archive.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(CorruptDataError, match=r"zarr\.zip"):
        dasksc.open(archive)


def test_a_store_in_a_folder_of_the_archive_is_named(tmp_path: Path) -> None:
    archive = zip_of(write_store(make_adata(), tmp_path, "zarr3"), prefix="atlas.zarr/")
    with pytest.raises(StorageError, match=r"'atlas\.zarr'"):
        dasksc.open(archive)


def test_an_archive_that_is_changed_meanwhile_is_refused(tmp_path: Path, archive: Path) -> None:
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        zip_of(tmp_path / "atlas.zarr3.zarr", method=method)
        matrix = matrix_of(dasksc.open(archive).X)
        with zipfile.ZipFile(archive, "a") as file:
            file.writestr("more", "text")
        with pytest.raises(CorruptDataError, match="was replaced or changed"):
            matrix.fetch(np.arange(5))


def _directory_entry(content: bytes, name: str) -> int:
    """Return the offset of a member's entry in the central directory."""
    at = content.rindex(name.encode()) - 46
    assert content[at : at + 4] == b"PK\x01\x02"
    return at


def _chunk(archive: Path) -> str:
    with zipfile.ZipFile(archive) as file:
        return next(name for name in file.namelist() if name.startswith("X/data/c"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (8, b"\x01\x00", "encrypted"),
        (10, b"\x0e\x00", "X/data"),
        (42, struct.pack("<I", 2), "X/data/c/0' is not where"),
        (42, b"\xfe\xff\xff\x7f", "ends at byte|is not a zip file"),
        (20, b"\xfe\xff\xff\x7f\xfe\xff\xff\x7f", "is truncated|ends at byte"),
    ],
)
def test_a_directory_that_lies_is_refused(archive: Path, field: int, value: bytes, message: str) -> None:
    content = bytearray(archive.read_bytes())
    at = _directory_entry(content, _chunk(archive)) + field
    content[at : at + len(value)] = value
    archive.write_bytes(content)
    with bounded(), pytest.raises(StorageError, match=message):
        dasksc.open(archive).X.compute()


def test_a_shard_index_that_lies_is_refused(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    shards = {"shape": (40, 5), "index_location": "end"}
    array = group.create_array("X", shape=(40, 5), chunks=(10, 5), shards=shards, dtype="f4", compressors=None)
    array[:] = np.ones((40, 5), dtype="f4")
    (shard,) = (one for one in (tmp_path / "a.zarr" / "X" / "c").rglob("*") if one.is_file())
    content = bytearray(shard.read_bytes())
    content[-4 - 16 : -4] = struct.pack("<QQ", 10**6, 200)
    content[-4:] = struct.pack("<I", google_crc32c.value(bytes(content[-4 - 64 : -4])))
    shard.write_bytes(content)
    with pytest.raises(CorruptDataError, match="X/c/0/0"):
        open_matrix(zip_of(tmp_path / "a.zarr"), "X")
    shard.write_bytes(content[:10])
    with pytest.raises(CorruptDataError, match="no room for the index"):
        open_matrix(zip_of(tmp_path / "a.zarr"), "X")
