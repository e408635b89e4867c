"""Jobs that run ahead of the consumer of their results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from dasksc.batches.prefetch import run_ahead

pytestmark = pytest.mark.core


def gather_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("dasksc-gather")]


@pytest.mark.parametrize("n_threads", [0, 1, 3])
@pytest.mark.parametrize("n_ahead", [1, 2, 4, 100])
def test_running_ahead_keeps_the_order_and_runs_each_job_once(n_threads: int, n_ahead: int) -> None:
    runs: list[int] = []

    def job(i: int) -> int:
        runs.append(i)
        time.sleep(0.0001 * (i % 3))
        return i

    jobs = iter([lambda i=i: job(i) for i in range(50)])
    assert list(run_ahead(jobs, is_ready=lambda: True, n_ahead=n_ahead, n_threads=n_threads)) == list(range(50))
    assert sorted(runs) == list(range(50))
    assert not gather_threads()


@pytest.mark.parametrize("n_threads", [0, 2])
def test_an_error_while_running_ahead_comes_after_the_results_before_it(n_threads: int) -> None:
    def jobs() -> Iterator[Callable[[], int]]:
        for i in range(3):
            yield lambda i=i: i
        raise OSError("the fetch")

    results = run_ahead(jobs(), is_ready=lambda: True, n_ahead=8, n_threads=n_threads)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the fetch"):
        next(results)
    assert not gather_threads()


@pytest.mark.parametrize("n_threads", [0, 2])
def test_the_error_of_a_job_comes_in_its_turn_and_ends_the_rest(n_threads: int) -> None:
    def fail() -> int:
        raise OSError("the job")

    results = run_ahead(iter([lambda: 0, fail, lambda: 2]), is_ready=lambda: True, n_ahead=8, n_threads=n_threads)
    assert next(results) == 0
    with pytest.raises(OSError, match="the job"):
        next(results)
    assert list(results) == []
    assert not gather_threads()


def test_a_job_that_is_not_ready_is_requested_only_when_no_other_remains() -> None:
    requested: list[int] = []

    def jobs() -> Iterator[Callable[[], int]]:
        for i in range(5):
            requested.append(i)
            yield lambda i=i: i

    results = run_ahead(jobs(), is_ready=lambda: False, n_ahead=5, n_threads=2)
    for i, result in enumerate(results):
        assert result == i
        assert requested == list(range(i + 1))


def test_closing_ends_the_threads_and_drops_what_has_not_begun() -> None:
    begun = 0

    def job() -> None:
        nonlocal begun
        begun += 1
        time.sleep(0.01)

    results = run_ahead(iter([job] * 500), is_ready=lambda: True, n_ahead=500, n_threads=2)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert begun < 100
    assert not gather_threads()
