"""Sentence that names the bottleneck of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numba
import pytest

from dasksc.executor import progress
from dasksc.executor.reporting import diagnosis
from dasksc.kernels.compiled import compiling, seconds_compiling

pytestmark = pytest.mark.core


def figures(**changed: Any) -> dict[str, Any]:
    """Return the figures of a completed epoch with 38% waiting, whose fetches spent most of their time reading."""
    usual = {
        "wait_share": 0.38,
        "n_batches": 100,
        "n_batches_left": 0,
        "n_fetching": 0,
        "n_ready": 0,
        "n_fetched": 25,
        "n_rank_fetches": 25,
        "in_flight_bytes": 0,
        "limit_bytes": 1000,
        "fetch_s": 10.0,
        "read_s": 7.0,
        "decode_s": 2.0,
        "transfer_s": 0.5,
        "gather_s": 3.0,
    }
    return usual | changed


@pytest.mark.parametrize(
    ("changed", "beginning"),
    [
        ({"wait_share": 0.049}, "healthy: the trainer waited 5%"),
        ({}, "limited by reading: 38%"),
        ({"fetch_s": 30.0}, "limited by chunk lookup and array code"),
        ({"transfer_s": 9.0, "wait_share": 1.0}, "limited by transfers from Dask workers: 100%"),
        # Every fetch in flight is ready, but training still waits.
        ({"n_ready": 2, "in_flight_bytes": 200}, "limited by making batches"),
        # Two fetches of 400 bytes leave no room for a third; three of 250 bytes leave room for a fourth.
        ({"n_fetching": 1, "n_ready": 1, "in_flight_bytes": 800}, "limited by memory"),
        ({"n_fetching": 3, "in_flight_bytes": 750}, "limited by reading"),
        ({"n_batches": 0, "n_fetched": 0}, "starting: no batch"),
        ({"n_fetched": 1, "n_batches_left": 9}, "starting: 38%"),
        ({"n_fetched": 1}, "the epoch is too short to read ahead"),
        # A large fetch is several tasks.
        ({"n_fetched": 4, "n_rank_fetches": 1}, "the epoch is too short to read ahead"),
        # The summed time of a task's threads may exceed the duration of the task.
        ({"fetch_s": 1.0}, "limited by reading"),
    ],
)
def test_the_figures_of_an_epoch_say_what_limits_it(changed: dict[str, Any], beginning: str) -> None:
    assert diagnosis(figures(**changed)).startswith(beginning)


def test_waiting_while_kernels_are_compiled_is_in_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, clock = [0.0], [0.0]
    monkeypatch.setattr(progress, "seconds_compiling", lambda: compiled[0])
    monkeypatch.setattr(progress, "perf_counter", lambda: clock[0])

    def batches() -> Iterator[int]:
        for waited_s, compiled_s in ((20.0, 19.0), (1.0, 0.0)):
            clock[0] += waited_s
            compiled[0] += compiled_s
            yield 0

    stats = progress.EpochStats()
    for _ in stats.timed(batches()):
        clock[0] += 1  # the training step
    report = stats.report()
    assert (report["compile_s"], report["wait_s"], report["elapsed_s"]) == (19, 2, 3)
    assert report["wait_share"] == pytest.approx(2 / 3)


def test_compiling_a_kernel_is_announced_and_timed() -> None:
    calls: list[str] = []
    before = seconds_compiling()
    with compiling(lambda: calls.append("compiling")):
        assert numba.njit(lambda x: x + 1)(1) == 2
    assert calls
    assert seconds_compiling() > before
