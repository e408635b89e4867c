"""Fetches on a worker wait for room, and never for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dasksc.window import headroom
from dasksc.window.headroom import Headroom

LIMIT = 1000
UNNOTICED_S = 0.2  # what waits has not begun for so long


class Worker:
    """A worker whose process holds as many bytes as is said here."""

    def __init__(self, *, limit: int | None = LIMIT, spill: float | bool = 0.7, pause: float | bool = 0.8) -> None:
        self.memory_manager = SimpleNamespace(
            memory_limit=limit, memory_spill_fraction=spill, memory_pause_fraction=pause
        )
        self.n_bytes = 100
        self.monitor = SimpleNamespace(get_process_memory=lambda: self.n_bytes)


class Result:
    def __init__(self, n_bytes: int) -> None:
        self.nbytes = n_bytes


def begun(room: Headroom, fetch: Callable[[], Any]) -> tuple[threading.Thread, threading.Event]:
    has_begun = threading.Event()

    def run() -> None:
        room.run(lambda: (has_begun.set(), fetch())[1])

    thread = threading.Thread(target=run)
    thread.start()
    return thread, has_begun


def test_a_fetch_begins_when_there_is_room_for_it() -> None:
    worker = Worker()
    room = Headroom(worker)
    unsent = room.run(lambda: Result(100))
    worker.n_bytes = 500  # and 300 for the next one are more than 700
    thread, has_begun = begun(room, lambda: Result(1))
    assert not has_begun.wait(UNNOTICED_S)
    worker.n_bytes = 400
    thread.join(30)
    assert has_begun.is_set()
    assert unsent.nbytes == 100


def test_one_fetch_is_always_let_through_once_the_last_has_been_sent() -> None:
    worker = Worker()
    room = Headroom(worker)
    unsent = room.run(lambda: Result(100))
    worker.n_bytes = 5000
    thread, has_begun = begun(room, lambda: Result(1))
    assert not has_begun.wait(UNNOTICED_S)
    del unsent
    thread.join(30)
    assert has_begun.is_set()


def test_those_that_run_count_and_only_one_runs_until_a_size_is_known() -> None:
    room = Headroom(Worker())
    go_on = threading.Event()
    first, first_has_begun = begun(room, lambda: (go_on.wait(30), Result(150))[1])
    assert first_has_begun.wait(30)
    second, second_has_begun = begun(room, go_on.wait)
    assert not second_has_begun.wait(UNNOTICED_S)
    go_on.set()
    for thread in (first, second):
        thread.join(30)
    assert second_has_begun.is_set()

    # 100 bytes and 3 * 150 for one; for two they are beyond 700.
    go_on.clear()
    third, third_has_begun = begun(room, go_on.wait)
    assert third_has_begun.wait(30)
    fourth, fourth_has_begun = begun(room, go_on.wait)
    assert not fourth_has_begun.wait(UNNOTICED_S)
    go_on.set()
    for thread in (third, fourth):
        thread.join(30)
    assert fourth_has_begun.is_set()


def test_nothing_waits_for_ever_for_a_rank_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headroom, "_PATIENCE_S", 0.05)
    worker = Worker()
    room = Headroom(worker)
    unsent = room.run(lambda: Result(100))
    worker.n_bytes = 5000
    assert room.run(lambda: Result(7)).nbytes == 7
    assert unsent.nbytes == 100


def test_a_failed_fetch_makes_room_again() -> None:
    room = Headroom(Worker())

    def fail() -> None:
        raise OSError("gone")

    for _ in range(3):
        with pytest.raises(OSError, match="gone"):
            room.run(fail)
    assert room.run(lambda: Result(7)).nbytes == 7


def test_without_a_limit_there_is_always_room() -> None:
    worker = Worker(limit=None)
    room = Headroom(worker)
    worker.n_bytes = 5000
    unsent = [room.run(lambda: Result(1000)) for _ in range(3)]
    assert len(unsent) == 3


@pytest.mark.parametrize(("spill", "pause"), [(False, False), (0.7, False), (False, 0.7), (0.9, 0.7)])
def test_less_counts_than_a_worker_is_stopped_at(spill: float | bool, pause: float | bool) -> None:
    worker = Worker(spill=spill, pause=pause)
    room = Headroom(worker)
    unsent = room.run(lambda: Result(100))
    worker.n_bytes = 401
    thread, has_begun = begun(room, lambda: Result(1))
    assert not has_begun.wait(UNNOTICED_S)
    worker.n_bytes = 400
    thread.join(30)
    assert has_begun.is_set()
    assert unsent.nbytes == 100


def test_mapped_pages_are_let_go_of_before_they_count_as_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    monkeypatch.setattr(headroom, "let_go_of_pages", lambda: setattr(worker, "n_bytes", 100))
    room = Headroom(worker)
    worker.n_bytes = 501
    unsent = room.run(lambda: Result(100))
    assert worker.n_bytes == 100
    worker.n_bytes = 650
    assert room.run(lambda: Result(7)).nbytes == 7  # at once
    assert unsent.nbytes == 100


@pytest.mark.parametrize("value", [7, np.float64(7), np.arange(7)], ids=str)
def test_results_of_any_kind_pass(value: Any) -> None:
    room = Headroom(Worker())
    assert [room.run(lambda: value) is value for _ in range(2)] == [True, True]


def test_all_windows_of_a_worker_share_its_memory() -> None:
    worker = Worker()
    assert Headroom.of(worker) is Headroom.of(worker)
    assert Headroom.of(worker) is not Headroom.of(Worker())
