"""Programs written for the scDataset 0.3 library, with only the import changed."""

from __future__ import annotations

from collections import Counter
from functools import partial

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

from dasksc import (
    BlockShuffling,
    scDataset,
)
from dasksc.transforms.hooks import adata_to_mindex

N_OBS, N_VARS = 600, 30
BATCH, FETCH_FACTOR = 16, 4
# Sorted on disk and far from balanced, as cell types often are.
LABELS = np.repeat(["T", "B", "NK"], [450, 120, 30])

pytestmark = [
    pytest.mark.programs,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning"),
]


def counts() -> np.ndarray:
    """Return counts whose first gene is the row number, counted from 1."""
    X = np.random.default_rng(0).poisson(0.5, (N_OBS, N_VARS)).astype(np.float32)
    X[:, 0] = np.arange(1, N_OBS + 1)
    return X


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical(LABELS),
            "plate": pd.Categorical([f"p{i % 14}" for i in range(N_OBS)]),
            "n_counts": counts().sum(1),
        },
        index=[f"cell{i}" for i in range(N_OBS)],
    )
    adata = ad.AnnData(X=sp.csr_matrix(counts()), obs=obs)
    adata.layers["counts"] = sp.csr_matrix(counts() * 2)
    adata.obsm["X_pca"] = counts()[:, :3]
    file = tmp_path_factory.mktemp("atlas") / "atlas.h5ad"
    adata.write_h5ad(file)
    return file


@pytest.fixture
def adata(path):
    backed = ad.read_h5ad(path, backed="r")
    yield backed
    backed.file.close()


def rows_of(batches) -> list[int]:
    """Return the row numbers of batches of X, from its first gene."""
    rows = []
    for batch in batches:
        rows += (np.asarray(batch)[:, 0].astype(int) - 1).tolist()
    return rows


@pytest.mark.parametrize(
    "fetch_callback",
    [
        lambda d, idx: torch.from_numpy(d[idx].X.toarray()),
        lambda d, idx: d[idx].to_memory().X.toarray(),
        lambda d, idx: d.X[idx].toarray(),
        lambda d, idx: d[idx].layers["counts"].toarray() / 2,
        lambda d, idx: d[idx].to_df().to_numpy(),
    ],
    ids=["d[idx].X", "d[idx].to_memory()", "d.X[idx]", "d[idx].layers", "d[idx].to_df()"],
)
def test_backed_anndata_through_a_fetch_callback(adata, fetch_callback):
    dataset = scDataset(
        adata,
        BlockShuffling(block_size=8),
        batch_size=BATCH,
        fetch_factor=FETCH_FACTOR,
        fetch_callback=fetch_callback,
    )
    batches = list(dataset)
    assert len(batches) == len(dataset)
    rows = rows_of(batches)
    assert sorted(rows) == list(range(N_OBS))
    assert rows != list(range(N_OBS))
    np.testing.assert_array_equal(np.concatenate([np.asarray(b) for b in batches]), counts()[rows])


def test_an_ann_collection_of_backed_files(path):
    experimental = pytest.importorskip("anndata.experimental")
    files = [ad.read_h5ad(path, backed="r") for _ in range(2)]
    collection = experimental.AnnCollection(files, join_vars="inner", index_unique="-")
    dataset = scDataset(
        collection,
        BlockShuffling(block_size=8),
        batch_size=BATCH,
        fetch_factor=FETCH_FACTOR,
        fetch_transform=partial(adata_to_mindex, columns=["cell_type"]),
    )
    seen = []
    for batch in dataset:
        rows = rows_of([batch["X"]])
        assert list(batch["cell_type"]) == LABELS[rows].tolist()
        seen += rows
    assert Counter(seen) == dict.fromkeys(range(N_OBS), 2)
    for file in files:
        file.file.close()
