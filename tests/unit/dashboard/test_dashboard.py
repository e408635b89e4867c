"""Loader page of the dashboard, reports that ranks send to it, and metrics for Prometheus."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import types
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import distributed
import pytest
import torch.utils.data
from make_atlas import make_atlas

import dasksc
from dasksc import dashboard
from dasksc.dashboard.page import LoaderPage
from dasksc.errors import InputError
from dasksc.executor import reporting

pytestmark = pytest.mark.core

WAIT_S = 60.0  # timeout in seconds; only a failing test waits this long
LABELS = {"key", "name", "worker", "host", "pid", "tasks", "n_fetches"}
ADDED = {"recent", "age_s", "has_ended", "clock_s", "waited_s", "wait_share_now", "diagnosis"}


def eventually(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "atlas.h5ad"
    make_atlas(path, 2_000, 100)
    return path


# A new cluster for each test, because a page's additions to its scheduler are permanent.
@pytest.fixture
def cluster() -> Iterator[distributed.LocalCluster]:
    with (
        dask.config.set({"dasksc.report-interval": "50ms"}),
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, dashboard_address="127.0.0.1:0"
        ) as cluster,
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


# The page


def test_the_page_is_there_before_any_rank_has_reported(cluster):
    assert dashboard.install(cluster).endswith("/loader")
    page = served(address(cluster, "loader"))
    assert "No rank has reported yet" in page
    assert '"loaders": []' in page
    assert not re.search(r"""(src|href)=["'](https?:)?//""", page), "it loads something from elsewhere"
    assert loaders(cluster) == []


def test_reports_of_a_rank_equal_its_stats(cluster, client, atlas):
    dashboard.install(client)
    data = dataset(atlas, client, rank=1, world_size=2)
    seen: list[int] = []
    for i, _ in enumerate(data):
        if i in (0, 20, 40):

            def shown(i: int = i) -> bool:
                reports = loaders(cluster)
                return bool(reports) and reports[0]["n_batches"] == i + 1

            assert eventually(shown)
            (report,) = loaders(cluster)
            assert report["rank"] == 1
            assert not report["has_ended"]
            assert report["n_batches"] + report["n_batches_left"] == len(data)
            seen.append(report["n_rows"])
    assert seen == [16, 21 * 16, 41 * 16]
    (report,) = loaders(cluster)  # the final report is sent before the loop ends
    assert report["has_ended"]
    assert {name: value for name, value in report.items() if name not in LABELS | ADDED} == data.stats()
    assert (report["name"], report["worker"], report["pid"]) == ("atlas", None, os.getpid())
    assert report["n_fetched"] == data.plan(0).n_fetches
    assert 0 < report["read_s"] <= report["fetch_s"]
    assert report["transfer_s"] > 0
    assert report["gather_s"] > 0
    assert report["limit_bytes"] == 2**31


def test_the_progress_panel_of_dask_counts_the_whole_epoch(cluster, client, atlas):
    def panel() -> dict[str, int]:
        def states(dask_scheduler: Any) -> dict[str, dict[str, int]]:
            return {name: dict(prefix.states) for name, prefix in dask_scheduler.task_prefixes.items()}

        counts = client.run_on_scheduler(states).get("epoch 0: dasksc-fetch-atlas", {})
        return {name: n for name, n in counts.items() if n and name != "forgotten"}

    dashboard.install(client)
    data = dataset(atlas, client)
    n_fetches = data.plan(0).n_fetches
    assert n_fetches > 8
    for i, _ in enumerate(data):
        if i == len(data) // 2:
            # Finished, running and pending fetches sum to n_fetches. Finished fetches count as released tasks, which
            # the panel shows as done.
            assert eventually(lambda: sum(panel().values()) == n_fetches)
            assert eventually(lambda: panel()["released"] == sum(data.stats()[it] for it in ("n_fetched", "n_ready")))
            assert 2 < panel()["released"] < n_fetches
    assert eventually(lambda: panel() == {})


