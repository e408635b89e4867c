"""Measurement of the time that fetches spend on reading and decoding, per thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter


@dataclass(slots=True)
class ThreadTimes:
    """Time spent in a thread."""

    read_s: float = 0.0  # Seconds spent on requesting, awaiting and copying bytes
    decode_s: float = 0.0  # Seconds spent in codecs. For memory-mapped files this includes waiting for pages.


class _TimesOfThread(threading.local):
    def __init__(self) -> None:
        self.spent = ThreadTimes()


_of_thread = _TimesOfThread()


def thread_times() -> ThreadTimes:
    """Return the current counter of this thread, to which loops over chunks add their times."""
    return _of_thread.spent


@contextmanager
def clock() -> Iterator[ThreadTimes]:
    """Measure the calling thread inside a ``with`` block."""
    outer, _of_thread.spent = _of_thread.spent, ThreadTimes()
    try:
        yield _of_thread.spent
    finally:
        _of_thread.spent = outer


@contextmanager
def reading() -> Iterator[None]:
    """Count a ``with`` block as reading."""
    begun = perf_counter()
    try:
        yield
    finally:
        _of_thread.spent.read_s += perf_counter() - begun
