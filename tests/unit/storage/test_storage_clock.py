"""Time that a fetch spends reading and decoding."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dasksc.storage import read_timing as clock
from dasksc.storage.read_timing import Clock, ThreadTimes, decoding, read_from, reading

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


def test_what_fails_is_counted_too(hands: Hands) -> None:
    def torn() -> Iterator[int]:
        hands.now += 1
        raise OSError("torn")
        yield 0

    with Clock() as spent, pytest.raises(OSError, match="torn"):
        next(read_from(torn()))
    assert spent == ThreadTimes(read_s=1)


def test_an_iterator_is_counted_while_it_makes_the_next_item_only(hands: Hands) -> None:
    def source() -> Iterator[int]:
        for i in range(3):
            hands.now += 1
            yield i
        hands.now += 5

    with Clock() as spent:
        items = []
        for i in read_from(source()):
            hands.now += 100
            items.append(i)
    assert items == [0, 1, 2]
    assert spent == ThreadTimes(read_s=8)


def test_a_clock_counts_from_nought_and_leaves_what_was_counted_around_it(hands: Hands) -> None:
    with Clock() as outer:
        with reading():
            hands.now += 1
        with Clock() as inner, reading():
            hands.now += 2
        with reading():
            hands.now += 4
    assert (outer, inner) == (ThreadTimes(read_s=5), ThreadTimes(read_s=2))


def test_threads_count_for_themselves(hands: Hands) -> None:
    def other() -> None:
        with reading():
            hands.now += 7

    with Clock() as spent:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert spent == ThreadTimes()
