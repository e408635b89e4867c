"""Opening of atlases, encoding of obs columns, and the view passed to hooks."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path
from typing import Any

import anndata as ad
import dask.array as da
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from anndata.io import sparse_dataset

import dasksc
from dasksc.atlas.stored import AnnDataView
from dasksc.errors import CorruptDataError, InputError, MissingKeyError, MissingPathError, StorageError
from dasksc.plan.labels import encode_column
from dasksc.pushdown import DaskMatrix, matrix_of
from dasksc.readers.anndata import AnnDataStore
from tests.support.conversions import read
from tests.support.data import (
    FORMATS,
    SAMPLE_FILES,
    SAMPLE_ZARRS,
    STORES,
    arrays_of,
    computed,
    dense,
    make_adata,
    same,
    sample,
    unpacked_sample,
    write_store,
)
from tests.support.recorders import recorded_reads

pytestmark = pytest.mark.core


@pytest.fixture(scope="module", params=STORES, ids=str)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ad.AnnData, Path]:
    """Return an atlas with everything, raw of more genes among it, and the path of its store."""
    format, layout = request.param
    full = make_adata(layout=layout, has_everything=True)
    adata = full[:, 3:9].copy()
    adata.raw = full
    return adata, write_store(adata, tmp_path_factory.mktemp("stored"), format)


def test_a_store_opens_with_everything_in_it_and_reads_nothing_of_the_matrices(stored: Any) -> None:
    path = stored[1]
    with recorded_reads() as reads:
        opened = dasksc.open(path)
        repr(opened)
        da.log1p(opened.X)
    for name in ("X", "layers", "raw/X", "obsm/X_pca", "obsm/sparse", "obsp"):
        assert not reads.of(f"{name}/"), name
    assert not reads.reached
    assert reads.of("obs/")
    with recorded_reads() as reads:
        opened.X[:3].compute(scheduler="synchronous")
    assert reads.reached
    assert not reads.of("layers/")
    expected = read(path)
    same(opened, expected)
    assert set(opened.uns) == set(expected.uns)
    for key, value in arrays_of(opened).items():
        assert isinstance(value, pd.DataFrame if key in ("obsm/table", "raw/var") else da.Array) or "varm" in key


def test_raw_opens_as_an_atlas_of_its_own(stored: Any) -> None:
    adata, path = stored
    for data in (path, dasksc.open(path), adata):
        raw = dasksc.open(data, raw=True)
        np.testing.assert_array_equal(dense(computed(raw.X)), dense(adata.raw.X))
        pd.testing.assert_frame_equal(raw.var, adata.raw.var)
        assert list(raw.obs) == list(adata.obs)


def test_only_the_obs_columns_asked_for_are_read(stored: Any) -> None:
    path = stored[1]
    with recorded_reads() as reads:
        opened = dasksc.open(path, obs=["float32", "cell_type"])
    pd.testing.assert_frame_equal(opened.obs, read(path).obs[["float32", "cell_type"]])
    assert reads.of("obs/float32")
    assert not reads.of("obs/text")
    assert not reads.of("obs/int64")
    assert dasksc.open(path, obs=[]).obs.shape == (60, 0)
    assert list(dasksc.open(path, obs=["flag", "flag"]).obs.columns) == ["flag"]


def test_a_view_reads_rows_into_memory_as_anndata_takes_them(stored: Any) -> None:
    adata, path = stored
    view, rows = AnnDataView(dasksc.open(path)), np.array([2, 17, 40, 41])
    got, expected = view[rows], read(path)[rows].copy()
    assert not got.is_view
    assert isinstance(got.X, sp.csr_matrix if sp.issparse(adata.X) else np.ndarray)
    assert got.X.dtype == expected.X.dtype
    # Codes mean the same in every fetch; AnnData drops unused categories.
    assert list(got.obs["cell_type"].cat.categories) == list(adata.obs["cell_type"].cat.categories)
    for table in (got.obs, got.obsm["table"]):
        for name in table.select_dtypes("category"):
            table[name] = table[name].cat.remove_unused_categories()
    del got.obsp, expected.obsp, got.raw, expected.raw
    same(got, expected)
    got.uns["source"] = "changed"
    assert dict(view[rows].uns) == {"source": "made up"}


@pytest.mark.parametrize("name", SAMPLE_FILES + SAMPLE_ZARRS)
def test_a_file_of_any_anndata_version_opens_as_anndata_reads_it_without_a_warning(name: str, tmp_path: Path) -> None:
    path = sample(name) if name.endswith(".h5ad") else unpacked_sample(name, tmp_path)
    same(dasksc.open(path), read(path))


def test_arrays_in_memory_are_shared_not_copied() -> None:
    adata = make_adata(layout="dense", has_everything=True)
    opened = dasksc.open(adata)
    adata.X[7] = 99
    adata.obsm["X_pca"][7] = 98
    assert (opened.X[7].compute() == 99).all()
    assert (opened.obsm["X_pca"][7].compute() == 98).all()
    assert opened.obsp["neighbours"] is adata.obsp["neighbours"]


@pytest.mark.parametrize("index", [np.arange(60) % 2 == 0, slice(10, 30), [5, 2, 40]])
def test_a_view_of_a_backed_object_opens_with_its_rows_and_columns(tmp_path: Path, index: Any) -> None:
    adata = make_adata()
    adata.raw = adata
    backed = ad.read_h5ad(write_store(adata, tmp_path, "h5ad"), backed="r")
    opened = dasksc.open(backed[index, 3:9])
    expected = adata[index, 3:9]
    np.testing.assert_array_equal(dense(computed(opened.X)), dense(expected.X))
    assert list(opened.obs_names) == list(expected.obs_names)
    np.testing.assert_array_equal(dense(computed(opened.layers["counts"])), dense(expected.layers["counts"]))
    backed.file.close()


def test_stored_arrays_inside_an_anndata_are_read_by_our_readers(tmp_path: Path) -> None:
    adata = make_adata()
    h5ad, store = write_store(adata, tmp_path, "h5ad"), write_store(adata, tmp_path, "zarr3")
    with h5py.File(h5ad) as file:
        group = zarr.open_group(store, mode="r")
        lazy = ad.AnnData(
            X=sparse_dataset(file["X"]),
            layers={"zarr": sparse_dataset(group["X"])},
            obsm={"h5": file["layers/scaled"], "zarr": group["layers/scaled"]},
        )
        opened = dasksc.open(lazy)
    for array in (opened.X, opened.layers["zarr"]):
        assert not isinstance(matrix_of(array), DaskMatrix)
        np.testing.assert_array_equal(dense(computed(array)), dense(adata.X))
    for array in opened.obsm.values():
        np.testing.assert_array_equal(computed(array), adata.layers["scaled"])
    elsewhere = zarr.create_array(zarr.storage.MemoryStore(), shape=(4, 3), dtype="float32")
    with pytest.raises(InputError, match="local directory"):
        dasksc.open(ad.AnnData(X=elsewhere))


def test_an_anndata_without_x_opens(tmp_path: Path) -> None:
    adata = ad.AnnData(obs=make_adata().obs, layers={"counts": make_adata().layers["counts"]})
    for data in (adata, write_store(adata, tmp_path, "h5ad")):
        opened = dasksc.open(data)
        assert opened.X is None
        np.testing.assert_array_equal(dense(computed(opened.layers["counts"])), dense(adata.layers["counts"]))


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an atlas, and with files and folders that are none."""
    folder = tmp_path_factory.mktemp("odd")
    whole = write_store(make_adata(), folder, "h5ad").read_bytes()
    (folder / "empty").mkdir()
    texts = {"text.zarr.zip": b"gene1,gene2\n1,2\n", "cells.csv": b"a,b\n1,2\n", "nothing.h5ad": b""}
    damaged = {"half.h5ad": whole[: len(whole) // 2], "lacking.h5ad": whole, "uneven.h5ad": whole}
    for name, content in (texts | damaged).items():
        (folder / name).write_bytes(content)
    zarr.create_group(folder / "other.zarr").create_array("matrix", shape=(3, 3), dtype="f4")
    with zipfile.ZipFile(folder / "other.zarr.zip", "w") as archive:
        archive.writestr("zarr.json", "{}")
    with h5py.File(folder / "other.h5", "w") as file:
        file["matrix"] = np.zeros((3, 3))
    with h5py.File(folder / "lacking.h5ad", "r+") as file:
        del file["obs/flag"]
    with h5py.File(folder / "uneven.h5ad", "r+") as file:
        del file["obsm/X_pca"]
        file["obsm/X_pca"] = np.zeros((59, 2))
    return folder


@pytest.mark.parametrize(
    ("data", "error", "facts"),
    [
        ("./atlsa.h5ad", MissingPathError, r"atlsa\.h5ad.*atlas\.h5ad"),
        ("./nowhere/atlas.h5ad", FileNotFoundError, "nowhere"),
        ("./disk:/atlas.h5ad", MissingPathError, "nothing at (?!.*did you mean)"),
        ("https:/me:SECRET@host/a.h5ad", MissingPathError, r"^(?!.*SECRET).*https://host/a\.h5ad"),
        ("s3:/bucket/atlas.zarr", MissingPathError, r"s3://bucket/atlas\.zarr"),
        ("./empty", StorageError, "Zarr"),
        ("./other.h5", StorageError, "obs.*var"),
        ("./other.zarr", StorageError, "obs.*var"),
        ("./other.zarr.zip", StorageError, "obs.*var"),
        ("./text.zarr.zip", CorruptDataError, r"text\.zarr\.zip.*16"),
        ("./cells.csv", StorageError, r"cells\.csv.*\.h5ad"),
        ("./nothing.h5ad", CorruptDataError, r"nothing\.h5ad.*0 bytes"),
        ("./half.h5ad", CorruptDataError, "truncated.* bytes"),
        ("./lacking.h5ad", StorageError, r"lacking\.h5ad"),
        ("./uneven.h5ad", StorageError, r"uneven\.h5ad:/obsm/X_pca.*59.*obs"),
        *((data, InputError, r"\.h5ad") for data in (None, 3, np.zeros((3, 3)), da.zeros((3, 3)), [np.zeros((3, 3))])),
        *((data, InputError, "no atlas") for data in ([], (), {})),
    ],
)
def test_what_is_no_atlas_is_refused(
    odd: Path, data: Any, error: type[Exception], facts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(odd)
    with recorded_reads() as reads, pytest.raises(error, match=facts):
        dasksc.open(data)
    assert not reads.of("X/")


@pytest.mark.parametrize(
    ("values", "codes", "labels", "dtype"),
    [
        (pd.Categorical(["b", "a", None, "b"], categories=["b", "c", "a"]), [0, 2, -1, 0], ["b", "c", "a"], "int8"),
        (pd.Categorical([3, 1, 3]), [1, 0, 1], [1, 3], "int8"),
        (["b", "a", "b"], [1, 0, 1], ["a", "b"], "int8"),
        (np.array(["b", None, "a", np.nan], dtype=object), [1, -1, 0, -1], ["a", "b"], "int8"),
        (pd.array(["b", None, "a"], dtype="string"), [1, -1, 0], ["a", "b"], "int8"),
        (np.array([None, None], dtype=object), [-1, -1], [], "int8"),
        ([True, False], [True, False], None, "bool"),
        (pd.array([True, None, False], dtype="boolean"), [1, -1, 0], [False, True], "int8"),
        (np.array([True, None], dtype=object), [1, -1], [False, True], "int8"),
        (np.array([1, 2], dtype=">i4"), [1, 2], None, "int32"),
        (pd.array([1.5, 2], dtype="Float32"), [1.5, 2], None, "float32"),
        (pd.arrays.SparseArray([0, 0, 2]), [0, 0, 2], None, "int64"),
        (pd.array([1, None, 3], dtype="Int64"), [1, np.nan, 3], None, "float64"),
        (np.array([1, None, 3], dtype=object), [1, np.nan, 3], None, "float64"),
    ],
)  # fmt: skip
def test_a_column_is_encoded(values: Any, codes: list[Any], labels: Any, dtype: str) -> None:
    array, found = encode_column(pd.Series(values, name="column"))
    assert (found, str(array.dtype)) == (labels, dtype)
    np.testing.assert_array_equal(array, codes)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_dates_become_seconds_since_1970_and_durations_seconds(unit: str) -> None:
    texts = ["1969-12-31T23:59:58.750", None, "2024-02-29T12:00:00.125"]
    expected = np.array([-1.25, np.nan, 1709208000.125])
    if unit == "s":
        texts, expected = [text and text[:19] for text in texts], np.floor(expected)
    dates = pd.Series(pd.to_datetime(texts)).astype(f"datetime64[{unit}]")
    durations = dates - pd.Timestamp(0)
    berlin = dates.dt.tz_localize("UTC").dt.tz_convert("Europe/Berlin")
    for column in (dates, durations, berlin):
        array, labels = encode_column(column)
        assert labels is None
        assert array.dtype == np.float64
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(
    "values",
    [
        pd.period_range("2020-01", periods=2, freq="M"),
        np.array([1j, 2j]),
        np.array(["a", 1], dtype=object),
        np.array([[1], [2]], dtype=object).tolist(),
    ],
)
def test_a_column_without_tensor_form_is_refused_by_name(values: Any) -> None:
    with pytest.raises(InputError, match="'column'"):
        encode_column(pd.Series(values, name="column"))


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(10, 20, 3), [10, 13, 16, 19]),
        (np.arange(60) % 20 == 0, [0, 20, 40]),
        ([-1, 0], [59, 0]),
        (np.int32(7), [7]),
        (slice(0, 0), []),
    ],
)
def test_a_view_takes_every_kind_of_index(index: Any, rows: list[int]) -> None:
    adata = make_adata()
    got = AnnDataView(dasksc.open(adata))[index]
    assert list(got.obs_names) == [f"cell{row}" for row in rows]
    np.testing.assert_array_equal(dense(got.X), dense(adata.X)[rows])


