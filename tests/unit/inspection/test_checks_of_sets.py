"""Warnings of `dasksc.check` for sets of cells, at a cost that does not grow with the epoch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import anndata
import numpy as np
import pandas as pd
import pytest

import dasksc
from dasksc.inspection.checking import used_share
from dasksc.kernels import sets as kernels

pytestmark = pytest.mark.core

CONTROL = {"gene": "ctrl"}


def screen(n: int = 4000, *, is_sorted: bool = False, unlabelled: int = 0) -> anndata.AnnData:
    rng = np.random.default_rng(0)
    genes = rng.choice(["ctrl", "A", "B"], n)
    obs = pd.DataFrame({"gene": pd.Categorical(np.sort(genes) if is_sorted else genes)}, index=map(str, range(n)))
    obs.iloc[:unlabelled, 0] = np.nan
    return anndata.AnnData(np.ones((n, 4), dtype="f4"), obs)


def dataset(adata: Any = None, set_size: int = 8, batch_size: int = 32, **options: Any) -> dasksc.scDataset:
    sets = dasksc.CellSets("gene", set_size, **({"control": CONTROL} | options))
    return dasksc.scDataset(screen() if adata is None else adata, sets, batch_size, seed=0, obs=["gene"])


def test_classes_are_counted_in_few_sets_and_without_controls() -> None:
    data = dataset(n_sets=5000, n_controls=3)
    n_rows: list[int] = []
    fill = kernels.fill_sets

    def counted(*args: Any) -> None:
        n_rows.append(len(args[-1]))
        fill(*args)

    with (
        mock.patch("dasksc.inspection.checking._MAX_COUNTED_ROWS", 1000),
        mock.patch.object(kernels, "fill_sets", counted),
        mock.patch.object(kernels, "fill_controls", side_effect=AssertionError("controls are drawn")),
    ):
        classes = {one.name: one.drawn for one in dasksc.check(data).classes}
    assert n_rows == [1000]
    assert classes["ctrl"] == 0
    assert abs(classes["A"] - 0.5) < 0.2
    assert classes["A"] + classes["B"] == 1


def test_the_share_that_is_wanted() -> None:
    # In a large atlas, runs rarely share a chunk of 10 rows: a single row uses a tenth of its chunk, and a run of 10
    # rows touches 1.9 chunks on average.
    assert used_share(100, 1, 10**9, 10.0) == pytest.approx(0.1, rel=1e-3)
    assert used_share(100, 10, 10**9, 10.0) == pytest.approx(10 / 19, rel=1e-3)
    assert used_share(100, 1, 10, 10.0) == 1.0


def test_memory_is_projected_for_the_runs_of_targets_and_controls() -> None:
    # Cells are sorted by gene, so that targets form runs of 8. The values of obs["batch"] alternate, so that matched
    # controls are single rows.
    adata = screen(is_sorted=True)
    adata.obs["batch"] = pd.Categorical(np.arange(4000) % 2)
    matched = dataset(adata, set_size=64, batch_size=64, match="batch", n_controls=3)
    sampler = matched.plan(0).sampler
    assert (sampler.block_rows, sampler.controls.block_size) == (8, 1)
    assert sampler.run_rows == 4 / (1 / 8 + 3 / 1)
    assert matched.memory.run_rows == sampler.run_rows
    assert dataset(adata, set_size=64, batch_size=64).plan(0).sampler.run_rows == 8
    assert dataset(adata, set_size=64, batch_size=64, control=None).plan(0).sampler.run_rows == 8


def test_the_report_counts_sets_and_warns_of_more_ranks_than_sets() -> None:
    report = dasksc.check(dataset(screen(unlabelled=70), n_sets=100))
    assert (report.n_rows, report.n_obs, report.n_blocks, report.warnings) == (800, 4000, None, [])
    assert report.sets.n_unlabelled == 70
    assert (report.sets.n_sets, report.sets.set_size, report.sets.n_groups) == (100, 8, 2)
    (warning,) = dasksc.check(dataset(n_sets=3), world_size=4).warnings
    assert "more ranks (4) than sets (3)" in warning
