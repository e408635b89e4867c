"""Conversion of selected cells and genes, compared with the batches of a data set with the same selection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import dasksc
from tests.support.conversions import read, same
from tests.support.data import dense, make_adata, write_store

pytestmark = pytest.mark.core

NEEDED = "cell_type == 'T cell' and int64 > -20"


def written(tmp_path: Path, data: Any, **options: Any) -> ad.AnnData:
    dasksc.convert(data, tmp_path / "new.zarr", **{"order": "keep", "verify": True} | options)
    return read(tmp_path / "new.zarr")


@pytest.fixture
def adata() -> ad.AnnData:
    made = make_adata(60, 17)
    made.raw = ad.AnnData(made.X, var=made.var)
    made.var["symbol"] = ["twice" if i in (2, 9) else f"S{i}" for i in range(17)]
    made.var["n"] = np.arange(17)
    made.varm["loadings"] = np.arange(34.0).reshape(17, 2)
    return made


def test_cells_are_those_of_the_filter(tmp_path: Path) -> None:
    adata = make_adata(60, 17, has_everything=True)
    adata.raw = adata
    path = write_store(adata, tmp_path, "h5ad")
    found = written(tmp_path, path, filter=NEEDED)
    rows = dasksc.rows_where(path, NEEDED)
    assert 0 < len(rows) < 60
    expected = adata[rows].copy()
    # An AnnData view drops unused categories; a converted subset keeps them, in tables of obsm as in obs.
    expected.obs, expected.obsm["table"] = adata.obs.iloc[rows], adata.obsm["table"].iloc[rows]
    same(found, expected)
    assert list(found.obs_names) == list(expected.obs_names)
    np.testing.assert_array_equal(dense(found.raw.X), dense(expected.raw.X))


@pytest.mark.parametrize(
    ("genes", "layout", "narrow"),
    [
        ({"genes": ["gene5", "gene0", "gene16"]}, "csr", True),
        ({"genes": ["gene5", "new", "gene0"], "genes_missing": "drop"}, "csr", True),
        (
            {"genes": ["new", "twice", "S1"], "genes_key": "symbol", "genes_repeated": "sum", "genes_missing": "zero"},
            "dense",
            False,
        ),
    ],
    ids=str,
)
def test_genes_are_those_of_a_data_set(
    tmp_path: Path, adata: ad.AnnData, genes: Any, layout: str, narrow: bool
) -> None:
    adata.X = adata.X if layout == "csr" else adata.X.toarray()
    path = write_store(adata, tmp_path, "h5ad")
    options = {"layers": ["counts", "scaled"], "obs": ["int64"]}
    dataset = dasksc.scDataset(path, dasksc.Streaming(), batch_size=60, dtype=None, **genes, **options)
    expected = next(iter(dataset))
    found = written(tmp_path, path, narrow=narrow, **genes)
    np.testing.assert_array_equal(dense(found.X), expected.X.numpy())
    for name in ("counts", "scaled"):
        np.testing.assert_array_equal(dense(found.layers[name]), expected.layers[name].numpy())
    assert sp.issparse(found.X) == (layout == "csr")
    # For the converted store, the data set needs `genes_key`, but neither `genes_missing` nor `genes_repeated`.
    names = list(found.var["symbol"]) if "genes_key" in genes else list(found.var_names)
    options = {"genes": names, "genes_key": genes.get("genes_key"), "dtype": None}
    again = dasksc.scDataset(tmp_path / "new.zarr", dasksc.Streaming(), batch_size=60, **options)
    np.testing.assert_array_equal(next(iter(again)).numpy(), expected.X.numpy())
    if dataset.gene_match is not None:
        assert tuple(names) == dataset.gene_match.names
    assert found.raw.n_vars == 17
    if "genes_missing" not in genes:
        np.testing.assert_array_equal(found.varm["loadings"], adata.varm["loadings"][[5, 0, 16]])


def test_var_follows_the_genes(tmp_path: Path, adata: ad.AnnData) -> None:
    path = write_store(adata, tmp_path, "h5ad")
    found = written(tmp_path, path, genes=["gene5", "new", "gene0"], genes_missing="zero")
    assert list(found.var_names) == ["gene5", "new", "gene0"]
    assert found.var["n"].tolist()[::2] == [5, 0]
    assert np.isnan(found.var["n"].iloc[1])
    assert found.var["symbol"].isna().tolist() == [False, True, False]
    assert "loadings" not in found.varm
    report = dasksc.convert(path, tmp_path / "b.zarr", genes=["gene5", "new"], genes_missing="drop")
    assert report.genes is not None
    assert report.genes.startswith("1 of 2 genes matched by var_names (50.0%); 1 missing, left out: new")


def test_missing_genes_have_the_key_that_was_asked_for(tmp_path: Path, adata: ad.AnnData) -> None:
    path = write_store(adata, tmp_path, "h5ad")
    options: dict[str, Any] = {"genes_key": "symbol", "genes_missing": "zero", "genes_repeated": "sum"}
    found = written(tmp_path, path, genes=["S4", "none", "twice"], **options)
    assert list(found.var["symbol"]) == ["S4", "none", "twice"]
    assert list(found.var_names) == ["gene4", "none", "gene2"]


def test_sums_of_narrow_counts_do_not_wrap(tmp_path: Path) -> None:
    values = np.full((20, 3), 200, dtype=np.uint8)
    var = pd.DataFrame({"symbol": ["a", "a", "b"]}, index=["x", "y", "z"])
    for x, narrow in ((sp.csr_matrix(values), True), (values, False)):
        options: dict[str, Any] = {"genes_key": "symbol", "genes_repeated": "sum", "narrow": narrow}
        found = written(tmp_path, ad.AnnData(x, var=var), genes=["a", "b"], overwrite=True, **options)
        np.testing.assert_array_equal(dense(found.X), [[400, 200]] * 20)
        assert found.X.dtype == (np.uint16 if narrow else np.uint64)


def test_several_atlases_become_an_aligned_subset(tmp_path: Path) -> None:
    parts = [make_adata(30, 17), make_adata(30, 17)]
    parts[1].var_names = [f"gene{i + 5}" for i in range(17)]
    paths = [write_store(part, tmp_path, "h5ad", name=name) for part, name in zip(parts, "ab", strict=True)]
    found = written(
        tmp_path, paths, join="outer", label="part", filter="part == 'b' or int64 > 0", genes=["gene20", "gene3"]
    )
    kept = np.concatenate([parts[0].obs["int64"] > 0, np.ones(30, dtype=bool)])
    expected = np.zeros((60, 2))
    expected[30:, 0] = dense(parts[1].X)[:, 15]
    expected[:30, 1] = dense(parts[0].X)[:, 3]
    np.testing.assert_array_equal(dense(found.X), expected[kept])
