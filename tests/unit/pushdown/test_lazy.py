"""Conversion of a matrix to a Dask array and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.pushdown import DaskMatrix, gather_block, matrix_of, to_dask
from dasksc.storage import Matrix, as_matrix, open_matrix
from dasksc.storage.matrices import CSRMatrix, DenseMatrix
from tests.support.data import LAYOUTS, dense, make_adata, make_values, write_store
from tests.support.recorders import recorded_reads

pytestmark = pytest.mark.core

N_OBS, N_VARS = 60, 17


def read(matrix: Matrix, rows: NDArray[np.int64]) -> NDArray[Any]:
    return dense(gather_block(matrix.fetch(rows), np.arange(len(rows))))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_the_array_has_the_values_of_the_matrix_and_reads_a_chunk_in_one_task(layout: str, dtype: str) -> None:
    values = make_values(N_OBS, N_VARS, layout=layout, dtype=dtype)
    with recorded_reads() as reads:
        array = to_dask(as_matrix(values, "X"), chunk_rows=13)
    assert not reads.reached
    assert (array.shape, array.dtype) == (values.shape, values.dtype)
    assert array.chunks == ((13, 13, 13, 13, 8), (N_VARS,))
    computed = array.compute(scheduler="synchronous")
    assert type(computed) is type(array._meta) is (sp.csr_matrix if layout == "csr" else np.ndarray)
    assert computed.dtype == values.dtype
    np.testing.assert_array_equal(dense(computed), dense(values))
    # The matrix is one node of the graph, shared by the five tasks.
    assert len(dict(array.dask)) == 5 + 1
    kind = CSRMatrix if layout == "csr" else DenseMatrix
    with mock.patch.object(kind, "fetch", autospec=True, side_effect=kind.fetch) as fetch:
        array.blocks[1].compute(scheduler="synchronous")
    assert [call.args[1].tolist() for call in fetch.call_args_list] == [list(range(13, 26))]


def test_a_file_that_was_replaced_gives_other_keys(tmp_path: Path) -> None:
    path = write_store(make_adata(), tmp_path, "h5ad")
    before = to_dask(open_matrix(path, "X")).name
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert to_dask(open_matrix(path, "X")).name != before


def computed_array(kind: str) -> tuple[da.Array, NDArray[Any]]:
    """Return an array whose rows are available only by computing its chunks, and its values."""
    rng = np.random.default_rng(0)
    values = np.where(rng.random((N_OBS, N_VARS)) < 0.3, rng.random((N_OBS, N_VARS)), 0)
    array = da.from_array(values, chunks=(13, 5))
    if kind == "dense":
        return array, values
    to = {"csr": sp.csr_matrix, "csr_array": sp.csr_array, "csc": sp.csc_matrix}[kind]
    return array.map_blocks(to, meta=to((0, 0), dtype=float)), values


@pytest.mark.parametrize("kind", ["dense", "csr", "csr_array", "csc"])
@given(rows=st.lists(st.integers(0, N_OBS - 1), max_size=40).map(sorted))
def test_a_dask_matrix_gives_the_rows_of_the_computed_array(kind: str, rows: list[int]) -> None:
    array, values = computed_array(kind)
    matrix = DaskMatrix(array)
    assert isinstance(matrix, Matrix)
    assert matrix.shape == values.shape
    assert matrix.dtype == values.dtype
    assert matrix.layout == ("dense" if kind == "dense" else "csr")
    taken = np.array(rows, dtype=np.int64)
    fetched = matrix.fetch(taken)
    assert fetched.shape == (len(rows), N_VARS)
    assert fetched.layout == matrix.layout
    np.testing.assert_array_equal(read(matrix, taken), values[taken])


def test_a_dask_matrix_computes_only_the_chunks_that_the_rows_touch() -> None:
    blocks = []

    def seen(block: NDArray[Any], block_info: Any = None) -> NDArray[Any]:
        blocks.append(block_info[0]["chunk-location"][0])
        return block

    array, _ = computed_array("dense")
    matrix = DaskMatrix(array.map_blocks(seen, dtype=float, meta=np.empty((0, 0))))
    matrix.fetch(np.array([0, 1, 27, 27, 30]))
    # Each row chunk has four column chunks.
    assert sorted(blocks) == [0] * 4 + [2] * 4


def test_what_is_no_matrix_is_refused_by_name() -> None:
    computed, _ = computed_array("dense")
    for array in (computed[computed[:, 0] > 0], da.zeros(10), da.zeros((10, 2, 2))):
        with pytest.raises(InputError, match=array.name):
            matrix_of(array)
    for rows in ([-1, 3], [3, N_OBS], [5, 4]):
        with pytest.raises(InputError, match="rows"):
            DaskMatrix(computed).fetch(np.array(rows))
    table = da.zeros((10, 2)).map_blocks(lambda block: block, meta=sp.coo_array((0, 0)))
    table._meta = memoryview(b"")
    with pytest.raises(InputError, match=r"builtins\.memoryview"):
        matrix_of(table)
