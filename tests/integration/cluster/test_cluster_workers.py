"""Discovery of a Dask cluster, and files and results that a rank shares with its worker processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import distributed
import pytest

import dasksc
from dasksc.executor import schedulers as window_schedulers
from dasksc.executor.schedulers import resolve_scheduler
from dasksc.storage.files import FileIdentity
from tests.support.data import make_adata, write_store

pytestmark = pytest.mark.programs


@pytest.fixture
def client(two_process_client: distributed.Client) -> distributed.Client:
    return two_process_client


def test_a_relative_path_means_the_same_file_to_workers(
    client: distributed.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_store(make_adata(), tmp_path, "h5ad")
    monkeypatch.chdir(tmp_path)
    dataset = dasksc.scDataset("atlas.h5ad", dasksc.Streaming(), batch_size=10, scheduler=client, seed=0)
    assert len(list(dataset)) == 6


def hide(path: str) -> None:
    """Hide `path` from this process."""
    from dasksc.executor import cluster

    def hidden(requested: str) -> Any:
        if requested == path:
            raise FileNotFoundError(2, "No such file or directory", path)
        return FileIdentity.of(requested)

    cluster.FileIdentity = SimpleNamespace(of=hidden)  # type: ignore[attr-defined]


def show() -> None:
    """Make all paths visible to this process again."""
    from dasksc.executor import cluster

    cluster.FileIdentity = FileIdentity  # type: ignore[attr-defined]


def test_results_come_straight_from_the_workers(
    client: distributed.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def through_the_scheduler(**_: Any) -> None:
        raise AssertionError("the scheduler was asked for a result")

    monkeypatch.setattr(client.scheduler, "gather", through_the_scheduler, raising=False)
    path = write_store(make_adata(n_obs=600), tmp_path, "h5ad")
    data = dasksc.scDataset(path, dasksc.Streaming(), batch_size=10, fetch_factor=4, scheduler=client)
    assert sum(len(batch) for batch in data) == 600


def test_a_worker_that_does_not_see_the_file_is_named_before_the_first_fetch(
    client: distributed.Client, tmp_path: Path
) -> None:
    path = write_store(make_adata(), tmp_path, "h5ad")
    blind, sighted = client.scheduler_info()["workers"]
    client.run(hide, str(path), workers=[blind])
    dataset = dasksc.scDataset(path, dasksc.Streaming(), batch_size=10, scheduler=client, seed=0)
    try:
        with pytest.raises(dasksc.StorageError, match="1 of 2") as caught:
            next(iter(dataset))
    finally:
        client.run(show)
    assert blind in str(caught.value)
    assert sighted not in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(list(dataset)) == 6


@pytest.fixture
def scheduler_file(two_process_client: distributed.Client, tmp_path: Path) -> Iterator[Path]:
    # The content is that of `dask scheduler --scheduler-file`.
    path = tmp_path / "scheduler.json"
    path.write_text(json.dumps(two_process_client.cluster.scheduler.identity(n_workers=0)))
    yield path
    window_schedulers._close_clients()


@pytest.mark.parametrize("by", ["scheduler-file", "scheduler-address"])
def test_dasks_configuration_names_the_scheduler_unless_a_client_is_active(
    scheduler_file: Path, in_process_client: distributed.Client, by: str
) -> None:
    address = json.loads(scheduler_file.read_text())["address"]
    assert resolve_scheduler(str(scheduler_file)).client.scheduler.address == address
    with dask.config.set({by: str(scheduler_file) if by == "scheduler-file" else address}):
        assert resolve_scheduler().client.scheduler.address == address
        assert resolve_scheduler("threads").kind == "threads"
        with dask.config.set(scheduler="synchronous"):
            assert resolve_scheduler().kind == "synchronous"
        with in_process_client.as_current():
            scheduler = resolve_scheduler()
            assert scheduler.client is in_process_client
            assert scheduler.in_process
            assert resolve_scheduler(scheduler).client is in_process_client
            with dask.config.set(scheduler="threads"):
                assert resolve_scheduler().kind == "threads"
