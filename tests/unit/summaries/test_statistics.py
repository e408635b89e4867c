"""Statistics in one pass, compared with NumPy in float64 and with scanpy in memory."""

from __future__ import annotations

from typing import Any

import anndata as ad
import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import scipy.sparse as sp

import dasksc
from dasksc import InputError, MissingKeyError, WrongTypeError
from dasksc.summaries.reading import Groups
from tests.support.data import dense, make_adata, write_store

pytestmark = pytest.mark.core

NAMES = ["sum", "mean", "var", "count_nonzero"]


def expected_of(values: Any) -> dict[str, np.ndarray[Any, Any]]:
    values = dense(values).astype(np.float64)
    return {
        "sum": values.sum(axis=0),
        "mean": values.mean(axis=0),
        "var": values.var(axis=0, ddof=1),
        "count_nonzero": (values != 0).sum(axis=0),
    }


def assert_are(found: pd.DataFrame, values: Any) -> None:
    assert (found["n"] == len(dense(values))).all()
    for name, expected in expected_of(values).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("layout", "dtype"), [("csr", "f4"), ("csr", "u1"), ("dense", "f8"), ("dense", "f2"), ("dense", "?")]
)
def test_statistics_of_genes_are_those_of_numpy(layout, dtype, tmp_path):
    values = dense(make_adata(60, 17).X) % 200
    adata = ad.AnnData(sp.csr_matrix(values.astype("f4")) if layout == "csr" else values.astype(dtype))
    if layout == "csr":
        adata.X = sp.csr_matrix(values.astype(dtype))
    for data in (adata, write_store(adata, tmp_path, "h5ad")):
        found = dasksc.statistics(data)
        assert_are(found.genes, adata.X)
        assert found.groups is found.cells is None
        assert list(found.genes.index) == list(adata.var_names)


def test_layers_files_and_dask_arrays_are_read(tmp_path):
    adata = make_adata(60, 17)
    path = write_store(adata, tmp_path, "h5ad")
    assert_are(dasksc.statistics(path, layer="counts").genes, adata.layers["counts"])
    assert_are(dasksc.statistics(write_store(adata, tmp_path, "v3"), layer="scaled").genes, adata.layers["scaled"])
    assert_are(dasksc.statistics([path, path]).genes, sp.vstack([adata.X, adata.X]))
    lazy = dasksc.open(path)
    lazy.X = da.log1p(lazy.X)
    assert_are(dasksc.statistics(lazy).genes, np.log1p(dense(adata.X)))
    for scheduler in ("synchronous", "threads"):
        with dask.config.set(scheduler=scheduler):
            assert_are(dasksc.statistics(path).genes, adata.X)


def test_a_filter_leaves_cells_out(tmp_path):
    adata = make_adata(60, 17)
    path = write_store(adata, tmp_path, "h5ad")
    chosen = adata[adata.obs["int64"] > 0]
    found = dasksc.statistics(path, filter="int64 > 0", by="cell_type", qc=[])
    assert_are(found.genes, chosen.X)
    assert found.groups.obs["n_obs_aggregated"].sum() == chosen.n_obs
    assert list(found.cells.index) == list(chosen.obs_names)
    none = dasksc.statistics(path, filter="int64 > 1000", by="cell_type", qc=[])
    assert (none.genes["n"] == 0).all()
    assert (none.genes["sum"] == 0).all()
    assert none.genes[["mean", "var"]].isna().all(axis=None)
    assert none.groups.shape == (0, 17)
    assert len(none.cells) == 0
    one = dasksc.statistics(adata[:1])
    assert one.genes["var"].isna().all()


def test_variances_about_a_large_mean_are_right_in_many_rows():
    rng = np.random.default_rng(0)
    first = rng.normal(size=(10_000, 3)) * [1, 3, 0.01] + [1e6, 1e7, 1e5]
    rows = da.concatenate([da.from_array(first, chunks=(10_000, 3)) + 1e-3 * i for i in range(20)])
    values = rows.compute()
    groups, n = np.repeat(["a", "b"], [60_000, 140_000]), 200_000
    adata = ad.AnnData(values, obs=pd.DataFrame({"group": pd.Categorical(groups)}, index=np.arange(n).astype(str)))
    found = dasksc.statistics(adata, by="group")
    exact = (values.astype(np.longdouble) - values.mean(axis=0, dtype=np.longdouble)) ** 2
    np.testing.assert_allclose(found.genes["var"], (exact.sum(axis=0) / (n - 1)).astype(float), rtol=1e-6)
    np.testing.assert_allclose(found.genes["mean"], values.mean(axis=0), rtol=1e-12)
    for i, name in enumerate("ab"):
        part = values[groups == name]
        np.testing.assert_allclose(found.groups.layers["var"][i], part.var(axis=0, ddof=1), rtol=1e-6)


