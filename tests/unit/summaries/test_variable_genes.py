"""Highly variable genes, compared with scanpy in memory on real and synthetic atlases."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

import anndata as ad
import dask
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import dasksc
from dasksc import InputError, MissingKeyError
from tests.support.data import sample, write_store

pytestmark = pytest.mark.core

FLAVORS = ["seurat", "cell_ranger", "seurat_v3", "pearson_residuals"]
# The last atlas is used without batches: in batches of 35 cells, many genes have identical scores.
REAL = [
    *[("pbmc_5k_protein_v3", key) for key in (None, "batch")],
    ("brainlarge_dataset_test", None),
]


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


def real(name: str) -> ad.AnnData:
    path = sample(f"{name}.h5ad")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about duplicate names
        stored = ad.read_h5ad(path)
    counts = sp.csr_matrix(stored.X).astype(np.float32)
    # With unexpressed genes, the edges of scanpy's bins would not be unique.
    expressed = np.asarray(counts.sum(axis=0)).reshape(-1) > 0
    counts = sp.csr_matrix(counts[:, expressed])
    obs = pd.DataFrame({"batch": pd.Categorical(np.arange(len(stored)) % 2)}, index=np.arange(len(stored)).astype(str))
    return ad.AnnData(counts, obs=obs, var=pd.DataFrame(index=np.arange(counts.shape[1]).astype(str)))


def prepared(counts: ad.AnnData, flavor: str) -> ad.AnnData:
    """Return a copy with X normalized as a flavor requires."""
    sc = pytest.importorskip("scanpy")
    adata = counts.copy()
    if flavor in ("seurat", "cell_ranger"):
        sc.pp.normalize_total(adata, target_sum=1e4)
        sc.pp.log1p(adata)
    return adata


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


def of_scanpy(adata: ad.AnnData, n_top_genes: int, flavor: str, batch_key: str | None = None) -> pd.DataFrame:
    sc = pytest.importorskip("scanpy")
    if flavor == "seurat_v3":
        pytest.importorskip("skmisc")
    pp = sc.experimental.pp if flavor == "pearson_residuals" else sc.pp
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.filterwarnings("ignore", "The inplace keyword in")  # deprecated in pandas 3.1, used by scanpy
        inner = importlib.import_module("scanpy.preprocessing._highly_variable_genes")
        if hasattr(inner, "aggregate"):
            patch.setattr(inner, "aggregate", moments_of_batches)
        found: pd.DataFrame = pp.highly_variable_genes(
            adata.copy(), n_top_genes=n_top_genes, flavor=flavor, batch_key=batch_key, inplace=False
        )
    return found


def assert_same(ours: pd.DataFrame, theirs: pd.DataFrame) -> None:
    """Check that both results select the same genes, except for tied scores."""
    score = next(n for n in ("dispersions_norm", "variances_norm", "residual_variances") if n in theirs)
    assert list(ours.index) == list(theirs.index)
    names = {"means", "variances", "dispersions", score, "highly_variable_nbatches", "highly_variable_intersection"}
    assert names & set(theirs) == names & set(ours)
    for name in names & set(theirs):
        np.testing.assert_allclose(
            ours[name].to_numpy(float), theirs[name].to_numpy(float), rtol=2e-5, atol=2e-5, err_msg=name
        )
    differ = ours["highly_variable"].to_numpy() != theirs["highly_variable"].to_numpy(bool)
    chosen = theirs.loc[theirs["highly_variable"].to_numpy(bool), score]
    for gene in ours.index[differ]:
        assert np.isclose(chosen, ours.loc[gene, score], rtol=1e-6, atol=1e-12).any(), gene


@pytest.mark.parametrize("n_top_genes", [1, 50, 300, 1000])
@pytest.mark.parametrize("batch_key", [None, "batch"])
@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.filterwarnings("ignore:.*n_top_genes.*")
def test_genes_of_a_made_up_atlas_are_those_of_scanpy(flavor, batch_key, n_top_genes, tmp_path):
    adata = prepared(made_up(), flavor)
    theirs = of_scanpy(adata, n_top_genes, flavor, batch_key)
    path = write_store(adata, tmp_path, "h5ad")
    ours = dasksc.highly_variable_genes(path, n_top_genes, flavor, batch_key)
    assert_same(ours, theirs)
    assert ours["highly_variable"].tolist() == theirs["highly_variable"].tolist()
    assert ours["highly_variable"].dtype == bool


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize(("name", "batch_key"), REAL)
def test_genes_of_a_real_atlas_are_those_of_scanpy(name, flavor, batch_key):
    adata = prepared(real(name), flavor)
    try:
        theirs = of_scanpy(adata, 100, flavor, batch_key)
    except ValueError as error:
        # The atlas has too few cells for scanpy's fit or for unique bin edges. In the former case, dasksc raises an
        # error; in the latter, it selects genes.
        if "unique" in str(error):
            assert dasksc.highly_variable_genes(adata, 100, flavor, batch_key)["highly_variable"].sum() >= 100
            return
        with pytest.raises(InputError, match="which fails for batch"):
            dasksc.highly_variable_genes(adata, 100, flavor, batch_key)
        return
    assert_same(dasksc.highly_variable_genes(adata, 100, flavor, batch_key), theirs)


def sparse_counts() -> ad.AnnData:
    """Return an atlas in which many genes have few counts per batch and thus identical scores.

    The same happens in a real atlas from which rarely expressed genes were not removed.
    """
    rng = np.random.default_rng(0)
    counts = rng.poisson(rng.lognormal(-2, 1.3, 2_000), (900, 2_000)).astype(np.float32)
    obs = pd.DataFrame({"batch": pd.Categorical(np.arange(900) % 3)}, index=np.arange(900).astype(str))
    return ad.AnnData(sp.csr_matrix(counts), obs=obs, var=pd.DataFrame(index=np.arange(2_000).astype(str)))


@pytest.mark.parametrize("n_top_genes", [100, 400, 700])
def test_genes_tied_in_a_batch_are_chosen_as_scanpy_chooses_them(n_top_genes):
    adata, obs = sparse_counts(), sparse_counts().obs
    theirs = of_scanpy(adata, n_top_genes, "seurat_v3", "batch")
    ours = dasksc.highly_variable_genes(adata, n_top_genes, "seurat_v3", "batch")
    if not hasattr(importlib.import_module("scanpy.preprocessing._highly_variable_genes"), "aggregate"):
        for name in ("highly_variable", "highly_variable_nbatches", "highly_variable_rank"):
            np.testing.assert_array_equal(ours[name].to_numpy(float), theirs[name].to_numpy(float), err_msg=name)
        return
    # The moments of scanpy 1.12 differ from those of dasksc in the last bits, so genes tied in one may not be tied in
    # the other.
    is_tied = np.zeros(adata.n_vars, dtype=bool)
    for batch in obs["batch"].cat.categories:
        of_batch = dasksc.highly_variable_genes(adata[obs["batch"] == batch].copy(), n_top_genes, "seurat_v3")
        order = np.argsort(of_batch["variances_norm"].to_numpy())
        scores = of_batch["variances_norm"].to_numpy()[order]
        follows = np.isclose(scores[1:], scores[:-1], rtol=1e-6, atol=0)
        is_tied[order] |= np.append(follows, False) | np.append(False, follows)
    assert is_tied.mean() > 0.05
    # Genes are also tied if equally many batches select them and their median ranks are equal.
    as_often = theirs.duplicated(["highly_variable_nbatches", "highly_variable_rank"], keep=False)
    is_tied |= (as_often & theirs["highly_variable_rank"].notna()).to_numpy()
    differs = ours["highly_variable"].to_numpy() != theirs["highly_variable"].to_numpy(bool)
    # If only one library selects an untied gene, the other selects a tied gene in its place.
    assert (differs & ~is_tied).sum() <= (differs & is_tied).sum()
    assert differs.sum() <= 0.02 * n_top_genes


def residual_variances(adata: ad.AnnData, batches: Any) -> np.ndarray:
    """Compute the variances of Pearson residuals in float64, in each batch."""
    clip, found = None, []
    for batch in np.unique(batches):
        X = adata.X[np.flatnonzero(batches == batch)].toarray().astype(np.float64)
        clip = np.sqrt(len(X)) if clip is None else clip  # scanpy clips all batches at the bound of the first one
        mean = X.sum(axis=1, keepdims=True) * X.sum(axis=0) / X.sum()
        with np.errstate(invalid="ignore"):
            residuals = np.nan_to_num((X - mean) / np.sqrt(mean + mean**2 / 100))
        found.append(residuals.clip(-clip, clip).var(axis=0))
    return np.stack(found)


@pytest.mark.parametrize("batch_key", ["batch", "depth", "uneven"])
@pytest.mark.parametrize("name", ["made up", "pbmc_5k_protein_v3", "brainlarge_dataset_test"])
def test_ranks_of_residuals_are_those_of_scanpy_except_for_ties(name, batch_key):
    adata = sparse_counts() if name == "made up" else real(name)
    totals = np.asarray(adata.X.sum(axis=1)).reshape(-1)
    adata.obs["depth"] = pd.qcut(totals, 4, labels=list("abcd"))
    adata.obs["uneven"] = pd.Categorical(np.where(np.arange(adata.n_obs) % 9 == 0, "a", "b"))
    scores = residual_variances(adata, adata.obs[batch_key].to_numpy())
    # The first and the last rank that a gene can have, if scores that agree to 1e-6 are tied.
    ordered = np.sort(scores, axis=1)
    pairs = list(zip(ordered, scores, strict=True))
    first = np.stack([len(all_) - np.searchsorted(all_, own * (1 + 1e-6), side="right") for all_, own in pairs])
    last = np.stack([len(all_) - np.searchsorted(all_, own * (1 - 1e-6), side="left") - 1 for all_, own in pairs])
    for n_top_genes in (100, 300, 400, 700, 1000, 2000):
        theirs = of_scanpy(adata, n_top_genes, "pearson_residuals", batch_key)
        ours = dasksc.highly_variable_genes(adata, n_top_genes, "pearson_residuals", batch_key)
        assert ours["highly_variable"].tolist() == theirs["highly_variable"].tolist()
        is_top, may_be_top = last < n_top_genes, first < n_top_genes
        certain = (is_top == may_be_top).all(axis=0)
        ranked = certain & is_top.any(axis=0)
        assert ranked.sum() >= min(n_top_genes, adata.n_vars) / 2
        low, high = (np.nanmedian(np.where(is_top, rank, np.nan)[:, ranked], axis=0) for rank in (first, last))
        for found in (ours, theirs):
            np.testing.assert_array_equal(found["highly_variable_nbatches"][certain], is_top.sum(axis=0)[certain])
            rank = found["highly_variable_rank"].to_numpy(float)
            assert ((low <= rank[ranked]) & (rank[ranked] <= high)).all()
            assert np.isnan(rank[certain & ~ranked]).all()


@pytest.mark.parametrize("flavor", ["seurat_v3", "pearson_residuals"])
def test_batches_that_need_more_memory_than_there_may_be_are_refused_before_a_pass(flavor, monkeypatch):
    from dasksc.summaries.reading import Pass

    pytest.importorskip("skmisc")
    monkeypatch.setattr(Pass, "__iter__", lambda self: pytest.fail("values are read"))
    adata = made_up()
    # Sufficient for the first pass, which needs 64 bytes per gene and batch.
    n_bytes = adata.obs["batch"].nunique() * adata.n_vars * 80
    message = r"groups of cells x .* genes need .*memory-limit is .* Group by fewer"
    with dask.config.set({"dasksc.memory-limit": n_bytes}), pytest.raises(InputError, match=message):
        dasksc.highly_variable_genes(adata, 50, flavor, "batch")


def test_what_cannot_be_compared_is_refused(caplog):
    adata = made_up()
    with pytest.raises(InputError, match="flavor='seurat_v4'"):
        dasksc.highly_variable_genes(adata, 50, "seurat_v4")
    with pytest.raises(InputError, match="n_top_genes"):
        dasksc.highly_variable_genes(adata, 0)
    with pytest.raises(MissingKeyError, match="nothing"):
        dasksc.highly_variable_genes(adata, 50, batch_key="nothing")
    with pytest.raises(InputError, match="filter"):
        dasksc.highly_variable_genes(adata, 50, filter="batch == 'b9'")
    adata.obs["gaps"] = adata.obs["batch"].where(np.arange(600) > 9)
    with pytest.raises(InputError, match="batch.* 10 "):
        dasksc.highly_variable_genes(adata, 50, batch_key="gaps")
    pytest.importorskip("skmisc")
    missing, below, fractions = adata.copy(), adata.copy(), adata.copy()
    missing.X.data[5], below.X.data[5], fractions.X.data[5] = np.nan, -1, 0.5
    for flavor in FLAVORS:
        with pytest.raises(InputError, match="X has missing values"):
            dasksc.highly_variable_genes(missing, 50, flavor)
    for flavor in ("seurat_v3", "pearson_residuals"):
        with pytest.raises(InputError, match="values below 0"):
            dasksc.highly_variable_genes(below, 50, flavor)
        with caplog.at_level(logging.WARNING, "dasksc.summaries"):
            dasksc.highly_variable_genes(fractions, 50, flavor)
        assert "fractional values" in caplog.text
        caplog.clear()
    large, infinite = adata.copy(), adata.copy()
    large.X.data[5], infinite.X.data[5] = 2_000, np.inf
    for flavor, refused in (("seurat", [large, infinite]), ("cell_ranger", [infinite])):
        for one in refused:
            with pytest.raises(InputError, match=f"flavor='{flavor}'"):
                dasksc.highly_variable_genes(one, 50, flavor)
        with caplog.at_level(logging.WARNING, "dasksc.summaries"):
            dasksc.highly_variable_genes(adata, 50, flavor)
        assert "expects log-normalized values" in caplog.text
        caplog.clear()
        dasksc.highly_variable_genes(dasksc.normalize(adata), 50, flavor)
        assert not caplog.text
    small = adata[:3].copy()
    with pytest.raises(InputError, match="'all'"):
        dasksc.highly_variable_genes(small, 50, "seurat_v3")


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


@pytest.mark.parametrize("flavor", FLAVORS)
def test_no_gene_is_refused(flavor):
    with pytest.raises(InputError, match="genes"):
        dasksc.highly_variable_genes(made_up(30, 40)[:, :0].copy(), 5, flavor)


def test_counts_too_large_for_seurat_raise_one_error_and_no_warning(caplog):
    atlas = made_up(30, 40)
    atlas.X = atlas.X * 1000
    with pytest.raises(InputError, match="seurat"):
        dasksc.highly_variable_genes(atlas, 5, "seurat")
    assert not caplog.records
