"""Entropy of batches compared with that of ideal batches."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import dasksc
from dasksc.plan import label_entropy as mixing
from dasksc.plan.binding import bind

pytestmark = pytest.mark.core


def plan_of(strategy: dasksc.SamplingStrategy, n: int, fetch_factor: int = 4) -> dasksc.EpochPlan:
    sampler = bind(strategy, range(n), n, lambda key: None)
    return dasksc.EpochPlan(sampler=sampler, batch_size=64, fetch_factor=fetch_factor)


def test_entropy_is_that_of_the_labels_of_each_batch() -> None:
    batches = [np.array([0, 0, 1, 1]), np.array([0, 1, 2, 3]), np.array([2, 2, 2, 2, -1])]
    measured = mixing.diversity_of(batches, 4)
    assert measured.mean == pytest.approx((1 + 2 + 0) / 3)
    assert measured.spread == pytest.approx(np.std([1, 2, 0]))
    assert measured.n_batches == 3


def test_single_rows_mix_ideally_and_large_blocks_do_not() -> None:
    labels = np.arange(20_000) // 1000
    single = plan_of(dasksc.BlockShuffling(1), 20_000).diversity(labels)
    blocks = plan_of(dasksc.BlockShuffling(64), 20_000).diversity(labels)
    stream = plan_of(dasksc.Streaming(), 20_000).diversity(labels)
    assert single.share == pytest.approx(1, abs=0.01)
    assert stream.mean < blocks.mean < single.mean
    assert single.spread == pytest.approx(single.ideal_spread, rel=0.3)
    longer = plan_of(dasksc.BlockShuffling(64), 20_000, fetch_factor=32).diversity(labels)
    assert blocks.mean < longer.mean <= longer.ideal_mean + 0.05


def test_a_data_set_is_measured_by_a_column_of_obs() -> None:
    plates = pd.Categorical.from_codes(np.arange(2000) // 200, list("abcdefghij"))
    obs = pd.DataFrame({"plate": plates}, index=[str(i) for i in range(2000)])
    adata = ad.AnnData(np.zeros((2000, 3), dtype=np.float32), obs=obs)
    dataset = dasksc.scDataset(adata, dasksc.BlockShuffling(50), batch_size=50, fetch_factor=4, seed=0)
    measured = dasksc.diversity(dataset, "plate")
    assert measured == dataset.plan().diversity(plates)
    assert 0 < measured.mean < measured.ideal_mean
