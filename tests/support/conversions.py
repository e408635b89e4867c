"""Comparison of converted stores with their source, and inputs that produce many parts."""

from __future__ import annotations

import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from dasksc.conversion import converting, writing
from dasksc.output import shards
from tests.support.data import dense, make_adata


def read(path: Path) -> ad.AnnData:
    """Read a store or an h5ad file with AnnData."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ad.read_zarr(path) if path.is_dir() else ad.read_h5ad(path)


def order_of(written: ad.AnnData, source: ad.AnnData) -> NDArray[np.int64]:
    """Return the row of the source for each converted row; fail unless each appears once."""
    order = source.obs_names.get_indexer(written.obs_names)
    assert sorted(order) == list(range(source.n_obs))
    return order


def same(written: ad.AnnData, source: ad.AnnData) -> None:
    """Fail unless a converted store holds the data of its source, in any order of rows."""
    order = order_of(written, source)
    assert np.array_equal(dense(written.X), dense(source.X)[order])
    for name, layer in source.layers.items():
        if name is not None:
            assert np.array_equal(dense(written.layers[name]), dense(layer)[order]), name
    assert set(written.obsm) == set(source.obsm)
    for name, array in source.obsm.items():
        if isinstance(array, pd.DataFrame):
            pd.testing.assert_frame_equal(written.obsm[name], array.iloc[order], check_dtype=False)
        else:
            assert np.array_equal(dense(written.obsm[name]), dense(array)[order]), name
    pd.testing.assert_frame_equal(
        written.obs.astype(object), source.obs.iloc[order].astype(object), check_dtype=False, check_categorical=False
    )
    for name in source.obs:
        if isinstance(source.obs[name].dtype, pd.CategoricalDtype):
            assert list(written.obs[name].cat.categories) == list(source.obs[name].cat.categories)
            assert written.obs[name].cat.ordered == source.obs[name].cat.ordered
    pd.testing.assert_frame_equal(written.var, source.var, check_dtype=False)
    assert set(written.varm) == set(source.varm)
    assert dict(written.uns) == dict(source.uns)


def contents(store: Path) -> dict[str, bytes]:
    return {str(file.relative_to(store)): file.read_bytes() for file in sorted(store.rglob("*")) if file.is_file()}


def make_parts_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks, shards and tasks small enough that a few cells produce many of them."""
    monkeypatch.setattr(writing, "_CHUNK_VALUES", 64)
    monkeypatch.setattr(writing, "_INDPTR_CHUNK", 8)
    monkeypatch.setattr(writing, "_DENSE_CHUNK_BYTES", 200)
    monkeypatch.setattr(converting, "_SCAN_ROWS", 7)
    monkeypatch.setattr("dasksc.conversion.tables._PIECE_ROWS", 25)
    monkeypatch.setattr(converting, "_PIECE_VALUES", 40)
    # Each sync waits for the disk, and no test simulates a power failure, so syncs are disabled.
    monkeypatch.setattr(shards, "sync", lambda file: None)


def write_gzipped(folder: Path) -> Path:
    """Write a small atlas that is converted by way of sorted runs of rows in intermediate files."""
    path = folder / "atlas.h5ad"
    source = make_adata(600, 40)
    small = ad.AnnData(X=source.X, obs=source.obs[["cell_type", "float32"]], var=source.var[[]])
    small.obsm["X_pca"] = source.obsm["X_pca"]
    small.write_h5ad(path, compression="gzip")
    return path