def test_a_store_that_is_replaced_while_it_is_opened_is_noticed(tmp_path, monkeypatch):
    store = write_store(make_adata(), tmp_path, "zarr3")

    def table(self: Any, *args: Any, read: Any = AnnDataStore.table) -> Any:
        os.utime(store / "X" / "data" / "zarr.json")
        return read(self, *args)

    monkeypatch.setattr(AnnDataStore, "table", table)
    with pytest.raises(CorruptDataError, match="X/data"):
        dasksc.open(store)


@pytest.mark.parametrize("format", FORMATS)
def test_names_are_left_out_if_asked(tmp_path, format):
    path = write_store(make_adata(n_obs=37), tmp_path, format)
    named, unnamed = dasksc.open(path), dasksc.open(path, names=False)
    assert unnamed.obs.index.equals(pd.RangeIndex(37))
    pd.testing.assert_frame_equal(unnamed.obs, named.obs.reset_index(drop=True))
    assert (unnamed.X.compute() != named.X.compute()).sum() == 0
    assert unnamed[3:5].obs.index.tolist() == [3, 4]
    several = dasksc.open([path, path], label="which", names=False)
    assert several.obs.index.equals(pd.RangeIndex(74))
    assert several.obs["which"].tolist() == dasksc.open([path, path], label="which").obs["which"].tolist()
    assert dasksc.open(unnamed).obs.index.equals(unnamed.obs.index)
    with pytest.raises(dasksc.InputError, match="index_unique"):
        dasksc.open([path, path], index_unique="-", names=False)