def test_recent_figures_are_those_between_reports(cluster, client, atlas):
    dashboard.install(client)
    for i, _ in enumerate(dataset(atlas, client)):
        if i == 10:  # training pauses: no rows are read, and no time is spent waiting

            def pausing() -> bool:
                (report,) = loaders(cluster) or [{"n_batches": 0}]
                return report["n_batches"] == 11 and report["recent"][-1][0] == 0 and report["recent"][-1][1] < 0.1

            assert eventually(pausing)
            (report,) = loaders(cluster)
    assert all(0 <= waited <= 1 for _, waited, _ in report["recent"])


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


def test_a_scheduler_without_a_page_keeps_nothing_and_complains_of_nothing(cluster, client, atlas, caplog):
    before = dict(cluster.scheduler.task_metadata)
    with caplog.at_level(logging.DEBUG):
        list(dataset(atlas, client))
    assert cluster.scheduler.task_metadata == before
    assert not [
        record
        for record in caplog.records
        if "No handler" in record.message or ("dasksc" in record.name and record.levelno > logging.INFO)
    ]


def test_a_page_that_is_installed_during_an_epoch_is_found(cluster, client, atlas, monkeypatch):
    monkeypatch.setattr(reporting, "_RECHECK_S", 0.1)
    epoch = iter(dataset(atlas, client))
    next(epoch)
    dashboard.install(client)
    assert eventually(lambda: loaders(cluster))
    epoch.close()


def test_reports_can_be_turned_off(cluster, client, atlas):
    dashboard.install(client)
    with dask.config.set({"dasksc.report-interval": None}):
        list(dataset(atlas, client))
    assert loaders(cluster) == []


