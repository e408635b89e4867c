"""Loader page of the dashboard, and reports that ranks send to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import distributed
import pytest

import dasksc
from dasksc import dashboard
from tests.support.waiting import WAIT_S, eventually

pytestmark = pytest.mark.programs

LABELS = {"key", "name", "worker", "host", "pid", "tasks", "n_fetches"}
ADDED = {"recent", "age_s", "has_ended", "clock_s", "waited_s", "wait_share_now", "diagnosis"}
ON_LOOPBACK = {"n_workers": 1, "processes": False, "dashboard_address": "127.0.0.1:0"}


@pytest.fixture(scope="module")
def atlas(atlas_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copy(atlas_of(2_000, 100), tmp_path_factory.mktemp("data") / "atlas.h5ad")


# A new cluster for each test, because a page's additions to its scheduler are permanent.
@pytest.fixture
def cluster() -> Iterator[distributed.LocalCluster]:
    with (
        dask.config.set({"dasksc.report-interval": "50ms"}),
        distributed.LocalCluster(threads_per_worker=2, **ON_LOOPBACK) as cluster,
    ):
        yield cluster


@pytest.fixture
def client(cluster: distributed.LocalCluster) -> Iterator[distributed.Client]:
    with distributed.Client(cluster, set_as_default=False) as client:
        yield client


def address(cluster: distributed.LocalCluster, page: str) -> str:
    return f"http://127.0.0.1:{cluster.scheduler.http_server.port}/{page}"


def served(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        return answer.read().decode()


def loaders(cluster: distributed.LocalCluster) -> list[dict[str, Any]]:
    return json.loads(served(address(cluster, "loader.json")))["loaders"]


def dataset(atlas: Path, client: Any, **options: Any) -> dasksc.scDataset:
    settings = {"batch_size": 16, "fetch_factor": 4, "seed": 0, "scheduler": client}
    return dasksc.scDataset(atlas, dasksc.BlockShuffling(block_size=8), **(settings | options))


def test_the_page_loads_nothing_from_elsewhere(cluster):
    page = served(dashboard.install(cluster))
    assert not re.search(r"""(src|href)=["'](https?:)?//""", page)
    assert loaders(cluster) == []


def test_reports_of_a_rank_equal_its_stats(cluster, client, atlas):
    dashboard.install(client)
    data = dataset(atlas, client, rank=1, world_size=2)
    for i, _ in enumerate(data):
        if i == 20:
            assert eventually(lambda: [report["n_batches"] for report in loaders(cluster)] == [21])
            (report,) = loaders(cluster)
            assert (report["rank"], report["n_rows"], report["has_ended"]) == (1, 21 * 16, False)
            assert report["n_batches"] + report["n_batches_left"] == len(data)
    (report,) = loaders(cluster)  # the final report is sent before the loop ends
    assert report["has_ended"]
    assert {name: value for name, value in report.items() if name not in LABELS | ADDED} == data.stats()
    assert report["n_fetched"] == data.plan(0).n_fetches
    assert 0 < report["read_s"] <= report["fetch_s"]


def test_two_data_sets_of_one_file_are_told_apart_and_an_epoch_left_early_too(cluster, client, atlas):
    dashboard.install(client)
    training, validation = dataset(atlas, client), dataset(atlas, client)
    for _ in training:
        break
    for _ in range(2):
        list(validation)
    reports = {report["epoch"]: report for report in loaders(cluster)}
    assert set(reports) == {0, 1}
    assert reports[0]["n_batches_left"] == len(training) - 1
    assert reports[1]["n_batches_left"] == 0
    assert all(report["has_ended"] for report in reports.values())


def test_nothing_is_left_of_a_rank_whose_client_is_gone(cluster, client, atlas):
    dashboard.install(client)
    with distributed.Client(cluster, set_as_default=False) as leaving:
        list(dataset(atlas, leaving))
        assert len(loaders(cluster)) == 1
    assert eventually(lambda: loaders(cluster) == [])


def test_reports_can_be_turned_off(cluster, client, atlas):
    dashboard.install(client)
    with dask.config.set({"dasksc.report-interval": None}):
        list(dataset(atlas, client))
    assert loaders(cluster) == []


def test_a_scheduler_of_the_command_line_preloads_the_page(tmp_path):
    file = tmp_path / "scheduler.json"
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--preload", "dasksc.dashboard"]
    command += ["--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0"]
    command += ["--dashboard-prefix", "some/where", "--scheduler-file", str(file)]
    environment = os.environ | {"PYTHONPATH": str(Path(dasksc.__file__).parents[1])}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, cwd=tmp_path)
    try:
        assert eventually(file.exists), "the scheduler has not started"
        with distributed.Client(scheduler_file=str(file), set_as_default=False) as client:
            port = client.scheduler_info()["services"]["dashboard"]
        assert json.loads(served(f"http://127.0.0.1:{port}/some/where/loader.json"))["loaders"] == []
    finally:
        process.terminate()
        process.wait()


def test_names_cannot_end_the_script_of_the_page(cluster, client, atlas, tmp_path):
    dashboard.install(client)
    named = tmp_path / "<b><!--.h5ad"
    shutil.copy(atlas, named)
    next(iter(dataset(named, client)))
    assert eventually(lambda: loaders(cluster))
    assert "<b><!--" not in served(address(cluster, "loader"))
