"""SOMA experiments and Parquet files of lists: their batches are those of the same atlas as h5ad."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import dasksc
from dasksc.pushdown import matrix_of
from dasksc.readers import soma
from dasksc.readers.parquet import ParquetMatrix
from tests.support.corpora import N_OBS, N_VARS, source, write_parquet, write_soma
from tests.support.data import dense

pytestmark = [
    pytest.mark.core,
    # tiledbsoma 2.3 with pyarrow and anndata
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module", params=[write_soma, write_parquet], ids=["soma", "parquet"])
def atlas(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, dict[str, Any]]:
    """Return the path of an h5ad file, and the path and options of the same atlas in another format."""
    folder = tmp_path_factory.mktemp("corpora")
    adata = source()
    adata.write_h5ad(folder / "atlas.h5ad")
    write: Callable[..., tuple[Path, dict[str, Any]]] = request.param
    return folder / "atlas.h5ad", *write(adata, folder)


def test_a_catalogue_of_what_it_cannot_open_is_refused(atlas: Any, tmp_path: Path) -> None:
    _, path, options = atlas
    with pytest.raises(dasksc.InputError, match=path.name):
        dasksc.index([path], tmp_path / "all.catalog", reader_options=options)


def test_an_atlas_opens_as_its_h5ad(atlas: Any) -> None:
    h5ad, path, options = atlas
    expected, found = dasksc.open(h5ad), dasksc.open(path, reader_options=options)
    np.testing.assert_array_equal(dense(found.X.compute()), dense(expected.X.compute()))
    for key in found.layers:
        np.testing.assert_array_equal(dense(found.layers[key].compute()), dense(expected.layers[key].compute()))
    assert list(found.obs_names) == list(expected.obs_names)
    assert list(found.var_names) == list(expected.var_names)
    for name in expected.obs:
        np.testing.assert_array_equal(found.obs[name], expected.obs[name].to_numpy())
    some = dasksc.open(path, obs=["int64"], names=False, reader_options=options).obs
    assert list(some) == ["int64"]
    assert some.index.equals(pd.RangeIndex(N_OBS))
    with pytest.raises(dasksc.MissingKeyError, match="int63"):
        dasksc.open(path, obs=["int63"], reader_options=options)
    with pytest.raises(dasksc.InputError, match="gene_tabel"):
        dasksc.open(path, reader_options={"gene_tabel": "x"})


def test_a_matrix_is_pickled_and_holds_at_most_its_cost(atlas: Any) -> None:
    h5ad, path, options = atlas
    matrix = matrix_of(dasksc.open(path, reader_options=options).X)
    again = pickle.loads(pickle.dumps(matrix))
    rows = np.array([0, 3, 3, 19, 20, 21, 101])
    for one in (matrix, again):
        found = one.fetch(rows)
        np.testing.assert_array_equal(
            found.gather_csr(np.arange(7))[2], sp.csr_matrix(dense(dasksc.open(h5ad).X.compute())[rows]).data
        )
    whole = matrix.fetch(np.arange(N_OBS))
    assert whole.nbytes <= N_OBS * matrix.cost.held
    assert matrix.fetch(np.empty(0, np.int64)).shape == (0, N_VARS)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an experiment with two measurements, two layers, gaps in the numbers of its cells, and two writes of X."""
    tiledbsoma = pytest.importorskip("tiledbsoma")
    import pyarrow as pa

    path = tmp_path_factory.mktemp("soma") / "gaps.soma"
    with tiledbsoma.Experiment.create(str(path)) as made:
        made.add_new_collection("ms")
        obs = pa.table({"soma_joinid": [2, 3, 5, 8], "obs_id": list("abcd"), "kind": [0, 1, 0, 1]})
        var = pa.table({"soma_joinid": [1, 4], "name": ["g", "h"]})
        made.add_new_dataframe("obs", schema=obs.schema, domain=[[0, 9]]).write(obs)
        for name in ("RNA", "ADT"):
            measurement = made.ms.add_new_collection(name, tiledbsoma.Measurement)
            measurement.add_new_dataframe("var", schema=var.schema, domain=[[0, 9]]).write(var)
            measurement.add_new_collection("X")
            for layer in ("raw", "scaled"):
                array = measurement.X.add_new_sparse_ndarray(layer, type=pa.int32(), shape=(10, 10))
                for rows, columns, values in (([8, 2], [4, 1], [84, 21]), ([2, 5, 7], [4, 1, 1], [24, 51, 71])):
                    names = ("soma_dim_0", "soma_dim_1", "soma_data")
                    arrays = [pa.array(rows), pa.array(columns), pa.array(values, pa.int32())]
                    array.write(pa.table(dict(zip(names, arrays, strict=True))))
            measurement.X.add_new_dense_ndarray("dense", type=pa.float32(), shape=(10, 10)).write(
                (slice(0, 9), slice(0, 9)), pa.Tensor.from_numpy(np.arange(100, dtype=np.float32).reshape(10, 10))
            )
    return path


