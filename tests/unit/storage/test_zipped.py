"""Zarr stores in zip files, compared with the unzipped directory."""

from __future__ import annotations

import struct
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

import dasksc
from dasksc.errors import CorruptDataError, StorageError
from dasksc.pushdown import matrix_of
from tests.support.data import batches, dense, make_adata, same, write_store, zip_of
from tests.support.hostile import bounded

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("format", "mmap", "method"), [("zarr2", True, zipfile.ZIP_STORED), ("zarr3", False, zipfile.ZIP_DEFLATED)]
)
def test_a_zipped_store_opens_and_is_read_as_its_directory(
    tmp_path: Path, format: str, mmap: bool, method: int
) -> None:
    adata = make_adata()
    adata.raw = adata
    store = write_store(adata, tmp_path, format)
    archive = zip_of(store, method=method)
    same(dasksc.open(archive, mmap=mmap), dasksc.open(store, mmap=mmap))
    raw = dasksc.open(archive, raw=True)
    np.testing.assert_array_equal(dense(raw.X.compute()), dense(dasksc.open(store, raw=True).X.compute()))
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
        (42, struct.pack("<I", 2), "X/data"),
        (42, b"\xfe\xff\xff\x7f", "X/data|is not a zip file"),
        (20, b"\xfe\xff\xff\x7f\xfe\xff\xff\x7f", "X/data"),
    ],
)
def test_a_directory_that_lies_is_refused(archive: Path, field: int, value: bytes, message: str) -> None:
    content = bytearray(archive.read_bytes())
    at = _directory_entry(content, _chunk(archive)) + field
    content[at : at + len(value)] = value
    archive.write_bytes(content)
    with bounded(), pytest.raises(StorageError, match=message):
        dasksc.open(archive).X.compute()


def test_a_member_that_unpacks_to_more_than_it_says_is_refused(tmp_path: Path, archive: Path) -> None:
    name = "obs/int8/c/0"
    with zipfile.ZipFile(archive) as file, zipfile.ZipFile(tmp_path / "b.zarr.zip", "w", compresslevel=1) as new:
        assert name in file.namelist()
        for one in file.namelist():
            if one == name:
                new.writestr(one, bytes(2**20), zipfile.ZIP_DEFLATED)
            else:
                new.writestr(one, file.read(one))
    content = bytearray((tmp_path / "b.zarr.zip").read_bytes())
    at = _directory_entry(content, name) + 24
    content[at : at + 4] = struct.pack("<I", 10)
    (tmp_path / "b.zarr.zip").write_bytes(content)
    with pytest.raises(StorageError, match="int8"):
        dasksc.open(tmp_path / "b.zarr.zip")
