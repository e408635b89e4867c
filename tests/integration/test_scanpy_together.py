"""One program with dasksc, scanpy, AnnData and a Dask cluster, whose versions must be compatible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scanpy as sc
import torch

import dasksc
from tests.support.data import dense

pytestmark = pytest.mark.programs

N_CELLS, N_GENES, BATCH = 1000, 60, 64


@pytest.mark.filterwarnings("ignore:The 'mode.chained_assignment' option is deprecated")
def test_scanpy_on_lazy_x_and_batches_of_it_on_a_cluster(
    atlas_of: Callable[..., Path], two_process_client: Any
) -> None:
    path = atlas_of(N_CELLS, N_GENES, n_types=3, n_plates=2, seed=2)
    lazy, eager = dasksc.open(path), ad.read_h5ad(path)
    for adata in (lazy, eager):
        sc.pp.normalize_total(adata, target_sum=1e4)
        sc.pp.log1p(adata)
        sc.pp.highly_variable_genes(adata, n_top_genes=20)
    # The genes are not compared, since scanpy breaks ties by rounding errors.
    for column in ("means", "dispersions", "dispersions_norm"):
        np.testing.assert_allclose(lazy.var[column], eager.var[column], rtol=1e-4)
    expected = dense(eager.X)

    def batches(scheduler: Any) -> list[Any]:
        sampling = dasksc.ClassBalancedSampling(label_key="cell_type")
        dataset = dasksc.scDataset(lazy, sampling, BATCH, obs=["cell_type"], seed=0, scheduler=scheduler)
        return list(dataset)

    here, on_cluster = batches("threads"), batches(two_process_client)
    assert sum(len(batch.X) for batch in here) == N_CELLS
    for one, other in zip(here, on_cluster, strict=True):
        assert torch.equal(one.X, other.X)
        assert torch.equal(one.obs["cell_type"], other.obs["cell_type"])
        assert torch.equal(one.index, other.index)
        np.testing.assert_allclose(one.X.numpy(), expected[one.index.numpy()], rtol=1e-5)
