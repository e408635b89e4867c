from __future__ import annotations

from types import SimpleNamespace

import anndata as ad
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import torch

from dasksc.inspection import suggestions
from dasksc.inspection.suggestions import rows_per_s, suggest_parameters
from dasksc.multiindexable import MultiIndexable

pytestmark = pytest.mark.core

GIB = 1024**3


@pytest.fixture(autouse=True)
def ten_gib(monkeypatch):
    monkeypatch.setattr(suggestions, "memory_limit", lambda: SimpleNamespace(n_bytes=16 * GIB, held=6 * GIB))


def row_bytes(data, **hooks):
    result = suggest_parameters(data, 4, verbose=False, **hooks)
    return result["system_info"]["estimated_sample_size_bytes"]


class Unreadable:
    """2-D array whose shape and dtype may be inspected but whose values must not be read."""

    def __init__(self, n_rows, n_columns):
        self.shape, self.ndim, self.dtype = (n_rows, n_columns), 2, np.dtype(np.float32)

    def __getitem__(self, key):
        raise AssertionError(f"read {key}")


LAZY = da.from_array(Unreadable(1000, 300), chunks=(100, -1), meta=np.empty((0, 0), np.float32))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (LAZY, 1200),
        (ad.AnnData(X=LAZY), 1200),
        (np.zeros((50, 20)), 160),
        (MultiIndexable(X=torch.zeros(50, 20), y=np.zeros(50, np.int32)), 84),
        (np.zeros((0, 20)), 0),
    ],
)
def test_what_is_read_is_sized_by_its_elements_and_an_atlas_without_reading(data, expected):
    assert row_bytes(data) == expected


def test_hooks_run_in_the_loaders_order_on_one_read_of_rows_spread_over_the_collection(monkeypatch):
    monkeypatch.setattr(suggestions, "_N_READ", 5)
    calls = []

    def callback(data, rows):
        calls.append(rows.tolist())
        return data[rows]

    size = row_bytes(
        np.arange(101),
        fetch_callback=callback,
        fetch_transform=lambda data: data[:, None].repeat(10, 1),
        batch_callback=callback,
        batch_transform=lambda data: torch.from_numpy(data).to(torch.float16),
    )
    assert calls == [[0, 25, 50, 75, 100], [0, 1, 2, 3, 4]]
    assert size == 20


def test_no_workers_are_suggested_unless_they_are_asked_for_and_what_is_returned_is_printed(capsys):
    data = np.zeros((10, 8))
    result = suggest_parameters(data, 4)
    assert capsys.readouterr().out == f"{result}\n"
    # DataLoader rejects a prefetch_factor without workers.
    assert (result["num_workers"], result["prefetch_factor"]) == (0, None)
    assert suggest_parameters(data, 4, verbose=False, min_workers=1)["num_workers"] == 1


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([1, 2, 4, 8, 16, 32], (4, 16, 64)),  # larger blocks are faster: the largest that mix well enough
        ([100, 99, 98, 97, 96, 95], (1, 1, 1)),  # all have similar rates: the smallest
        ([10, 100, 105, 109, 50, 10], (4, 4, 4)),  # larger blocks do not gain enough speed
    ],
)
def test_blocks_are_chosen_by_diversity_and_throughput(rates, expected):
    shares = {1: 1.0, 4: 0.995, 16: 0.97, 64: 0.85, 256: 0.5, 1024: 0.1}
    measured = [
        {"block_size": block, "diversity": share, "rows_per_s": rate}
        for (block, share), rate in zip(shares.items(), rates, strict=True)
    ]
    assert tuple(suggestions._best_block(measured, least) for least in (0.99, 0.95, 0.8)) == expected
    # If no block size mixes well enough, the one that mixes best is chosen.
    assert suggestions._best_block(measured[3:], 0.99) == 64


def test_labels_may_be_a_column(monkeypatch):
    monkeypatch.setattr(suggestions, "rows_per_s", lambda dataset: min(1.0, rows_per_s(dataset)))
    obs = pd.DataFrame({"kind": np.arange(500) // 50}, index=[str(i) for i in range(500)])
    adata = ad.AnnData(np.zeros((500, 10), np.float32), obs=obs)
    result = suggest_parameters(adata, 16, verbose=False, labels="kind")
    assert result["block_size_balanced"] == 1


def test_a_fetch_holds_at_most_the_rows_of_a_collection_of_known_length(tmp_path):
    known = np.zeros((1000, 20), np.float32)
    unknown = da.zeros((1000, 20), chunks=(100, -1), dtype="float32")
    unknown = unknown[unknown[:, 0] >= 0]
    ad.AnnData(known).write_h5ad(tmp_path / "atlas.h5ad")
    for data in (known, tmp_path / "atlas.h5ad"):
        assert suggest_parameters(data, 100, verbose=False)["fetch_factor"] == 10
    assert suggest_parameters(known[:0], 100, verbose=False)["fetch_factor"] == 1
    assert suggest_parameters(unknown, 100, verbose=False)["fetch_factor"] > 10
