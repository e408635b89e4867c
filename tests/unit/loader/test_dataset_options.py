"""Options of a data set: genes, sizes of fetches and of the window, differences between ranks, and invalid input."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from anndata import AnnData

import dasksc
import dasksc.loader.projection
from dasksc import ClassBalancedSampling, InputError, Streaming, scDataset
from tests.support.data import make_adata, write_store
from tests.support.recorders import recorded_reads

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
        if prefetch is not None:  # with prefetch=None, fewer fetches are in flight, without an error
            with pytest.raises(InputError, match="memory_limit"):
                made(fetch_factor=usual.fetch_factor * 2)
    with mock.patch.object(dasksc.loader.projection, "default_threads", return_value=n_threads):
        dataset = made(fetch_factor=None)
    assert dataset.fetch_factor == usual.fetch_factor > 1
    assert dataset.projected_bytes <= 100e6


class WithoutLength:
    """Collection that has no length and can be read only through a callback."""

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
        with pytest.raises(error, match="strategy.*SamplingStrategy"):
            dasksc.scDataset(np.zeros((4, 2)), dasksc.BlockShuffling, batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(dasksc.WrongTypeError, match="64.*batch_size=64"):
        dasksc.scDataset(np.zeros((4, 2)), 64)  # type: ignore[arg-type]


@pytest.mark.parametrize("equal_ranks", [True, False])
def test_ranks_that_stream_in_storage_order_need_no_seed(equal_ranks: bool) -> None:
    rows: list[int] = []
    for rank in range(2):
        options: dict[str, Any] = {"rank": rank, "world_size": 2, "equal_ranks": equal_ranks}
        dataset = dasksc.scDataset(np.arange(11), dasksc.Streaming(), batch_size=2, fetch_factor=1, **options)
        rows += np.concatenate(list(dataset)).tolist()
        dataset.load_state_dict(dataset.state_dict() | {"seed": 7})  # earlier versions drew a seed
    assert sorted(set(rows)) == list(range(11))
    with pytest.raises(dasksc.InputError, match="seed=None with world_size=2"):
        len(dasksc.scDataset(np.arange(11), dasksc.Streaming(shuffle=True), batch_size=2, rank=0, world_size=2))


def rows_of(dataset: dasksc.scDataset) -> list[int]:
    return [int(row) for batch in dataset for row in batch.index]


def labelled(n: int = 90) -> AnnData:
    obs = {"kind": np.array(["a", "b", "b"] * (n // 3))}
    return AnnData(np.arange(2.0 * n, dtype=np.float32).reshape(n, 2), obs=obs)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, dasksc.BlockShuffling()),
        ({"strategy": "shuffle"}, dasksc.BlockShuffling()),
        ({"strategy": "stream"}, dasksc.Streaming()),
        ({"strategy": "balance", "label_key": "kind"}, dasksc.ClassBalancedSampling(label_key="kind")),
    ],
    ids=["default", "shuffle", "stream", "balance"],
)
def test_a_strategy_is_given_by_its_name(named: dict[str, Any], expected: dasksc.SamplingStrategy) -> None:
    options: dict[str, Any] = {"batch_size": 8, "seed": 3, "return_index": True}
    by_name = dasksc.scDataset(labelled(), **named, **options)
    by_object = dasksc.scDataset(labelled(), expected, **options)
    assert type(by_name.strategy) is type(expected)
    assert rows_of(by_name) == rows_of(by_object)
    assert repr(by_name) == repr(by_object)


@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_return_index_yields_the_row_numbers_of_x(layout: Any) -> None:
    adata = labelled()
    plain = dasksc.scDataset(adata, batch_size=8, seed=1, layout=layout)
    numbered = dasksc.scDataset(adata, batch_size=8, seed=1, layout=layout, return_index=True)
    seen: list[int] = []
    for x, batch in zip(plain, numbered, strict=True):
        assert type(batch) is dasksc.Batch
        assert (batch.obs, batch.layers, batch.obsm) == ({}, {}, {})
        assert torch.equal(x.to_dense(), batch.X.to_dense())
        np.testing.assert_array_equal(batch.X.to_dense(), adata.X[batch.index])
        seen += batch.index.tolist()
    assert sorted(seen) == list(range(90))
    assert plain.fingerprint == numbered.fingerprint


def test_a_data_set_is_displayed_by_what_differs_from_defaults() -> None:
    dataset = dasksc.scDataset(labelled(), batch_size=16, obs=["kind"], transform=len, layers=(), dtype="float32")
    expected = "scDataset(data, 90 rows, BlockShuffling(), batch_size=16, obs=['kind'], transform=len)"
    assert repr(dataset) == repr(pickle.loads(pickle.dumps(dataset))) == expected


def test_an_epoch_without_batches_is_reported_once_with_the_reason(caplog):
    dataset = dasksc.scDataset(VALUES, dasksc.BlockShuffling(4), batch_size=60, drop_last=True, seed=0)
    assert list(dataset) == []
    (record,) = caplog.records
    assert "batch_size" in record.getMessage()


N_OBS = 60


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_store(make_adata(N_OBS, has_everything=True), tmp_path_factory.mktemp("atlas"), "h5ad")


SIZES = [("batch_size", 0), ("batch_size", 2.5), ("fetch_factor", "8"), ("prefetch", True)]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *(({name: "flag"}, rf"{name}='flag'.*list") for name in ("obs", "layers", "obsm", "genes")),
        *(({name: value}, f"{name}.*{value!r}") for name, value in SIZES),
        *(({"seed": seed}, r"seed.*2\*\*64") for seed in (-1, 1.5, 2**64)),
        ({"obs": ["cell_typ"]}, "cell_type"),
        ({"layers": ["count"]}, "'count'.*'counts'"),
        ({"obsm": ["pca"]}, "obsm.*'pca'"),
        ({"genes": ["gene0", "gen1"]}, "'gen1'.*'gene1"),
        ({"strategy": ClassBalancedSampling(label_key="celltype")}, "cell_type"),
        ({"layout": "coo"}, "layout must be 'dense' or 'csr'"),
        ({"dtype": "str"}, "dtype='str'"),
        ({"scheduler": "processes"}, "scheduler='processes'"),
        ({"memory_limit": "abc"}, "memory_limit='abc'"),
        ({"device": "gpu"}, "device='gpu'.*PyTorch.*'cpu'"),
        ({"genes": []}, "genes= selects no column"),
        ({"genes": [0, 0]}, "twice"),
        ({"genes": [99]}, r"\[0, 17\)"),
        ({"obsm": ["table"]}, "obsm/table is a DataFrame"),
        (
            {"memory_limit": "1kB", "fetch_factor": None},
            r"^batches of 8 rows.* need .*B of memory.*limit is 0\.98 kiB.* at least '\d+MiB'$",
        ),
        (
            {"memory_limit": "18MB", "fetch_factor": 10_000},
            r"10000 at a time.*limit is 17\.17 MiB\. Lower fetch_factor.* at least '\d+MiB'$",
        ),
        (
            {"memory_limit": "18MB", "fetch_factor": 100, "prefetch": 50},
            "100 at a time with prefetch=50.*prefetch, or raise",
        ),
        ({"fetch_transform": 3}, "fetch_transform must be callable"),
        ({"fetch_transform": len, "layers": ["counts"]}, "layers= cannot be used here: hooks determine"),
        ({"rank": 2, "world_size": 2}, r"rank must lie in \[0, world_size\)"),
        ({"strategy": "shufle"}, "strategy='shufle'.*strategy.*'shuffle'"),
        ({"strategy": "balance"}, "strategy='balance' needs label_key="),
        ({"strategy": "shuffle", "label_key": "text"}, "label_key='text'.*strategy='balance'.*strategy"),
        ({"strategy": "stream", "label_key": "text"}, "strategy is 'stream'"),
        ({"strategy": Streaming(), "label_key": "text"}, r"dasksc.ClassBalancedSampling\(label_key='text'\)"),
        ({"strategy": "balance", "label_key": "txt"}, "txt.*text"),
        ({"return_index": "no"}, "return_index.*'no'"),
        ({"data": AnnData(obs=pd.DataFrame(index=["a"]))}, "no X"),
        ({"data": iter([1, 2])}, "list_iterator.*len"),
        ({"data": None}, r"None.*len\(\)"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_read(path, options, match):
    given = {"data": path, "strategy": Streaming(), "batch_size": 8, "seed": 0} | options
    data = given.pop("data")
    with recorded_reads() as reads, pytest.raises(InputError, match=match):
        scDataset(data, given.pop("strategy"), **given)
    assert not reads.of("X/")
    assert not reads.of("layers/")


def test_mapping_cannot_be_switched_off_after_opening(path):
    opened = dasksc.open(path)
    with pytest.raises(InputError, match="mmap=False"):
        scDataset(opened, Streaming(), 8, mmap=False)
    for data in (opened, [opened, path]):
        with pytest.raises(InputError, match="mmap=False"):
            dasksc.open(data, mmap=False)
    one = scDataset(dasksc.open(path, mmap=False), Streaming(), 8, seed=0)
    assert sum(map(len, one)) == N_OBS
