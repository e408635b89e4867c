"""Zarr arrays in a local directory or behind a URL, with chunks read without zarr-python."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np

from dasksc.errors import CorruptDataError, MissingPathError
from dasksc.storage.arrays import StoredArray, UnknownLayoutError
from dasksc.storage.chunked import MappedChunks
from dasksc.storage.files import FileIdentity, LocalFile, UseMmap, can_map, read_at, should_map
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.remote.remote_file import AHEAD_BYTES, REQUEST_BYTES, Cache, RemoteFile, in_order, ranges_of
from dasksc.storage.remote.urls import RemoteLocation
from dasksc.storage.zarr.chunks import METADATA, At, File, ObjectCache, ZarrLayout, chunked_array, layout_of

T = TypeVar("T")

_OPEN_FILES = 16
_NOTHING = MappedChunks(at=np.zeros(1, dtype=np.uint64), sizes=np.zeros(1, dtype=np.int64), owner=None)


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


class Files:
    """Stored objects of an array as files; see `dasksc.storage.zarr.chunks.Objects`."""

    # The buffer for one file, which is negligible.
    working_bytes = 0

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
        # The time of opening is omitted, so that equal arrays pickle equally: Dask derives their names from the pickle.
        return self.__dict__ | {"_opened_ns": None, "_files": {}}

    @property
    def can_map(self) -> bool:
        return should_map(self._use_mmap)

    def require_unchanged(self) -> None:
        """Raise an error if the array was replaced, or objects were added, removed or replaced."""
        self._metadata.require_unchanged()
        if self._folder is not None:
            self._folder.require_unchanged()

    def contents(self, ats: list[At], *, n_bytes: int) -> Iterator[Any]:
        """Yield the bytes of whole files, in a buffer that the next file reuses."""
        buffer = bytearray()
        for at in ats:
            with self._opened(at) as opened:
                if opened is None:
                    yield None
                    continue
                number, size = opened
                if len(buffer) < size:
                    buffer = bytearray(size)
                n = read_at(number, 0, memoryview(buffer)[:size])
                yield memoryview(buffer)[:n]

    def mapped(self, ats: list[At]) -> Iterator[MappedChunks]:
        for at in ats:
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

    def file(self, at: At, identity: FileIdentity) -> LocalFile:
        """Return a file that `indexed` has read before; recently used files stay open."""
        file = self._files.pop(at, None) or LocalFile(identity, self._use_mmap)
        file.require_unchanged()
        self._files[at] = file
        # A file that is dropped from `_files` stays open while another thread still uses it.
        for oldest in list(self._files)[:-_OPEN_FILES]:
            self._files.pop(oldest, None)
        return file

    def ranges(self, groups: list[Any]) -> Iterator[Any]:
        for file, offsets, sizes in groups:
            yield from file.ranges(offsets, sizes)

    def _path(self, at: At) -> str:
        return f"{self._directory}/{self._layout.key(at)}"

    @contextmanager
    def _opened(self, at: At) -> Iterator[tuple[int, int] | None]:
        """Open a file; yield its descriptor and its size in bytes, or None if it was never written."""
        path = self._path(at)
        with ExitStack() as stack:
            try:
                file = stack.enter_context(open(path, "rb", buffering=0))
            except FileNotFoundError:
                seen = self._seen.get(at)
                if seen is not None:
                    seen.require_unchanged()
                self._check_absent(path)
                yield None
                return
            now = FileIdentity.of_open(path, file.fileno())
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


class StoreObjects:
    """Stored objects of an array behind a URL; see `dasksc.storage.zarr.chunks.Objects`."""

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
        """Do nothing, since `contents` and `indexed` check the array while they wait for objects."""

    def contents(self, ats: list[At], *, n_bytes: int) -> Iterator[Any]:
        """Yield the bytes of whole objects; later ones are requested ahead."""
        # Maximum size of a stored object: no codec encodes a chunk to more bytes than this.
        longest = 2 * n_bytes + 2**16
        yield from self._checked([(partial(self._content, at, longest=longest), n_bytes) for at in ats])

    def mapped(self, ats: list[At]) -> Iterator[MappedChunks]:
        raise NotImplementedError

    def indexed(self, ats: list[At], index_of: Callable[[File], T]) -> Iterator[T | None]:
        def indexed(at: At) -> T | None:
            try:
                file = RemoteFile.of(self._location(at), cache=self._cache)
            except MissingPathError:
                return None
            return index_of(file)

        return self._checked([(partial(indexed, at), 0) for at in ats])

    def file(self, at: At, identity: ObjectIdentity) -> RemoteFile:
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
