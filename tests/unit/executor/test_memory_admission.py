"""Fetches that wait for memory on a Dask worker, but never forever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from dasksc.executor import memory_admission
from dasksc.executor.memory_admission import MemoryAdmission

pytestmark = pytest.mark.faults

T = TypeVar("T")

LIMIT = 1000
UNNOTICED_S = 0.2  # how long a test checks that a waiting fetch does not begin


class Worker:
    """Worker whose process memory is set by the test, in bytes."""

    def __init__(
        self,
        *,
        limit: int | None = LIMIT,
        target: float | bool = 0.6,
        spill: float | bool = 0.7,
        pause: float | bool = 0.8,
    ) -> None:
        self.memory_manager = SimpleNamespace(
            memory_limit=limit,
            memory_target_fraction=target,
            memory_spill_fraction=spill,
            memory_pause_fraction=pause,
        )
        self.n_bytes = 100
        self.monitor = SimpleNamespace(get_process_memory=lambda: self.n_bytes)


class Result:
    def __init__(self, n_bytes: int) -> None:
        self.nbytes = n_bytes


def run(
    admission: MemoryAdmission, fetch: Callable[[], T], *, size: int | None = 100, is_wanted: bool = True
) -> T | None:
    return admission.run(fetch, size=size, is_wanted=lambda: is_wanted)


def begun(
    admission: MemoryAdmission, fetch: Callable[[], Any], size: int | None = 100
) -> tuple[threading.Thread, threading.Event]:
    has_begun = threading.Event()
    thread = threading.Thread(target=lambda: run(admission, lambda: (has_begun.set(), fetch())[1], size=size))
    thread.start()
    return thread, has_begun


def test_a_fetch_begins_when_there_is_room_for_it() -> None:
    worker = Worker()
    admission = MemoryAdmission(worker)
    unsent = run(admission, lambda: Result(100))
    worker.n_bytes = 500  # plus 300 for the next fetch exceeds 700
    thread, has_begun = begun(admission, lambda: Result(1))
    assert not has_begun.wait(UNNOTICED_S)
    worker.n_bytes = 400
    thread.join(30)
    assert has_begun.is_set()
    assert unsent


def test_one_fetch_is_always_let_through_once_the_last_has_been_sent() -> None:
    worker = Worker()
    admission = MemoryAdmission(worker)
    unsent = run(admission, lambda: Result(100))
    worker.n_bytes = 5000
    thread, has_begun = begun(admission, lambda: Result(1))
    assert not has_begun.wait(UNNOTICED_S)
    del unsent
    thread.join(30)
    assert has_begun.is_set()


@pytest.mark.parametrize("size", [None, 150])
def test_those_that_run_count_and_only_one_runs_until_a_size_is_known(size: int | None) -> None:
    # The worker holds 100 bytes and a fetch needs 3 * 150, so two would exceed the usable 700 bytes (70% of `LIMIT`).
    admission = MemoryAdmission(Worker())
    go_on = threading.Event()
    first, first_has_begun = begun(admission, go_on.wait, size)
    assert first_has_begun.wait(30)
    second, second_has_begun = begun(admission, go_on.wait, size)
    assert not second_has_begun.wait(UNNOTICED_S)
    # The fetches of another window are smaller.
    other, other_has_begun = begun(admission, go_on.wait, 10)
    assert other_has_begun.wait(30)
    go_on.set()
    for thread in (first, second, other):
        thread.join(30)
    assert second_has_begun.is_set()


def test_fetches_do_not_wait_forever_for_an_idle_rank_and_begin_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_admission, "_PATIENCE_S", 0.5)
    worker = Worker()
    admission = MemoryAdmission(worker)
    unsent = run(admission, lambda: Result(100))
    worker.n_bytes = 5000
    go_on = threading.Event()
    waiting = [begun(admission, go_on.wait) for _ in range(3)]
    assert eventually(lambda: sum(has_begun.is_set() for _, has_begun in waiting) == 1)
    assert eventually(lambda: sum(has_begun.is_set() for _, has_begun in waiting) == 2)
    go_on.set()
    for thread, has_begun in waiting:
        thread.join(30)
        assert has_begun.is_set()
    assert unsent


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize(
    ("target", "spill", "pause"), [(False, False, False), (0.6, 0.7, False), (False, False, 0.7), (0.6, 0.9, 0.7)]
)
def test_fetches_wait_below_the_limits_at_which_dask_stops_a_worker(
    target: float | bool, spill: float | bool, pause: float | bool
) -> None:
    worker = Worker(target=target, spill=spill, pause=pause)
    admission = MemoryAdmission(worker)
    unsent = run(admission, lambda: Result(100))
    worker.n_bytes = 401
    thread, has_begun = begun(admission, lambda: Result(1))
    assert not has_begun.wait(UNNOTICED_S)
    worker.n_bytes = 400
    thread.join(30)
    assert has_begun.is_set()
    assert unsent


def test_mapped_pages_are_released_before_they_count_as_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    monkeypatch.setattr(memory_admission, "release_pages", lambda: setattr(worker, "n_bytes", 100))
    admission = MemoryAdmission(worker)
    worker.n_bytes = 501
    unsent = run(admission, lambda: Result(100))
    assert worker.n_bytes == 100
    worker.n_bytes = 650
    assert run(admission, lambda: Result(7))  # begins immediately
    assert unsent
