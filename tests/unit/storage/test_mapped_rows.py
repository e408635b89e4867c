"""Rows of many small files, fetched together and one file after the other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import anndata as ad
import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError
from dasksc.storage import ColumnMaps, ConcatenatedMatrix, RowBuffer, open_matrix
from dasksc.storage.matrices import CSRMatrix
from tests.support.data import make_values, write_store

pytestmark = pytest.mark.core


def batch(fetched: RowBuffer) -> list[NDArray[Any]]:
    order = np.random.default_rng(0).permutation(fetched.shape[0])
    dense = np.empty(fetched.shape, fetched.dtype)
    fetched.gather(order, out=dense)
    return [dense, *fetched.gather_csr(order)]


def joined_in(folder: Path, maps: ColumnMaps | None = None) -> ConcatenatedMatrix:
    matrices = [open_matrix(folder / f"{i}.h5ad", "X", use_mmap=True) for i in range(4)]
    return ConcatenatedMatrix(label="joined", parts=matrices, maps=maps)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, n in enumerate((20, 7, 20, 33)):
        write_store(ad.AnnData(make_values(n, 9, seed=i)), tmp_path, "h5ad", str(i))
    return tmp_path


ORDERS = [np.random.default_rng(i).permutation(9) for i in range(4)]
MAPS = {
    "same genes": None,
    "inner": ColumnMaps([np.where(order < 6, order, -1) for order in ORDERS], 9),
    "outer": ColumnMaps([order + i for i, order in enumerate(ORDERS)], 14),
}


@pytest.mark.parametrize("maps", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("rows", [np.arange(0, 80, 3), np.array([10, 10, 25, 31, 79])], ids=["many", "few"])
def test_rows_fetched_together_equal_those_fetched_one_part_after_the_other(
    maps: ColumnMaps | None, rows: NDArray[np.int64], folder: Path
) -> None:
    joined = joined_in(folder, maps)
    with mock.patch.object(ConcatenatedMatrix, "_fetch_together", return_value=None):
        slow = joined.fetch(rows)
    with mock.patch.object(CSRMatrix, "fetch", side_effect=AssertionError("a part is fetched by itself")):
        fast = joined.fetch(rows)
    assert fast.nbytes == slow.nbytes
    for ours, theirs in zip(batch(fast), batch(slow), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("at", "value"), [(5, 10**6), (0, -1), (-1, 10**6)])
def test_damaged_offsets_are_refused_as_by_a_part(at: int, value: int, folder: Path) -> None:
    with h5py.File(folder / "2.h5ad", "r+") as file:
        file["X/indptr"][at] = value
    with pytest.raises(CorruptDataError) as of_part:
        open_matrix(folder / "2.h5ad", "X").fetch(np.arange(20))
    with pytest.raises(CorruptDataError) as of_all:
        joined_in(folder).fetch(np.arange(80))
    assert str(of_all.value) == str(of_part.value)


def test_damaged_columns_are_refused_with_their_file(folder: Path) -> None:
    with h5py.File(folder / "2.h5ad", "r+") as file:
        file["X/indices"][3] = 9
    with pytest.raises(CorruptDataError, match=r"2\.h5ad:/X/indices"):
        batch(joined_in(folder).fetch(np.arange(80)))


def test_a_file_replaced_after_a_fetch_is_refused(folder: Path) -> None:
    joined = joined_in(folder)
    fetched, expected = joined.fetch(np.arange(80)), batch(joined.fetch(np.arange(80)))
    os.replace(write_store(ad.AnnData(make_values(30, 9)), folder, "h5ad", "new"), folder / "2.h5ad")
    with pytest.raises(CorruptDataError, match=r"2\.h5ad was replaced"):
        joined.fetch(np.arange(80))
    joined.fetch(np.arange(27))
    for ours, theirs in zip(batch(fetched), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
