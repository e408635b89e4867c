"""Slices read through h5py and zarr-python: no more memory than requested, and errors that name a broken array."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from dasksc.storage.arrays import BrokenRunError
from dasksc.storage.file_identity import FileIdentity
from dasksc.storage.files import LocalFile
from dasksc.storage.hdf5.reader import H5Array, H5File
from dasksc.storage.sliced import SlicedArray
from dasksc.storage.zarr.reader import ZarrArray, ZarrFile

pytestmark = pytest.mark.core

N_ROWS, N_COLUMNS = 20_000, 25


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 1000, (N_ROWS, N_COLUMNS), dtype=np.int32)


@pytest.fixture(scope="module", params=["h5py", "h5py chunked", "zarr-python"])
def array(request: pytest.FixtureRequest, values: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> SlicedArray:
    path = tmp_path_factory.mktemp("sliced") / "array"
    if request.param == "zarr-python":
        zarr.open_group(path, mode="w").create_array("X", data=values, chunks=(96, N_COLUMNS))
        return ZarrArray(ZarrFile(str(path)), "X")
    with h5py.File(path, "w") as file:
        file.create_dataset("X", data=values, chunks=(96, N_COLUMNS) if "chunked" in request.param else None)
    return H5Array(H5File(LocalFile(FileIdentity.of(path))), "X")


def read(array: SlicedArray, starts: Any, stops: Any) -> tuple[list[np.ndarray], int]:
    """Return the values of each run, and the number of bytes held."""
    starts, stops = np.asarray(starts, dtype=np.int64), np.asarray(stops, dtype=np.int64)
    reached = array.locate(starts, stops)
    (block,) = reached.owners
    firsts = (reached.at - np.uint64(block.ctypes.data)).astype(np.int64) // (4 * N_COLUMNS)
    return [block[a : a + n] for a, n in zip(firsts, stops - starts, strict=True)], reached.held_bytes


@given(st.lists(st.tuples(st.integers(0, N_ROWS), st.integers(0, 300)), min_size=1, max_size=60))
def test_any_runs_are_read(array: SlicedArray, values: np.ndarray, runs: list[tuple[int, int]]) -> None:
    starts = np.sort([start for start, _ in runs])
    stops = np.minimum(starts + [n for _, n in runs], N_ROWS)
    for start, stop, got in zip(starts, stops, read(array, starts, stops)[0], strict=True):
        if stop > start:
            np.testing.assert_array_equal(got, values[start:stop])


def test_scattered_rows_hold_no_rows_in_between(
    array: SlicedArray, values: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = []
    reader = array.reader()

    def recording() -> Any:
        def read(start: int, stop: int, *, into: np.ndarray) -> None:
            slices.append(stop - start)
            reader(start, stop, into=into)

        return read

    monkeypatch.setattr(array, "reader", recording)
    monkeypatch.setattr("dasksc.storage.sliced._SLICE_BYTES", 2**16)
    rows = np.arange(0, N_ROWS, 7)
    got, held = read(array, rows, rows + 1)
    np.testing.assert_array_equal(np.concatenate(got), values[rows])
    assert held == len(rows) * 4 * N_COLUMNS
    # Neighboring rows are read together, but no slice exceeds the limit.
    assert len(slices) < len(rows) / 50
    assert max(slices) <= 2**16 // (4 * N_COLUMNS)


def test_a_broken_chunk_is_named(values: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "array"
    zarr.open_group(path, mode="w", zarr_format=3).create_array("X", data=values, chunks=(96, N_COLUMNS))
    (path / "X" / "c" / "2" / "0").write_bytes(b"not what was there")
    array = ZarrArray(ZarrFile(str(path)), "X")
    np.testing.assert_array_equal(read(array, [10], [11])[0][0], values[10:11])
    with pytest.raises(BrokenRunError) as raised:
        read(array, [200], [210])
    assert (raised.value.start, raised.value.stop) == (200, 210)
