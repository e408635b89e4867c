"""Converted atlases: every cell of the input exactly once, whatever happens during the conversion."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from numpy.typing import NDArray

import dasksc
from dasksc.conversion import converting, scanning
from dasksc.errors import CorruptDataError, InputError, MissingKeyError, StorageError
from dasksc.output import shards
from tests.support.conversions import contents, make_parts_small, order_of, read, same, write_gzipped
from tests.support.data import dense, make_adata, write_store

pytestmark = pytest.mark.core


@pytest.fixture
def small_parts(monkeypatch):
    make_parts_small(monkeypatch)


def few_columns(n_obs: int, n_vars: int, **options: Any) -> ad.AnnData:
    """Return `make_adata` with fewer columns, for tests that do not check the completeness of the output."""
    source = make_adata(n_obs, n_vars, **options)
    source.obs = source.obs[["cell_type", "cell_type_missing", "float32"]]
    del source.layers["counts"]
    return source


# Each layout of X; the layers include both layouts.
@pytest.mark.parametrize(("format", "layout"), [("h5ad", "csr"), ("zarr2", "dense")])
@pytest.mark.usefixtures("small_parts")
def test_every_cell_is_converted_once_with_all_its_data(tmp_path, format, layout):
    source = make_adata(60, 17, layout=layout, has_everything=format == "h5ad")
    path = write_store(source, tmp_path, format)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    is_verified = format == "zarr2"
    report = dasksc.convert(path, tmp_path / "a::b.zarr", verify=is_verified)
    assert (report.n_obs, report.n_vars, report.is_verified) == (60, 17, is_verified)
    assert report.left_out == (["obsp/neighbours"] if source.obsp else [])
    written = read(tmp_path / "a::b.zarr")
    same(written, source)
    assert not np.array_equal(order_of(written, source), np.arange(60))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([path.name, "a::b.zarr"])
    assert {file: file.read_bytes() for file in before} == before
    files = [file for file in (tmp_path / "a::b.zarr").rglob("*") if file.is_file()]
    assert json.loads(report.to_json())["n_bytes"] == sum(file.stat().st_size for file in files)


@pytest.mark.usefixtures("small_parts")
def test_dense_matrices_become_sparse_without_their_zeros(tmp_path):
    rng = np.random.default_rng(0)
    X = rng.poisson(0.5, (60, 17)).astype(np.float32)
    X[3, :4] = [-0.0, np.nan, -2.5, 0]
    X[7] = 0
    source = few_columns(60, 17, layout="dense")
    source.X, source.layers["counts"] = X, rng.poisson(0.2, (60, 17)).astype(np.int64)
    source.layers["counts"][0, 0] = 300
    path = tmp_path / "atlas.h5ad"
    source.write_h5ad(path, compression="gzip")
    report = dasksc.convert(path, tmp_path / "out.zarr", seed=1, layout="csr", memory_limit="20kB", verify=True)
    assert (report.types["X"], report.types["layers/counts"]) == ("float32", "uint16")
    written = read(tmp_path / "out.zarr")
    order = order_of(written, source)
    for name, values in (("X", X), ("counts", source.layers["counts"])):
        found = written.X if name == "X" else written.layers[name]
        expected = sp.csr_matrix(values[order])
        assert np.array_equal(found.indptr, expected.indptr)
        assert np.array_equal(found.indices, expected.indices)
        assert np.array_equal(found.data, expected.data, equal_nan=True)
    assert not sp.issparse(written.obsm["X_pca"])


def test_the_order_depends_on_the_seed(tmp_path):
    source = small(60)
    for i, seed in enumerate([0, 0, 1]):
        dasksc.convert(source, tmp_path / f"{i}.zarr", seed=seed)
    one, same_seed, other = (order_of(read(tmp_path / f"{i}.zarr"), source).tolist() for i in range(3))
    assert one == same_seed != other


@pytest.mark.parametrize(("layout", "compression"), [("csr", "gzip"), ("dense", None)])
@pytest.mark.usefixtures("small_parts")
def test_a_shuffle_through_runs_is_the_same_shuffle(tmp_path, monkeypatch, layout, compression):
    source = few_columns(40, 9, layout=layout)
    path = tmp_path / "atlas.h5ad"
    source.write_h5ad(path, compression=compression)
    dasksc.convert(source, tmp_path / "direct.zarr", seed=3)
    monkeypatch.setattr(converting, "needs_runs", lambda matrix: True)
    with mock.patch.object(scanning, "ConcatenatedMatrix", wraps=scanning.ConcatenatedMatrix) as staged:
        dasksc.convert(path, tmp_path / "runs.zarr", seed=3, memory_limit="1kB", verify=True)
    assert min(len(call.kwargs["parts"]) for call in staged.call_args_list) > 3
    assert contents(tmp_path / "direct.zarr") == contents(tmp_path / "runs.zarr")
    same(read(tmp_path / "runs.zarr"), source)


def test_values_take_the_narrowest_type_of_counts_that_holds_all_of_them(tmp_path):
    cases = [
        ([1, 255], "float32", "uint8"),
        ([1, 256], "float64", "uint16"),
        ([1, 65_536], "int64", "uint32"),
        # The largest uint32, which float32 cannot represent exactly.
        ([1, 2**32 - 1], "float64", "uint32"),
        ([1, 2**32], "float64", "float64"),
        ([1, -1], "int32", "int32"),
        ([1, 0.5], "float32", "float32"),
        ([1, np.nan], "float32", "float32"),
        ([1, -0.0], "float32", "float32"),
        ([True, True], "bool", "bool"),
    ]
    layers = {
        f"{values} as {dtype}": sp.csr_matrix((np.array(values, dtype=dtype), [0, 1], [0, 2]), shape=(1, 2))
        for values, dtype, _ in cases
    }
    source = ad.AnnData(obs=pd.DataFrame(index=["a"]), var=pd.DataFrame(index=["x", "y"]), layers=layers)
    report = dasksc.convert(source, tmp_path / "out.zarr", order="keep", verify=True)
    written = zarr.open_group(tmp_path / "out.zarr", mode="r")["layers"]
    for (name, layer), (_, _, expected) in zip(layers.items(), cases, strict=True):
        assert written[name]["data"].dtype == report.types[f"layers/{name}"] == expected, name
        stored = np.asarray(written[name]["data"][:]).astype(layer.dtype)
        np.testing.assert_array_equal(stored, layer.data)
        np.testing.assert_array_equal(np.signbit(stored.astype(float)), np.signbit(layer.data.astype(float)))


@pytest.mark.parametrize(
    ("stored", "values", "written", "compression", "narrow"),
    [
        ("float32", [200, 100, 7], "uint16", "gzip", True),
        ("uint8", [200, 100, 7], "uint16", "gzip", False),
        ("int64", [2**62, 2**61, -1], "int64", None, False),
    ],
)
def test_duplicates_are_summed_before_they_are_narrowed(tmp_path, stored, values, written, compression, narrow):
    # Row 0 has two values in column 3; the columns of row 1 are not sorted.
    data = np.array([*values[:2], values[2], 1, 2], dtype=stored)
    X = sp.csr_matrix((data, np.array([3, 3, 5, 4, 1]), np.array([0, 2, 3, 5])), shape=(3, 10))
    assert not X.has_canonical_format
    source = tmp_path / "atlas.h5ad"
    ad.AnnData(X=X, obs=pd.DataFrame(index=list("abc"))).write_h5ad(source, compression=compression)
    report = dasksc.convert(source, tmp_path / "out.zarr", seed=1, narrow=narrow, verify=True)
    assert report.types == {"X": written if narrow or stored == "uint8" else stored}
    got = read(tmp_path / "out.zarr")
    assert got.X.has_canonical_format
    got = got[list("abc")].copy()
    expected = np.zeros((3, 10), dtype=object)
    expected[0, 3], expected[1, 5], expected[2, 4], expected[2, 1] = values[0] + values[1], values[2], 1, 2
    np.testing.assert_array_equal(got.X.toarray().astype(object), expected)


@pytest.mark.parametrize(("n_vars", "expected"), [(256, "uint8"), (65_536, "uint16"), (65_537, "int32")])
def test_column_numbers_take_the_narrowest_type_for_all_genes_and_every_reader_takes_it(tmp_path, n_vars, expected):
    X = sp.csr_matrix(([1.0, 2.0, 3.0], ([0, 0, 1], [0, 7, n_vars - 1])), shape=(2, n_vars))
    obs, var = pd.DataFrame(index=["a", "b"]), pd.DataFrame(index=[f"g{i}" for i in range(n_vars)])
    dasksc.convert(ad.AnnData(X=X, obs=obs, var=var), tmp_path / "out.zarr", order="keep", verify=True)
    assert zarr.open_array(tmp_path / "out.zarr" / "X" / "indices").dtype == expected
    for written in (read(tmp_path / "out.zarr").X, dasksc.open(tmp_path / "out.zarr").X.compute()):
        assert (written != X).nnz == 0
    for layout in ("dense", "csr"):
        (batch,) = dasksc.scDataset(tmp_path / "out.zarr", dasksc.Streaming(), batch_size=2, layout=layout)
        assert np.array_equal(batch.to_dense().numpy(), X.toarray())
    # Convert the narrow store again with narrow=False, which widens the column indices.
    dasksc.convert(tmp_path / "out.zarr", tmp_path / "wide.zarr", narrow=False, verify=True)
    assert zarr.open_array(tmp_path / "wide.zarr" / "X" / "indices").dtype == np.int32
    assert abs(read(tmp_path / "wide.zarr")[["a", "b"]].X - X).max() == 0


@pytest.mark.parametrize(("shape", "layout"), [((0, 5), "csr"), ((4, 0), "dense"), ((4, 5), "csr")])
def test_atlases_without_cells_genes_or_values_come_out_as_they_are(tmp_path, shape, layout):
    X: Any = np.zeros(shape, dtype=np.float32)
    obs = pd.DataFrame(index=[f"c{i}" for i in range(shape[0])])
    var = pd.DataFrame(index=[f"g{i}" for i in range(shape[1])])
    source = ad.AnnData(X=sp.csr_matrix(X) if layout == "csr" else X, obs=obs, var=var)
    dasksc.convert(source, tmp_path / "out.zarr", verify=True)
    written = read(tmp_path / "out.zarr")
    assert written.shape == shape
    assert np.array_equal(dense(written.X), X)


def test_raw_comes_too_and_an_atlas_may_lack_x(tmp_path):
    source = few_columns(30, 17)
    source.raw = source.copy()
    source.X = None
    dasksc.convert(source, tmp_path / "out.zarr", verify=True)
    written = read(tmp_path / "out.zarr")
    assert written.X is None
    order = order_of(written, source)
    assert np.array_equal(dense(written.raw.X), dense(source.raw.X)[order])
    assert list(written.raw.var_names) == list(source.raw.var_names)


def small(n_obs: int, **columns: Any) -> ad.AnnData:
    obs = pd.DataFrame(columns, index=[f"c{i}" for i in range(n_obs)])
    return ad.AnnData(X=np.ones((n_obs, 2), dtype=np.float32), obs=obs, var=pd.DataFrame(index=["g0", "g1"]))


def test_python_objects_in_obs_are_stored_as_what_they_are(tmp_path):
    cases = [
        (["a", None, "b", "a"], "category"),
        (["a", np.nan, "b", "c"], "category"),
        ([None, None, None, None], "category"),
        (["a", "b", "c", "d"], "string"),
        ([True, None, False, True], "boolean"),
        ([True, False, False, True], "bool"),
        ([1, None, 2**60 + 1, 4], "Int64"),
        ([1, 2, 3, 4], "int64"),
        ([1.5, None, 2.0, 1], "float64"),
    ]
    names = [f"c{i}" for i in range(4)]
    columns = {f"note{i}": pd.Series(values, dtype=object, index=names) for i, (values, _) in enumerate(cases)}
    source = small(4, **columns, other=range(4))
    for name, column in columns.items():
        source.var[name] = pd.Series(column.tolist()[:2], dtype=object, index=source.var_names)
    source.obsm["table"] = pd.DataFrame(columns)
    dasksc.convert(source, tmp_path / "out.zarr", verify=True)
    assert all(source.obs[name].dtype == object for name in columns)
    written = read(tmp_path / "out.zarr")
    for name, (values, kind) in zip(columns, cases, strict=True):
        for table, expected in ((written.obs, values), (written.var, values[:2]), (written.obsm["table"], values)):
            if table is not written.var:
                assert pd.api.types.is_string_dtype(table[name]) if kind == "string" else table[name].dtype == kind
                table = table.loc[names]
            found = table[name].astype(object)
            assert [None if pd.isna(value) else value for value in found] == [
                None if pd.isna(value) else value for value in expected
            ]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (["a", 1, "b"], "'bad' contains values of pandas type 'mixed-integer'"),
        ([b"a", b"b", b"c"], "'bad' contains values of pandas type 'bytes'"),
        ([2**70, 1, None], "'bad' cannot be stored"),
        (pd.Categorical(["a", 1, "b"]), "'bad' contains values of pandas type 'mixed-integer'"),
        (pd.to_datetime(["2020-01-01"] * 3), "cannot be written by AnnData.*'bad'"),
        (pd.to_timedelta([1, 2, 3]), "cannot be written by AnnData.*'bad'"),
    ],
)
def test_a_column_that_cannot_be_stored_is_named_before_anything_is_written(tmp_path, values, named):
    source = small(3, good=[1, 2, 3], bad=values)
    with pytest.raises(InputError, match=f"obs.*{named}"):
        dasksc.convert(source, tmp_path / "out.zarr")
    source = small(3)
    source.uns["bad"] = object()
    with pytest.raises(InputError, match="uns.*AnnData.*'bad'"):
        dasksc.convert(source, tmp_path / "out.zarr")
    assert os.listdir(tmp_path) == []


def test_lazy_array_code_is_computed_on_the_way(tmp_path):
    import dask.array as da

    source = few_columns(30, 17)
    path = write_store(source, tmp_path, "h5ad")
    opened = dasksc.open(path)
    opened.X = da.log1p(opened.X)
    report = dasksc.convert(opened, tmp_path / "out.zarr", verify=True)
    assert report.types["X"] == "float32"
    written = read(tmp_path / "out.zarr")
    assert np.array_equal(dense(written.X), np.log1p(dense(source.X))[order_of(written, source)])


@pytest.fixture(scope="module")
def gzipped(tmp_path_factory):
    return write_gzipped(tmp_path_factory.mktemp("input"))


def shard_of(writer: shards.ShardWriter) -> Path:
    """Return the file that a writer completes, which has a temporary name: ``.0.<unique>.partial``."""
    path = Path(writer._file.name)
    return path.with_name(path.name.split(".")[1])


@pytest.mark.usefixtures("small_parts")
def test_completed_parts_are_not_written_again(tmp_path, gzipped, monkeypatch):
    written: list[Path] = []
    write_chunk = shards.ShardWriter._write_chunk

    def full(self: shards.ShardWriter, chunk: NDArray[Any]) -> None:
        if len(written) > 60:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(shard_of(self))
        write_chunk(self, chunk)

    before = gzipped.read_bytes()
    monkeypatch.setattr(shards.ShardWriter, "_write_chunk", full)
    with pytest.raises(StorageError, match="out.zarr") as caught:
        dasksc.convert(gzipped, tmp_path / "out.zarr")
    assert caught.value.errno == errno.ENOSPC
    assert "run the same conversion again to resume it" in str(caught.value)
    assert gzipped.read_bytes() == before
    assert not (tmp_path / "out.zarr").exists()
    with pytest.raises(StorageError):
        dasksc.open(tmp_path / "out.zarr.partial" / "store")
    there = {path for path in written if path.exists()}
    assert there
    # Files that a killed process leaves behind; the second name is Zarr's.
    for name in (".0.1-ab.partial", "zarr.ab.partial"):
        (tmp_path / "out.zarr.partial" / "store" / "X" / name).touch()
    again: list[Path] = []
    monkeypatch.setattr(
        shards.ShardWriter, "_write_chunk", lambda self, chunk: (again.append(shard_of(self)), write_chunk(self, chunk))
    )
    dasksc.convert(gzipped, tmp_path / "out.zarr", verify=True)
    assert not there & set(again)
    assert not list((tmp_path / "out.zarr").rglob("*.partial"))
    same(read(tmp_path / "out.zarr"), ad.read_h5ad(gzipped))


def test_nothing_is_overwritten_unasked(tmp_path, gzipped):
    target = tmp_path / "out.zarr"
    dasksc.convert(gzipped, target, order="keep")
    with pytest.raises(InputError, match="out.zarr.*overwrite=True"):
        dasksc.convert(gzipped, target)
    assert os.listdir(tmp_path) == ["out.zarr"]
    dasksc.convert(gzipped, target, overwrite=True)
    assert order_of(read(target), ad.read_h5ad(gzipped)).tolist() != list(range(600))
    folder = tmp_path / "notes"
    folder.mkdir()
    with pytest.raises(InputError, match="is not a Zarr store, so it is not overwritten"):
        dasksc.convert(gzipped, folder, overwrite=True)
    assert folder.exists()


@pytest.mark.filterwarnings("ignore:Observation names are not unique")
def test_an_unfinished_conversion_is_not_resumed_with_other_arguments(tmp_path, monkeypatch):
    for name in "ab":
        small(3, kind=list("xyx")).write_h5ad(tmp_path / f"{name}.h5ad")
    data, target = [tmp_path / "a.h5ad", tmp_path / "b.h5ad"], tmp_path / "out.zarr"
    begun = {"label": "of", "keys": ["one", "two"]}
    with monkeypatch.context() as patched:
        patched.setattr(converting, "write_tables", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dasksc.convert(data, target, **begun)
    for name, other in (
        ("label", None),
        ("keys", ["1", "2"]),
        ("join", "outer"),
        ("narrow", False),
        ("group_by", "kind"),
        ("layout", "csr"),
        ("filter", "kind == 'x'"),
        ("genes", ["g1", "g0"]),
    ):
        with pytest.raises(InputError, match=f"differs from this one in .*{name}"):
            dasksc.convert(data, target, **{**begun, name: other})
    # Options that do not affect the content may differ.
    dasksc.convert(data, target, **begun, memory_limit="1GiB", verify=True)
    assert set(read(target).obs["of"]) == {"one", "two"}


def test_an_input_that_changed_meanwhile_is_not_gone_on_with(tmp_path, monkeypatch):
    path = write_store(small(3), tmp_path, "h5ad")
    monkeypatch.setattr(converting, "write_tables", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dasksc.convert(path, tmp_path / "out.zarr")
    small(3, kind=list("xyx")).write_h5ad(path)
    with pytest.raises(InputError, match="differs from this one in inputs"):
        dasksc.convert(path, tmp_path / "out.zarr")


def test_a_target_may_not_be_an_input(tmp_path):
    path = write_store(make_adata(), tmp_path, "zarr3")
    for target in (path, path / "sub.zarr"):
        with pytest.raises(InputError, match="is, or lies in, the input"):
            dasksc.convert(path, target, overwrite=True)


@pytest.mark.parametrize("order", ["shuffle", "keep"])
def test_cells_that_agree_in_several_columns_lie_together(tmp_path, order):
    rng = np.random.default_rng(0)
    source = small(
        500, gene=rng.choice(["b", "a", "c"], 500), line=pd.Categorical(rng.choice(["y", "x"], 500), ["y", "x"])
    )
    source.obs["line"] = source.obs.line.where(rng.random(500) < 0.9)
    dasksc.convert(source, tmp_path / "out.zarr", order=order, group_by=["line", "gene"])
    written = ad.read_zarr(tmp_path / "out.zarr")
    n_missing = int(source.obs.line.isna().sum())
    assert written.obs.line[-n_missing:].isna().all()
    assert written.obs.gene[-n_missing:].tolist() == sorted(written.obs.gene[-n_missing:])
    keys = list(zip(written.obs.line[:-n_missing], written.obs.gene[:-n_missing], strict=True))
    assert keys == sorted(keys, key=lambda key: ("yx".index(key[0]), key[1]))
    places = [source.obs_names.get_loc(name) for name in written.obs_names]
    for key in set(keys):
        own = [place for place, other in zip(places, keys, strict=False) if other == key]
        assert (own == sorted(own)) == (order == "keep")
    if order == "keep":
        sets = dasksc.CellSets(["line", "gene"], 8)
        assert not len(sets.bind(500, lambda name: written.obs[name]).groups.members)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"seed": 2**64}, InputError, r"seed.*2\*\*64"),
        ({"order": "sorted"}, InputError, "order.*'keep'.*'sorted'"),
        ({"group_by": 3}, InputError, "group_by.*3"),
        ({"group_by": []}, InputError, "obs"),
        ({"group_by": ["cell_type", "cell_type"]}, InputError, "each only once"),
        ({"group_by": ["cell_type", "celltype"]}, MissingKeyError, "'celltype'.*'cell_type'"),
        ({"layout": "dense"}, InputError, "layout.*'csr'.*'dense'"),
        ({"filter": "cell_type == 'no'"}, InputError, "filter=.*no.*6"),
        ({"genes_missing": "zero"}, InputError, "genes_missing=.*genes="),
        ({"target": "s3://bucket/out.zarr"}, InputError, "'s3://bucket/out.zarr' cannot be written.*local"),
        ({"target": "a.h5ad/out.zarr"}, StorageError, "a.h5ad/out.zarr"),
    ],
)
@pytest.mark.filterwarnings("ignore:Observation names are not unique")
def test_what_cannot_be_used_is_refused_and_leaves_nothing_behind(tmp_path, monkeypatch, arguments, error, message):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        small(3, cell_type=list("xyz")).write_h5ad(f"{name}.h5ad")
    with pytest.raises(error, match=message):
        dasksc.convert(["a.h5ad", "b.h5ad"], **{"target": "out.zarr"} | arguments)
    assert sorted(os.listdir()) == ["a.h5ad", "b.h5ad"]


@pytest.mark.parametrize("name", ["indices", "data"])
def test_verifying_finds_a_value_that_went_wrong(tmp_path, name, monkeypatch):
    append = shards.ShardWriter.append

    def wrong(self: shards.ShardWriter, rows: NDArray[Any]) -> None:
        if shard_of(self).parent.parent.name == name and shard_of(self).parents[2].name == "X":
            rows = rows.copy()
            rows[11] += 1
        append(self, rows)

    monkeypatch.setattr(shards.ShardWriter, "append", wrong)
    with pytest.raises(
        CorruptDataError, match="row [0-9]+ has (sum|checksum) .*, but its source, row [0-9]+ of the input, has"
    ):
        dasksc.convert(few_columns(60, 17), tmp_path / "out.zarr", verify=True)
    assert not (tmp_path / "out.zarr").exists()


# Arrays in which AnnData stores each kind of column, and the name of the column in the error.
@pytest.mark.parametrize(
    ("array", "named"),
    [("text", "text"), ("kind/categories", "kind"), ("whole/values", "whole"), ("_index", "the names of the cells")],
)
def test_verifying_finds_one_value_of_a_table_that_went_wrong(tmp_path, array, named, monkeypatch):
    from dasksc.conversion import tables

    n = 9
    source = small(
        n,
        number=np.where(np.arange(n) % 2, np.nan, np.arange(n)),
        text=[f"t{i}" for i in range(n)],
        kind=pd.Categorical(pd.array(["a", "b", None] * 3, dtype="string")),
        whole=pd.array([None, 1, 2] * 3, dtype="Int64"),
    )
    write = tables.write_tables

    def damaged(adata: Any, folder: Path, store: Path, *more: Any) -> None:
        write(adata, folder, store, *more)
        stored = zarr.open_group(store / "obs", mode="r+")[array]
        if isinstance(stored, zarr.Group):  # AnnData 0.13 writes strings as a group
            stored = stored["values"]
        value = stored[-1:]
        stored[-1:] = np.array(["other"]) if value.dtype.kind in "OT" else ~value if value.dtype == bool else value + 1

    monkeypatch.setattr(tables, "_PIECE_ROWS", 4)
    monkeypatch.setattr(converting, "write_tables", damaged)
    with pytest.raises(CorruptDataError, match=f"obs differs from the input in {named}\\. .* convert again"):
        dasksc.convert(source, tmp_path / "out.zarr", order="keep", verify=True)
    assert not (tmp_path / "out.zarr").exists()
