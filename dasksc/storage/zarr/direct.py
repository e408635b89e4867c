"""Zarr arrays in a local directory or behind a URL, with chunks read without zarr-python."""

from __future__ import annotations

import math
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError, MissingPathError
from dasksc.storage.arrays import StoredArray, UnknownLayoutError
from dasksc.storage.chunked import ChunkedArray, ChunkSource, MappedChunks
from dasksc.storage.codecs import Crc32c
from dasksc.storage.files import FileIdentity, LocalFile, UseMmap, can_map, is_hashing, read_at, should_map
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.remote.remote_file import AHEAD_BYTES, REQUEST_BYTES, Cache, RemoteFile, in_order, ranges_of
from dasksc.storage.remote.urls import RemoteLocation
from dasksc.storage.zarr.layout import METADATA, At, ZarrLayout, layout_of, tuples

T = TypeVar("T")
V = TypeVar("V")

_OPEN_FILES = 16
_NOTHING = MappedChunks(at=np.zeros(1, dtype=np.uint64), sizes=np.zeros(1, dtype=np.int64), owner=None)
# Size of the facts about the objects of an array that a process keeps, and of an entry without the facts themselves.
_KEPT_BYTES, _ENTRY_BYTES = 2**26, 512
# Value that a shard's index holds as both offset and size of a chunk that was never written.
_NEVER = 2**64 - 1

File: TypeAlias = LocalFile | RemoteFile


def local_array(directory: str, *, label: str, use_mmap: UseMmap) -> StoredArray:
    """Open a Zarr array for reading without zarr-python."""
    for name in METADATA:
        path = os.path.join(directory, name)
        if os.path.exists(path):
            metadata = FileIdentity.of(path)
            with open(path, "rb") as file:
                layout = layout_of(name, file.read())
            files = Files(directory, layout=layout, metadata=metadata, use_mmap=use_mmap)
            return chunked_array(files, layout=layout, label=label)
    raise UnknownLayoutError("its directory has no metadata")


class ObjectCache(Generic[V]):
    """Facts about the objects of an array that a process has read; pickled without them."""

    # An array may have millions of objects. The oldest facts are dropped, and their objects are treated as new.

    def __init__(self, fact_bytes: int = 0) -> None:
        self._fact_bytes = fact_bytes
        self._kept = OrderedDict[At, V]()

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectCache, (self._fact_bytes,)

    def get(self, at: At) -> V | None:
        """Return the fact about an object, or None if there is none."""
        return self._kept.get(at)

    def keep(self, at: At, value: V) -> V:
        """Keep a fact about an object unless there is one already; return the kept one."""
        value = self._kept.setdefault(at, value)
        while len(self._kept) * (self._fact_bytes + _ENTRY_BYTES) > _KEPT_BYTES and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return value


