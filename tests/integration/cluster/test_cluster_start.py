"""Start of a Dask cluster for all ranks, and discovery of a running cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import distributed
import pytest
from distributed.security import Security

import dasksc
from dasksc.executor import schedulers as window_schedulers
from dasksc.executor.cluster import rendezvous
from dasksc.executor.cluster import starting as start
from dasksc.executor.schedulers import resolve_scheduler
from tests.support.dask_processes import listening, rows_of_epoch
from tests.support.data import make_adata, write_store

pytestmark = pytest.mark.programs


@pytest.fixture
def atlas(tmp_path: Path) -> Path:
    return write_store(make_adata(n_obs=101), tmp_path, "h5ad")


# One process


def test_one_process_gets_threads_and_serialises_nothing(atlas: Path) -> None:
    with dasksc.start_cluster(threads_per_worker=2) as cluster:
        assert cluster.address.startswith("inproc://")
        assert distributed.default_client() is cluster.client
        assert sum(cluster.client.nthreads().values()) == 2
        assert b"<html" in urllib.request.urlopen(cluster.dashboard_link).read()
        assert sorted(rows_of_epoch(atlas)) == list(range(101))
        assert listening() <= {"127.0.0.1"}
        assert not cluster.cluster.scheduler.tasks
    assert cluster.client.status == "closed"
    cluster.close()
    with pytest.raises(ValueError, match="No client"):
        distributed.default_client()


def test_worker_processes_listen_on_loopback_only() -> None:
    with dasksc.start_cluster(2, threads_per_worker=1, processes=True) as cluster:
        assert cluster.address.startswith("tcp://127.0.0.1:")
        assert len(cluster.client.nthreads()) == 2
        assert listening() == {"127.0.0.1"}


def test_modules_to_preload_reach_the_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "preloaded.py"
    module.write_text("def dask_setup(scheduler):\n    scheduler.greeting = 'hello'\n")
    monkeypatch.setattr(start, "PRELOAD", [str(module)])
    with dasksc.start_cluster() as cluster:
        assert cluster.cluster.scheduler.greeting == "hello"


# Several ranks


def _store_on_loopback() -> Any:
    import torch.distributed

    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_an_outdated_address_is_replaced_by_the_next_one() -> None:
    store = _store_on_loopback()
    store.set("address", json.dumps({"address": "tcp://127.0.0.1:9", "dashboard": None, "token": "old"}))
    with distributed.LocalCluster(
        n_workers=0, processes=False, protocol="tcp://", host="127.0.0.1", dashboard_address="127.0.0.1:0"
    ) as cluster:
        new = {"address": cluster.scheduler_address, "dashboard": None, "token": "new"}
        timer = threading.Timer(0.5, store.set, ("address", json.dumps(new)))
        timer.start()
        with rendezvous.join_cluster(store, security=None, timeout_s=60) as joined:
            assert joined.address == cluster.scheduler_address
        timer.join()
        assert store.add("left/new", 0) == 1


def test_a_failure_of_an_earlier_attempt_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    store = _store_on_loopback()
    store.set("address", json.dumps({"error": "OSError: of old", "attempt": "0"}))
    threading.Timer(0.3, store.set, ("address", json.dumps({"error": "OSError: of now", "attempt": "1"}))).start()
    with pytest.raises(dasksc.StartError, match="OSError: of now"):
        rendezvous.join_cluster(store, security=None, timeout_s=60)


def test_a_scheduler_without_answer_is_named() -> None:
    store = _store_on_loopback()
    store.set("address", json.dumps({"address": "tcp://127.0.0.1:9", "dashboard": None, "token": "old"}))
    with pytest.raises(dasksc.StartError, match=r"tcp://127\.0\.0\.1:9.*host=") as caught:
        rendezvous.join_cluster(store, security=None, timeout_s=1)
    assert isinstance(caught.value.__cause__, OSError)


def test_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(dasksc.InputError, match="no process group"):
        dasksc.start_cluster()


def test_ranks_on_several_machines_need_another_host_than_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    _two_machines(monkeypatch)
    with pytest.raises(dasksc.InputError, match="MASTER_ADDR"):
        dasksc.start_cluster()


class Store:
    """Subset of the store interface of a process group."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, key: str, n: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + n
        return self.counts[key]


def test_rank_0_waits_for_the_others_but_not_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    def started(n_left: int) -> dasksc.StartedCluster:
        cluster = distributed.LocalCluster(n_workers=0, processes=False, dashboard_address=":0")
        store = Store()
        store.add("left/of this start", n_left)
        client = distributed.Client(cluster)
        return dasksc.StartedCluster(
            client,
            cluster=cluster,
            dashboard_link=None,
            store=store,
            token="of this start",
            n_others=2,
            timeout_s=0.2,
        )

    started(2).close()
    assert "have not closed" not in caplog.text
    started(1).close()
    assert "1 of 2 other ranks have not closed their Clients" in caplog.text


# Invalid settings


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dashboard_address": 8787}, r"dashboard_address=8787.*'127\.0\.0\.1:8787'"),
        ({"n_workers": -1}, "n_workers=-1"),
        ({"n_workers": 1.5}, r"n_workers=1\.5"),
        ({"threads_per_worker": 0}, "threads_per_worker=0"),
        ({"port": -5}, "port=-5"),
        ({"port": "8786"}, "port='8786'"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"host": None}, "host=None"),
        ({"host": "no such host"}, "host='no such host'.*cannot be resolved"),
    ],
)
def test_arguments_are_checked_before_anything_starts(
    options: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "LocalCluster", lambda **_: pytest.fail("a cluster was started"))
    with pytest.raises(dasksc.InputError, match=complaint):
        dasksc.start_cluster(**options)


