"""How long a fetch reads and decodes: counted where that happens, in the thread that does it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Literal, TypeVar

__all__ = ["Clock", "Spent", "decoding", "here", "read_from", "reading"]

T = TypeVar("T")


@dataclass(slots=True)
class Spent:
    """What was counted in a thread.

    Parameters
    ----------
    read_s
        Seconds in which bytes were asked for, waited for and copied.
    decode_s
        Seconds in which codecs ran. On mapped files that includes the waiting for pages.
    """

    read_s: float = 0.0
    decode_s: float = 0.0


class _Thread(threading.local):
    def __init__(self) -> None:
        self.spent = Spent()


_thread = _Thread()


def here() -> Spent:
    """Return what is being counted in this thread, for loops over chunks to add to."""
    return _thread.spent


class Clock:
    """Counts what the calling thread spends inside a ``with`` block, which gives the `Spent`."""

    def __enter__(self) -> Spent:
        self._outer = _thread.spent
        _thread.spent = Spent()
        return _thread.spent

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _thread.spent = self._outer


class _Counted:
    """A ``with`` block whose time is added up, at the price of a microsecond."""

    __slots__ = ("_start", "_to")

    def __init__(self, to: Literal["read_s", "decode_s"]) -> None:
        self._to = to

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        spent = _thread.spent
        setattr(spent, self._to, getattr(spent, self._to) + perf_counter() - self._start)


def reading() -> _Counted:
    """Count a ``with`` block as reading."""
    return _Counted("read_s")


def decoding() -> _Counted:
    """Count a ``with`` block as decoding."""
    return _Counted("decode_s")


def read_from(source: Iterator[T]) -> Iterator[T]:
    """Yield what `source` yields; what it takes to do so is reading."""
    while True:
        with reading():
            try:
                item = next(source)
            except StopIteration:
                return
        yield item
