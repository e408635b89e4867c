"""Sums, means and variances of lazy Dask arrays, sparse and dense."""

from __future__ import annotations

import tracemalloc
from typing import Any

import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
from anndata import AnnData, concat, read_h5ad

import dasksc
from dasksc.pushdown import RowLocalMatrix, dask_arrays, gather_block, matrix_of, to_dask
from dasksc.storage import as_matrix
from tests.support.data import LAYOUTS, dense, make_adata, make_values, write_store

pytestmark = pytest.mark.core

METHODS = ["sum", "mean", "var", "std", "max", "min"]


def lazy(
    dtype: Any, *, layout: str = "csr", n_obs: int = 60, chunk_rows: int = 7
) -> tuple[da.Array, np.ndarray[Any, Any]]:
    values = make_values(n_obs, 17, layout=layout, dtype=dtype)
    return to_dask(as_matrix(values, "made:/X"), chunk_rows=chunk_rows), dense(values)


# Every method along every axis of both layouts; types and keepdims alternate.
@pytest.mark.parametrize(
    ("layout", "method", "axis", "dtype", "keepdims"),
    [
        (layout, method, axis, ["f4", "f8", "i4", "u1"][(i + j) % 4], (i + j + k) % 2 == 1)
        for k, layout in enumerate(LAYOUTS)
        for j, method in enumerate(METHODS)
        for i, axis in enumerate([None, 0, 1, -1, (0, 1)])
    ],
)
def test_sums_of_chunks_are_those_of_numpy(layout, method, axis, dtype, keepdims, monkeypatch):
    monkeypatch.setattr(dask_arrays, "_PIECE_VALUES", 40)
    array, values = lazy(dtype, layout=layout)
    expected = np.asarray(getattr(values, method)(axis=axis, keepdims=keepdims))
    reduced = getattr(array, method)(axis=axis, keepdims=keepdims)
    assert getattr(np, method)(array, axis=axis, keepdims=keepdims).name == reduced.name
    assert (reduced.dtype, reduced.shape) == (expected.dtype, expected.shape)
    found = reduced.compute()
    assert type(found) is np.ndarray or isinstance(found, np.generic)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5 if dtype == "f4" else 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_changed_in_place_are_reduced_and_written_as_they_are_now(layout, tmp_path):
    array, values = lazy("f4", layout=layout)
    adata = AnnData(array)
    np.sqrt(array, out=array)  # scanpy changes X in this way
    np.testing.assert_allclose(adata.X.sum(axis=0).compute(), np.sqrt(values).sum(axis=0), rtol=1e-5)
    np.testing.assert_allclose(adata.X.std().compute(), np.sqrt(values).std(), rtol=1e-5)
    joined = concat([adata, adata[2:4]], index_unique="-").X  # of views, which are another subclass of Dask arrays
    np.testing.assert_allclose(joined[-2:].compute().sum(), np.sqrt(values)[2:4].sum(), rtol=1e-5)
    adata.write_h5ad(tmp_path / "a.h5ad")
    np.testing.assert_array_equal(read_h5ad(tmp_path / "a.h5ad").to_df(), np.sqrt(values))


@pytest.mark.parametrize("kind", [np.asarray, sp.csr_matrix])
@pytest.mark.parametrize(("n_obs", "mean", "spread", "dtype"), [(300_000, 1.0005, 5e-4, "f4"), (5_000, 1e8, 1, "f8")])
def test_sums_are_accumulated_in_float64_about_any_mean(kind, n_obs, mean, spread, dtype):
    values = np.random.default_rng(0).normal(mean, spread, (n_obs, 2)).astype(dtype)
    array, wide = to_dask(as_matrix(kind(values), "made:/X"), chunk_rows=n_obs // 2), values.astype("f8")
    np.testing.assert_allclose(array.sum(axis=0).compute(), wide.sum(axis=0), rtol=1e-7)
    np.testing.assert_allclose(array.mean().compute(), wide.mean(), rtol=1e-7)
    np.testing.assert_allclose(array.var(axis=0).compute(), wide.var(axis=0), rtol=1e-6)


@pytest.mark.parametrize("kind", [np.asarray, sp.csr_matrix])
@pytest.mark.parametrize("method", ["sum", "var"])
def test_a_chunk_is_reduced_in_less_memory_than_it_takes(method, kind):
    block = kind(np.ones((4_000, 1_000), dtype="f4"))
    array = to_dask(as_matrix(block, "made:/X"))
    reduced = getattr(array, method)(axis=0)
    tracemalloc.start()
    try:
        reduced.compute(scheduler="synchronous")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    n_bytes = 4_000 * 1_000 * (8 if sp.issparse(block) else 4)
    # Dask holds the chunk; a part of it is converted at a time.
    assert peak < 2 * n_bytes


@pytest.mark.parametrize("method", ["sum", "std", "max"])
def test_sums_over_genes_are_computed_row_by_row(method, tmp_path):
    def code(x):
        return x / getattr(x, method)(axis=1)[:, None]

    adata = make_adata(40, 12, layout="csr")
    adata.X = adata.X + sp.csr_matrix(np.eye(40, 12, dtype=np.float32)[:, [0] * 12])
    with np.errstate(invalid="ignore"):
        opened = dasksc.open(write_store(adata, tmp_path, "h5ad"))
        expected = code(dense(adata.X))
        matrix = matrix_of(code(opened.X))
        assert isinstance(matrix, RowLocalMatrix)
        rows = np.arange(3, 33, 5)
        found = dense(gather_block(matrix.fetch(rows), np.arange(len(rows))))
    np.testing.assert_allclose(found, expected[rows], rtol=1e-5)
