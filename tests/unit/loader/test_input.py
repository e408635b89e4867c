"""Invalid input: a clear error before any data is read."""

from __future__ import annotations

import numpy as np
import pytest

import dasksc
from dasksc import (
    ClassBalancedSampling,
    CorruptDataError,
    InputError,
    MissingKeyError,
    MissingPathError,
    StorageError,
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


def refuse(error, match, data, strategy=None, batch_size=8, **options):
    """Check that creating the data set raises `error` without reading any matrix."""
    with recorded_reads() as reads, pytest.raises(error, match=match):
        scDataset(data, strategy or Streaming(), batch_size, seed=0, **options)
    assert not reads.of("X/")
    assert not reads.of("layers/")


def test_a_directory_that_is_no_store(tmp_path):
    refuse(StorageError, "neither a Zarr group", tmp_path)


def test_a_truncated_file(path, tmp_path):
    truncated = tmp_path / "truncated.h5ad"
    truncated.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    n_bytes, n_all = truncated.stat().st_size, path.stat().st_size
    refuse(CorruptDataError, f"is truncated: it has {n_bytes:,} of {n_all:,} bytes", truncated)


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "cells.csv").write_text("a,b\n1,2\n")
    refuse(StorageError, r"cells\.csv.*\.h5ad", tmp_path / "cells.csv")


def test_a_url_without_a_slash_is_shown_without_its_password(tmp_path):
    refuse(
        MissingPathError, r"^(?!.*SECRET).*did you mean https://host/atlas\.h5ad", "https:/me:SECRET@host/atlas.h5ad"
    )
    refuse(MissingPathError, r"did you mean s3://bucket/atlas\.zarr\?", "s3:/bucket/atlas.zarr")
    refuse(MissingPathError, "there is nothing at (?!.*did you mean)", tmp_path / "disk:" / "atlas.h5ad")


def test_an_empty_file(tmp_path):
    (tmp_path / "atlas.h5ad").write_bytes(b"")
    refuse(CorruptDataError, r"atlas\.h5ad is empty \(0 bytes\)\. Copy", tmp_path / "atlas.h5ad")


def test_an_object_without_a_length():
    refuse(InputError, "^an object of type list_iterator has no len", iter([1, 2]))
    refuse(InputError, r"^None has no len\(\).* Give a path", None)
    refuse(InputError, r"^an object of type int has no len\(\).* Give a path", 5)


@pytest.mark.parametrize("nothing", [[], (), {}])
def test_a_list_without_an_atlas(nothing):
    refuse(InputError, "contains no atlas; give at least one path or AnnData", nothing)


@pytest.mark.parametrize(
    ("name", "value"), [("batch_size", 0), ("batch_size", 2.5), ("fetch_factor", "8"), ("prefetch", True)]
)
def test_sizes_that_are_no_whole_numbers(path, name, value):
    refuse(InputError, f"{name} must be a whole number of at least 1; got {value!r}", path, **{name: value})


@pytest.mark.parametrize("seed", [-1, 1.5, 2**64])
def test_seeds_out_of_range(path, seed):
    with pytest.raises(InputError, match=r"seed.*2\*\*64"):
        scDataset(path, Streaming(), 8, seed=seed)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"obs": ["cell_typ"]}, "cell_type"),
        ({"layers": ["count"]}, r"layers of .*\.\w+ has no 'count'; did you mean 'counts'"),
        ({"obsm": ["pca"]}, r"obsm of .*\.\w+ has no 'pca'"),
        ({"genes": ["gene0", "gen1"]}, "var_names has no 'gen1'; did you mean 'gene1"),
        ({"genes": ["gene0", "GENE1"]}, r"var_names has no 'GENE1'; did you mean 'gene1'\?"),
        ({"strategy": ClassBalancedSampling(label_key="celltype")}, "cell_type"),
    ],
)
def test_names_that_the_data_does_not_have(path, options, match):
    refuse(MissingKeyError, match, path, **options)


@pytest.mark.parametrize("name", ["obs", "layers", "obsm", "genes"])
def test_a_string_where_a_list_belongs(path, name):
    refuse(InputError, rf"{name}='flag' is a string; give a list", path, **{name: "flag"})


@pytest.mark.parametrize(
    ("options", "match"),
    [
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
    ],
)
def test_options_that_make_no_sense(path, options, match):
    refuse(InputError, match, path, **options)


def test_an_anndata_without_x():
    adata = make_adata(N_OBS)
    adata.X = None
    with pytest.raises(InputError, match="no X"):
        scDataset(adata, Streaming(), 8)


def test_mapping_cannot_be_switched_off_after_opening(path):
    opened = dasksc.open(path)
    refuse(InputError, "mmap=False", opened, mmap=False)
    for data in (opened, [opened, path]):
        with pytest.raises(InputError, match="mmap=False"):
            dasksc.open(data, mmap=False)
    one = scDataset(dasksc.open(path, mmap=False), Streaming(), 8, seed=0)
    assert sum(map(len, one)) == N_OBS
