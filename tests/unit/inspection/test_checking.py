"""Reports of `check`, which does not read X, compared with the epoch itself."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from torch.utils.data import DataLoader

import dasksc
from dasksc import BlockShuffling, ClassBalancedSampling, InputError, scDataset
from tests.support.data import make_adata, write_store
from tests.support.recorders import recorded_reads

pytestmark = pytest.mark.core

N_OBS = 203


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_store(make_adata(N_OBS), tmp_path_factory.mktemp("atlas"), "h5ad")


def dataset(data, strategy=None, **options) -> scDataset:
    options = {"batch_size": 8, "fetch_factor": 4, "seed": 1, **options}
    return scDataset(data, strategy or BlockShuffling(4), **options)


@pytest.mark.parametrize(
    ("world_size", "equal_ranks", "drop_last"), [(1, True, True), (3, False, True), (3, True, True), (4, True, False)]
)
def test_the_report_equals_what_every_rank_yields(path, world_size, equal_ranks, drop_last):
    sizes = {"equal_ranks": equal_ranks, "drop_last": drop_last}
    found = dasksc.check(dataset(path, **sizes), world_size=world_size)
    assert found.world_size == world_size
    assert found.global_batch_size == 8 * world_size
    for share in found.ranks:
        one = dataset(path, rank=share.rank, world_size=world_size, **sizes)
        lengths = [len(batch) for batch in one]
        stats = one.stats()
        assert (share.n_rows, share.n_batches) == (sum(lengths), len(lengths))
        assert (share.n_padded, share.n_dropped) == (stats["n_rank_padded"], stats["n_rank_dropped"])
        assert (found.n_padded, found.n_dropped) == (stats["n_padded"], stats["n_dropped"])
        assert share.n_fetches == one.plan(0).n_fetches
    assert sum(share.n_rows for share in found.ranks) == N_OBS + found.n_padded - found.n_dropped


def test_nothing_of_x_is_read_and_no_epoch_used(path):
    one = dataset(path, ClassBalancedSampling(label_key="cell_type"), obs=["cell_type"], layers=["counts"])
    with recorded_reads() as reads:
        found = dasksc.check(DataLoader(one, batch_size=None, num_workers=2), world_size=2)
        repr(found)
    assert not reads.of("X/")
    assert not reads.of("layers/")
    assert one.stats()["epoch"] is None
    next(iter(one))
    assert one.stats()["epoch"] == found.epoch == 0


def test_the_class_mix_is_that_of_the_epoch(path):
    one = dataset(path, ClassBalancedSampling(label_key="cell_type", total_size=6000), obs=["cell_type"])
    found = dasksc.check(one)
    drawn = pd.Series(np.concatenate([batch.obs["cell_type"] for batch in one])).value_counts(normalize=True)
    stored = make_adata(N_OBS).obs["cell_type"].value_counts(normalize=True)
    assert found.label_key == "cell_type"
    assert {share.name for share in found.classes} == {"T cell", "B cell", "NK cell"}
    for share in found.classes:
        assert share.drawn == pytest.approx(drawn[one.categories["cell_type"].index(share.name)])
        assert share.stored == pytest.approx(stored[share.name])


def test_memory_counts_workers_and_the_batches_they_prefetch(path):
    one = dataset(path)
    alone = dasksc.check(one)
    assert alone.rank_bytes == alone.process_bytes == one.projected_bytes
    few = dasksc.check(DataLoader(one, batch_size=None, num_workers=2))
    more = dasksc.check(DataLoader(one, batch_size=None, num_workers=2, prefetch_factor=50))
    assert (few.num_workers, few.prefetch_factor, more.prefetch_factor) == (2, 2, 50)
    batch_bytes = 8 * 17 * 4
    assert few.prefetched_bytes >= 2 * 2 * batch_bytes
    assert more.prefetched_bytes == 25 * few.prefetched_bytes
    assert few.rank_bytes == 2 * one.projected_bytes + few.prefetched_bytes
    assert (more.pages_bytes, more.request_bytes >= more.job_bytes) == (one.projected_pages, True)


def test_a_good_configuration_is_not_warned_of_and_the_first_column_with_labels_is_reported(path):
    found = dasksc.check(dataset(path, obs=["float32", "cell_type"]), world_size=4)
    assert (found.warnings, found.label_key, bool(found.classes)) == ([], "cell_type", True)
    assert dasksc.check(dataset(path), label_key="text").label_key == "text"
    found = dasksc.check(dataset(path))
    assert (found.label_key, found.classes) == (None, [])


def test_sorted_labels_with_a_small_buffer_are_warned_of():
    obs = pd.DataFrame({"plate": pd.Categorical(np.arange(4000) * 8 // 4000)}, index=np.arange(4000).astype(str))
    adata = ad.AnnData(X=sp.random(4000, 5, density=0.4, format="csr", random_state=0), obs=obs)
    (warning,) = dasksc.check(dataset(adata, BlockShuffling(16), obs=["plate"], fetch_factor=4)).warnings
    assert "label diversity of random batches (plate)" in warning
    assert "a fetch mixes only 2 blocks" in warning
    assert dasksc.check(dataset(adata, BlockShuffling(16), obs=["plate"], fetch_factor=128)).warnings == []


@pytest.mark.parametrize(("layout", "gain"), [("csr", 9), ("dense", 16)])
def test_fetches_and_blocks_smaller_than_a_chunk_are_warned_of(tmp_path, layout, gain):
    X = sp.random(3000, 20, density=0.5, format="csr", dtype=np.float32, random_state=0)
    adata = ad.AnnData(X=X if layout == "csr" else X.toarray())
    adata.write_h5ad(tmp_path / "gzip.h5ad", compression="gzip")
    whole = dataset(tmp_path / "gzip.h5ad")
    chunk_rows = whole.source.matrices["X"].cost.chunk_rows
    (warning,) = dasksc.check(whole).warnings
    assert f"chunks of about {chunk_rows:,.0f} rows" in warning
    assert dasksc.check(dataset(tmp_path / "gzip.h5ad", fetch_factor=512)).warnings == []
    # A converted store is decoded in parts.
    group = zarr.open_group(tmp_path / "zstd.zarr", mode="w", zarr_format=3)
    with ad.settings.override(auto_shard_zarr_v3=False):
        ad.io.write_elem(group, "/", adata)
        ad.io.write_elem(group, "X", adata.X, dataset_kwargs={"chunks": (1500,) if layout == "csr" else (150, 20)})
    (warning,) = dasksc.check(dataset(tmp_path / "zstd.zarr", fetch_factor=32)).warnings
    assert "only about 9% of the rows of X" in warning
    assert "chunks of about 150 rows are decoded for runs of 4. Raise block_size or fetch_factor" in warning
    assert f"{gain} times as fast" in warning
    dasksc.convert(tmp_path / "zstd.zarr", tmp_path / "new.zarr")
    assert dasksc.check(dataset(tmp_path / "new.zarr", fetch_factor=32)).warnings == []


def test_an_epoch_without_batches_is_warned_of(path):
    (warning,) = dasksc.check(dataset(path, batch_size=150, drop_last=True), world_size=2).warnings
    assert "no rank yields a batch" in warning
    (warning,) = dasksc.check(dataset(path, strategy=dasksc.BlockShuffling(4, indices=[]))).warnings
    assert "no rank yields a batch: the strategy draws no rows" in warning
    (warning,) = dasksc.check(dataset(path, strategy=dasksc.BlockShuffling(10_000, drop_last=True))).warnings
    assert "its rows do not fill a block of 10,000. Lower block_size" in warning


@pytest.mark.parametrize("wrong", [None, [1, 2], DataLoader([1, 2])])
def test_what_is_no_data_set_is_refused(wrong):
    with pytest.raises(InputError, match="dasksc.scDataset"):
        dasksc.check(wrong)


def test_an_atlas_without_x_is_described_as_such(tmp_path):
    adata = ad.AnnData(obs=pd.DataFrame(index=["a", "b"]), var=pd.DataFrame(index=["x"]))
    adata.write_h5ad(tmp_path / "atlas.h5ad")
    (advice,) = dasksc.describe(tmp_path / "atlas.h5ad", seconds=0).advice
    assert "X is not stored" in advice
