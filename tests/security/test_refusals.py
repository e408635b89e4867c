"""Rejection of malicious files without running code, reading other files or allocating what they declare.

Valid files that resemble them are read. `test_hostile` reads malicious files at URLs.
"""

from __future__ import annotations

import errno
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest

import dasksc
from dasksc.errors import CorruptDataError, StorageError
from dasksc.plan.arrays import array_of
from dasksc.storage import open_matrix
from tests.support.data import make_adata, write_store, zip_of
from tests.support.hostile import (
    VALUES,
    bounded,
    edited,
    full,
    h5ad_of_many_arrays,
    h5ad_whose_values_are_elsewhere,
    memory_of,
    recompressed,
    small,
    store_of_shape,
    store_with_a_column_called,
    store_with_bombs,
    store_with_pickles,
)

# Warnings about future formats.
pytestmark = [
    pytest.mark.core,
    pytest.mark.filterwarnings("ignore:Writing zarr v2"),
    pytest.mark.filterwarnings("ignore:Consolidated"),
]


def with_huge_chunks(folder: Path, format: str) -> Path:
    path = write_store(full(), folder, format)
    if format == "zarr2":
        recompressed(path, "obs/n", chunks=[2**29], compressor={"id": "zlib", "level": 1})
        return path
    with h5py.File(path, "r+") as file:
        attributes = dict(file["obs/n"].attrs)
        del file["obs/n"]
        new = file.create_dataset("obs/n", (20,), "f8", maxshape=(None,), chunks=(2**28,), compression="gzip")
        new.attrs.update(attributes)
    return path


def with_keys_elsewhere(folder: Path, format: int) -> Path:
    path = write_store(small(), folder, f"zarr{format}")
    away = "/../../../../"
    if format == 2:
        edited(path / "X" / ".zarray", dimension_separator=away)
    else:
        encoding = {"name": "default", "configuration": {"separator": away}}
        edited(path / "X" / "zarr.json", chunk_key_encoding=encoding)
    (folder / "0").write_bytes(bytes(10**4))
    return path


def with_links_to_links(folder: Path) -> Path:
    path = write_store(full(), folder, "h5ad")
    outside = folder.parent / f"{folder.name}-outside.h5"
    with h5py.File(path, "r+") as file, h5py.File(outside, "w") as other, h5py.File(folder / "b.h5", "w") as beside:
        file.copy("uns/n", other, "it")
        beside["it"] = h5py.ExternalLink(str(outside), "/it")
        beside["soft"] = h5py.SoftLink("/it")
        del file["uns/n"]
        file["uns/n"] = h5py.ExternalLink("b.h5", "/soft")
    return path