class Files(ChunkSource):
    """Stored objects of an array as files; their chunks if each object is a chunk."""

    # Reads raise an error if an object has changed since the array was opened.

    def __init__(self, directory: str, *, layout: ZarrLayout, metadata: FileIdentity, use_mmap: UseMmap) -> None:
        is_local = can_map(directory)
        self._directory = directory
        self._layout = layout
        self._metadata = metadata
        self._use_mmap = use_mmap if is_local else False
        # Directory that contains all objects, if they are all in the same directory. Adding or removing objects changes
        # its modification time.
        self._folder = None
        if layout.separator != "/" or len(layout.shape) == 1:
            folder = os.path.dirname(f"{directory}/{layout.prefix}0")
            self._folder = FileIdentity.of(folder) if os.path.isdir(folder) else None
        # Time of opening. Files modified later raise an error. None on network file systems, where the clock of a
        # server may set modification times.
        self._opened_ns = time.time_ns() if is_local else None
        # Identities of files at their first read in this process. Inspecting all files on opening would take too long.
        self._seen = ObjectCache[FileIdentity]()
        # Only a few files stay open: an atlas may have more shards than a process may open files.
        self._files: dict[At, LocalFile] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened_ns": None if is_hashing.get() else self._opened_ns, "_files": {}}

    @property
    def can_map(self) -> bool:
        """True if the calling thread may memory-map the objects."""
        return should_map(self._use_mmap)

    def require_unchanged(self) -> None:
        """Raise an error if the array was replaced, or objects were added, removed or replaced."""
        self._metadata.require_unchanged()
        if self._folder is not None:
            self._folder.require_unchanged()

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[Any, int]]:
        """Yield the bytes of each file in a buffer that the next file reuses; see `ChunkSource.read`."""
        buffer = bytearray()
        for at in self._layout.places(numbers):
            with self._opened(at) as opened:
                if opened is None:
                    yield None, 0
                    continue
                number, size = opened
                if len(buffer) < size:
                    buffer = bytearray(size)
                n = read_at(number, 0, memoryview(buffer)[:size])
                yield memoryview(buffer)[:n], 0

    def mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks] | None:
        """Return the memory-mapped files, each as one group; None if they cannot be mapped."""
        return self._mapped(numbers) if self.can_map else None

    def _mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks]:
        for at in self._layout.places(numbers):
            with self._opened(at) as opened:
                if opened is None:
                    yield _NOTHING
                    continue
                number, size = opened
                data = mmap.mmap(number, size, access=mmap.ACCESS_READ) if size else bytes(1)
            owner = np.frombuffer(data, dtype=np.uint8)
            place = np.array([owner.ctypes.data], dtype=np.uint64)
            yield MappedChunks(at=place, sizes=np.array([size]), owner=owner)

    def indexed(self, ats: list[At], index_of: Callable[[File], T]) -> Iterator[T | None]:
        """Yield the result of `index_of` for each object, or None if it is missing; callers cache the results."""
        for at in ats:
            path = self._path(at)
            try:
                identity = FileIdentity.of(path)
            except FileNotFoundError:
                self._check_absent(path)
                yield None
                continue
            self._check_object(identity)
            yield index_of(LocalFile(identity, self._use_mmap))

    def file(self, at: At, identity: Any) -> LocalFile:
        """Return a file that `indexed` has read before; recently used files stay open."""
        file = self._files.pop(at, None) or LocalFile(identity, self._use_mmap)
        file.require_unchanged()
        self._files[at] = file
        # A file that is dropped from `_files` stays open while another thread still uses it.
        for oldest in list(self._files)[:-_OPEN_FILES]:
            self._files.pop(oldest, None)
        return file

    def ranges(self, groups: list[Any]) -> Iterator[Any]:
        """Yield the bytes of ranges, valid until the next one is requested; a group is (file, offsets, sizes)."""
        for file, offsets, sizes in groups:
            yield from file.ranges(offsets, sizes)

    def _path(self, at: At) -> str:
        return f"{self._directory}/{self._layout.key(at)}"

    @contextmanager
    def _opened(self, at: At) -> Iterator[tuple[int, int] | None]:
        """Open a file; yield its descriptor and its size in bytes, or None if it was never written."""
        path = self._path(at)
        try:
            file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
        except FileNotFoundError:
            if (seen := self._seen.get(at)) is not None:
                seen.require_unchanged()
            self._check_absent(path)
            yield None
            return
        with file:
            now = FileIdentity.of(path, file.fileno())
            self._check_object(now)
            self._seen.keep(at, now).compare(now)
            yield file.fileno(), now.size

    def _check_object(self, now: FileIdentity) -> None:
        """Raise an error if an object was written after the array was opened."""
        if self._opened_ns is None or now.mtime_ns <= self._opened_ns:
            return
        # A modification time in the future may come from a machine whose clock is ahead. The ctime always comes from
        # the clock of this machine.
        if os.stat(now.path).st_ctime_ns > self._opened_ns:
            raise CorruptDataError(
                f"{now.path} was changed since it was opened. Open it again, and do not write to it."
            )

    def _check_absent(self, path: str) -> None:
        """Raise an error for a missing object if it may have been removed after the array was opened."""
        folder = os.path.dirname(path)
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        if self._opened_ns is not None and os.stat(folder).st_mtime_ns > self._opened_ns:
            raise CorruptDataError(
                f"{path} is missing, and {folder} was changed since the array was opened. Open it again, and do not "
                "write to it."
            )


def metadata_of(array: RemoteLocation) -> tuple[RemoteFile, bytes]:
    """Return the metadata object of the array at a location, and its content."""
    for name in METADATA:
        location = array.below(name)
        try:
            content, identity = location.client.get(location.key)
        except MissingPathError:
            continue
        return RemoteFile(location, identity), bytes(content)
    raise UnknownLayoutError("it has no metadata object of its own")