def test_dasks_own_configuration_installs_the_page(atlas):
    routes = dask.config.get("distributed.scheduler.http.routes")
    with (
        dask.config.set(
            {"distributed.scheduler.http.routes": [*routes, "dasksc.dashboard"], "dasksc.report-interval": "50ms"}
        ),
        distributed.LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        assert "No rank has reported yet" in served(address(cluster, "loader"))
        list(dataset(atlas, client))
        assert len(loaders(cluster)) == 1


def test_installing_twice_changes_nothing_and_dasks_pages_name_this_one(cluster, client):
    pytest.importorskip("bokeh")
    for target in (client, cluster, cluster.scheduler):
        dashboard.install(target)
    assert sum(isinstance(plugin, LoaderPage) for plugin in cluster.scheduler.plugins.values()) == 1
    assert served(address(cluster, "status")).count('href="loader"') == 1
    assert "No rank has reported yet" in served(address(cluster, "loader"))


def test_the_link_leads_to_the_page_wherever_the_dashboard_listens():
    for dashboard_address in ("127.0.0.1:0", "127.0.0.2:0", ":0"):
        with (
            distributed.LocalCluster(n_workers=0, processes=False, dashboard_address=dashboard_address) as cluster,
            distributed.Client(cluster, set_as_default=False) as client,
        ):
            for target in (client, cluster):
                assert "No rank has reported yet" in served(dashboard.install(target))


def test_the_dashboard_link_of_a_site_is_kept(cluster, client):
    with dask.config.set({"distributed.dashboard.link": "https://hub/user/me/proxy/{port}/status"}):
        assert dashboard.install(client) == f"https://hub/user/me/proxy/{cluster.scheduler.http_server.port}/loader"


@pytest.mark.parametrize("dashboard_address", ["127.0.0.1:0", None])
def test_the_page_can_be_put_on_what_start_cluster_returns(dashboard_address):
    with dasksc.start_cluster(1, threads_per_worker=1, dashboard_address=dashboard_address) as started:
        assert (started.dashboard_link is None) == (dashboard_address is None)
        assert "No rank has reported yet" in served(dashboard.install(started))


def test_an_asynchronous_client_is_refused():
    async def install() -> None:
        async with distributed.Client(
            n_workers=0, processes=False, dashboard_address="127.0.0.1:0", asynchronous=True, set_as_default=False
        ) as client:
            with pytest.raises(InputError, match=r"asynchronous=False.*--preload dasksc\.dashboard"):
                dashboard.install(client)

    asyncio.run(install())


def test_something_else_is_refused():
    with pytest.raises(InputError, match="'tcp://host:1'"):
        dashboard.install("tcp://host:1")


def test_a_scheduler_of_the_command_line_preloads_the_page(tmp_path, atlas):
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
            page = f"http://127.0.0.1:{port}/some/where/loader"
            assert "No rank has reported yet" in served(page)

            async def started() -> distributed.Worker:
                return await distributed.Worker(client.scheduler.address, nthreads=1, dashboard=False)

            worker = client.sync(started)
            try:
                data = dataset(atlas, client)
                list(data)
                (report,) = json.loads(served(f"{page}.json"))["loaders"]
                assert report["n_rows"] == data.stats()["n_rows"] == 2_000
                assert 0 < report["read_s"] < report["fetch_s"]
            finally:
                client.sync(worker.close)
    finally:
        process.terminate()
        process.wait()


def test_dataloader_workers_are_rows_of_their_own_and_go_when_they_end(atlas):
    with (
        distributed.LocalCluster(
            n_workers=1, processes=False, protocol="tcp://", host="127.0.0.1", dashboard_address="127.0.0.1:0"
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        dashboard.install(client)
        data = dataset(atlas, client)
        loader = torch.utils.data.DataLoader(
            data, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
        )
        batches = iter(loader)
        n_rows = len(next(batches))  # the workers wait until more batches are consumed
        assert eventually(lambda: len(loaders(cluster)) == 2)
        reports = loaders(cluster)
        assert [report["worker"] for report in reports] == [0, 1]
        assert len({report["pid"] for report in reports} | {os.getpid()}) == 3
        assert sum(report["n_batches"] + report["n_batches_left"] for report in reports) == len(data)
        assert n_rows + sum(len(batch) for batch in batches) == 2_000
        del batches
        assert eventually(lambda: loaders(cluster) == [])


def test_an_epoch_outlives_a_page_that_fails(cluster, client, atlas, caplog):
    dashboard.install(client)

    def fail(**_: Any) -> None:
        raise RuntimeError("the page is broken")

    cluster.scheduler.handlers[reporting.OPERATION] = fail
    assert sum(len(batch) for batch in dataset(atlas, client)) == 2_000
    assert loaders(cluster) == []


# State on the scheduler


def page_by_itself(*clients: str) -> LoaderPage:
    return LoaderPage(
        types.SimpleNamespace(
            clients=set(clients), handlers={}, task_metadata={}, workers={}, address="a", task_prefixes={}
        )
    )


def report_of(key: str, **changed: Any) -> dict[str, Any]:
    figures = {"key": key, "name": "atlas", "worker": None, "rank": 0, "epoch": 0, "n_batches_before": 0}
    fetches = {"tasks": "epoch 0: dasksc-fetch-atlas", "n_fetches": 8, "n_fetched": 0, "n_fetching": 0, "n_ready": 0}
    return figures | fetches | {"n_rows": 0, "clock_s": 0.0, "waited_s": 0.0, "has_ended": False} | changed


def test_reports_of_clients_that_are_gone_are_not_kept():
    page = page_by_itself("here")
    assert page.report("here", report_of("a"))
    assert not page.report("gone", report_of("b"))
    assert [loader.figures["key"] for loader in page.loaders] == ["a"]


def test_a_client_with_ever_new_data_sets_does_not_fill_the_scheduler():
    page = page_by_itself("here", "there")
    page.report("there", report_of("kept"))
    for i in range(200):
        page.report("here", report_of(str(i)))
    keys = [loader.figures["key"] for loader in page.loaders]
    assert len(keys) < 50
    assert "kept" in keys
    assert "199" in keys
    assert "0" not in keys


def test_rates_cover_the_time_between_two_reports_and_restart_with_each_epoch():
    page = page_by_itself("here")
    page.report("here", report_of("a", n_rows=100, clock_s=1.0, waited_s=1.0))
    page.report("here", report_of("a", n_rows=400, clock_s=3.0, waited_s=1.5))
    page.report("here", report_of("a", n_rows=50, clock_s=0.5, waited_s=0.0, epoch=1))
    page.report("here", report_of("a", n_rows=60, clock_s=0.505, waited_s=0.0, epoch=1))  # too short
    # The same epoch is read again, as in validation.
    page.report("here", report_of("a", n_rows=20, clock_s=0.1, waited_s=0.1, epoch=1))
    (loader,) = page.loaders
    assert [(rate, wait) for rate, wait, _ in loader.recent] == [
        (100.0, 1.0),
        (150.0, 0.25),
        (100.0, 0.0),
        (200.0, 1.0),
    ]
    arrivals = [arrival for _, _, arrival in loader.recent]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == loader.at


def test_a_running_epoch_is_diagnosed_from_its_last_reports_and_one_that_has_ended_from_its_means():
    page = page_by_itself("here")
    figures = {"n_batches": 9, "n_batches_left": 5, "n_fetching": 1, "n_ready": 0, "n_fetched": 8}
    figures |= {"in_flight_bytes": 8, "limit_bytes": None, "fetch_s": 9.0, "read_s": 1.0, "decode_s": 7.0}
    figures |= {"transfer_s": 0.0, "gather_s": 1.0, "wait_share": 0.5, "has_ended": False}
    # The first second consists of waiting, as at the start of an epoch; the next three have no waiting.
    for clock_s in (1.0, 2.0, 3.0, 4.0):
        page.report("here", report_of("a", **figures, n_rows=int(clock_s), clock_s=clock_s, waited_s=1.0))
    (loader,) = page.loaders
    assert (loader.wait_share, loader.diagnosis) == (0.0, "healthy: the trainer never waited")
    (loader_figures,) = page.figures()["loaders"]
    assert (loader_figures["wait_share_now"], loader_figures["diagnosis"]) == (0.0, "healthy: the trainer never waited")
    assert [round(age_s, 3) >= 0 for _, _, age_s in loader_figures["recent"]] == [True] * 4
    page.report("here", report_of("a", **figures | {"has_ended": True}, n_rows=4, clock_s=4.0, waited_s=1.0))
    assert loader.diagnosis == "limited by decoding: 50% waiting; raise block_size, or use more cores"


def test_names_cannot_end_the_script_of_the_page(cluster, client, atlas, tmp_path):
    dashboard.install(client)
    named = tmp_path / "<b><!--.h5ad"
    shutil.copy(atlas, named)
    next(iter(dataset(named, client)))
    assert eventually(lambda: loaders(cluster))
    page = served(address(cluster, "loader"))
    assert "<b><!--" not in page
    assert "\\u003cb>\\u003c!--" in page


# Prometheus


def metrics(text: str) -> dict[str, float]:
    """Return the value of each metric, summed over its labels."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("dasksc_"):
            name, value = re.match(r"(\w+)(?:{.*})? (\S+)$", line).groups()
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def test_the_scheduler_serves_the_reports_to_prometheus(cluster, client, atlas):
    pytest.importorskip("prometheus_client")
    dashboard.install(client)
    data = dataset(atlas, client)
    list(data)
    text = served(address(cluster, "metrics"))
    found, stats = metrics(text), data.stats()
    assert found["dasksc_loader_rows_per_second"] == pytest.approx(stats["rows_per_s"])
    assert found["dasksc_loader_wait_share"] == pytest.approx(stats["wait_share"])
    assert found["dasksc_loader_batches"] == len(data)
    assert found["dasksc_loader_fetches"] == stats["n_fetched"]
    assert f'dasksc_loader_epoch{{dataset="atlas",host="{os.uname().nodename}"' in text
    assert found["dasksc_fetches_total"] >= stats["n_fetched"]  # in-process workers also count fetches of earlier tests


def test_workers_serve_what_their_fetches_do_to_prometheus(atlas, two_process_client):
    pytest.importorskip("prometheus_client")
    workers = two_process_client.scheduler_info()["workers"].values()

    def found() -> list[dict[str, float]]:
        return [metrics(served(f"http://127.0.0.1:{one['services']['dashboard']}/metrics")) for one in workers]

    before, data = found(), dataset(atlas, two_process_client)
    list(data)
    more = [{name: n - of.get(name, 0) for name, n in after.items()} for of, after in zip(before, found(), strict=True)]
    assert sum(of["dasksc_fetches_total"] for of in more) == data.stats()["n_fetched"]
    assert sum(of["dasksc_fetched_rows_total"] for of in more) == 2_000
    assert all(of["dasksc_fetch_seconds_total"] > 0 for of in more)


def test_without_prometheus_nothing_is_exported(monkeypatch):
    from dasksc.executor import fetch_totals as figures

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    figures.export("never", object())
    assert "never" not in figures._collectors


# In a browser


@pytest.fixture
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no browser: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-background-networking", "no-first-run"):
        options.add_argument(f"--{flag}")
    options.add_argument("--window-size=1440,760")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


def test_a_browser_shows_an_epoch_as_it_runs(cluster, client, atlas, browser):
    dashboard.install(client)
    browser.get(address(cluster, "loader"))
    assert eventually(lambda: "No rank has reported yet" in browser.find_element("id", "empty").text)

    def shown() -> dict[str, str]:
        found = browser.execute_script(
            "return Array.from(document.querySelectorAll('#loaders [data-figure]'), "
            "of => [of.dataset.figure, of.dataset.value, of.textContent])"
        )
        assert all(text for _, _, text in found), "a figure without its text"
        return {figure: value for figure, value, _ in found}

    data = dataset(atlas, client)
    taken = []
    for i, _ in enumerate(data):
        if i in (1, 60):  # training pauses until the page shows the figures of the data set
            stats = data.stats()
            assert eventually(lambda: shown().get("n_batches") == str(data.stats()["n_batches"]))
            figures = shown()
            for name in ("n_batches", "rows_per_s", "wait_share", "n_fetched", "epoch"):
                assert float(figures[name]) == pytest.approx(stats[name]), name
            assert eventually(lambda: float(shown()["n_ready"]) == data.stats()["n_ready"] > 0)
            assert float(shown()["in_flight_bytes"]) == data.stats()["in_flight_bytes"]
            assert shown()["state"] == "running"
            taken.append(figures)
    first, second = taken
    assert all(first[name] != second[name] for name in ("n_batches", "rows_per_s", "wait_share", "n_fetched"))
    assert eventually(lambda: shown()["state"] == "done")
    assert float(shown()["rows_per_s"]) == pytest.approx(data.stats()["rows_per_s"])
    assert [entry["message"] for entry in browser.get_log("browser")] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 600])
def test_the_page_fits_wide_and_narrow_windows_in_light_and_dark(cluster, client, atlas, browser, width, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    dashboard.install(client)
    browser.get(address(cluster, "loader"))
    data = dataset(atlas, client)
    for i, _ in enumerate(data):
        if i == 60:
            assert eventually(lambda: browser.find_element("id", "diagnosis").text != "")
            assert eventually(lambda: browser.find_elements("css selector", "#rates polyline"))
    assert eventually(lambda: browser.find_element("id", "running").text.startswith("0 loaders"))
    (loader,) = loaders(cluster)
    assert browser.find_element("id", "diagnosis").text.lower().startswith(loader["diagnosis"].lower())
    too_wide = browser.execute_script(
        "return [document.documentElement, ...document.querySelectorAll('.tile, .plot')]"
        ".filter(one => one.scrollWidth > one.clientWidth).map(one => one.outerHTML.slice(0, 80))"
    )
    assert too_wide == []
    tops = browser.execute_script("return [...document.querySelectorAll('.tile')].map(one => one.offsetTop)")
    assert len(set(tops)) == (1 if width == 1440 else 2)
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 3 * 128) is (scheme == "dark")
