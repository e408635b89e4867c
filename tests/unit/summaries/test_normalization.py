"""Normalized counts, computed during reading and compared with scanpy."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import scanpy as sc
import scipy.sparse as sp

import dasksc
from dasksc import InputError, MissingKeyError
from dasksc.pushdown import RowLocalMatrix, matrix_of
from tests.support.data import dense, write_store

pytestmark = pytest.mark.core


@pytest.fixture
def counts() -> ad.AnnData:
    rng = np.random.default_rng(0)
    values = rng.poisson(1.5, (61, 20)).astype(np.float32)
    values[:, 3] = 0
    return ad.AnnData(sp.csr_matrix(values), layers={"dense": values * 3, "whole": sp.csr_matrix(values.astype(int))})


@pytest.mark.parametrize("log1p", [True, False])
@pytest.mark.parametrize("target_sum", [None, 1e4, 7])
def test_values_are_those_of_scanpy(counts, target_sum, log1p, tmp_path):
    theirs = counts.copy()
    sc.pp.normalize_total(theirs, target_sum=target_sum)
    if log1p:
        sc.pp.log1p(theirs)
    for given in (counts, write_store(counts, tmp_path, "h5ad", f"{target_sum}{log1p}")):
        ours = dasksc.normalize(given, target_sum=target_sum, log1p=log1p)
        assert ours.X.dtype == np.float32
        made = ours.X.compute()
        assert sp.issparse(made)
        np.testing.assert_allclose(dense(made), dense(theirs.X), rtol=2e-6)
        assert ours.uns.get("log1p") == ({"base": None} if log1p else None)
    assert counts.X.sum() % 1 == 0  # unchanged
    assert "log1p" not in counts.uns


def test_batches_are_computed_row_by_row(counts, tmp_path):
    ours = dasksc.normalize(write_store(counts, tmp_path, "h5ad"))
    assert isinstance(matrix_of(ours.X), RowLocalMatrix)
    whole = dense(ours.X.compute())
    for layout in ("dense", "csr"):
        dataset = dasksc.scDataset(
            ours, dasksc.BlockShuffling(4), 8, 2, genes=[5, 2], layout=layout, seed=0, transform=lambda batch: batch
        )
        for batch in dataset:
            X = batch.X.to_dense() if layout == "csr" else batch.X
            np.testing.assert_array_equal(X.numpy(), whole[batch.index][:, [5, 2]])


@pytest.mark.parametrize("layer", ["dense", "whole"])
def test_a_layer_is_normalized_and_X_is_not(counts, layer):
    ours = dasksc.normalize(counts, target_sum=100, layer=layer, log1p=False)
    np.testing.assert_allclose(dense(ours.layers[layer].compute()).sum(axis=1), 100, rtol=1e-5)
    assert sp.issparse(ours.layers[layer].compute()) == (layer == "whole")
    np.testing.assert_array_equal(dense(ours.X.compute()), dense(counts.X))
    again = dasksc.normalize(ours, target_sum=5, log1p=True, layer=layer)
    np.testing.assert_allclose(np.expm1(dense(again.layers[layer].compute())).sum(axis=1), 5, rtol=1e-5)
    np.testing.assert_allclose(dense(ours.layers[layer].compute()).sum(axis=1), 100, rtol=1e-5)
    assert "log1p" not in ours.uns


def test_cells_without_counts_stay_so(counts):
    values = dense(counts.X)
    values[5] = 0
    for X in (values, sp.csr_matrix(values)):
        ours = dense(dasksc.normalize(ad.AnnData(X), log1p=False).X.compute())
        median = np.median(values.sum(axis=1)[values.sum(axis=1) > 0])
        np.testing.assert_allclose(np.delete(ours, 5, axis=0).sum(axis=1), median, rtol=1e-5)
        assert (ours[5] == 0).all()


@pytest.mark.parametrize("target_sum", [0, -1, np.nan, np.inf, "100", True])
def test_other_totals_are_refused(counts, target_sum):
    with pytest.raises(InputError, match="target_sum"):
        dasksc.normalize(counts, target_sum=target_sum)


def test_what_has_no_median_or_is_not_there_is_refused(counts):
    with pytest.raises(InputError, match="no cell has a total of X above 0"):
        dasksc.normalize(ad.AnnData(np.zeros((3, 4), dtype=np.float32)))
    with pytest.raises(InputError, match="NoneType"):
        dasksc.normalize(ad.AnnData(obs=counts.obs), target_sum=5)
    with pytest.raises(MissingKeyError, match="layers.*'nothing'"):
        dasksc.normalize(counts, layer="nothing")