@pytest.mark.parametrize("index", [[60], [-61], np.ones(59, dtype=bool), ["cell5"], [0.5], [[1, 2]]], ids=str)
def test_a_view_refuses_rows_that_are_not_there(index: Any) -> None:
    with pytest.raises((IndexError, InputError)):
        AnnDataView(dasksc.open(make_adata()))[index]


@pytest.fixture
def table(tmp_path):
    """A table of four files of 20, 21, 22 cells and one that does not exist."""
    for i in range(3):
        make_adata(20 + i).write_h5ad(tmp_path / f"{i}.h5ad")
    rows = {"path": [f"{i}.h5ad" for i in range(4)], "tissue": ["lung", "skin", "lung", None], "age": [1.5, 2, 3, 4]}
    pd.DataFrame(rows).to_csv(tmp_path / "files.csv", index=False)
    return tmp_path / "files.csv"


def test_only_files_that_a_table_selects_are_opened(table):
    one = dasksc.open(table, files="path", where="tissue == 'lung'")
    assert one.n_obs == 42
    assert one.obs["tissue"].tolist() == ["lung"] * 42
    assert one.obs["age"].tolist() == [1.5] * 20 + [3.0] * 22
    both = dasksc.open([table.parent / "0.h5ad", table.parent / "2.h5ad"])
    one.obs = one.obs[both.obs.columns]
    same(one, both)
    assert dasksc.open(table, files="path", where="tissue == 'skin'", obs=["age"]).obs.columns.tolist() == ["age"]
    frame = pd.read_csv(table).assign(path=lambda rows: [str(table.parent / path) for path in rows["path"]])
    assert dasksc.open(frame, files="path", where="age == 2").n_obs == 21


