"""Values in the types in which they are stored, computed and yielded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
import torch
import zarr

import dasksc
from dasksc.errors import CorruptDataError, FetchError, InputError
from dasksc.pushdown import gather_block, matrix_of
from tests.support.data import dense, write_store

pytestmark = pytest.mark.core

# Large values of each type, and small ones that reveal a wrong sign or a lost fraction.
STORED: dict[str, list[float]] = {
    "uint8": [1, 20, 255],
    "uint32": [1, 70_000, 2**32 - 1],
    "int32": [-(2**31), -1, 70_000],
    "float16": [-1.5, 300, 65_504],
    "float32": [-1.5, 300, 70_000],
    "float64": [-1.5, 300, 2**40],
}

BY_ROW: list[Callable[[Any], Any]] = [lambda x: x**2, lambda x: x * 10, lambda x: x - 1, da.log1p]


@pytest.mark.parametrize(("dtype", "layout"), [("uint8", "csr"), ("int32", "dense"), ("float16", "dense")])
def test_array_code_computes_as_on_float64_whatever_type_is_stored(dtype: str, layout: str, tmp_path: Path) -> None:
    values = np.resize([0, 0, *STORED[dtype]], (23, 9)).astype(dtype)
    X, expected = sp.csr_matrix(values) if layout == "csr" else values, values.astype(np.float64)
    adata = ad.AnnData(X, layers={"same": X.copy()}, obsm={"rep": values})
    paths = write_store(adata, tmp_path, "h5ad"), tmp_path / "converted.zarr"
    dasksc.convert(*paths, order="keep", verify=True)
    for path in paths:
        adata = dasksc.open(path)
        for array in (adata.X, adata.layers["same"], adata.obsm["rep"]):
            assert array.dtype.kind == "f"
            assert array.dtype == adata.X.dtype == array._meta.dtype == array.compute().dtype
            np.testing.assert_array_equal(dense(array.compute()), expected)
        with np.errstate(all="ignore"):
            for code in BY_ROW:
                wanted = code(da.from_array(expected)).compute(scheduler="synchronous")
                found = gather_block(matrix_of(code(adata.X)).fetch(np.arange(23)), np.arange(23))
                np.testing.assert_allclose(dense(found), wanted, rtol=1e-5)
        for requested in ("float32", None):
            batch = next(iter(dasksc.scDataset(path, dasksc.Streaming(), batch_size=23, dtype=requested)))
            np.testing.assert_allclose(batch.numpy(), expected.astype(requested or adata.X.dtype), rtol=0)


def set_attribute(store: Path, value: dict[str, str]) -> None:
    zarr.open_array(store / "X", mode="r+").attrs["dasksc"] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about features outside the Zarr v3 specification
        zarr.consolidate_metadata(store)


@pytest.mark.parametrize(("stored", "computed"), [("float32", "float32"), ("float64", "float64"), ("int64", "float64")])
def test_a_converted_store_says_what_type_its_counts_were_of(stored: str, computed: str, tmp_path: Path) -> None:
    counts = np.arange(12).reshape(4, 3).astype(stored)
    source = write_store(ad.AnnData(X=counts, layers={"csr": sp.csr_matrix(counts)}), tmp_path, "h5ad")
    report = dasksc.convert(source, tmp_path / "out.zarr", order="keep")
    root = zarr.open_group(tmp_path / "out.zarr", mode="r+")
    assert report.types == {"X": "uint8", "layers/csr": "uint8"}
    for key in ("X", "layers/csr"):
        assert root[key].attrs["dasksc"] == {"dtype": computed}
    adata = dasksc.open(tmp_path / "out.zarr")
    assert adata.X.dtype == adata.layers["csr"].dtype == dasksc.open(source).X.dtype == computed
    np.testing.assert_array_equal(dense(ad.read_zarr(tmp_path / "out.zarr").X), counts)
    # A type in which stored values would overflow is ignored, and an invalid or non-numeric type is refused.
    set_attribute(tmp_path / "out.zarr", {"dtype": "uint8"})
    assert dasksc.open(tmp_path / "out.zarr").X.dtype == "float32"
    for damaged in ({"dtype": "S3"}, {"dtype": "?!"}, {}):
        set_attribute(tmp_path / "out.zarr", damaged)
        with pytest.raises((CorruptDataError, InputError), match="X"):
            dasksc.open(tmp_path / "out.zarr")


@pytest.mark.parametrize("genes", [None, ["3", "0", "2"]])
@pytest.mark.parametrize("layout", ["csr", "dense"])
@pytest.mark.parametrize("stored", ["int32", "float32", "float64"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_of_two_bytes_round_the_float32_values(dtype: Any, stored: str, layout: str, genes: Any) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 250, 1000).astype(stored)
    if values.dtype.kind == "f":
        # Exponents from those of subnormal numbers on; ties between two neighbors, and the largest finite value
        limits, ties = (0, 0x7F7F0000), [0x3F808000, 0x3F818000, 0x7F7F7FFF]
        if dtype == torch.float16:
            limits, ties = (0x32000000, 0x477FE000), [0x3F801000, 0x3F803000, 0x477FEFFF]
        bits = np.array([*ties, *rng.integers(*limits, 997)], dtype=np.uint32)
        values[:] = bits.view(np.float32) * rng.choice([1, -1], 1000)
        values[-3:] = np.inf, -np.inf, np.nan
    X = sp.csr_matrix(np.resize(values, (250, 4)))
    for row in range(125, 250):  # rows of unsorted columns
        for part in (X.data, X.indices):
            part[X.indptr[row] : X.indptr[row + 1]] = part[X.indptr[row] : X.indptr[row + 1]][::-1].copy()
    adata = ad.AnnData(X if layout == "csr" else X.toarray())
    for batch_size in (25, 250):
        for tensors in ("dense", "csr"):
            options = {"batch_size": batch_size, "layout": tensors, "genes": genes}
            wide, narrow = (
                dasksc.scDataset(adata, dasksc.Streaming(), dtype=one, **options) for one in ("float32", dtype)
            )
            for made, expected in zip(narrow, wide, strict=True):
                assert made.dtype == dtype
                np.testing.assert_array_equal(made.to_dense().float(), expected.to_dense().to(dtype).float())


@pytest.mark.parametrize("tensors", ["dense", "csr"])
@pytest.mark.parametrize("layout", ["csr", "dense"])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_a_value_that_becomes_infinite_in_bfloat16_is_refused_with_its_row(
    layout: str, tensors: str, order: Any
) -> None:
    X = sp.csr_matrix(np.array([[1, 2, 3], [np.inf, 4, np.nan], [5, 6, -3.4e38]], dtype="float32"))
    X = sp.csr_matrix((X.data.reshape(3, 3)[:, order].ravel(), X.indices.reshape(3, 3)[:, order].ravel(), X.indptr))
    adata = ad.AnnData(X if layout == "csr" else X.toarray())
    options = {"batch_size": 3, "layout": tensors, "dtype": torch.bfloat16}
    with pytest.raises(InputError, match="row 2 .*bfloat16.*-inf"):
        list(dasksc.scDataset(adata, dasksc.Streaming(), **options))
    (batch,) = dasksc.scDataset(adata, dasksc.Streaming(indices=[0, 1]), **options)
    np.testing.assert_array_equal(batch.to_dense().float(), [[1, 2, 3], [np.inf, 4, np.nan]])
    with pytest.raises(InputError, match="bfloat16"):
        dasksc.scDataset(adata, dasksc.Streaming(), **options).to_dask()


@pytest.mark.parametrize(
    ("stored", "value", "requested", "layout", "tensors"),
    [
        ("float32", -1.0, "uint8", "csr", "csr"),
        ("float64", np.nan, "int32", "dense", "dense"),
        ("uint64", 2**64 - 1, "int64", "csr", "dense"),
        ("float32", 70_000.0, "float16", "csr", "dense"),
        ("int32", 65_536, "uint16", "csr", "dense"),
        ("float32", 1.5, "uint16", "dense", "dense"),
    ],
)
def test_a_dtype_that_cannot_hold_a_value_is_refused_with_it(
    stored: str, value: float, requested: str, layout: str, tensors: str, tmp_path: Path
) -> None:
    X = np.array([[0, 1, 2], [3, 0, 4], [5, 6, value]], dtype=object).astype(stored)
    path = write_store(ad.AnnData(X=sp.csr_matrix(X) if layout == "csr" else X), tmp_path, "h5ad")
    dataset = dasksc.scDataset(path, dasksc.Streaming(), batch_size=3, dtype=requested, layout=tensors)
    with pytest.raises(InputError, match=rf"row 2 .*{requested}"):
        list(dataset)
    # The other rows fit, and are returned unchanged.
    fitting = dasksc.scDataset(path, dasksc.Streaming(indices=[0, 1]), batch_size=2, dtype=requested, layout=tensors)
    (batch,) = fitting
    np.testing.assert_array_equal(batch.to_dense().numpy(), X[:2])


@pytest.mark.parametrize(("stored", "value"), [("int64", 2**53 + 1), ("uint64", 2**64 - 1)])
@pytest.mark.parametrize("tensors", ["dense", "csr"])
def test_an_integer_that_float64_rounds_is_refused_with_its_row(
    stored: str, value: int, tensors: str, tmp_path: Path
) -> None:
    X = np.array([[0, 1, 2**60], [3, 0, 2**53], [5, value, 6]], dtype=stored)
    other = X.astype("float64")
    other[2, 1] = 4
    path, narrow = (
        write_store(ad.AnnData(X=sp.csr_matrix(one)), tmp_path, "h5ad", name)
        for one, name in ((X, "wide"), (other, "narrow"))
    )
    options: dict[str, Any] = {"strategy": dasksc.Streaming(), "batch_size": 6, "layout": tensors}
    for collection, dtype in ((path, "float32"), (path, None), ([path, narrow], "float32")):
        with pytest.raises((InputError, FetchError), match=f"{value}.*dtype='{stored}'"):
            list(dasksc.scDataset(collection, dtype=dtype, **options))
    lazy = dasksc.open(path).X
    with pytest.raises(InputError, match=f"row 2 .*{value}"):
        (lazy * 2).compute()
    np.testing.assert_array_equal(dense(lazy[:2].compute()), X[:2].astype("float64"))
    # Genes without such a value, and an integer type, are read.
    (some,) = dasksc.scDataset(path, genes=["0", "2"], dtype="float64", **options)
    np.testing.assert_array_equal(some.to_dense().numpy(), X[:, [0, 2]].astype("float64"))
    (whole,) = dasksc.scDataset(path, dtype=stored, **(options | {"layout": "dense"}))
    np.testing.assert_array_equal(whole.numpy(), X)
