"""Invalid input: a clear error before any data is read."""

from __future__ import annotations

import numpy as np
import pytest

import dasksc
from dasksc import (
    ClassBalancedSampling,
    InputError,
    Streaming,
    scDataset,
)
from tests.support.data import make_adata, write_store
from tests.support.recorders import recorded_reads

pytestmark = pytest.mark.core

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
        ({"genes": ["gene0", "GENE1"]}, "'GENE1'.*'gene1'"),
        ({"strategy": ClassBalancedSampling(label_key="celltype")}, "cell_type"),
        ({"layout": "coo"}, "layout must be 'dense' or 'csr'"),
        ({"dtype": "str"}, "dtype='str'"),
        ({"dtype": "float99"}, "dtype='float99'"),
        ({"scheduler": "processes"}, "scheduler='processes'"),
        ({"memory_limit": "abc"}, "memory_limit='abc'"),
        ({"device": "gpu"}, "device='gpu'.*PyTorch.*'cpu'"),
        ({"genes": np.ones(3, dtype=bool)}, r"genes is a mask of shape \(3,\), but there are 17 columns"),
        ({"genes": []}, "genes= selects no column"),
        ({"genes": [0, 0]}, "twice"),
        ({"genes": [99]}, r"\[0, 17\)"),
        ({"obsm": ["table"]}, "obsm/table is a DataFrame"),
        (
            {"memory_limit": "1kB", "fetch_factor": None},
            r"^batches of 8 rows need .*B of memory .*limit is 0\.98 kiB.*fetch_factor=1 needs.* at least '\d+MiB'$",
        ),
        (
            {"memory_limit": "18MB", "fetch_factor": 10_000},
            r"1 fetch of 10000 batches in flight.*limit is 17\.17 MiB\. Use fetch_factor=\d+,.* at least '\d+MiB'$",
        ),
        (
            {"memory_limit": "18MB", "fetch_factor": 100, "prefetch": 50},
            "50 fetches of 100 batches in flight.* Use fetch_factor=.* lower batch_size or prefetch",
        ),
        ({"fetch_transform": 3}, "fetch_transform must be callable"),
        ({"fetch_transform": len, "layers": ["counts"]}, "layers= cannot be used here: hooks determine"),
        ({"rank": 2, "world_size": 2}, r"rank must lie in \[0, world_size\)"),
        ({"rank": 0, "world_size": 0}, "world_size=0"),
        ({"rank": "0", "world_size": 1}, "rank must be a whole number"),
        ({"data": iter([1, 2])}, "list_iterator.*len"),
        ({"data": None}, r"None.*len\(\)"),
        ({"data": 5}, r"int.*len\(\)"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_read(path, options, match):
    given = {"data": path, "strategy": Streaming(), "batch_size": 8, "seed": 0} | options
    data = given.pop("data")
    with recorded_reads() as reads, pytest.raises(InputError, match=match):
        scDataset(data, given.pop("strategy"), **given)
    assert not reads.of("X/")
    assert not reads.of("layers/")


def test_an_anndata_without_x_is_refused():
    adata = make_adata(N_OBS)
    adata.X = None
    with pytest.raises(InputError, match="no X"):
        scDataset(adata, Streaming(), 8)


def test_mapping_cannot_be_switched_off_after_opening(path):
    opened = dasksc.open(path)
    with pytest.raises(InputError, match="mmap=False"):
        scDataset(opened, Streaming(), 8, mmap=False)
    for data in (opened, [opened, path]):
        with pytest.raises(InputError, match="mmap=False"):
            dasksc.open(data, mmap=False)
    one = scDataset(dasksc.open(path, mmap=False), Streaming(), 8, seed=0)
    assert sum(map(len, one)) == N_OBS
