"""Zarr arrays in a local directory, with chunks read without zarr-python."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np

from dasksc.errors import CorruptDataError
from dasksc.storage.arrays import StoredArray, UnknownLayoutError
from dasksc.storage.chunked import MappedChunks
from dasksc.storage.file_identity import FileIdentity
from dasksc.storage.files import LocalFile, UseMmap, can_map, read_at, should_map
from dasksc.storage.zarr.chunks import At, File, ObjectCache, chunked_array
from dasksc.storage.zarr.layout import METADATA, ZarrLayout, layout_of

T = TypeVar("T")

_OPEN_FILES = 16

_NOTHING = MappedChunks(at=np.zeros(1, dtype=np.uint64), sizes=np.zeros(1, dtype=np.int64), owner=None)


def direct_array(directory: str, *, label: str, use_mmap: UseMmap) -> StoredArray:
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
            yield index_of(LocalFile(identity))

    def file(self, at: At, identity: FileIdentity) -> LocalFile:
        """Return a file that `indexed` has read before; recently used files stay open."""
        file = self._files.pop(at, None) or LocalFile(identity)
        file.require_unchanged()
        self._files[at] = file
        # A file that is dropped from `_files` stays open while another thread still uses it.
        for oldest in list(self._files)[:-_OPEN_FILES]:
            self._files.pop(oldest, None)
        return file

    def ranges(self, groups: list[Any]) -> Iterator[Any]:
        for file, offsets, sizes in groups:
            yield from file.ranges(offsets, sizes, use_mmap=self._use_mmap)

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