def test_tables_of_files_that_do_not_fit_are_refused(table):
    frame = pd.read_csv(table).assign(path=lambda rows: [str(table.parent / path) for path in rows["path"]])
    column = dasksc.open(frame["path"][0]).obs.columns[0]
    for data, options, error, fact in [
        (table, {"files": "path"}, MissingPathError, "3.h5ad"),
        (table, {"files": "paths"}, MissingKeyError, "'path'"),
        (table, {"files": "path", "where": "tissue == 'liver'"}, InputError, "liver"),
        (table.with_name("no.csv"), {"files": "path"}, MissingPathError, "no.csv"),
        (frame["path"][0], {"files": "path"}, InputError, "csv"),
        (frame["path"][0], {"where": "age == 2"}, InputError, "files="),
        (frame, {}, InputError, "files="),
        (frame.assign(path=frame["path"][0]), {"files": "path"}, InputError, "4 times"),
        (frame.assign(path=None), {"files": "path"}, InputError, "4 rows"),
        (frame, {"files": "age"}, InputError, "4 rows"),
        (frame.assign(**{column: 0}), {"files": "path", "where": "age < 4"}, InputError, column),
        (
            frame.assign(path=[str(table.parent), *frame["path"][1:]]),
            {"files": "path", "where": "age < 2"},
            InputError,
            "3",
        ),
    ]:
        with pytest.raises(error, match=re.escape(fact)):
            dasksc.open(data, **options)