def remote_array(array: RemoteLocation, *, label: str, cache: Cache | None) -> StoredArray:
    """Open a Zarr array for reading without zarr-python."""
    metadata, content = metadata_of(array)
    layout = layout_of(os.path.basename(metadata.location.key), content)
    objects = StoreObjects(array, layout=layout, metadata=metadata, cache=cache)
    return chunked_array(objects, layout=layout, label=label)


class StoreObjects(ChunkSource):
    """Stored objects of an array behind a URL, with the methods and errors of `Files`."""

    working_bytes = AHEAD_BYTES + REQUEST_BYTES
    can_map = False

    def __init__(self, array: RemoteLocation, *, layout: ZarrLayout, metadata: RemoteFile, cache: Cache | None) -> None:
        self._array = array
        self._layout = layout
        self._metadata = metadata
        self._cache = cache
        # Identities of objects at their first read in this process.
        self._seen = ObjectCache[ObjectIdentity]()

    def require_unchanged(self) -> None:
        """Do nothing, since `read` and `indexed` check the array while they wait for objects."""

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[Any, int]]:
        """Yield the bytes of whole objects; later ones are requested ahead."""
        n_bytes = math.prod(self._layout.chunk_shape) * self._layout.chain.dtype.itemsize
        # Maximum size of a stored object: no codec encodes a chunk to more bytes than this.
        longest = 2 * n_bytes + 2**16
        calls = [(partial(self._content, at, longest=longest), n_bytes) for at in self._layout.places(numbers)]
        for data in self._checked(calls):
            yield data, 0

    def indexed(self, ats: list[At], index_of: Callable[[File], T]) -> Iterator[T | None]:
        def indexed(at: At) -> T | None:
            try:
                file = RemoteFile.of(self._location(at), cache=self._cache)
            except MissingPathError:
                return None
            return index_of(file)

        return self._checked([(partial(indexed, at), 0) for at in ats])

    def file(self, at: At, identity: Any) -> RemoteFile:
        return RemoteFile(self._location(at), identity, cache=self._cache)

    def ranges(self, groups: list[Any]) -> Iterator[Any]:
        return ranges_of(groups)

    def _checked(self, calls: Sequence[tuple[Callable[[], Any], int]]) -> Iterator[Any]:
        """Return an iterator over the results of calls, after a check of the array; see `in_order`."""
        answers = in_order([(self._metadata.verify, 0), *calls])
        # The result of the check comes first, so that no data of a replaced array are returned.
        next(answers)
        return answers

    def _location(self, at: At) -> RemoteLocation:
        return self._array.below(self._layout.key(at))

    def _content(self, at: At, *, longest: int) -> memoryview | None:
        location, seen = self._location(at), self._seen.get(at)
        try:
            if self._cache is not None:
                if seen is None:  # the cached content must be that of the current object
                    seen = self._seen.keep(at, location.client.stat(location.key))
                seen.check_size(longest)
                return RemoteFile(location, seen, cache=self._cache).fetch(0, seen.size)
            data, identity = location.client.get(location.key, expected=seen, longest=longest)
        except MissingPathError:
            if seen is not None:
                raise CorruptDataError(f"{location} was removed since it was opened") from None
            return None
        self._seen.keep(at, identity).compare(identity)
        return data


Objects: TypeAlias = Files | StoreObjects


def chunked_array(objects: Objects, *, layout: ZarrLayout, label: str) -> ChunkedArray:
    """Return the array with this layout, whose chunks are in stored objects."""
    return ChunkedArray(
        label=label,
        shape=layout.shape,
        chunk_shape=layout.chunk_shape,
        chain=layout.chain,
        source=objects if layout.shard_shape is None else _Shards(objects, layout),
        fill=layout.fill,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shard:
    identity: FileIdentity | ObjectIdentity
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]


