"""Files written by AnnData before version 0.7."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

import dasksc

pytestmark = pytest.mark.core


def test_tables_obsm_and_raw_of_old_files_are_read(tmp_path: Path) -> None:
    path, rows = tmp_path / "old.h5ad", np.arange(30, dtype=np.float32).reshape(10, 3)
    obs = np.zeros(10, dtype=[("index", "S8"), ("kind", np.int8)])
    obs["index"], obs["kind"] = [f"cell{i}" for i in range(10)], np.arange(10) % 2
    genes = np.array([(b"gene0",), (b"gene1",), (b"gene2",)], dtype=[("index", "S8")])
    embeddings = np.zeros(10, dtype=[("X_pca", np.float32, (3,))])
    embeddings["X_pca"] = rows + 1
    with h5py.File(path, "w") as file:
        file["X"], file["obs"], file["var"], file["obsm"] = rows, obs, genes, embeddings
        file["raw.X"], file["raw.var"] = rows + 2, genes
        file["uns/kind_categories"] = np.array([b"T", b"B"])
    adata = dasksc.open(path)
    assert [*adata.obs_names[:2]] == ["cell0", "cell1"]
    assert [*adata.var_names] == ["gene0", "gene1", "gene2"]
    assert [*adata.obs["kind"][:3]] == ["T", "B", "T"]
    np.testing.assert_array_equal(adata.X.compute(), rows)
    np.testing.assert_array_equal(np.asarray(adata.obsm["X_pca"]), rows + 1)
    np.testing.assert_array_equal(dasksc.open(path, raw=True).X.compute(), rows + 2)
    dataset = dasksc.scDataset(path, dasksc.Streaming(), batch_size=10, obs=["kind"], obsm=["X_pca"])
    batch = next(iter(dataset))
    np.testing.assert_array_equal(batch.obsm["X_pca"], rows + 1)
    assert dataset.categories["kind"] == ["T", "B"]
