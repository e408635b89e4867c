"""Time that a fetch spends reading and decoding."""

from __future__ import annotations

import threading

import pytest

from dasksc.storage import read_timing as clock
from dasksc.storage.read_timing import Clock, ThreadTimes, decoding, reading

pytestmark = pytest.mark.core


class Hands:
    """Clock whose time is set by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    hands = Hands()
    monkeypatch.setattr(clock, "perf_counter", hands)
    return hands


def test_reading_and_decoding_are_counted_apart_and_nothing_else_is(hands: Hands) -> None:
    with Clock() as spent:
        with reading():
            hands.now += 1
        hands.now += 10
        with decoding():
            hands.now += 2
        with reading():
            hands.now += 4
    assert spent == ThreadTimes(read_s=5, decode_s=2)


def test_threads_count_for_themselves(hands: Hands) -> None:
    def other() -> None:
        with reading():
            hands.now += 7

    with Clock() as spent:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert spent == ThreadTimes()