CHOSEN = {"measurement": "RNA", "layer": "raw", "var_names": "name"}


def test_rows_of_an_experiment_are_its_numbers_and_a_filter_selects_among_them(experiment: Path) -> None:
    data = dasksc.open(experiment, reader_options=CHOSEN)
    expected = np.array([[21, 24], [0, 0], [51, 0], [0, 84]])
    np.testing.assert_array_equal(dense(data.X.compute()), expected)
    np.testing.assert_array_equal(data.layers["dense"].compute(), [[21, 24], [31, 34], [51, 54], [81, 84]])
    assert list(data.obs_names) == list("abcd")
    assert list(data.var_names) == ["g", "h"]
    some = dasksc.open(experiment, reader_options={**CHOSEN, "value_filter": "kind == 1"})
    np.testing.assert_array_equal(dense(some.X.compute()), expected[[1, 3]])
    np.testing.assert_array_equal(some.layers["dense"].compute(), [[31, 34], [81, 84]])
    assert list(some.obs_names) == ["b", "d"]


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({}, "RNA.*ADT|ADT.*RNA"),
        ({"measurement": "rna"}, "rna.*RNA"),
        ({"measurement": "RNA"}, "raw.*scaled"),
        ({**CHOSEN, "layer": "row"}, "row.*raw"),
        ({**CHOSEN, "var_names": "nam"}, "nam.*name"),
        ({**CHOSEN, "value_filter": "kinds == 1"}, "value_filter.*kinds"),
        ({**CHOSEN, "value_filter": "kind == 7"}, "value_filter.*no cell"),
    ],
)
def test_choices_of_an_experiment_that_it_lacks_are_named(
    experiment: Path, options: dict[str, str], facts: str
) -> None:
    with pytest.raises(dasksc.InputError, match=facts):
        dasksc.open(experiment, reader_options=options)


def test_what_is_no_experiment_and_damaged_ones_are_refused(experiment: Path, tmp_path: Path) -> None:
    with pytest.raises(dasksc.StorageError, match="SOMACollection.*ADT"):
        dasksc.open(experiment / "ms")
    copy = shutil.copytree(experiment, tmp_path / "copy.soma")
    data = dasksc.open(copy, reader_options=CHOSEN)
    for file in copy.glob("ms/RNA/X/raw/__fragments/*/a0.tdb"):
        file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(dasksc.CorruptDataError, match=r"copy\.soma:/ms/RNA/X/raw"):
        data.X.compute()
    shutil.rmtree(copy / "ms" / "RNA" / "var")
    with pytest.raises(dasksc.StorageError, match=r"copy\.soma"):
        dasksc.open(copy, reader_options=CHOSEN)


