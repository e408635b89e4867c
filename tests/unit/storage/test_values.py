"""Values compared with those that AnnData reads: rows of matrices, obs columns, and tensors of a data set."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import dask.array as da
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st

import dasksc
from dasksc.atlas.encoding import encode_column
from dasksc.atlas.view import AnnDataView
from dasksc.errors import CorruptDataError, FetchError, InputError
from dasksc.pushdown import matrix_of
from tests.support.data import (
    SAMPLE_FILES,
    SAMPLE_ZARRS,
    STORES,
    dense,
    make_adata,
    sample,
    unpacked_sample,
    write_store,
)

# AnnData 0.13 sets this deprecated pandas option when it subsets.
pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:The 'mode.chained_assignment' option is deprecated")]

# An atlas as `dasksc.open` opens it, and as AnnData reads it.
Opened = tuple[ad.AnnData, ad.AnnData]


def both(path: Path) -> Opened:
    """Open a store with dasksc and with AnnData, without AnnData's warnings about old files."""
    opened = dasksc.open(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return opened, ad.read_h5ad(path) if path.suffix == ".h5ad" else ad.read_zarr(path)


@pytest.fixture(scope="module", params=STORES, ids="-".join)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    format, layout = request.param
    return both(write_store(make_adata(layout=layout, has_everything=True), tmp_path_factory.mktemp("stores"), format))


@pytest.fixture(scope="module", params=SAMPLE_FILES + SAMPLE_ZARRS)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    name = request.param
    if name.endswith(".h5ad"):
        return both(sample(name))
    return both(unpacked_sample(name, tmp_path_factory.mktemp("archives")))


def matrices(opened: ad.AnnData, expected: ad.AnnData) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of every lazy matrix, the matrix in `opened`, and the one in `expected`."""
    if expected.X is not None:
        yield "X", opened.X, expected.X
    for part in ("layers", "obsm", "obsp"):
        for name in getattr(expected, part):
            if name is None or not isinstance(getattr(opened, part)[name], da.Array):
                # Tables, and graphs that AnnData before 0.7 stored in uns, are in memory.
                continue
            yield f"{part}/{name}", getattr(opened, part)[name], getattr(expected, part)[name]
    if expected.raw is not None:
        yield "raw/X", opened.raw.X, expected.raw.X


def assert_rows_equal(opened: ad.AnnData, expected: ad.AnnData, draws: list[float]) -> None:
    for name, array, values in matrices(opened, expected):
        matrix = matrix_of(array)
        n_obs, n_vars = values.shape
        rows = np.sort((np.array(draws) * n_obs).astype(np.int64))
        order = np.random.default_rng(0).permutation(len(rows))
        fetched = matrix.fetch(rows)
        out = np.empty((len(rows), n_vars), dtype=values.dtype)
        fetched.gather(order, out=out)
        np.testing.assert_array_equal(out, dense(values)[rows][order], err_msg=name)


@given(draws=st.lists(st.floats(0, 1, exclude_max=True), max_size=30))
def test_any_rows_of_any_matrix_are_those_that_anndata_reads(written: Opened, draws: list[float]) -> None:
    assert_rows_equal(*written, draws)


def test_every_row_of_a_real_file_and_scattered_ones_are_those_that_anndata_reads(real: Opened) -> None:
    n_obs = real[0].n_obs
    assert_rows_equal(*real, (np.arange(n_obs) / n_obs + 1e-9).tolist())
    for n_rows in (0, 1, 7, 30):
        assert_rows_equal(*real, np.random.default_rng(n_rows).random(n_rows).tolist())


def assert_column_equal(column: pd.Series, array: np.ndarray, labels: list[Any] | None) -> None:
    """Check that the encoded column, decoded with its labels, equals `column`."""
    assert len(array) == len(column)
    missing = column.isna().to_numpy()
    if labels is None:
        decoded, known = array, ~missing
        assert np.isnan(array[missing].astype(float)).all()
    else:
        assert array.dtype == np.int64
        np.testing.assert_array_equal(array == -1, missing)
        decoded, known = np.array([*labels, None], dtype=object)[array], ~missing
    assert decoded[known].tolist() == column.to_numpy(dtype=object)[known].tolist()


def test_every_obs_column_of_every_kind_survives_being_written_and_encoded(written: Opened) -> None:
    opened, _ = written
    original = make_adata(has_everything=True).obs
    assert list(opened.obs.columns) == list(original.columns)
    for name in original.columns:
        assert_column_equal(original[name], *encode_column(opened.obs[name]))


def test_every_batch_of_a_real_file_holds_the_rows_it_names(real: Opened) -> None:
    opened, expected = real
    if expected.X is None:
        pytest.skip("this file has no X")
    assert_batches_equal(opened, expected, batch_size=64)


def assert_batches_equal(opened: ad.AnnData, expected: ad.AnnData, batch_size: int) -> None:
    dataset = dasksc.scDataset(
        opened,
        dasksc.BlockShuffling(block_size=3),
        batch_size=batch_size,
        fetch_factor=2,
        obs=list(opened.obs.columns),
        layers=[name for name in opened.layers if name is not None],
        obsm=[name for name in expected.obsm if not isinstance(expected.obsm[name], pd.DataFrame)],
        seed=0,
        dtype=None,
    )
    values = dense(expected.X)
    columns = {name: encode_column(opened.obs[name]) for name in expected.obs}
    for name, (array, labels) in columns.items():
        assert_column_equal(expected.obs[name], array, labels)
    seen = []
    for batch in dataset:
        rows = batch.index.numpy()
        seen.extend(rows.tolist())
        np.testing.assert_array_equal(batch.X.numpy(), values[rows])
        for name, tensor in batch.layers.items():
            np.testing.assert_array_equal(tensor.numpy(), dense(expected.layers[name])[rows])
        for name, tensor in batch.obsm.items():
            np.testing.assert_array_equal(tensor.numpy(), dense(expected.obsm[name])[rows])
        for name, tensor in batch.obs.items():
            np.testing.assert_array_equal(tensor.numpy(), columns[name][0][rows])
    assert sorted(seen) == list(range(expected.n_obs))


def test_the_rows_that_a_hook_reads_are_those_that_anndata_reads(real: Opened) -> None:
    opened, expected = real
    rows = np.array([7, 0, 3, 3])
    got = AnnDataView(opened)[rows]
    if expected.X is not None:
        np.testing.assert_array_equal(dense(got.X), dense(expected.X)[rows])
    assert got.obs.astype(str).to_numpy().tolist() == expected.obs.iloc[rows].astype(str).to_numpy().tolist()
    for name in expected.obsm:
        np.testing.assert_array_equal(dense(got.obsm[name]), dense(expected.obsm[name])[rows])


# Large values of each type, and small ones that reveal a wrong sign or a lost fraction.
STORED: dict[str, list[float]] = {
    "bool": [1],
    "uint8": [1, 20, 255],
    "int8": [-128, -1, 127],
    "uint16": [1, 300, 65_535],
    "int16": [-32_768, -1, 300],
    "uint32": [1, 70_000, 2**32 - 1],
    "int32": [-(2**31), -1, 70_000],
    "uint64": [1, 2**40, 2**63],
    "int64": [-(2**63), -1, 2**40],
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
    root = h5py.File(path, "r+") if path.suffix == ".h5ad" else zarr.open_group(path, mode="r+")
    for name in ("X", "layers/same"):
        values = root[f"{name}/data"][:].astype("float16")
        del root[f"{name}/data"]
        if isinstance(root, h5py.File):
            root[f"{name}/data"] = values
        else:
            root[name].create_array("data", data=values)
    if isinstance(root, h5py.File):
        root.close()


def stores_of(dtype: str, layout: str, folder: Path) -> tuple[dict[str, Path], np.ndarray]:
    """Write the atlas with AnnData in both formats and with `convert`; return the paths, and X as float64."""
    adata, values = atlas_of(dtype, layout)
    paths = {format: write_store(adata, folder, format, name=f"{dtype}-{layout}") for format in ("h5ad", "zarr3")}
    if (dtype, layout) == ("float16", "csr"):
        for path in paths.values():
            make_float16(path)
    paths["converted"] = folder / f"{dtype}-{layout}-converted.zarr"
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
        arrays = {"X": (adata.X, expected), "layer": (adata.layers["same"], expected)}
        arrays["obsm"] = adata.obsm["rep"], expected[:, :4]
        assert len({str(array.dtype) for array, _ in arrays.values()}) == 1
        for key, (array, of) in arrays.items():
            assert array.dtype.kind == "f" == array.compute().dtype.kind, (format, key)
            assert array.dtype == array._meta.dtype == array.compute().dtype
            np.testing.assert_array_equal(dense(array.compute()), of)
            if key != "X":
                continue
            with np.errstate(all="ignore"):
                for name, code in BY_ROW.items():
                    wanted = code(da.from_array(of)).compute(scheduler="synchronous")
                    np.testing.assert_allclose(
                        rows_of(code(array)), wanted, rtol=1e-5, err_msg=f"{format}, {key}, {name}"
                    )
                # Dask cannot sum sparse blocks.
                blocks = array.map_blocks(dense, dtype=array.dtype, meta=np.empty((0, 0), array.dtype))
                total = blocks.sum(axis=0).compute(scheduler="synchronous")
            np.testing.assert_allclose(total, of.sum(axis=0), rtol=1e-5, err_msg=f"{format}, {key}, sum")
        for requested in ("float32", None):
            batch = next(iter(dasksc.scDataset(path, dasksc.Streaming(), batch_size=23, dtype=requested)))
            np.testing.assert_allclose(batch.numpy(), expected.astype(requested or adata.X.dtype), rtol=0)


def test_joined_stores_of_several_stored_types_compute_in_a_type_that_holds_all(tmp_path: Path) -> None:
    parts = {dtype: stores_of(dtype, "csr", tmp_path) for dtype in ("uint8", "uint32")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        joined = dasksc.open([paths["converted"] for paths, _ in parts.values()], index_unique="-")
    expected = np.concatenate([values for _, values in parts.values()])
    assert joined.X.dtype == "float64"
    np.testing.assert_allclose(rows_of(joined.X**2), expected**2, rtol=1e-6)
    np.testing.assert_array_equal(rows_of(-joined.X), -expected)


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
