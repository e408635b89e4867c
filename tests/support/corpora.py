"""The same atlas as a SOMA experiment and as a Parquet file of lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata import AnnData

from tests.support.data import make_adata

N_OBS, N_VARS = 103, 17


def source() -> AnnData:
    adata = make_adata(N_OBS, N_VARS)
    del adata.layers["scaled"]
    adata.obs = adata.obs[["text", "int64", "float32", "flag"]]
    return adata


def write_soma(adata: AnnData, folder: Path) -> tuple[Path, dict[str, Any]]:
    tiledbsoma = pytest.importorskip("tiledbsoma")
    from tiledbsoma import io

    if None in adata.layers:
        pytest.skip("tiledbsoma does not write AnnData 0.13, whose layers contain X")
    create = {"tiledb": {"create": {"capacity": 100, "dims": {"soma_dim_0": {"tile": 16}, "soma_dim_1": {"tile": 5}}}}}
    io.from_anndata(str(folder / "atlas.soma"), adata, "RNA", platform_config=create)
    assert tiledbsoma.Experiment.exists(str(folder / "atlas.soma"))
    return folder / "atlas.soma", {}


def write_parquet(adata: AnnData, folder: Path, **changed: Any) -> tuple[Path, dict[str, Any]]:
    """Write cells in row groups of 20, with a marker as in Tahoe-100M; `changed` replaces columns."""
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    X = sp.csr_matrix(adata.X)
    tokens = 3 + 2 * np.random.default_rng(0).permutation(adata.n_vars)
    rows = [slice(*X.indptr[i : i + 2]) for i in range(adata.n_obs)]
    columns = {
        "genes": pa.array([[1, *tokens[X.indices[row]]] for row in rows], pa.list_(pa.int64())),
        "expressions": pa.array([[-2, *X.data[row]] for row in rows], pa.list_(pa.float32())),
        "barcode": adata.obs_names.to_list(),
        **{name: adata.obs[name].to_list() for name in adata.obs},
    }
    pq.write_table(pa.table({**columns, **changed}), folder / "cells.parquet", row_group_size=20)
    genes = pd.DataFrame({"ensembl_id": adata.var_names.to_numpy(object)}, pd.Index(tokens, "u2", name="token_id"))
    genes.to_parquet(folder / "genes.parquet")
    return folder / "cells.parquet", {"gene_table": str(folder / "genes.parquet"), "cell_names": "barcode"}