# How to write each malicious store, and a fact of the error.
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "shape of h5ad": (lambda folder: store_of_shape(folder, "h5ad", "obs/int8", 2**40), ""),
    "shape of zarr 2": (lambda folder: store_of_shape(folder, "zarr2", "X", 2**62), ""),
    "shape of zarr 3": (lambda folder: store_of_shape(folder, "zarr3", "obs/int8", 2**62), ""),
    "bomb in X of zarr": (lambda folder: store_with_bombs(folder, "X"), "rows"),
    "huge chunks of zarr": (lambda folder: with_huge_chunks(folder, "zarr2"), "shape"),
    "huge chunks of hdf5": (lambda folder: with_huge_chunks(folder, "h5ad"), "shape"),
    "keys of zarr 2": (lambda folder: with_keys_elsewhere(folder, 2), ""),
    "keys of zarr 3": (lambda folder: with_keys_elsewhere(folder, 3), ""),
    "column upwards": (lambda folder: store_with_a_column_called(folder, "h5ad", "../../secret"), ""),
    "column elsewhere": (lambda folder: store_with_a_column_called(folder, "zarr2", "/etc/passwd"), ""),
    "X through a link": (lambda folder: h5ad_whose_values_are_elsewhere(folder, "X", "absolute"), "other"),
    "X through a link upwards": (lambda folder: h5ad_whose_values_are_elsewhere(folder, "X", "upwards"), "other"),
    "X is virtual": (lambda folder: h5ad_whose_values_are_elsewhere(folder, "X", "virtual"), "other"),
    "X is external": (lambda folder: h5ad_whose_values_are_elsewhere(folder, "X", "external"), "other"),
    "table is external": (lambda folder: h5ad_whose_values_are_elsewhere(folder, "uns/n", "external"), "other"),
    "table beside": (lambda folder: h5ad_whose_values_are_elsewhere(folder, "varm/n", "beside"), "other"),
    "links of links": (with_links_to_links, "other"),
}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import what reading needs before memory is traced."""
    dasksc.open(write_store(small(), tmp_path_factory.mktemp("warm"), "zarr2")).X.compute()


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", REFUSED)
def test_malicious_stores_are_refused_before_they_fill_memory(tmp_path: Path, name: str) -> None:
    write, fact = REFUSED[name]
    path = write(tmp_path)
    with bounded(), pytest.raises(StorageError) as caught:
        dasksc.open(path).X.compute()
    assert fact in str(caught.value)


@pytest.mark.parametrize(
    ("where", "name", "encoding"),
    [
        ("obs/int8", "pickle", "utf-8"),
        ("X", "pickle", "utf-8"),
        ("obs/int8", r"pi\u0063kle", "utf-8"),
        ("obs/int8", "pickle", "utf-16"),
    ],
)
def test_pickles_in_arrays_are_not_loaded(tmp_path: Path, where: str, name: str, encoding: str) -> None:
    mark = tmp_path / "unpickled"
    path = store_with_pickles(tmp_path, where, mark)
    for metadata in (path / where / ".zarray", path / ".zmetadata"):
        metadata.write_text(metadata.read_text().replace('"pickle"', f'"{name}"'), encoding)
    with pytest.raises(StorageError, match="pickle"):
        dasksc.open(path).X.compute()
    assert not mark.exists()


def test_arrays_that_are_too_large_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_of(2**30, monkeypatch)
    path = h5ad_of_many_arrays(tmp_path)
    with bounded(), pytest.raises(StorageError, match="1073741824"):
        dasksc.open(path)


# dtypes that dasksc reads, or leaves to h5py.
@pytest.mark.parametrize(("where", "dtype"), [("X", "f4"), ("X", "f2")])
def test_files_that_hdf5_would_look_for_in_the_working_directory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, dtype: str
) -> None:
    (tmp_path / "atlas").mkdir()
    path = write_store(full(), tmp_path / "atlas", "h5ad")
    (tmp_path / "secret").write_bytes(bytes(480))
    monkeypatch.chdir(tmp_path)
    with h5py.File(path, "r+") as file:
        shape, attributes = file[where].shape, dict(file[where].attrs)
        del file[where]
        file.create_dataset(where, shape, dtype, external=[("secret", 0, 480)]).attrs.update(attributes)
    with pytest.raises(StorageError, match="other"):
        dasksc.open(path)


def test_values_and_tables_beside_a_file_are_read(tmp_path: Path) -> None:
    path = write_store(full(), tmp_path, "h5ad")
    with h5py.File(path, "r+") as file, h5py.File(tmp_path / "b.h5", "w") as beside:
        beside["n"] = np.arange(100.0, 120.0)
        file.copy("var", beside, "var")
        for name in ("uns/n", "var"):
            del file[name]
        layout = h5py.VirtualLayout((20,), "f8")
        layout[:] = h5py.VirtualSource("b.h5", "n", shape=(20,))
        file.create_virtual_dataset("uns/n", layout).attrs.update(
            {"encoding-type": "array", "encoding-version": "0.2.0"}
        )
        file["var"] = h5py.ExternalLink("b.h5", "/var")
    adata = dasksc.open(path)
    np.testing.assert_array_equal(adata.uns["n"], np.arange(100.0, 120.0))
    np.testing.assert_array_equal(adata.var["n"], np.arange(6.0))


def test_a_file_that_is_itself_reached_by_a_link_is_read(tmp_path: Path) -> None:
    path = write_store(full(), tmp_path, "h5ad")
    link = tmp_path / "elsewhere" / "atlas.h5ad"
    link.parent.mkdir()
    link.symlink_to(path)
    np.testing.assert_array_equal(dasksc.open(link).X.compute(), VALUES[:20])


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped"])
def test_zipped_stores_write_nothing_anywhere(tmp_path: Path, name: str) -> None:
    archive = zip_of(write_store(small(), tmp_path, "zarr3"))
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr(name, "harm")
    before = sorted(tmp_path.rglob("*"))
    matrix = open_matrix(archive, "X")
    matrix.fetch(np.arange(20))
    assert sorted(tmp_path.rglob("*")) == before


def _read_lzf_rows(path: Path) -> None:
    make_adata(50).write_h5ad(path / "lzf.h5ad", compression="lzf")
    open_matrix(path / "lzf.h5ad", "X").fetch(np.arange(50))


@pytest.mark.parametrize("raised", [MemoryError("no room"), ImportError("no module")], ids=repr)
@pytest.mark.parametrize(
    ("failing", "act"),
    [
        ("dasksc.readers.tables.read_elem", lambda path: dasksc.open(write_store(make_adata(50), path, "h5ad"))),
        ("dasksc.readers.tables.read_elem", lambda path: dasksc.open(write_store(make_adata(50), path, "zarr2"))),
        ("dasksc.storage.opening._array_at", lambda path: open_matrix(write_store(make_adata(50), path, "h5ad"), "X")),
        ("numpy.asanyarray", lambda path: array_of("labels", [1, 2])),
        ("pandas.DataFrame.eval", lambda path: dasksc.rows_where(make_adata(20).obs, "float32 > 1")),
        ("dasksc.storage.codecs.Chain.decode", _read_lzf_rows),
        ("dasksc.conversion.tables.write_elem", lambda path: dasksc.convert(make_adata(20), path / "out.zarr")),
    ],
    ids=["h5ad", "zarr", "matrix", "labels", "filter", "rows", "tables"],
)
def test_other_errors_are_not_blamed_on_files(tmp_path: Path, raised: Exception, failing: str, act: Any) -> None:
    with mock.patch(failing, side_effect=raised), pytest.raises(type(raised)) as caught:
        act(tmp_path)
    assert caught.value is raised
    if failing.endswith("read_elem"):
        assert any(str(tmp_path) in note for note in raised.__notes__)


def test_errors_of_the_operating_system_are_not_reported_as_corruption(tmp_path: Path) -> None:
    path = write_store(make_adata(50), tmp_path, "h5ad")
    refused = PermissionError(errno.EACCES, "Permission denied")
    with (
        mock.patch("dasksc.storage.opening._array_at", side_effect=refused),
        pytest.raises(StorageError, match="Permission denied") as caught,
    ):
        open_matrix(path, "X")
    assert not isinstance(caught.value, CorruptDataError)


@pytest.mark.parametrize("metadata", ["3", "[]"])
def test_metadata_of_the_wrong_type_are_blamed_on_the_file(tmp_path: Path, metadata: str) -> None:
    path = write_store(make_adata(50), tmp_path, "zarr2")
    for name in (".zattrs", ".zmetadata"):
        (path / name).unlink(missing_ok=True)
    (path / "X" / ".zattrs").write_text(metadata)
    with pytest.raises(StorageError, match="X"):
        open_matrix(path, "X")
