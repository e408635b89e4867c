"""Measurement of the time that fetches spend on reading and decoding, per thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Literal, TypeVar

__all__ = ["Clock", "ThreadTimes", "decoding", "thread_times", "read_from", "reading"]

T = TypeVar("T")


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


class Clock:
    """Context manager that measures the calling thread inside a ``with`` block and yields its `ThreadTimes`."""

    def __enter__(self) -> ThreadTimes:
        self._outer = _of_thread.spent
        _of_thread.spent = ThreadTimes()
        return _of_thread.spent

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _of_thread.spent = self._outer


class _Counted:
    """Context manager that adds the duration of a ``with`` block to a counter, at a cost of one microsecond."""

    __slots__ = ("_start", "_to")

    def __init__(self, to: Literal["read_s", "decode_s"]) -> None:
        self._to = to

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        spent = _of_thread.spent
        setattr(spent, self._to, getattr(spent, self._to) + perf_counter() - self._start)


def reading() -> _Counted:
    """Return a context manager that counts a ``with`` block as reading."""
    return _Counted("read_s")


def decoding() -> _Counted:
    """Return a context manager that counts a ``with`` block as decoding."""
    return _Counted("decode_s")


def read_from(source: Iterator[T]) -> Iterator[T]:
    """Yield the items of `source`; the time that `source` takes to produce them counts as reading."""
    while True:
        with reading():
            try:
                item = next(source)
            except StopIteration:
                return
        yield item
