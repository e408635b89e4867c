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
from torch.utils.data import DataLoader

from dasksc import (
    BlockShuffling,
    MultiIndexable,
    SamplingStrategy,
    Streaming,
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


# Each collection once, and each strategy with arrays, sparse matrices and objects.
@pytest.mark.parametrize(
    ("collection", "kind", "dense", "strategy"),
    [
        (counts(), np.ndarray, np.asarray, Streaming()),
        (sp.csr_array(counts()), sp.csr_array, lambda batch: batch.toarray(), Streaming()),
        (torch.from_numpy(counts()), torch.Tensor, lambda batch: batch.numpy(), BlockShuffling(8)),
        (pd.DataFrame(counts(), index=np.arange(N_OBS)[::-1]), pd.DataFrame, lambda b: b.to_numpy(), Streaming()),
        (MultiIndexable(y=np.arange(N_OBS), X=counts()), MultiIndexable, lambda batch: batch["X"], BlockShuffling(8)),
    ],
    ids=["numpy", "csr_array", "torch", "pandas", "MultiIndexable"],
)
def test_batches_of_any_collection_equal_the_result_of_its_indexing(collection, kind, dense, strategy):
    batches = list(scDataset(collection, strategy, batch_size=BATCH, fetch_factor=FETCH_FACTOR))
    assert all(isinstance(batch, kind) for batch in batches)
    rows = rows_of(dense(batch) for batch in batches)
    assert sorted(rows) == list(range(N_OBS))
    np.testing.assert_array_equal(np.concatenate([dense(batch) for batch in batches]), counts()[rows])
    if isinstance(strategy, Streaming):
        assert rows == list(range(N_OBS))
    if kind is MultiIndexable:
        assert np.concatenate([batch["y"] for batch in batches]).tolist() == rows


class RandomHalf(SamplingStrategy):
    def __init__(self, indices=None):
        super().__init__(indices)
        self._shuffle_before_yield = True

    def get_len(self, data_collection):
        return len(data_collection) // 2

    def get_indices(self, data_collection, seed=None, rng=None):
        rng = np.random.default_rng(seed) if rng is None else rng
        return rng.permutation(len(data_collection))[: len(data_collection) // 2]


def test_a_strategy_of_ones_own_works_under_ranks_and_workers():
    strategy, together = RandomHalf(), []
    for rank in range(3):
        dataset = scDataset(np.arange(N_OBS), strategy, BATCH, FETCH_FACTOR, rank=rank, world_size=3, seed=3)
        batches = list(DataLoader(dataset, batch_size=None, num_workers=2))
        assert len(batches) == len(dataset)
        together += np.concatenate(batches).tolist()
    assert len(together) == len(set(together)) == 300
    alone = scDataset(np.arange(N_OBS), strategy, BATCH, FETCH_FACTOR, seed=3)
    assert sorted(together) == sorted(np.concatenate(list(alone)).tolist())
