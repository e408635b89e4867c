"""Reading of byte ranges of remote objects, with nearby ranges merged, many requests in flight, and a local cache.

Each request costs a round trip of tens of milliseconds, so threads make the requests of a fetch far enough ahead to
fill the link.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import re
import secrets
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
from dask.utils import parse_bytes
from numpy.typing import NDArray

from dasksc import config
from dasksc.errors import InputError, MissingPathError, StorageError
from dasksc.storage.remote.client import ObjectIdentity, ObstoreClient
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


@lru_cache(maxsize=2)
def _threads(name: str, process: int) -> ThreadPoolExecutor:
    """Return a thread pool of a process, since a fork does not copy threads."""
    return ThreadPoolExecutor(int(config.get("requests")), thread_name_prefix=name)


logger = logging.getLogger("dasksc.storage")

# Size of a block, the unit of requests for missing data.
BLOCK_BYTES = 2**22
# Names of blocks, and of those that a process is writing or left unfinished when it was killed.
_OWN_NAME = re.compile(r"[0-9a-f]{40}|new-[0-9]+-[0-9a-f]{16}")
# Shares of the limit: each time a process wrote the first, it reduces a folder above the second to the third.
_MEASURED, _FULL, _LEFT = 1 / 64, 15 / 16, 7 / 8

# Bytes that this process has written to each folder since it last measured the folder.
_written: dict[str, float] = {}
# Folders that this process cannot use, with the reason; each pair is logged once.
_warned: set[tuple[str, str]] = set()


def in_order(calls: Iterable[tuple[Callable[[], T], int]], name: str = "dasksc-request") -> Iterator[T]:
    """Run calls on other threads, several at a time, and yield their results in order."""
    threads = _threads(name, os.getpid())
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

    use_mmap = is_mapped = False
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
        return self._cache.read(self.location.url, self.identity, start, stop, request=self._request)

    def ranges(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> Iterator[Any]:
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
        filled = self.ranges(starts, sizes)
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
    # Jobs wait for h5py's lock, which a thread may hold that waits for the other threads.
    for file, held in in_order(jobs, "dasksc-open"):
        if file is not None and isinstance(held, memoryview):
            file.content = held
        yield file
        if file is not None:
            file.content = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Folder with blocks of remote objects, created for this user alone, and its maximum size in bytes."""

    # The processes of the user share it. Each block is a file named by the URL, version and size of its object and by
    # its offset, so files are never modified in place. A file has a temporary name until it is complete. There are no
    # locks. When the folder reaches its limit, the least recently used files are removed. A folder that others can
    # access is not used.

    folder: str
    limit: int

    @classmethod
    def of(cls, given: Any) -> Cache | None:
        """Return the cache for an argument: a folder, a mapping with ``path`` and ``limit``, or None."""
        if given is None:
            return None
        values = dict(given) if isinstance(given, Mapping) else {"path": given}
        try:
            if not (path := os.fspath(values.pop("path"))):
                raise ValueError("the name of the folder is empty")
            folder = os.path.abspath(os.path.expanduser(path))
            limit = int(parse_bytes(values.pop("limit", "100GiB")))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"cache={given!r} is neither a folder nor {{'path': ..., 'limit': '100GiB'}}") from error
        if values or limit < 4 * BLOCK_BYTES:
            raise InputError(
                f"cache={given!r}: give 'path' and 'limit' only, and a limit of at least {4 * BLOCK_BYTES} bytes"
            )
        return cls(folder=folder, limit=limit)

    def read(
        self, url: str, identity: ObjectIdentity, start: int, stop: int, *, request: Callable[[int, int], memoryview]
    ) -> memoryview:
        """Return bytes [start, stop) of an object, after requesting and caching missing blocks."""
        # The path of the identity lacks the query of the URL, which may name the object.
        if (identity.etag is None and identity.modified.startswith("1970-01-01")) or not self._is_usable():
            return request(start, stop)  # versions of an object without ETag and time could not be distinguished
        pieces = []
        for base in range(start - start % BLOCK_BYTES, stop, BLOCK_BYTES):
            end = min(base + BLOCK_BYTES, identity.size)
            low, high = max(start, base) - base, min(stop, end) - base
            name = hashlib.blake2b(repr((url, identity, base)).encode(), digest_size=20).hexdigest()
            path = os.path.join(self.folder, name[:2], name)
            piece = _kept(path, end - base, low, high)
            if piece is None:
                whole = request(base, end)
                self._keep(path, whole)
                piece = whole[low:high]
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def _is_usable(self) -> bool:
        """Create the folder if it is missing; return False, and log why, if it is not this user's alone."""
        # Every call checks the folder, since users with write access to its parent could replace it.
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            status = os.stat(self.folder)
            mode = stat.S_IMODE(status.st_mode)
            if hasattr(os, "geteuid") and (status.st_uid not in (0, os.geteuid()) or mode & 0o077):
                raise PermissionError(
                    f"other users have access to it (owner {status.st_uid}, mode {mode:03o}). Run chmod 700 "
                    f"{self.folder}, or give a folder that does not exist yet"
                )
        except OSError as error:
            if (self.folder, str(error)) not in _warned:
                _warned.add((self.folder, str(error)))
                logger.warning("blocks cannot be kept in the cache %s: %s", self.folder, error)
            return False
        return True

    def _keep(self, path: str, content: memoryview) -> None:
        """Write a block to the folder; log a warning if that fails."""
        temporary = os.path.join(self.folder, f"new-{os.getpid()}-{secrets.token_hex(8)}")
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(content)
            os.replace(temporary, path)
        except OSError as error:
            logger.warning("a block cannot be kept in the cache %s: %s", self.folder, error)
            return
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        _written[self.folder] = _written.get(self.folder, float("inf")) + len(content)
        if _written[self.folder] > self.limit * _MEASURED:
            _written[self.folder] = 0.0
            self._shrink()

    def _shrink(self) -> None:
        """Remove the least recently used files if the limit is near."""
        files = []
        for folder, _, names in os.walk(self.folder):
            # The folder may hold other files of the user.
            for path in (os.path.join(folder, name) for name in names if _OWN_NAME.fullmatch(name)):
                with contextlib.suppress(OSError):  # another process may remove it
                    status = os.stat(path)
                    files.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in files)
        if total > self.limit * _FULL:
            for _, size, path in sorted(files):
                if total > self.limit * _LEFT:
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                    total -= size


def _kept(path: str, n_bytes: int, low: int, high: int) -> memoryview | None:
    """Return bytes [low, high) of a block of `n_bytes`; None if its file is missing or incomplete."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if time.time() - status.st_mtime > 60:
                os.utime(path)
            file.seek(low)
            data = file.read(high - low)
            return memoryview(data) if status.st_size == n_bytes and len(data) == high - low else None
    except OSError:
        return None
