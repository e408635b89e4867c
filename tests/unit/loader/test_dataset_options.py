"""What a data set is asked for: genes, how much to fetch and to hold, and by what ranks are told to differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata import AnnData

import dasksc
import dasksc.loader.projection
from dasksc.errors import InputError

pytestmark = pytest.mark.core

VALUES = np.arange(300.0, dtype=np.float32).reshape(50, 6)


@pytest.fixture(scope="module")
def gzipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("options") / "atlas.h5ad"
    x = sp.random(2000, 1500, density=0.3, format="csr", dtype=np.float32, random_state=0)
    AnnData(X=x, obs=pd.DataFrame(index=np.arange(2000).astype(str))).write_h5ad(path, compression="gzip")
    return path


@pytest.mark.parametrize("n_threads", [1, 64])
@pytest.mark.parametrize("prefetch", [None, 2, 8])
def test_the_fetch_factor_chosen_is_the_same_on_every_machine(
    gzipped: Path, n_threads: int, prefetch: int | None
) -> None:
    def made(**options: Any) -> Any:
        settings = {"prefetch": prefetch, "memory_limit": "100MB", "seed": 0, "rank": 0, "world_size": 1}
        return dasksc.scDataset(gzipped, dasksc.BlockShuffling(8), 64, **settings, **options)

    with mock.patch.object(dasksc.loader.projection, "default_threads", return_value=2):
        usual = made(fetch_factor=None)
        if prefetch is not None:  # else fewer would be kept in flight
            with pytest.raises(InputError, match="memory_limit"):
                made(fetch_factor=usual.fetch_factor * 2)
    with mock.patch.object(dasksc.loader.projection, "default_threads", return_value=n_threads):
        dataset = made(fetch_factor=None)
    assert dataset.fetch_factor == usual.fetch_factor > 1
    assert dataset.projected_bytes <= 100e6


def test_memory_is_projected_for_the_threads_there_are_now(gzipped: Path) -> None:
    # Workers join a cluster, and a Client becomes the active one, after the data set was made.
    with mock.patch.object(dasksc.loader.projection, "default_threads", return_value=1):
        dataset = dasksc.scDataset(gzipped, dasksc.BlockShuffling(8), 64, fetch_factor=8, seed=0, rank=0, world_size=1)
        before = dataset.projected_bytes
    with mock.patch.object(dasksc.loader.projection, "default_threads", return_value=4):
        assert dataset.projected_bytes > before


@pytest.mark.parametrize("genes", [{"g1", "g2"}, frozenset({"g1"}), {"g1": 1}])
def test_genes_without_an_order_are_refused(genes: Any) -> None:
    adata = AnnData(X=VALUES, var=pd.DataFrame(index=[f"g{i}" for i in range(6)]))
    with pytest.raises(InputError, match="which has no order"):
        dasksc.scDataset(adata, dasksc.Streaming(), 4, genes=genes, rank=0, world_size=1)


@pytest.mark.parametrize("genes", [[0.0, 1.0], 0, [["g1"]], [[1, 2]]], ids=str)
def test_genes_that_are_no_list_of_names_are_refused(genes: Any) -> None:
    adata = AnnData(X=VALUES, var=pd.DataFrame(index=[f"g{i}" for i in range(6)]))
    with pytest.raises(InputError, match="genes "):
        dasksc.scDataset(adata, dasksc.Streaming(), 4, genes=genes, rank=0, world_size=1)


@pytest.mark.filterwarnings("ignore:Variable names are not unique")
def test_a_gene_that_names_two_columns_is_refused() -> None:
    adata = AnnData(X=VALUES, var=pd.DataFrame(index=["g0", "g1", "g2", "g1", "g4", "g5"]))
    with pytest.raises(InputError, match=r"var_names repeats \['g1'\]"):
        dasksc.scDataset(adata, dasksc.Streaming(), 4, genes=["g1"], rank=0, world_size=1)
    (batch,) = dasksc.scDataset(adata, dasksc.Streaming(), 50, genes=["g5", "g0"], rank=0, world_size=1)
    np.testing.assert_array_equal(batch, VALUES[:, [5, 0]])


def test_ranks_that_yield_other_columns_differ_in_fingerprint() -> None:
    adata = AnnData(X=VALUES)

    def fingerprint(**options: Any) -> str:
        return dasksc.scDataset(adata, dasksc.Streaming(), 4, seed=0, rank=0, world_size=1, **options).fingerprint

    alike = [fingerprint(genes=["0", "1"]), fingerprint(genes=["0", "1"])]
    assert len(set(alike)) == 1
    others = [fingerprint(genes=["1", "0"]), fingerprint(), fingerprint(layout="csr"), fingerprint(dtype="float64")]
    assert len({*alike, *others}) == 5


def test_a_limit_that_is_no_size_is_refused() -> None:
    with pytest.raises(InputError, match="memory_limit='abc'"):
        dasksc.scDataset(AnnData(X=VALUES), dasksc.Streaming(), 4, memory_limit="abc", rank=0, world_size=1)


def test_array_code_is_projected_by_what_is_stored(gzipped: Path) -> None:
    plain, changed = dasksc.open(gzipped), dasksc.open(gzipped)
    changed.X = da.log1p(changed.X * 2.0)
    options = {"fetch_factor": 16, "seed": 0, "rank": 0, "world_size": 1, "prefetch": 1}
    stored, computed = (
        dasksc.scDataset(adata, dasksc.BlockShuffling(64), 64, **options).projected_bytes for adata in (plain, changed)
    )
    row = 1500 * 0.3 * 8
    # Every layer's rows, beside those that were read.
    assert computed - stored > 2 * 16 * 64 * row


class WithoutLength:
    """A collection that only a callback knows how to read."""

    def __getitem__(self, rows: Any) -> Any:
        return np.asarray(rows) * 10


def test_a_collection_without_a_length_is_read_by_a_callback_at_the_indices_given() -> None:
    indices = np.array([2, 3, 5, 8, 13, 21])
    options: dict[str, Any] = {"batch_size": 2, "fetch_callback": lambda data, rows: data[rows]}
    dataset = dasksc.scDataset(WithoutLength(), dasksc.BlockShuffling(2, indices=indices), **options)
    assert len(dataset) == 3
    assert np.sort(np.concatenate(list(dataset))).tolist() == (indices * 10).tolist()
    for strategy in (dasksc.Streaming(), dasksc.Streaming(slice(0, 4))):
        with pytest.raises(dasksc.WrongTypeError, match="no len"):
            dasksc.scDataset(WithoutLength(), strategy, **options)
    with pytest.raises(dasksc.WrongTypeError, match="no len"):
        dasksc.scDataset(WithoutLength(), dasksc.Streaming(indices), batch_size=2)


def test_what_is_no_strategy_is_both_an_input_error_and_a_type_error() -> None:
    for error in (TypeError, ValueError, dasksc.InputError):
        with pytest.raises(error, match="strategy must be a SamplingStrategy"):
            dasksc.scDataset(np.zeros((4, 2)), "shuffle", batch_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("equal_ranks", [True, False])
def test_ranks_that_stream_in_storage_order_need_no_seed(equal_ranks: bool) -> None:
    rows: list[int] = []
    for rank in range(2):
        options: dict[str, Any] = {"rank": rank, "world_size": 2, "equal_ranks": equal_ranks}
        dataset = dasksc.scDataset(np.arange(11), dasksc.Streaming(), batch_size=2, fetch_factor=1, **options)
        rows += np.concatenate(list(dataset)).tolist()
        dataset.load_state_dict(dataset.state_dict() | {"seed": 7})  # as versions before drew it
    assert sorted(set(rows)) == list(range(11))
    with pytest.raises(dasksc.InputError, match="seed=None with world_size=2"):
        len(dasksc.scDataset(np.arange(11), dasksc.Streaming(shuffle=True), batch_size=2, rank=0, world_size=2))


@pytest.mark.parametrize("genes", [np.array([0, 2], ">i4"), np.array([0, 2], "u8"), np.array([True, False, True])])
def test_genes_of_any_type_keep_their_columns(genes: Any) -> None:
    X = np.arange(12, dtype=np.float32).reshape(4, 3)
    (batch,) = dasksc.scDataset(AnnData(X), dasksc.Streaming(), batch_size=4, genes=genes)
    np.testing.assert_array_equal(batch, X[:, [0, 2]])


@pytest.mark.parametrize(
    ("genes", "message"),
    [
        (np.array([0, 1], "m8[s]"), "genes holds timedelta64"),
        (np.array([2**64 - 1], "u8"), "genes holds position 18446744073709551615"),
        (np.ma.masked_array([0, 1], mask=[False, True]), "genes has 1 masked entries"),
        ([[0], [1, 2]], "genes cannot be made an array"),
    ],
)
def test_genes_that_say_no_columns_are_refused_by_name(genes: Any, message: str) -> None:
    with pytest.raises(dasksc.InputError, match=message):
        dasksc.scDataset(AnnData(np.ones((4, 3))), dasksc.Streaming(), batch_size=4, genes=genes)
