"""Names parsed from the bytes of an HDF5 file, compared with those that h5py reads."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasksc.storage.hdf5.strings import read_strings

pytestmark = pytest.mark.core

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