def test_values_written_after_an_experiment_was_opened_are_not_read(experiment: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import tiledbsoma

    copy = shutil.copytree(experiment, tmp_path / "copy.soma")
    data = dasksc.open(copy, reader_options=CHOSEN)
    with tiledbsoma.open(str(copy / "ms/RNA/X/raw"), "w") as array:
        columns = {"soma_dim_0": [3], "soma_dim_1": [1], "soma_data": pa.array([31], pa.int32())}
        array.write(pa.table(columns))
    assert dense(data.X.compute())[1, 0] == 0
    assert dense(dasksc.open(copy, reader_options=CHOSEN).X.compute())[1, 0] == 31


def test_a_fetch_decodes_each_row_group_once(tmp_path: Path) -> None:
    path, options = write_parquet(source(), tmp_path)
    matrix = matrix_of(dasksc.open(path, reader_options=options).X)
    with mock.patch.object(ParquetMatrix, "_group", autospec=True, side_effect=ParquetMatrix._group) as decoded:
        matrix.fetch(np.array([0, 1, 19, 40, 41, 102]))
    assert [call.args[1] for call in decoded.call_args_list] == [0, 2, 5]


def test_a_table_of_cells_is_joined_by_its_key(tmp_path: Path) -> None:
    adata = source()
    path, options = write_parquet(adata, tmp_path)
    doses = pd.array([*range(2**60, 2**60 + N_OBS - 1), None], "Int64")  # float64 would round them
    cells = pd.DataFrame({"barcode": adata.obs_names[::-1], "dose": doses})
    cells.set_index("barcode").to_parquet(tmp_path / "doses.parquet")
    options |= {"obs_table": str(tmp_path / "doses.parquet"), "obs_key": "barcode"}
    adata.write_h5ad(tmp_path / "own.h5ad")
    data = dasksc.open(path, obs=["dose"], reader_options=options, attach={"obsm/X_pca": tmp_path / "own.h5ad"})
    assert (len(data.obsm["X_pca"]), data.obs["dose"].to_list()) == (N_OBS, cells["dose"].to_list()[::-1])
    cells[1:].to_csv(tmp_path / "cells.csv", index=False)
    with pytest.raises(dasksc.InputError, match="barcode.*cell102"):
        dasksc.open(path, reader_options=options | {"obs_table": str(tmp_path / "cells.csv")})


def lists(folder: Path, genes: Any, expressions: Any) -> Any:
    """Return the atlas of a Parquet file with these lists."""
    pa = pytest.importorskip("pyarrow")
    given = {
        "genes": pa.array(genes, pa.list_(pa.int64())),
        "expressions": pa.array(expressions, pa.large_list(pa.float32())),
    }
    path, options = write_parquet(source()[: len(genes)].copy(), folder, **given)
    return dasksc.open(path, reader_options=options)


@pytest.mark.parametrize(
    ("genes", "expressions", "facts"),
    [
        ([[3, 4]], [[1, 1]], "row 0 .*4"),
        ([[3, 10**12]], [[1, 1]], "row 0 .*1000000000000"),
        ([[3], [3, 1]], [[1], [2, -2]], "row 1 .*1"),
        ([[3, 5]], [[-1, 1]], "row 0 .*-1"),
        ([[3, 5]], [[1]], "row 0 .*2 and 1"),
        ([None], [[1]], "missing.*genes"),
        ([[3]], [[None]], "missing.*expressions"),
    ],
)
def test_bad_lists_are_refused_by_row(tmp_path: Path, genes: Any, expressions: Any, facts: str) -> None:
    with pytest.raises(dasksc.CorruptDataError, match=rf"cells\.parquet.*{facts}"):
        lists(tmp_path, genes, expressions).X.compute()


def test_empty_cells_and_repeated_genes_are_those_of_csr(tmp_path: Path) -> None:
    data = lists(tmp_path, [[], [5, 3, 5], [1]], [[], [1, 2, 3], [-2]])
    expected = np.zeros((3, N_VARS))
    expected[1, data.var["token_id"].to_list().index(5)] = 4
    expected[1, data.var["token_id"].to_list().index(3)] = 2
    np.testing.assert_array_equal(dense(data.X.compute()), expected)


def test_options_and_tables_of_parquet_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path, options = write_parquet(source(), tmp_path)
    for changed, facts in (
        ({"gene_table": str(tmp_path / "gone.parquet")}, "gone.parquet"),
        ({"genes": "gene"}, "gene.*genes"),
        ({"gene_names": "symbol"}, "symbol.*ensembl_id"),
        ({"token": "ensembl_id"}, "integers"),
        ({"expressions": "text"}, "lists"),
        ({"obs_key": "barcode"}, "obs_table"),
        ({"cell_names": "barcodes"}, "barcodes.*barcode"),
    ):
        with pytest.raises(dasksc.DaskscError, match=facts):
            dasksc.open(path, reader_options={**options, **changed})
    with pytest.raises(dasksc.InputError, match="gene_table"):
        dasksc.open(path)
    data = dasksc.open(path, reader_options=options)
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 2000 + content[2004:])
    with pytest.raises(dasksc.CorruptDataError, match=r"cells\.parquet"):
        data.X.compute()
    with pytest.raises(dasksc.StorageError, match=r"cells\.parquet"):
        dasksc.open(path, reader_options=options).X.compute()
    path.write_bytes(content[:1000])
    with pytest.raises(dasksc.StorageError, match=r"cells\.parquet"):
        dasksc.open(path, reader_options=options)


def test_storage_options_of_soma_have_the_names_of_object_stores_or_of_tiledb():
    given = {"aws_region": "eu", "endpoint_url": "http://127.0.0.1:9", "skip_signature": True, "retry_config": {}}
    config = dict(soma._config({**given, "vfs.s3.max_parallel_ops": 4}))
    options = {name.removeprefix("vfs.s3."): value for name, value in config.items() if name.startswith("vfs.s3.")}
    place = {"region": "eu", "endpoint_override": "http://127.0.0.1:9", "scheme": "http"}
    assert options == place | {"no_sign_request": "true", "max_parallel_ops": "4"}
    with pytest.raises(dasksc.InputError, match="colour"):
        soma._config({"colour": 1})
