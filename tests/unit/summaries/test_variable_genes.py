"""Highly variable genes, compared with scanpy in memory on real and synthetic atlases."""

from __future__ import annotations

import importlib
import logging
import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import scipy.sparse as sp

import dasksc
from dasksc import InputError, MissingKeyError
from tests.support.data import write_store

pytestmark = pytest.mark.core


def made_up(n_obs: int = 600, n_vars: int = 400, n_batches: int = 3) -> ad.AnnData:
    rng = np.random.default_rng(0)
    batches = rng.integers(0, n_batches, n_obs)
    depth = rng.lognormal(0, 0.4, (n_obs, 1))
    programs = rng.lognormal(0, rng.gamma(1, 0.3, n_vars), (n_batches + 5, n_vars))
    # Genes are expressed in so many cells that no two scores are equal.
    mean = (0.3 + rng.gamma(0.5, 2, n_vars)) * programs[rng.integers(0, n_batches + 5, n_obs)] * depth
    counts = rng.poisson(mean).astype(np.float32)
    counts[:, 7] = 0
    counts[batches == 1, 11] = 0
    obs = pd.DataFrame({"batch": pd.Categorical([f"b{i}" for i in batches])}, index=[f"c{i}" for i in range(n_obs)])
    return ad.AnnData(sp.csr_matrix(counts), obs=obs, var=pd.DataFrame(index=[f"g{i}" for i in range(n_vars)]))


def moments_of_batches(adata: ad.AnnData, by: str, func: list[str]) -> ad.AnnData:
    """Compute the moments of all batches with scanpy's function for a single batch.

    scanpy 1.12 computes all batches together. Both results are accurate to 1e-15, but the fit of seurat_v3
    changes by 2e-3 if its points change by 1e-12.
    """
    from fast_array_utils import stats

    assert func == ["mean", "var"]
    batches = adata.obs[by].to_numpy()
    names = np.unique(batches)
    moments = [stats.mean_var(adata.X[np.flatnonzero(batches == name)], axis=0, correction=1) for name in names]
    mean, var = map(np.stack, zip(*moments, strict=True))
    obs = pd.DataFrame({by: names}, index=names.astype(str))
    return ad.AnnData(obs=obs, var=pd.DataFrame(index=adata.var_names), layers={"mean": mean, "var": var})


def of_scanpy(adata: ad.AnnData, n_top_genes: int, batch_key: str | None = None) -> pd.DataFrame:
    pytest.importorskip("skmisc")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.filterwarnings("ignore", "The inplace keyword in")  # deprecated in pandas 3.1, used by scanpy
        inner = importlib.import_module("scanpy.preprocessing._highly_variable_genes")
        if hasattr(inner, "aggregate"):
            patch.setattr(inner, "aggregate", moments_of_batches)
        found: pd.DataFrame = sc.pp.highly_variable_genes(
            adata.copy(), n_top_genes=n_top_genes, flavor="seurat_v3", batch_key=batch_key, inplace=False
        )
    return found


def assert_same(ours: pd.DataFrame, theirs: pd.DataFrame) -> None:
    """Check that both results select the same genes, except for tied scores."""
    assert list(ours.index) == list(theirs.index)
    names = {"means", "variances", "variances_norm", "highly_variable_nbatches"}
    assert names & set(theirs) == names & set(ours)
    for name in names & set(theirs):
        np.testing.assert_allclose(
            ours[name].to_numpy(float), theirs[name].to_numpy(float), rtol=2e-5, atol=2e-5, err_msg=name
        )
    differ = ours["highly_variable"].to_numpy() != theirs["highly_variable"].to_numpy(bool)
    chosen = theirs.loc[theirs["highly_variable"].to_numpy(bool), "variances_norm"]
    for gene in ours.index[differ]:
        assert np.isclose(chosen, ours.loc[gene, "variances_norm"], rtol=1e-6, atol=1e-12).any(), gene


@pytest.mark.parametrize(("batch_key", "n_top_genes"), [(None, 1000), ("batch", 50)])
def test_genes_of_a_made_up_atlas_are_those_of_scanpy(batch_key, n_top_genes, tmp_path):
    adata = made_up()
    theirs = of_scanpy(adata, n_top_genes, batch_key)
    path = write_store(adata, tmp_path, "h5ad")
    ours = dasksc.highly_variable_genes(path, n_top_genes, "seurat_v3", batch_key)
    assert_same(ours, theirs)
    assert ours["highly_variable"].tolist() == theirs["highly_variable"].tolist()
    assert ours["highly_variable"].dtype == bool


def test_other_flavors_are_left_to_scanpy():
    with pytest.raises(InputError, match="'seurat'.*'seurat_v3'.*scanpy"):
        dasksc.highly_variable_genes(made_up(30, 40), 5, "seurat")


def test_what_cannot_be_compared_is_refused(caplog):
    adata = made_up()
    with pytest.raises(InputError, match="n_top_genes"):
        dasksc.highly_variable_genes(adata, 0)
    with pytest.raises(MissingKeyError, match="nothing"):
        dasksc.highly_variable_genes(adata, 50, batch_key="nothing")
    with pytest.raises(InputError, match="filter"):
        dasksc.highly_variable_genes(adata, 50, filter="batch == 'b9'")
    with pytest.raises(InputError, match="genes"):
        dasksc.highly_variable_genes(adata[:, :0].copy(), 5)
    adata.obs["gaps"] = adata.obs["batch"].where(np.arange(600) > 9)
    with pytest.raises(InputError, match="batch.* 10 "):
        dasksc.highly_variable_genes(adata, 50, batch_key="gaps")
    pytest.importorskip("skmisc")
    for value, fact in ((np.nan, "NaN"), (np.inf, "infinite"), (-1, "below 0")):
        wrong = adata.copy()
        wrong.X.data[5] = value
        with pytest.raises(InputError, match=fact):
            dasksc.highly_variable_genes(wrong, 50)
    fractions = adata.copy()
    fractions.X.data[5] = 0.5
    with caplog.at_level(logging.WARNING, "dasksc.summaries"):
        dasksc.highly_variable_genes(adata, 50)
        assert not caplog.records
        dasksc.highly_variable_genes(fractions, 50)
    assert [one.name for one in caplog.records] == ["dasksc.summaries"]


@pytest.mark.parametrize("kind", ["one cell", "empty", "constant", "three genes"])
def test_a_batch_that_is_too_small_for_the_fit_is_named(kind):
    atlas = made_up(100, 40)
    is_odd = np.arange(100) == 0 if kind == "one cell" else np.arange(100) < 30
    atlas.obs["part"] = pd.Categorical(np.where(is_odd, "odd", "rest"))
    counts = atlas.X.toarray()
    if kind != "one cell":
        counts[is_odd, 3 if kind == "three genes" else 0 :] = 0 if kind == "empty" else 2
    atlas.X = sp.csr_matrix(counts)
    with pytest.raises(InputError, match="odd"):
        dasksc.highly_variable_genes(atlas, 5, "seurat_v3", "part")
