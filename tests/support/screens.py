"""Small perturbation screen with expression values, and batches of its cell sets."""

from __future__ import annotations

from typing import Any

import anndata
import numpy as np
import pandas as pd
import scipy.sparse as sp

import dasksc

CONTROL = {"gene": "ctrl"}
N = 1200


def screen() -> anndata.AnnData:
    rng = np.random.default_rng(0)
    obs = pd.DataFrame(
        {
            "gene": rng.choice(["ctrl", "A", "B", "C"], N, p=[0.3, 0.4, 0.2, 0.1]),
            "line": rng.choice(["K562", "RPE1"], N),
            "dose": rng.random(N),
        },
        index=[f"cell{i}" for i in range(N)],
    ).astype({"gene": "category", "line": "category"})
    X = sp.random(N, 30, 0.3, format="csr", dtype=np.float32, random_state=1)
    counts = sp.random(N, 30, 0.3, format="csr", dtype=np.float32, random_state=2)
    return anndata.AnnData(X, obs, layers={"counts": counts}, obsm={"X_pca": rng.random((N, 4)).astype("f4")})


def sets(**options: Any) -> dasksc.CellSets:
    return dasksc.CellSets(["line", "gene"], 8, **({"control": CONTROL} | options))


def dataset(data: Any, strategy: dasksc.CellSets | None = None, **options: Any) -> dasksc.scDataset:
    return dasksc.scDataset(data, strategy or sets(), **({"batch_size": 32, "seed": 5, "fetch_factor": 4} | options))


def numbers(batch: Any) -> tuple[Any, ...]:
    return tuple(part.tolist() for part in (batch.sets, batch.index, batch.control.index, batch.X, batch.control.X))
