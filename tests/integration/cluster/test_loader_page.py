"""The loader page in a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import distributed
import pytest

import dasksc
from dasksc import dashboard
from tests.support.waiting import eventually

pytestmark = pytest.mark.core


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


def test_a_browser_shows_the_figures_of_an_epoch(training_atlas: Path, browser: Any) -> None:
    with (
        dask.config.set({"dasksc.report-interval": "50ms"}),
        distributed.LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        browser.get(dashboard.install(client))
        data = dasksc.scDataset(training_atlas, dasksc.BlockShuffling(8), 16, 4, seed=0, scheduler=client)
        list(data)

        def shown() -> dict[str, str]:
            return browser.execute_script(
                "return Object.fromEntries(Array.from(document.querySelectorAll('#loaders [data-figure]'), "
                "of => [of.dataset.figure, of.dataset.value]))"
            )

        assert eventually(lambda: shown().get("state") == "done")
        stats, figures = data.stats(), shown()
        for name in ("n_batches", "rows_per_s", "wait_share", "n_fetched", "epoch"):
            assert float(figures[name]) == pytest.approx(stats[name]), name
        assert [entry["message"] for entry in browser.get_log("browser")] == []
