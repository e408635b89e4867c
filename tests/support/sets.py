"""Small perturbation screens, cell sets drawn from them, their batches, and a strategy of a user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import anndata
import numpy as np
import pandas as pd
import scipy.sparse as sp

from dasksc import CellSets, EpochPlan, SamplingStrategy, scDataset
from dasksc.plan.sets import SetSampler

CONTROL = {"gene": "ctrl"}


class Own(SamplingStrategy):
    """Strategy of a user that draws given rows, and may state another number of them."""

    def __init__(self, rows: Any, length: Any = None) -> None:
        super().__init__()
        self.rows = rows
        self.length = len(rows) if length is None else length

    def get_len(self, data_collection: Any) -> Any:
        return self.length

    def get_indices(self, data_collection: Any, seed: int | None = None, rng: Any = None) -> Any:
        return self.rows


def screen(n: int = 2000, *, is_sorted: bool = False, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    genes = rng.choice(["ctrl", "A", "B", "C", "D"], n, p=[0.3, 0.4, 0.15, 0.1, 0.05])
    lines = rng.choice(["K562", "RPE1", "HepG2"], n)
    obs = pd.DataFrame({"gene": genes, "line": lines, "batch": rng.choice(list("xyz"), n)}).astype("category")
    return obs.sort_values(["line", "gene"], kind="stable").reset_index(drop=True) if is_sorted else obs


def bound(obs: pd.DataFrame, *args: Any, **options: Any) -> SetSampler:
    return CellSets(*args, **options).bind(len(obs), lambda name: obs[name])


def plan_of(sampler: SetSampler, sets_of_batch: int = 2, **options: Any) -> EpochPlan:
    return EpochPlan(sampler=sampler, batch_size=sets_of_batch * sampler.set_size, fetch_factor=3, **options)


def sets_of(plan: EpochPlan) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield the group, rows and control rows of each set that a rank yields."""
    for i in range(plan.n_batches):
        fetch = plan.fetch(i // plan.fetch_factor)
        at = i % plan.fetch_factor
        size = cast(SetSampler, plan.sampler).set_size
        targets = fetch.rows[fetch.batch(at)].reshape(-1, size)
        controls = fetch.batch_controls(at)
        beside = np.empty((len(targets), 0)) if controls is None else fetch.rows[controls].reshape(len(targets), -1)
        groups = fetch.batch_groups(at)
        assert groups is not None
        assert len(groups) == len(targets)
        for group, rows, own in zip(groups.tolist(), targets.tolist(), beside.tolist(), strict=True):
            yield group, tuple(rows), tuple(own)


N = 1200


def screened() -> anndata.AnnData:
    """Return a screen with expression values."""
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


def sets(**options: Any) -> CellSets:
    return CellSets(["line", "gene"], 8, **({"control": CONTROL} | options))


def dataset(data: Any, strategy: CellSets | None = None, **options: Any) -> scDataset:
    return scDataset(data, strategy or sets(), **({"batch_size": 32, "seed": 5, "fetch_factor": 4} | options))


def numbers(batch: Any) -> tuple[Any, ...]:
    return tuple(part.tolist() for part in (batch.sets, batch.index, batch.control.index, batch.X, batch.control.X))