@pytest.mark.parametrize("by", ["cell_type", ["cell_type", "flag"]])
def test_groups_are_laid_out_as_scanpy_does(by, tmp_path):
    adata = make_adata(200, 17)
    adata.obs["flag"] = adata.obs["flag"].astype(str)
    theirs = sc.get.aggregate(adata, by, NAMES)
    ours = dasksc.statistics(write_store(adata, tmp_path, "h5ad"), by=by).groups
    assert list(ours.obs_names) == list(theirs.obs_names)
    assert list(ours.var_names) == list(theirs.var_names)
    for name in [by] if isinstance(by, str) else by:
        assert ours.obs[name].tolist() == theirs.obs[name].tolist()
    for name in NAMES:
        np.testing.assert_allclose(ours.layers[name], theirs.layers[name], rtol=1e-6, atol=1e-6)
    counts = adata.obs.groupby(by, observed=True).size()
    assert ours.obs["n_obs_aggregated"].tolist() == counts.tolist()


def test_cells_without_a_label_belong_to_no_group_and_count_over_all():
    adata = make_adata(60, 17)
    found = dasksc.statistics(adata, by="cell_type_missing")
    assert_are(found.genes, adata.X)
    labelled = adata.obs["cell_type_missing"].notna()
    assert found.groups.obs["n_obs_aggregated"].sum() == labelled.sum() < 60
    np.testing.assert_allclose(found.groups.layers["sum"].sum(axis=0), dense(adata[labelled].X).sum(axis=0))


def test_groups_that_need_more_memory_than_there_may_be_are_refused():
    adata = make_adata(60, 17, has_everything=True)
    message = r"60 groups of cells x 17 genes need .*memory-limit is .* Group by fewer"
    with dask.config.set({"dasksc.memory-limit": "20kB"}), pytest.raises(InputError, match=message):
        dasksc.statistics(adata, by=["int64", "uint16", "text", "float32"])


def test_results_per_cell_that_exceed_the_memory_limit_are_refused():
    adata = make_adata(600, 17)
    message = r"600 cells .*33600 bytes.*memory-limit.*30000 bytes.* filter="
    with dask.config.set({"dasksc.memory-limit": "30kB"}), pytest.raises(InputError, match=message):
        dasksc.statistics(adata, qc={"first": list(adata.var_names[:3])})
    with dask.config.set({"dasksc.memory-limit": "19kB"}):
        with pytest.raises(InputError, match="600.*19800.*target_sum="):
            dasksc.normalize(adata)
        dasksc.normalize(adata, target_sum=1e4)


def test_columns_may_have_more_combinations_than_an_integer_can_number():
    many = pd.Categorical([f"{i}" for i in range(3000)])
    groups = Groups(pd.DataFrame({f"c{i}": many for i in range(6)}), [f"c{i}" for i in range(6)])
    assert groups.n_rows.tolist() == [1] * 3000
    assert sorted(groups.codes(slice(None))) == list(range(3000))


def test_cells_have_the_totals_and_shares_of_scanpy(tmp_path):
    adata = make_adata(60, 17)
    adata.var["mito"] = adata.var_names.str.endswith(("1", "5"))
    adata.var["none"] = False
    path = write_store(adata, tmp_path, "h5ad")
    theirs, _ = sc.pp.calculate_qc_metrics(adata, qc_vars=["mito", "none"], percent_top=None, log1p=False)
    genes = adata.var_names[adata.var["mito"]].tolist()
    for qc in (["mito", "none"], {"mito": genes, "none": []}, {"mito": adata.var["mito"].to_numpy(), "none": []}):
        ours = dasksc.statistics(path, qc=qc).cells
        assert set(ours.columns) == set(theirs.columns)
        for name in ours:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6)
        assert list(ours.index) == list(adata.obs_names)
    assert list(dasksc.statistics(path, qc=[]).cells.columns) == ["n_genes_by_counts", "total_counts"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"by": "nothing"}, MissingKeyError, "obs.*atlas.h5ad"),
        ({"by": []}, InputError, r"by=\[\] is empty"),
        ({"layer": "nothing"}, MissingKeyError, "layers.*'nothing'"),
        ({"filter": "nothing > 3"}, MissingKeyError, "nothing"),
        ({"qc": 5}, WrongTypeError, "qc=5"),
        ({"qc": ["nothing"]}, MissingKeyError, "var.*'nothing'"),
        ({"qc": ["mean"]}, InputError, "needs a boolean for each gene"),
        ({"qc": {"mito": ["gene0", "MT-CO1", "MT-ND1"]}}, MissingKeyError, "var_names.*'MT-CO1'.*'MT-ND1'"),
        ({"qc": {"mito": "MT-"}}, WrongTypeError, r"qc\['mito'\]='MT-'.*str\.startswith\('MT-'\)"),
    ],
)
def test_what_does_not_fit_the_atlas_is_refused(options, error, message, tmp_path):
    path = write_store(make_adata(60, 17), tmp_path, "h5ad")
    with pytest.raises(error, match=message):
        dasksc.statistics(path, **options)
