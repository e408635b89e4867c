"""Unusual and linked files, which are read, and files that change during reading, which raise errors."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
import zarr
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st

import dasksc
from dasksc.errors import CorruptDataError, StorageError
from dasksc.storage import open_matrix
from dasksc.storage.hdf5.direct import read_strings
from tests.support.data import rows_of

pytestmark = pytest.mark.core

VALUES = np.arange(300.0, dtype=np.float32).reshape(50, 6)


def read(path: Path, key: str = "X") -> np.ndarray:
    return rows_of(open_matrix(path, key), np.arange(50))


@pytest.mark.parametrize("chunks", [None, (7, 6)])
def test_links_to_other_files_are_followed(tmp_path: Path, chunks: Any) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file.create_dataset("named_otherwise", data=VALUES, chunks=chunks)
    with h5py.File(tmp_path / "linking.h5", "w") as file:
        file["junk"] = np.full(9999, 5.0)
        file["X"] = h5py.ExternalLink("other.h5", "/named_otherwise")
        file["soft"] = h5py.SoftLink("/X")
    np.testing.assert_array_equal(read(tmp_path / "linking.h5"), VALUES)
    np.testing.assert_array_equal(read(tmp_path / "linking.h5", "soft"), VALUES)


def wait_for_the_clock_of(folder: Path) -> None:
    """Wait until new files get a later timestamp than now, since timestamps of file systems have limited resolution."""
    now, probe = time.time_ns(), folder / "probe"
    probe.touch()
    while probe.stat().st_mtime_ns <= now:
        probe.touch()


@pytest.mark.parametrize("state", ["opened", "read", "pickled"])
@pytest.mark.parametrize(
    ("store", "change"),
    [("zarr2", "removed"), ("zarr2", "replaced"), ("zarr3", "removed with its directory"), ("zarr3", "written")],
)
def test_a_chunk_that_changed_is_refused(tmp_path: Path, store: str, change: str, state: str) -> None:
    path = tmp_path / "atlas.zarr"
    group = zarr.open_group(path, mode="w", zarr_format=int(store[-1]))
    group.create_array("X", data=np.arange(3000, dtype=np.float32).reshape(1500, 2), chunks=(100, 2))
    matrix = open_matrix(path, "X")
    matrix.fetch(np.arange(900, 1000) if state == "read" else np.arange(5))
    if state == "pickled":
        matrix = pickle.loads(pickle.dumps(matrix))
    chunk = path / "X" / ("c/9/0" if store == "zarr3" else "9.0")
    content = chunk.read_bytes()
    wait_for_the_clock_of(tmp_path)
    if change == "written":
        chunk.write_bytes(content)
    else:
        chunk.unlink()
    if change == "replaced":
        chunk.write_bytes(content)
    elif change == "removed with its directory":
        chunk.parent.rmdir()
    with pytest.raises(CorruptDataError, match=r"since (it|the array) was opened"):
        matrix.fetch(np.arange(900, 1000))


def test_a_chunk_from_a_machine_whose_clock_is_ahead_is_read(tmp_path: Path) -> None:
    path = tmp_path / "atlas.zarr"
    zarr.open_group(path, mode="w").create_array("X", data=VALUES, chunks=(10, 6))
    for chunk in (path / "X").rglob("*"):
        os.utime(chunk, ns=(2**62, 2**62))
    wait_for_the_clock_of(tmp_path)
    np.testing.assert_array_equal(read(path), VALUES)


def test_a_filter_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("X", data=VALUES, chunks=(10, 6), scaleoffset=3)
    AnnData(X=VALUES).write_h5ad(tmp_path / "odd.h5ad", compression="gzip")
    with mock.patch.object(h5py.h5z, "filter_avail", return_value=False):
        for call, given in ((read, path), (dasksc.open, tmp_path / "odd.h5ad")):
            with pytest.raises(StorageError, match="filter.*hdf5plugin"):
                call(given)


def test_an_attribute_that_anndata_does_not_know_raises_an_error_of_dasksc(tmp_path: Path) -> None:
    path = tmp_path / "odd.h5ad"
    AnnData(X=VALUES, uns={"a": 1}).write_h5ad(path)
    with h5py.File(path, "r+") as file:
        file["var"].attrs["encoding-version"] = "99.0"
    with pytest.raises(StorageError, match="odd.h5ad"):
        dasksc.open(path)


NAMES = st.text("cell_01 \t\x7f\xe9\u6f22\U0001f600", max_size=300)


@given(names=st.lists(NAMES, max_size=20), seed=st.integers(0, 99))
def test_names_read_from_the_bytes_of_a_file_are_those_that_h5py_reads(names, seed, tmp_path_factory):
    path = tmp_path_factory.mktemp("names") / "names.h5"
    with h5py.File(path, "w") as file:
        file["at_once"] = np.array(names, dtype=h5py.string_dtype())
        one_by_one = file.create_dataset("one_by_one", (len(names),), dtype=h5py.string_dtype())
        for i in np.random.default_rng(seed).permutation(len(names)):
            one_by_one[i] = names[i]
        file.create_dataset("in_chunks", (len(names) + 7,), dtype=h5py.string_dtype(), chunks=(7,))
    with h5py.File(path) as file:
        for name in ("at_once", "one_by_one"):
            found = read_strings(file[name], str(path))
            assert found is None or found.tolist() == file[name].asstr()[:].tolist() == names
            assert found is not None or not names
        assert read_strings(file["in_chunks"], str(path)) is None


def test_a_heap_that_is_damaged_is_left_to_h5py(tmp_path):
    path = tmp_path / "names.h5"
    with h5py.File(path, "w") as file:
        file["names"] = np.array([f"cell {i}" for i in range(100)], dtype=h5py.string_dtype())
    whole = path.read_bytes()
    heap = whole.index(b"GCOL")
    for place, byte in ((heap, 0), (heap + 14, 255), (heap + 24, 255), (heap + 30, 255), (heap + 16, 77)):
        path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
        with h5py.File(path) as file:
            assert read_strings(file["names"], str(path)) is None
