"""Programs written for the scDataset 0.3 library, with only the import changed."""

from __future__ import annotations

from functools import partial

import anndata as ad
import numpy as np
import pytest
import torch

from dasksc import BlockShuffling, scDataset
from dasksc.transforms.hooks import adata_to_mindex
from tests.support.data import dense, make_adata, write_store

N_OBS = 600
SIZES = {"batch_size": 16, "fetch_factor": 4}

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_store(make_adata(N_OBS), tmp_path_factory.mktemp("atlas"), "h5ad")


@pytest.mark.parametrize(
    ("fetch_callback", "layer"),
    [
        (lambda d, idx: torch.from_numpy(d[idx].X.toarray()), None),
        (lambda d, idx: d[idx].to_memory().X.toarray(), None),
        (lambda d, idx: d.X[idx].toarray(), None),
        (lambda d, idx: d[idx].layers["counts"].toarray(), "counts"),
        (lambda d, idx: d[idx].to_df().to_numpy(), None),
    ],
)
def test_backed_anndata_through_a_fetch_callback(path, fetch_callback, layer):
    backed = ad.read_h5ad(path, backed="r")
    dataset = scDataset(backed, BlockShuffling(block_size=8), **SIZES, fetch_callback=fetch_callback)
    plan = dataset.plan(0)
    rows = np.concatenate([plan.batch_rows(i) for i in range(len(dataset))])
    assert sorted(rows) == list(range(N_OBS))
    assert rows.tolist() != list(range(N_OBS))
    batches = np.concatenate([np.asarray(batch) for batch in dataset])
    adata = make_adata(N_OBS)
    np.testing.assert_array_equal(batches, dense(adata.layers[layer] if layer else adata.X)[rows])
    backed.file.close()


def test_an_ann_collection_of_backed_files(path):
    experimental = pytest.importorskip("anndata.experimental")
    files = [ad.read_h5ad(path, backed="r") for _ in range(2)]
    collection = experimental.AnnCollection(files, join_vars="inner", index_unique="-")
    fetch_transform = partial(adata_to_mindex, columns=["cell_type"])
    dataset = scDataset(collection, BlockShuffling(block_size=8), **SIZES, fetch_transform=fetch_transform)
    plan, adata = dataset.plan(0), make_adata(N_OBS)
    assert sorted(np.concatenate([plan.batch_rows(i) for i in range(len(dataset))])) == list(range(2 * N_OBS))
    for i, batch in enumerate(dataset):
        rows = plan.batch_rows(i) % N_OBS
        np.testing.assert_array_equal(batch["X"], dense(adata.X)[rows])
        assert list(batch["cell_type"]) == adata.obs["cell_type"].iloc[rows].tolist()
    for file in files:
        file.file.close()
