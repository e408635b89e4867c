"""Tests of ranks that share a Dask cluster, under torchrun and on several machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.dask_processes import NOT_LOOPBACK, secret_file
from tests.support.data import make_adata, write_store
from tests.support.programs import torchrun

pytestmark = pytest.mark.programs


@pytest.fixture
def atlas(tmp_path: Path) -> Path:
    return write_store(make_adata(n_obs=101), tmp_path, "h5ad")


def test_ranks_of_torchrun_share_the_cluster_of_rank_0_or_receive_its_error(atlas: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    secret = secret_file(tmp_path)
    whats = ("port", "dashboard", "127.0.0.1", NOT_LOOPBACK)
    torchrun(2, "shared_cluster.py", atlas, tmp_path / "seen.json", secret, *whats)
    *wrong, plain, encrypted = zip(*json.loads((tmp_path / "seen.json").read_text()), strict=True)
    for (mine, received), expected in zip(wrong, ["InputError: port=-5", "RuntimeError: Cluster failed"], strict=True):
        assert mine.startswith(expected)
        assert received.startswith("StartError: rank 0 could not start the Dask cluster")
    for ranks, kind in ((plain, "tcp://127.0.0.1:"), (encrypted, f"tls://{NOT_LOOPBACK}:")):
        assert [rank["starts"] for rank in ranks] == [True, False]
        assert len({rank["address"] for rank in ranks}) == 1
        assert ranks[0]["address"].startswith(kind)
        assert {row for rank in ranks for row in rank["rows"]} == set(range(101))
        assert len({len(rank["rows"]) for rank in ranks}) == 1
