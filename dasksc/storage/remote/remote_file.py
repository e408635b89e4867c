"""Objects of a store, read by byte ranges: near ones as one request, many requests at once.

A range costs the round trip to the server, tens of milliseconds, however short it is. So the requests of a fetch are
made by threads that do nothing else, far enough ahead to fill the link, and decoding starts with the first answer.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dasksc import config
from dasksc.storage.files import UseMmap
from dasksc.storage.io_threads import ThreadsOfProcess
from dasksc.storage.remote.cache import BLOCK_BYTES, Cache
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.remote.urls import Place

__all__ = ["AHEAD_BYTES", "REQUEST_BYTES", "RemoteFile", "in_order", "parts_of", "ranges_of"]

T = TypeVar("T")

# Ranges closer than this are asked for as one. A request costs about half a millisecond of a core beside its round
# trip, which others hide: in that time a link of 4 Gb/s transfers this much.
GAP_BYTES = 2**18
# No request is longer: a connection is slower than a link, and what is decoded first should come first.
REQUEST_BYTES = 2**22
# What a fetch asks for before it is needed: more than 100 ms of a link of 2 Gb/s.
AHEAD_BYTES = 2**25


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Byte ranges that are asked for as one: [start, stop) covers those from `first` up to `after`."""

    start: int
    stop: int
    first: int
    after: int


