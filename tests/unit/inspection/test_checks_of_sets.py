"""Warnings of `dasksc.check` for sets of cells, at a cost that does not grow with the epoch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import anndata
import numpy as np
import pandas as pd
import pytest

import dasksc
from dasksc.kernels import groups as kernels

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


def test_the_report_counts_sets_and_warns_of_more_ranks_than_sets() -> None:
    report = dasksc.check(dataset(screen(unlabelled=70), n_sets=100))
    assert (report.n_rows, report.n_obs, report.n_blocks, report.warnings) == (800, 4000, None, [])
    assert report.sets.n_unlabelled == 70
    assert (report.sets.n_sets, report.sets.set_size, report.sets.n_groups) == (100, 8, 2)
    (warning,) = dasksc.check(dataset(n_sets=3), world_size=4).warnings
    assert "more ranks (4) than sets (3)" in warning
