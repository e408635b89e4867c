"""State of the loader page on the scheduler: the reports that it keeps, and what it derives from them."""

from __future__ import annotations

import types
from typing import Any

import pytest

from dasksc import dashboard
from dasksc.dashboard import LoaderPage
from dasksc.errors import InputError

pytestmark = pytest.mark.core


def test_something_else_is_refused():
    with pytest.raises(InputError, match="'tcp://host:1'"):
        dashboard.install("tcp://host:1")


def page_by_itself(*clients: str) -> LoaderPage:
    return LoaderPage(
        types.SimpleNamespace(
            clients=set(clients), handlers={}, task_metadata={}, workers={}, address="a", task_prefixes={}
        )
    )


def report_of(key: str, **changed: Any) -> dict[str, Any]:
    figures = {"key": key, "name": "atlas", "worker": None, "rank": 0, "epoch": 0, "n_batches_before": 0}
    figures |= {"n_batches": 0, "n_rows": 0, "clock_s": 0.0, "waited_s": 0.0, "wait_share": 0.0, "has_ended": False}
    figures |= {"tasks": "epoch 0: dasksc-fetch-atlas", "n_fetches": 8, "n_fetched": 0, "n_fetching": 0, "n_ready": 0}
    return figures | changed


def shown(page: LoaderPage) -> list[dict[str, Any]]:
    return page.figures()["loaders"]


def test_a_client_with_ever_new_data_sets_does_not_fill_the_scheduler():
    page = page_by_itself("here", "there")
    page.report("there", report_of("kept"))
    for i in range(200):
        page.report("here", report_of(str(i)))
    keys = [loader["key"] for loader in shown(page)]
    assert len(keys) < 50
    assert {"kept", "199"} <= set(keys)


def test_rates_cover_the_time_between_two_reports_and_restart_with_each_epoch():
    page = page_by_itself("here")
    page.report("here", report_of("a", n_rows=100, clock_s=1.0, waited_s=1.0))
    page.report("here", report_of("a", n_rows=400, clock_s=3.0, waited_s=1.5))
    page.report("here", report_of("a", n_rows=50, clock_s=0.5, waited_s=0.0, epoch=1))
    page.report("here", report_of("a", n_rows=60, clock_s=0.505, waited_s=0.0, epoch=1))  # too short
    # The same epoch is read again, as in validation.
    page.report("here", report_of("a", n_rows=20, clock_s=0.1, waited_s=0.1, epoch=1))
    (loader,) = shown(page)
    assert [(rate, wait) for rate, wait, _ in loader["recent"]] == [
        (100.0, 1.0),
        (150.0, 0.25),
        (100.0, 0.0),
        (200.0, 1.0),
    ]


def test_a_running_epoch_is_diagnosed_from_its_last_reports_and_one_that_has_ended_from_its_means():
    page = page_by_itself("here")
    figures = {"n_batches": 9, "n_batches_left": 5, "n_fetching": 1, "n_ready": 0, "n_fetched": 8, "n_rank_fetches": 8}
    figures |= {"in_flight_bytes": 8, "limit_bytes": None, "fetch_s": 9.0, "read_s": 1.0, "decode_s": 7.0}
    figures |= {"transfer_s": 0.0, "gather_s": 1.0, "wait_share": 0.5, "has_ended": False}
    # The first second consists of waiting, as at the start of an epoch; the next three have no waiting.
    for clock_s in (1.0, 2.0, 3.0, 4.0):
        page.report("here", report_of("a", **figures, n_rows=int(clock_s), clock_s=clock_s, waited_s=1.0))
    (loader,) = shown(page)
    assert loader["wait_share_now"] == 0
    assert loader["diagnosis"].startswith("healthy")
    page.report("here", report_of("a", **figures | {"has_ended": True}, n_rows=4, clock_s=4.0, waited_s=1.0))
    assert shown(page)[0]["diagnosis"].startswith("limited by decoding: 50%")
