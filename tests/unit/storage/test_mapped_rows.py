"""Rows of many small files, fetched together and one file after the other."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError
from dasksc.storage import ColumnMaps, ConcatenatedMatrix, RowBuffer, concatenated, open_matrix
from dasksc.storage.files import mapping
from dasksc.storage.matrices import CSRMatrix

pytestmark = pytest.mark.core


def write(path: Path, n_obs: int, n_vars: int, seed: int, *, dtype: str = "float32", chunk: int | None = None) -> Path:
    """Write a CSR matrix with empty rows, in one piece, or in uncompressed chunks."""
    rng = np.random.default_rng(seed)
    dense = (rng.random((n_obs, n_vars)) < 0.4) * rng.integers(1, 100, (n_obs, n_vars)) * (rng.random((n_obs, 1)) < 0.8)
    matrix = sp.csr_array(dense.astype(dtype))
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": matrix.shape})
        for name in ("indptr", "indices", "data"):
            values = getattr(matrix, name)
            chunks = None if chunk is None or not len(values) else (min(chunk, len(values)),)
            group.create_dataset(name, data=values, chunks=chunks)
    return path


def one_by_one() -> Any:
    return mock.patch.object(concatenated, "locate", return_value=None)


def batch(fetched: RowBuffer, seed: int) -> tuple[NDArray[Any], ...]:
    order = np.random.default_rng(seed).permutation(fetched.shape[0])
    dense = np.empty(fetched.shape, fetched.dtype)
    fetched.gather(order, out=dense)
    return dense, *fetched.gather_csr(order)


@given(
    parts=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 5, 20]),
            st.sampled_from(["float32"] * 4 + ["float64"]),
            st.sampled_from([None, None, None, 4]),
        ),
        min_size=1,
        max_size=8,
    ),
    join=st.sampled_from([None, "inner", "outer"]),
    is_allowed=st.sampled_from([True, True, False]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=12)
def test_rows_fetched_together_equal_those_fetched_one_part_after_the_other(
    parts: list[tuple[int, str, int | None]], join: str | None, is_allowed: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    widths = rng.integers(4, 12, len(parts)) if join else np.full(len(parts), 9)
    maps = None
    if join:
        genes = [rng.permutation(14)[:width] for width in widths]
        maps = ColumnMaps([np.where(one < 10, one, -1) if join == "inner" else one for one in genes], 14)
    with tempfile.TemporaryDirectory() as folder:
        paths = [
            write(Path(folder, f"{i}.h5ad"), n, int(widths[i]), seed + i, dtype=dtype, chunk=chunk)
            for i, (n, dtype, chunk) in enumerate(parts)
        ]
        matrices = [open_matrix(path, "X") for path in paths]
        joined = ConcatenatedMatrix(label="joined", parts=matrices, maps=maps)
        n_obs = joined.shape[0]
        rows = np.sort(rng.integers(0, n_obs, int(rng.integers(0, 2 * n_obs + 1)))) if n_obs else np.empty(0, np.int64)
        with mapping(is_allowed):
            fast = joined.fetch(rows)
            with one_by_one():
                slow = joined.fetch(rows)
        assert fast.nbytes == slow.nbytes
        for ours, theirs in zip(batch(fast, seed), batch(slow, seed), strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)


@pytest.fixture
def joined(tmp_path: Path) -> ConcatenatedMatrix:
    matrices = [open_matrix(write(tmp_path / f"{i}.h5ad", 20, 9, i), "X", use_mmap=True) for i in range(4)]
    return ConcatenatedMatrix(label="joined", parts=matrices, maps=None)


@pytest.mark.parametrize("rows", [np.arange(0, 80, 3), np.array([10, 31, 52, 73])], ids=["many", "one-of-each"])
def test_no_part_is_fetched_by_itself(rows: NDArray[np.int64], joined: ConcatenatedMatrix) -> None:
    with one_by_one():
        expected = batch(joined.fetch(rows), 0)
    with mock.patch.object(CSRMatrix, "fetch", side_effect=AssertionError):
        fetched = joined.fetch(rows)
    for ours, theirs in zip(batch(fetched, 0), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("at", "value"), [(5, 10**6), (0, -1), (-1, 10**6)])
def test_damaged_offsets_are_refused_as_by_a_part(
    at: int, value: int, joined: ConcatenatedMatrix, tmp_path: Path
) -> None:
    with h5py.File(tmp_path / "2.h5ad", "r+") as file:
        file["X/indptr"][at] = value
    matrices = [open_matrix(tmp_path / f"{i}.h5ad", "X") for i in range(4)]
    damaged = ConcatenatedMatrix(label="joined", parts=matrices, maps=None)
    with pytest.raises(CorruptDataError) as of_part:
        matrices[2].fetch(np.arange(20))
    with pytest.raises(CorruptDataError) as of_all:
        damaged.fetch(np.arange(80))
    assert str(of_all.value) == str(of_part.value)


def test_damaged_columns_are_refused_with_their_file(joined: ConcatenatedMatrix, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "2.h5ad", "r+") as file:
        file["X/indices"][3] = 9
    matrices = [open_matrix(tmp_path / f"{i}.h5ad", "X") for i in range(4)]
    fetched = ConcatenatedMatrix(label="joined", parts=matrices, maps=None).fetch(np.arange(80))
    with pytest.raises(CorruptDataError, match=r"2\.h5ad:/X/indices"):
        batch(fetched, 0)


def test_a_file_replaced_after_a_fetch_is_refused(joined: ConcatenatedMatrix, tmp_path: Path) -> None:
    fetched, expected = joined.fetch(np.arange(80)), batch(joined.fetch(np.arange(80)), 0)
    os.replace(write(tmp_path / "new.h5ad", 30, 9, 7), tmp_path / "2.h5ad")
    with pytest.raises(CorruptDataError, match=r"2\.h5ad was replaced"):
        joined.fetch(np.arange(80))
    joined.fetch(np.arange(40))
    for ours, theirs in zip(batch(fetched, 0), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
