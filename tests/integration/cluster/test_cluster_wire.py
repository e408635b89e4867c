"""Data sent between a rank and its Dask workers, and the check that both see the same files."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
from dask.sizeof import sizeof
from distributed.protocol import deserialize, serialize

import dasksc
from dasksc.executor.cluster import describe_mismatch, pickle_with_files
from dasksc.executor.tasks import FetchedMatrices, FetchMatrices
from dasksc.storage import as_matrix, open_matrix
from dasksc.storage.files import FileIdentity
from tests.support.data import make_adata, make_values, write_store

pytestmark = pytest.mark.core

ROWS = np.arange(5, 45, dtype=np.int64)


def same_rows(one: Any, other: Any) -> None:
    assert (one.shape, one.dtype, one.layout, one.label) == (other.shape, other.dtype, other.layout, other.label)
    np.testing.assert_array_equal(one.rows, other.rows)
    order = np.random.default_rng(0).permutation(one.shape[0])
    out, expected = np.empty((2, *one.shape), dtype=one.dtype)
    one.gather(order, out=out)
    other.gather(order, out=expected)
    np.testing.assert_array_equal(out, expected)


def address(array: Any) -> int:
    return np.frombuffer(array, dtype=np.uint8).__array_interface__["data"][0]


@pytest.mark.parametrize(("layout", "dtype"), [("csr", np.float32), ("dense", np.float64)])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:0]], ids=len)
def test_a_block_holds_the_same_rows_before_and_after_it_is_sent(layout: Any, dtype: Any, rows: Any) -> None:
    fetched = as_matrix(make_values(60, 17, layout=layout, dtype=dtype), "m").fetch(rows)
    same_rows(fetched.compact(), fetched)
    for one in (fetched, fetched.compact()):
        same_rows(deserialize(*serialize(one)), fetched)
    same_rows(pickle.loads(pickle.dumps(fetched)), fetched)


@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_dasks_serializer_sends_and_receives_a_block_without_copies(layout: Any) -> None:
    fetched = as_matrix(make_values(60, 17, layout=layout), "m").fetch(ROWS).compact()
    header, (pickled, *frames) = serialize((0.5, FetchedMatrices({"X": fetched})))
    sent = {address(frame) for frame in frames}
    arrays = [fetched.rows, *fetched.block] if layout == "csr" else [fetched.rows, fetched.block]
    assert sent == {address(array.reshape(-1).view(np.uint8)) for array in arrays}
    arrived = [bytearray(frame) for frame in frames]
    back = deserialize(header, [pickled, *arrived])[1].parts["X"]
    same_rows(back, fetched)
    assert back.compact() is back
    block = back.block[2] if layout == "csr" else back.block.reshape(-1)
    assert address(block.view(np.uint8)) in {address(frame) for frame in arrived}


# The largest counts lie on both sides of the limits of one byte and two bytes.
@pytest.mark.parametrize(
    ("dtype", "largest", "expected"),
    [(np.float32, 255, np.uint8), (np.float32, 256, np.uint16), (np.float32, 65_536, None)],
)
def test_counts_take_one_or_two_bytes_and_come_back_in_their_type(dtype: Any, largest: int, expected: Any) -> None:
    values = np.tile(np.array([[0, 1, 2, 77, largest]], dtype=dtype), (4, 1))
    fetched = as_matrix(sp.csr_matrix(values), "m").fetch(np.arange(4))
    compact = deserialize(*serialize(fetched.compact()))
    assert compact.block[2].dtype == (dtype if expected is None else expected)
    assert compact.dtype == dtype
    same_rows(compact, fetched)
    assert compact.gather_csr(np.arange(4))[2].dtype == dtype


def test_a_block_weighs_what_it_holds_and_a_mapped_fetch_nothing(tmp_path: Path) -> None:
    path = write_store(make_adata(n_obs=200, n_vars=300), tmp_path, "h5ad")
    fetched = open_matrix(str(path), "X").fetch(np.arange(200))
    compact = fetched.compact()
    _, indices, data = compact.block
    assert sizeof(compact) >= compact.nbytes == indices.nbytes + data.nbytes
    assert sizeof((0.5, FetchedMatrices({"X": compact}))) >= compact.nbytes
    assert sizeof(fetched) < compact.nbytes / 10


def files_of(*matrices: Any) -> set[str]:
    _, files = pickle_with_files(FetchMatrices({str(i): matrix for i, matrix in enumerate(matrices)}))
    return {file.path for file in files}


@pytest.mark.parametrize("format", ["h5ad", "zarr3"])
def test_the_files_behind_a_task_are_found(tmp_path: Path, format: str) -> None:
    path = write_store(make_adata(), tmp_path, format)
    found = files_of(open_matrix(str(path), "X"))
    assert found
    assert all(Path(one).is_absolute() for one in found)
    assert all(str(path) in one for one in found)


def test_the_files_behind_array_code_and_joined_files_are_found(tmp_path: Path) -> None:
    one = write_store(make_adata(), tmp_path, "h5ad", "one")
    two = write_store(make_adata(), tmp_path, "h5ad", "two")
    arrays = [dasksc.open(path).X for path in (one, two)]
    matrix = dasksc.pushdown.matrix_of(da.log1p(da.concatenate(arrays)))
    assert files_of(matrix) == {str(one), str(two)}
    pickled, _ = pickle_with_files(FetchMatrices({"X": matrix}))
    assert pickle.loads(pickled).matrices["X"].shape == (120, 17)


def test_a_file_that_differs_or_is_missing_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 100)
    mine = FileIdentity.of(str(path))
    assert describe_mismatch([mine, mine]) is None
    os.utime(path, ns=(0, 0))
    assert "time" in str(describe_mismatch([mine]))
    path.write_bytes(b"a" * 99)
    assert "99 bytes" in str(describe_mismatch([mine]))
    path.unlink()
    assert str(path) in str(describe_mismatch([mine]))
