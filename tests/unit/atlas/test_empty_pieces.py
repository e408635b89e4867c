"""Passes over cells in pieces of which the first, a middle or the last is empty, compared with one piece in memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import dasksc
from dasksc.atlas import dealing, expressions
from dasksc.conversion import converting, tables
from dasksc.inference import store
from dasksc.readers import names as cell_names
from dasksc.summaries import reading
from tests.support.data import write_store

pytestmark = pytest.mark.core

N_PIECE = 4
SELECTED = {"first": "n >= 4", "middle": "n < 4 or n >= 8", "last": "n < 8"}
ENDS = {"first": (0, 0, 6, 12), "middle": (0, 6, 6, 12), "last": (0, 6, 12, 12)}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [(cell_names, "_PIECE"), (converting, "_SCAN_ROWS"), (store, "_LEAST_ROWS"), (store, "_MOST_ROWS")]
    places += [(module, "_PIECE_ROWS") for module in (expressions, dealing, converting, tables)]
    for module, name in places:
        monkeypatch.setattr(module, name, N_PIECE)
    for name in ("_FETCH_BYTES", "_LEAST_FETCH_BYTES"):
        monkeypatch.setattr(reading, name, 2**13)


def cells() -> ad.AnnData:
    X = np.random.default_rng(0).poisson(1.0, (12, 5)).astype(np.float32)
    kinds = pd.Categorical([["a", "b", None][row // N_PIECE] for row in range(12)])
    obs = pd.DataFrame({"n": np.arange(12), "kind": kinds}, index=[f"cell{row}" for row in range(12)])
    return ad.AnnData(X, obs, pd.DataFrame(index=list("vwxyz")))


def check_passes(data: Path | list[Path], adata: ad.AnnData, expression: str, folder: Path) -> None:
    rows = np.flatnonzero(adata.obs.eval(expression))
    kept = adata[rows]
    assert dasksc.rows_where(data, expression).tolist() == rows.tolist()
    batches = dasksc.scDataset(data, dasksc.Streaming(), batch_size=2, filter=expression, return_index=True)
    assert [row for batch in batches for row in batch.index.tolist()] == rows.tolist()
    found = dasksc.statistics(data, by="kind", filter=expression, qc=[])
    np.testing.assert_allclose(found.genes["var"], kept.X.var(axis=0, ddof=1), rtol=1e-6)
    assert found.cells["total_counts"].to_dict() == dict(zip(kept.obs_names, kept.X.sum(axis=1), strict=True))
    assert found.groups.obs["n_obs_aggregated"].to_dict() == kept.obs["kind"].value_counts()[lambda n: n > 0].to_dict()
    parts = dasksc.split(data, stratify="kind", fractions=(0.5, 0.5), indices=rows)
    expected = dasksc.split(adata.obs.copy(), stratify="kind", fractions=(0.5, 0.5), indices=rows)
    assert {name: part.tolist() for name, part in parts.items()} == {k: part.tolist() for k, part in expected.items()}
    dasksc.convert(data, folder / "converted.zarr", filter=expression, verify=True)
    converted = ad.read_zarr(folder / "converted.zarr")[kept.obs_names].to_memory()
    assert converted.obs.astype(str).to_dict() == kept.obs.astype(str).to_dict()
    np.testing.assert_array_equal(sp.csr_matrix(converted.X).toarray(), kept.X)
    dasksc.predict(lambda X: X[:, :2], data, folder / "predicted.zarr", batch_size=2)
    predicted = ad.read_zarr(folder / "predicted.zarr")
    assert predicted.obs_names.tolist() == adata.obs_names.tolist()
    np.testing.assert_array_equal(predicted.obsm["X_emb"], adata.X[:, :2])


@pytest.mark.parametrize("empty", ["first", "middle", "last"])
@pytest.mark.parametrize(("form", "layout", "is_file"), [("h5ad", "csr", False), ("zarr3", "dense", True)])
def test_passes_accept_empty_pieces_and_files(
    empty: str, form: str, layout: str, is_file: bool, tmp_path: Path
) -> None:
    adata = cells()
    stored = ad.AnnData(sp.csr_matrix(adata.X) if layout == "csr" else adata.X, adata.obs, adata.var)
    ranges = pairwise(ENDS[empty] if is_file else (0, 12))
    paths = [write_store(stored[a:b].copy(), tmp_path, form, str(i)) for i, (a, b) in enumerate(ranges)]
    check_passes(paths if is_file else paths[0], adata, SELECTED[empty], tmp_path)
