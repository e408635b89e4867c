"""Values in the types in which they are stored, computed and yielded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import dask.array as da
import h5py
import numpy as np
import pytest
import scipy.sparse as sp
import torch
import zarr

import dasksc
from dasksc.errors import CorruptDataError, FetchError, InputError
from dasksc.pushdown import matrix_of
from tests.support.data import (
    dense,
    write_store,
)

# AnnData 0.13 sets this deprecated pandas option when it subsets.
pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:The 'mode.chained_assignment' option is deprecated")]

# Large values of each type, and small ones that reveal a wrong sign or a lost fraction.
STORED: dict[str, list[float]] = {
    "uint8": [1, 20, 255],
    "uint32": [1, 70_000, 2**32 - 1],
    "int32": [-(2**31), -1, 70_000],
    "float16": [-1.5, 300, 65_504],
    "float32": [-1.5, 300, 70_000],
    "float64": [-1.5, 300, 2**40],
}

BY_ROW: dict[str, Callable[[Any], Any]] = {
    "X ** 2": lambda x: x**2,
    "X * 10": lambda x: x * 10,
    "-X": lambda x: -x,
    "X - 1": lambda x: x - 1,
    "X / 3": lambda x: x / 3,
    "log1p": da.log1p,
    "sqrt": da.sqrt,
    "astype": lambda x: x.astype(np.float64) * 1000,
    "X * X": lambda x: x * x,
}


def atlas_of(dtype: str, layout: str) -> tuple[ad.AnnData, np.ndarray]:
    """Return an atlas with large values of a type in X, a layer and an obsm array, and X as float64."""
    rng = np.random.default_rng(3)
    values = np.array([0, 0, *STORED[dtype]])[rng.integers(0, 2 + len(STORED[dtype]), (23, 9))].astype(dtype)
    # SciPy has no float16; `make_float16` replaces the values in the file.
    X = sp.csr_matrix(values.astype("float32") if dtype == "float16" else values) if layout == "csr" else values
    return ad.AnnData(X=X, layers={"same": X.copy()}, obsm={"rep": values[:, :4]}), values.astype(np.float64)


def make_float16(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        for name in ("X/data", "layers/same/data"):
            values = file[name][:].astype("float16")
            del file[name]
            file[name] = values


def stores_of(dtype: str, layout: str, folder: Path) -> tuple[dict[str, Path], np.ndarray]:
    """Write the atlas with AnnData and with `convert`; return the paths, and X as float64."""
    adata, values = atlas_of(dtype, layout)
    paths = {"h5ad": write_store(adata, folder, "h5ad"), "converted": folder / "converted.zarr"}
    if (dtype, layout) == ("float16", "csr"):
        make_float16(paths["h5ad"])
    dasksc.convert(paths["h5ad"], paths["converted"], order="keep", verify=True)
    return paths, values


def rows_of(array: Any) -> np.ndarray:
    """Return all rows of a Dask array, gathered as for batches."""
    matrix = matrix_of(array)
    fetched = matrix.fetch(np.arange(matrix.shape[0]))
    assert fetched.dtype == matrix.dtype == array.dtype
    out = np.empty(matrix.shape, dtype=matrix.dtype)
    fetched.gather(np.arange(matrix.shape[0]), out=out)
    return out


@pytest.mark.parametrize(("dtype", "layout"), [("uint8", "csr"), ("int32", "dense"), ("float16", "csr")])
def test_array_code_computes_as_on_float64_whatever_type_is_stored(dtype: str, layout: str, tmp_path: Path) -> None:
    paths, expected = stores_of(dtype, layout, tmp_path)
    for format, path in paths.items():
        adata = dasksc.open(path)
        for array, of in (
            (adata.X, expected),
            (adata.layers["same"], expected),
            (adata.obsm["rep"], expected[:, :4]),
        ):
            assert array.dtype.kind == "f"
            assert array.dtype == adata.X.dtype == array._meta.dtype == array.compute().dtype
            np.testing.assert_array_equal(dense(array.compute()), of)
        with np.errstate(all="ignore"):
            for name, code in BY_ROW.items():
                wanted = code(da.from_array(expected)).compute(scheduler="synchronous")
                np.testing.assert_allclose(rows_of(code(adata.X)), wanted, rtol=1e-5, err_msg=f"{format}, {name}")
            total = adata.X.sum(axis=0).compute(scheduler="synchronous")
        np.testing.assert_allclose(total, expected.sum(axis=0), rtol=1e-5, err_msg=format)
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
    values = np.array([*STORED[stored], *np.random.default_rng(0).integers(0, 250, 1000)]).astype(stored)
    if dtype == torch.float16:
        values = np.clip(values, -65_000, 65_000)
    if values.dtype.kind == "f":
        # Exponents from those of subnormal numbers on
        largest = 0x7F7F0000 if dtype == torch.bfloat16 else 0x477FE000
        bits = np.random.default_rng(0).integers(0 if dtype == torch.bfloat16 else 0x32000000, largest, 1000)
        bits = bits.astype(np.uint32)
        values[-1000:] = bits.view(np.float32) * np.where(np.arange(1000) % 2, 1, -1)
        # Ties between two neighbors, the largest value that does not become infinity, and special values
        ties = [0x3F808000, 0x3F818000, 0x7F7F7FFF]
        if dtype == torch.float16:
            ties = [0x3F801000, 0x3F803000, 0x477FEFFF]
        ties = np.array(ties, dtype=np.uint32).view(np.float32)
        values[:6] = [*ties, np.inf, -np.inf, np.nan]
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
        ("float32", 300.0, "uint8", "csr", "dense"),
        ("float64", np.nan, "int32", "dense", "dense"),
        ("uint64", 2**64 - 1, "int64", "csr", "dense"),
        ("float32", 70_000.0, "float16", "csr", "dense"),
        ("float32", 70_000.0, "float16", "dense", "csr"),
        ("int32", 65_536, "uint16", "csr", "csr"),
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
    if tensors == "csr":
        parts = batch.values().numpy(), batch.col_indices().numpy(), batch.crow_indices().numpy()
        # SciPy has no float16, and PyTorch lacks arithmetic for some types.
        batch = torch.from_numpy(sp.csr_matrix((parts[0].astype(np.float64), *parts[1:]), shape=(2, 3)).toarray())
    np.testing.assert_array_equal(batch.numpy(), X[:2])


@pytest.mark.parametrize(
    ("stored", "value", "layout", "tensors"),
    [
        ("int64", 2**53 + 1, "csr", "dense"),
        ("uint64", 2**64 - 1, "csr", "csr"),
    ],
)
def test_an_integer_that_float64_rounds_is_refused_with_its_row(
    stored: str, value: int, layout: str, tensors: str, tmp_path: Path
) -> None:
    X = np.array([[0, 1, 2**60], [3, 0, 2**53], [5, value, 6]], dtype=stored)
    other = X.astype("float64")
    other[2, 1] = 4
    path, narrow = (
        write_store(ad.AnnData(X=sp.csr_matrix(one) if layout == "csr" else one), tmp_path, "h5ad", name)
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