def parts_of(ranges: Sequence[tuple[int, int]], *, gap: int, longest: int, block: int = 0) -> list[Part]:
    """Return ranges in few parts, in their order.

    Parameters
    ----------
    ranges
        Pairs (start, stop) in bytes. Those that do not ascend begin a new part.
    gap
        A range that starts at most this far behind the one before it joins its part,
    longest
        unless that would become longer than this.
    block
        If not 0, ranges in the same block of so many bytes are in one part anyway, so that none is fetched twice.
    """
    parts: list[Part] = []
    for number, (start, stop) in enumerate(ranges):
        if parts:
            last = parts[-1]
            is_near = last.stop <= start <= last.stop + gap and stop - last.start <= longest
            if is_near or (block and last.stop <= start and start // block == max(last.stop - 1, 0) // block):
                parts[-1] = Part(start=last.start, stop=stop, first=last.first, after=number + 1)
                continue
        parts.append(Part(start=start, stop=stop, first=number, after=number + 1))
    return parts


_threads = ThreadsOfProcess(lambda: int(config.get("requests")), "dasksc-request")


def in_order(calls: Iterable[tuple[Callable[[], T], int]]) -> Iterator[T]:
    """Make calls on other threads, several at a time, and yield what they return in their order.

    Parameters
    ----------
    calls
        Each with the bytes that it returns, or holds: of those not yet yielded, at most `AHEAD_BYTES` are
        asked for, or one.
    """
    threads = _threads()
    pending: deque[tuple[Future[T], int]] = deque()
    ahead = 0
    rest = iter(calls)
    following = next(rest, None)
    try:
        while pending or following is not None:
            while following is not None and (not pending or ahead + following[1] <= AHEAD_BYTES):
                pending.append((threads.submit(following[0]), following[1]))
                ahead += following[1]
                following = next(rest, None)
            future, n_bytes = pending.popleft()
            yield future.result()
            ahead -= n_bytes
    finally:
        for future, _ in pending:
            future.cancel()


class RemoteFile:
    """An object of a store, read as `dasksc.storage.files.LocalFile` reads files. Pickles.

    Parameters
    ----------
    place
        Where it is.
    identity
        The object as it was when its manifest was made; it is refused when it changed.
    cache
        Where blocks of it are kept on this machine, if anywhere.
    """

    can_map = False
    working_bytes = AHEAD_BYTES + REQUEST_BYTES

    def __init__(self, place: Place, identity: ObjectIdentity, *, cache: Cache | None = None) -> None:
        self.place = place
        self.identity = identity
        self._cache = cache

    @classmethod
    def of(cls, place: Place, *, cache: Cache | None = None) -> RemoteFile:
        """Return the object that is there now; one request."""
        return cls(place, place.client.stat(place.key), cache=cache)

    def uncached(self) -> RemoteFile:
        """Return the object without its cache, which would fetch a block of it for each of many scattered pieces."""
        return RemoteFile(self.place, self.identity)

    @property
    def path(self) -> str:
        """Where the object is, for people."""
        return self.identity.path

    def check(self) -> None:
        """Do nothing: every request tells the server which object is meant."""

    def advise(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Do nothing: ranges are asked for ahead as they are read."""

    def fetch(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop), by one request or from the cache."""
        if self._cache is None:
            return self._request(start, stop)
        return self._cache.read(self.identity, start, stop, request=self._request)

    def ranges(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64], *, use_mmap: UseMmap) -> Iterator[Any]:
        """Yield the bytes of each range; neighbours are read together, and all of them ahead."""
        # A cache would go on with what was there when the object was opened.
        checks = [] if self._cache is None else [(self._verify, 0)]
        yield from ranges_of([(self, offsets, sizes)], checks=checks)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on."""
        for _ in self.read_into([offset], [into]):
            pass

    def read_into(self, offsets: Sequence[int], views: Sequence[memoryview]) -> Iterator[None]:
        """Fill each of `views` with the bytes from its offset on, one after the other; yield after each."""
        pieces = [
            (offset + at, view[at : at + REQUEST_BYTES])
            for offset, view in zip(offsets, views, strict=True)
            for at in range(0, len(view), REQUEST_BYTES)
        ]
        starts = np.array([start for start, _ in pieces], dtype=np.int64)
        sizes = np.array([len(view) for _, view in pieces], dtype=np.int64)
        filled = self.ranges(starts, sizes, use_mmap=False)
        places = iter(pieces)
        for view in views:
            for _ in range(0, len(view), REQUEST_BYTES):
                next(places)[1][:] = next(filled)
            yield

    def parts(self, ranges: Sequence[tuple[int, int]]) -> list[Part]:
        """Return the requests that ranges take."""
        if self._cache is None:
            return parts_of(ranges, gap=GAP_BYTES, longest=REQUEST_BYTES)
        return parts_of(ranges, gap=0, longest=REQUEST_BYTES, block=BLOCK_BYTES)

    def _verify(self) -> None:
        self.identity.compare(self.place.client.stat(self.place.key))

    def _request(self, start: int, stop: int) -> memoryview:
        return self.place.client.get(self.place.key, start, stop, expected=self.identity)[0]

    def __repr__(self) -> str:
        return f"<RemoteFile {self.path}>"


def ranges_of(
    groups: Iterable[tuple[RemoteFile, NDArray[np.int64], NDArray[np.int64]]],
    *,
    checks: Sequence[tuple[Callable[[], Any], int]] = (),
) -> Iterator[memoryview]:
    """Yield byte ranges of several objects.

    Parameters
    ----------
    groups
        Objects, each with offsets and sizes.
    checks
        Calls, as `in_order` takes them, that raise where something is amiss; they come first.
    """
    cuts: deque[list[tuple[int, int]]] = deque()

    def calls() -> Iterator[tuple[Callable[[], memoryview], int]]:
        for file, offsets, sizes in groups:
            ranges = list(zip(offsets.tolist(), (offsets + sizes).tolist(), strict=True))
            for part in file.parts(ranges):
                cuts.append([(a - part.start, b - part.start) for a, b in ranges[part.first : part.after]])
                yield _fetching(file, part.start, part.stop), part.stop - part.start

    answers = in_order(itertools.chain(checks, calls()))
    for _ in checks:
        next(answers)
    for data in answers:
        for begin, end in cuts.popleft():
            yield data[begin:end]


def _fetching(file: RemoteFile, start: int, stop: int) -> Callable[[], memoryview]:
    return lambda: file.fetch(start, stop) if stop > start else memoryview(b"")