@pytest.mark.parametrize("which", ["connected", "publish_result"])
def test_a_failure_after_the_start_closes_the_cluster(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clusters, clients = [], []

    class Noted(distributed.LocalCluster):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            clusters.append(self)

    class NotedClient(distributed.Client):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            clients.append(self)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("of the test")

    monkeypatch.setattr(distributed, "LocalCluster", Noted)
    monkeypatch.setattr(distributed, "Client", NotedClient)
    monkeypatch.setattr(start, which, fail)
    with pytest.raises(RuntimeError, match="of the test"):
        dasksc.start_cluster(1, threads_per_worker=1)
    assert [cluster.status.name for cluster in clusters] == ["closed"]
    assert [client.status for client in clients] == ([] if which == "connected" else ["closed"])


def _resolving(monkeypatch: pytest.MonkeyPatch, name: str, address: str) -> None:
    import socket

    real = socket.getaddrinfo

    def resolve(host: Any, *arguments: Any, **options: Any) -> Any:
        return real(address if host == name else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def _two_machines(monkeypatch: pytest.MonkeyPatch) -> Any:
    store = _store_on_loopback()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(start, "shared_store", lambda prefix: store)
    return store


def test_a_host_name_that_leads_to_loopback_is_refused_if_ranks_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    _resolving(monkeypatch, "node7", "127.0.1.1")  # as in /etc/hosts on Debian
    pytest.importorskip("cryptography")
    store = _two_machines(monkeypatch)
    with pytest.raises(dasksc.InputError, match=r"host='node7' is 127\.0\.1\.1.*address of the network interface"):
        dasksc.start_cluster(host="node7", security=Security.temporary())
    assert "host='node7' is 127.0.1.1" in json.loads(store.get("address"))["error"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.5", "::1"])
def test_any_loopback_address_is_refused_if_ranks_are_elsewhere(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    _two_machines(monkeypatch)
    with pytest.raises(dasksc.InputError, match="cannot be reached by ranks on other machines"):
        dasksc.start_cluster(host=host)


def test_a_host_name_that_leads_to_loopback_is_reported_if_all_ranks_are_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("cryptography")
    _resolving(monkeypatch, "node7", "127.0.1.1")
    with dasksc.start_cluster(1, threads_per_worker=1, processes=False, host="node7") as cluster:
        assert cluster.address.startswith("tls://127.0.1.1:")
    assert "host='node7' is 127.0.1.1" in caplog.text


# Existing clusters


@pytest.fixture
def scheduler_file(two_process_client: distributed.Client, tmp_path: Path) -> Iterator[Path]:
    # The content is that of `dask scheduler --scheduler-file`.
    path = tmp_path / "scheduler.json"
    path.write_text(json.dumps(two_process_client.cluster.scheduler.identity(n_workers=0)))
    yield path
    window_schedulers._close_clients()


def test_a_scheduler_file_names_the_scheduler(scheduler_file: Path, atlas: Path) -> None:
    address = json.loads(scheduler_file.read_text())["address"]
    client = resolve_scheduler(str(scheduler_file)).client
    assert client is not None
    assert client.scheduler.address == address
    assert rows_of_epoch(atlas, scheduler=str(scheduler_file)) == rows_of_epoch(atlas, scheduler="threads")


@pytest.mark.parametrize("by", ["scheduler-file", "scheduler-address"])
def test_dasks_configuration_names_the_scheduler(scheduler_file: Path, atlas: Path, by: str) -> None:
    address = json.loads(scheduler_file.read_text())["address"]
    with dask.config.set({by: str(scheduler_file) if by == "scheduler-file" else address}):
        assert str(resolve_scheduler()) == f"Dask scheduler at {address}"
        assert resolve_scheduler("threads").kind == "threads"
        with dask.config.set(scheduler="synchronous"):
            assert resolve_scheduler().kind == "synchronous"


@pytest.mark.parametrize("by", ["DASK_SCHEDULER_FILE", "DASK_SCHEDULER_ADDRESS"])
def test_the_environment_names_the_scheduler(scheduler_file: Path, by: str) -> None:
    address = json.loads(scheduler_file.read_text())["address"]
    value = str(scheduler_file) if by == "DASK_SCHEDULER_FILE" else address
    done = subprocess.run(
        [sys.executable, "-c", "from dasksc.executor.schedulers import resolve_scheduler; print(resolve_scheduler())"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), by: value},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert done.stdout == f"Dask scheduler at {address}\n"


def test_an_active_client_goes_before_the_configuration(
    scheduler_file: Path, in_process_client: distributed.Client
) -> None:
    with dask.config.set({"scheduler-file": str(scheduler_file)}), in_process_client.as_current():
        assert resolve_scheduler().client is in_process_client


@pytest.mark.parametrize("text", ["", "{}", "[]", "not json"])
def test_a_scheduler_file_without_an_address_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "scheduler.json").write_text(text)
    with pytest.raises(dasksc.InputError, match="contains no address"):
        resolve_scheduler(str(tmp_path / "scheduler.json"))


def test_a_scheduler_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dasksc.InputError, match="--scheduler-file"):
        resolve_scheduler(str(tmp_path / "scheduler.json"))