class _Shards(ChunkSource):
    """Chunks stored in shards, which are objects with several chunks and an index."""

    def __init__(self, objects: Objects, layout: ZarrLayout) -> None:
        self.working_bytes = objects.working_bytes
        self._objects = objects
        self._layout = layout
        # State of each shard when this process first read it; (None,) if it did not exist.
        self._seen = ObjectCache[tuple[_Shard | None]](16 * math.prod(layout.per_shard))

    def require_unchanged(self) -> None:
        self._objects.require_unchanged()

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[Any, int]]:
        shards = list(self._ranges(numbers))
        groups = [
            (file, offsets[offsets >= 0], sizes[offsets >= 0]) for file, offsets, sizes in shards if file is not None
        ]
        chunks = self._objects.ranges(groups)
        for _, offsets, _ in shards:
            for is_written in (offsets >= 0).tolist():
                yield (next(chunks), 0) if is_written else (None, 0)

    def mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks] | None:
        return self._mapped(numbers) if self._objects.can_map else None

    def _mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks]:
        for file, offsets, sizes in self._ranges(numbers):
            if file is None:
                yield MappedChunks(at=np.zeros(len(offsets), dtype=np.uint64), sizes=sizes, owner=None)
            else:
                assert isinstance(file, LocalFile)
                at, owner = file.mapped_ranges(offsets, sizes)
                yield MappedChunks(at=at, sizes=sizes, owner=owner)

    def _ranges(self, numbers: NDArray[np.int64]) -> Iterator[tuple[File | None, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the shard, offsets and sizes of each run of chunks in the same shard."""
        # A shard that was never written is None. The offset of a chunk that was never written is -1, and its size is 0.
        at = np.stack(np.unravel_index(numbers, self._layout.grid))
        per_shard = np.array(self._layout.per_shard)[:, None]
        shard_at = at // per_shard
        within = np.ravel_multi_index(tuple(at % per_shard), self._layout.per_shard)
        firsts = np.append(True, (shard_at[:, 1:] != shard_at[:, :-1]).any(axis=0)).nonzero()[0][: len(numbers)]
        of_runs = tuples(shard_at[:, firsts])
        shards = self._shards(of_runs)
        for one, chunks in zip(of_runs, np.split(within, firsts)[1:], strict=True):
            shard = shards[one]
            if shard is None:
                yield None, np.full(len(chunks), -1), np.zeros(len(chunks), dtype=np.int64)
                continue
            offsets, sizes = shard.offsets[chunks], shard.sizes[chunks]
            yield self._objects.file(one, shard.identity), offsets, sizes

    def _shards(self, ats: list[At]) -> dict[At, _Shard | None]:
        """Return the indexes of shards, cached after the first read; None for a shard that was never written."""
        cached = {at: self._seen.get(at) for at in ats}
        unknown = [at for at, shard in cached.items() if shard is None]
        for at, shard in zip(unknown, self._objects.indexed(unknown, self._indexed), strict=True):
            cached[at] = self._seen.keep(at, (shard,))
        return {at: shard and shard[0] for at, shard in cached.items()}

    def _indexed(self, file: File) -> _Shard:
        """Return the offset (-1 if never written) and size of each chunk of a shard in bytes, from its index."""
        layout, identity = self._layout, file.identity
        n_bytes = 16 * math.prod(layout.per_shard) + 4 * layout.index_checksum
        if identity.size < n_bytes:
            raise CorruptDataError(
                f"{identity.path} is truncated: it has no room for the index of its chunks. Copy or download it again."
            )
        start = 0 if layout.index_first else identity.size - n_bytes
        data: Any = file.fetch(start, start + n_bytes)
        if layout.index_checksum:
            try:
                data = Crc32c().decode(data, len(data))
            except ValueError as error:
                raise CorruptDataError(
                    f"{identity.path}: the index of its chunks is corrupt: {error}. Copy or download it again."
                ) from error
        table = np.frombuffer(data, dtype="<u8").reshape(-1, 2)
        # Offsets beyond int64 are clipped to an offset beyond the end of the shard.
        ranges = np.minimum(table, identity.size + 1).astype(np.int64)
        ranges[table[:, 0] == _NEVER] = -1, 0
        if (end := int(ranges.sum(axis=1).max())) > identity.size:
            raise CorruptDataError(
                f"{identity.path}: a chunk ends at byte {end}, but the shard has {identity.size} bytes. Copy, download "
                "or upload it again."
            )
        return _Shard(identity=identity, offsets=ranges[:, 0].copy(), sizes=ranges[:, 1].copy())
