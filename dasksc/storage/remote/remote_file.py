"""Reading of byte ranges of remote objects, with nearby ranges merged and many requests in flight.

Each request costs a round trip of tens of milliseconds, so threads make the requests of a fetch far enough ahead to
fill the link.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dasksc import config
from dasksc.errors import MissingPathError, StorageError
from dasksc.storage.files import UseMmap
from dasksc.storage.io_threads import ThreadsOfProcess
from dasksc.storage.remote.cache import BLOCK_BYTES, Cache
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.remote.obstore_client import ObstoreClient
from dasksc.storage.remote.urls import RemoteLocation

T = TypeVar("T")

# Ranges closer than this are requested as one. Concurrent requests hide each other's round trips, but not the CPU time
# of about half a millisecond per request. In that time, a link of 4 Gb/s transfers this many bytes.
GAP_BYTES = 2**18
# Maximum size of a request. Several concurrent requests take less time than a large one, since a single connection is
# slower than the link. In addition, decoding starts earlier.
REQUEST_BYTES = 2**22
# Bytes that a fetch requests ahead: more than a link of 2 Gb/s transfers in 100 ms.
AHEAD_BYTES = 2**25
# Objects of many that are opened are read whole up to this size: their scattered metadata take a round trip each.
_WHOLE_BYTES = 2**24
# Objects of a folder of which so many are wanted are listed, a thousand per request.
_MANY = 32


_threads = ThreadsOfProcess(lambda: int(config.get("requests")), "dasksc-request")
# These wait for h5py's lock, which a thread may hold that waits for the others.
_opening_threads = ThreadsOfProcess(lambda: int(config.get("requests")), "dasksc-open")


def in_order(calls: Iterable[tuple[Callable[[], T], int]], threads_of: ThreadsOfProcess = _threads) -> Iterator[T]:
    """Run calls on other threads, several at a time, and yield their results in order."""
    threads = threads_of()
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
    """Remote object with the interface of `dasksc.storage.files.LocalFile`. Instances can be pickled."""

    can_map = False
    working_bytes = AHEAD_BYTES + REQUEST_BYTES

    def __init__(self, location: RemoteLocation, identity: ObjectIdentity, *, cache: Cache | None = None) -> None:
        self.location = location
        self.identity = identity
        self.path = identity.path
        self._cache = cache
        # All bytes of the object, while it is opened as one of many.
        self.content: memoryview | None = None

    @classmethod
    def of(cls, location: RemoteLocation, *, cache: Cache | None = None) -> RemoteFile:
        """Return the object that is at a location now; takes one request."""
        return cls(location, location.client.stat(location.key), cache=cache)

    def uncached(self) -> RemoteFile:
        """Return the object without the cache, which would fetch a whole block for each scattered piece."""
        return RemoteFile(self.location, self.identity)

    def require_unchanged(self) -> None:
        """Do nothing, since every request checks the version of the object."""

    def advise(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Do nothing, since reads themselves request ranges ahead."""

    def fetch(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop), from one request or from the cache."""
        if stop <= start:
            return memoryview(b"")
        if self.content is not None:
            return self.content[start:stop]
        if self._cache is None:
            return self._request(start, stop)
        return self._cache.read(self.identity, start, stop, request=self._request)

    def ranges(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64], *, use_mmap: UseMmap) -> Iterator[Any]:
        """Yield the bytes of each range; nearby ranges are read together, and all are requested ahead."""
        # With a cache, reads alone would not detect that the object has changed since it was opened.
        checks = [] if self._cache is None else [(self.verify, 0)]
        yield from ranges_of([(self, offsets, sizes)], checks=checks)

    def read(self, offset: int, into: memoryview) -> None:
        for _ in self.read_into([offset], [into]):
            pass

    def read_into(self, offsets: Sequence[int], views: Sequence[memoryview]) -> Iterator[None]:
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

    def requests(self, ranges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Split byte ranges into groups, in order; each group is one request."""
        # Ranges with small gaps are in one group, unless it would be longer than `REQUEST_BYTES`. With a cache, a group
        # consists of ranges in the same block.
        gap, block = (GAP_BYTES, 0) if self._cache is None else (0, BLOCK_BYTES)
        groups: list[list[tuple[int, int]]] = []
        for start, stop in ranges:
            first, last = (groups[-1][0][0], groups[-1][-1][1]) if groups else (0, -gap - 1)
            is_near = last <= start <= last + gap and stop - first <= REQUEST_BYTES
            if is_near or (block and groups and last <= start and start // block == max(last - 1, 0) // block):
                groups[-1].append((start, stop))
            else:
                groups.append([(start, stop)])
        return groups

    def verify(self) -> None:
        """Raise an error if the object has changed since it was opened; takes one request."""
        self.identity.compare(self.location.client.stat(self.location.key))

    def _request(self, start: int, stop: int) -> memoryview:
        return self.location.client.get(self.location.key, start, stop, expected=self.identity)[0]

    def __repr__(self) -> str:
        return f"<RemoteFile {self.path}>"


def ranges_of(
    groups: Iterable[tuple[RemoteFile, NDArray[np.int64], NDArray[np.int64]]],
    *,
    checks: Sequence[tuple[Callable[[], Any], int]] = (),
) -> Iterator[memoryview]:
    """Yield byte ranges of several objects."""
    cuts: deque[list[tuple[int, int]]] = deque()

    def calls() -> Iterator[tuple[Callable[[], memoryview], int]]:
        for file, offsets, sizes in groups:
            ranges = list(zip(offsets.tolist(), (offsets + sizes).tolist(), strict=True))
            for group in file.requests(ranges):
                start, stop = group[0][0], group[-1][1]
                cuts.append([(a - start, b - start) for a, b in group])
                yield partial(file.fetch, start, stop), stop - start

    answers = in_order(itertools.chain(checks, calls()))
    for _ in checks:
        next(answers)
    for data in answers:
        for begin, end in cuts.popleft():
            yield data[begin:end]


def identities(locations: Sequence[RemoteLocation]) -> list[ObjectIdentity | None]:
    """Return the identities of objects, None for those that do not exist; folders of many objects are listed."""
    folders: dict[tuple[str, str], list[RemoteLocation]] = {}
    for one in locations:
        folders.setdefault((one.root, one.key.rpartition("/")[0]), []).append(one)
    found: dict[tuple[str, str], ObjectIdentity | None] = {}
    for (root, folder), inside in folders.items():
        client = inside[0].client
        # Listings of fsspec may state other times than `stat`.
        if len(inside) >= _MANY and isinstance(client, ObstoreClient) and not inside[0].is_on_web:
            with contextlib.suppress(StorageError):  # permission to read objects may not include listing them
                listed = client.objects(folder)
                found |= {(root, one.key): listed.get(one.key) for one in inside}
    rest = [one for one in locations if (one.root, one.key) not in found]
    stats = in_order((partial(_stat, one), 0) for one in rest)
    found |= {(one.root, one.key): identity for one, identity in zip(rest, stats, strict=True)}
    return [found[one.root, one.key] for one in locations]


def _stat(location: RemoteLocation) -> ObjectIdentity | None:
    try:
        return location.client.stat(location.key)
    except MissingPathError:
        return None


def files_ahead(
    locations: Sequence[RemoteLocation], *, cache: Cache | None, read: Callable[[RemoteFile], Any]
) -> Iterator[RemoteFile | None]:
    """Yield objects that are opened next; None for what must be opened alone.

    The content of small objects is read ahead, and kept until the next object is requested. From large ones, `read`
    reads what opening needs, and its result is kept as long.
    """
    try:
        found = identities(locations)
    except StorageError:
        found = [None] * len(locations)

    def ahead(location: RemoteLocation, identity: ObjectIdentity | None) -> tuple[RemoteFile | None, Any]:
        if identity is None:
            return None, None
        file = RemoteFile(location, identity, cache=cache)
        if identity.size > _WHOLE_BYTES:
            return file, read(file)
        try:
            return file, file.fetch(0, identity.size)
        except StorageError:  # opening the object reports it
            return None, None

    sizes = [0 if one is None else one.size if one.size <= _WHOLE_BYTES else REQUEST_BYTES for one in found]
    calls = zip(locations, found, sizes, strict=True)
    jobs = ((partial(ahead, location, identity), size) for location, identity, size in calls)
    for file, held in in_order(jobs, _opening_threads):
        if file is not None and isinstance(held, memoryview):
            file.content = held
        yield file
        if file is not None:
            file.content = None
