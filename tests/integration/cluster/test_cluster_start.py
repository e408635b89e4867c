"""Start of a Dask cluster for all ranks, and discovery of a running cluster."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import distributed
import pytest
import torch.distributed

import dasksc
from dasksc.executor import schedulers as window_schedulers
from dasksc.executor.cluster import rendezvous
from dasksc.executor.schedulers import resolve_scheduler
from tests.support.dask_processes import listening, rows_of_epoch
from tests.support.data import make_adata, write_store

pytestmark = pytest.mark.programs


@pytest.fixture
def atlas(tmp_path: Path) -> Path:
    return write_store(make_adata(n_obs=101), tmp_path, "h5ad")


def test_one_process_gets_threads_on_loopback_and_closes_what_it_started(atlas: Path) -> None:
    with dasksc.start_cluster(threads_per_worker=2) as cluster:
        assert cluster.address.startswith("inproc://")
        assert distributed.default_client() is cluster.client
        assert sum(cluster.client.nthreads().values()) == 2
        assert b"<html" in urllib.request.urlopen(cluster.dashboard_link).read()
        assert sorted(rows_of_epoch(atlas)) == list(range(101))
        assert listening() <= {"127.0.0.1"}
    assert cluster.client.status == "closed"
    with pytest.raises(ValueError, match="No client"):
        distributed.default_client()


@pytest.fixture
def store() -> Any:
    store = torch.distributed.HashStore()
    store.set("address", json.dumps({"address": "tcp://127.0.0.1:9", "dashboard": None, "token": "old"}))
    return store


def test_an_outdated_address_is_replaced_by_the_next_one(store: Any) -> None:
    with distributed.LocalCluster(
        n_workers=0, processes=False, protocol="tcp://", host="127.0.0.1", dashboard_address="127.0.0.1:0"
    ) as cluster:
        new = {"address": cluster.scheduler_address, "dashboard": None, "token": "new"}
        timer = threading.Timer(0.5, store.set, ("address", json.dumps(new)))
        timer.start()
        with rendezvous.join_cluster(store, security=None, timeout_s=60) as joined:
            assert joined.address == cluster.scheduler_address
        timer.join()


def test_a_scheduler_without_answer_is_named(store: Any) -> None:
    with pytest.raises(dasksc.StartError, match=r"tcp://127\.0\.0\.1:9"):
        rendezvous.join_cluster(store, security=None, timeout_s=1)


@pytest.fixture
def scheduler_file(two_process_client: distributed.Client, tmp_path: Path) -> Iterator[Path]:
    # The content is that of `dask scheduler --scheduler-file`.
    path = tmp_path / "scheduler.json"
    path.write_text(json.dumps(two_process_client.cluster.scheduler.identity(n_workers=0)))
    yield path
    window_schedulers._close_clients()


def test_a_scheduler_file_names_the_scheduler(scheduler_file: Path, atlas: Path) -> None:
    assert rows_of_epoch(atlas, scheduler=str(scheduler_file)) == rows_of_epoch(atlas, scheduler="threads")


@pytest.mark.parametrize("by", ["scheduler-file", "scheduler-address"])
def test_dasks_configuration_names_the_scheduler_unless_a_client_is_active(
    scheduler_file: Path, in_process_client: distributed.Client, by: str
) -> None:
    address = json.loads(scheduler_file.read_text())["address"]
    with dask.config.set({by: str(scheduler_file) if by == "scheduler-file" else address}):
        assert resolve_scheduler().client.scheduler.address == address
        assert resolve_scheduler("threads").kind == "threads"
        with dask.config.set(scheduler="synchronous"):
            assert resolve_scheduler().kind == "synchronous"
        with in_process_client.as_current():
            assert resolve_scheduler().client is in_process_client
