"""Zarr arrays in a directory of this machine, whose chunks are read without zarr-python."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError
from dasksc.storage.arrays import StoredArray, UnknownLayoutError
from dasksc.storage.chunked import ChunkedArray, ChunkSource, MappedChunks
from dasksc.storage.file_identity import FileIdentity
from dasksc.storage.files import LocalFile, UseMmap, can_map, maps, read_at
from dasksc.storage.remote.known_objects import Seen
from dasksc.storage.zarr.layout import METADATA, Layout, layout_of
from dasksc.storage.zarr.shard_index import index_bytes, index_places

__all__ = ["direct_array"]

_OPEN_SHARDS = 16

_NOTHING = MappedChunks(at=np.zeros(1, dtype=np.uint64), sizes=np.zeros(1, dtype=np.int64), owner=None)


def direct_array(directory: str, *, label: str, use_mmap: UseMmap) -> StoredArray:
    """Return a Zarr array as one that is read without zarr-python.

    Parameters
    ----------
    directory
        The directory of the array, with its ``zarr.json`` or ``.zarray``.
    label
        What to call it in errors.
    use_mmap
        Whether files of this machine may be mapped.

    Raises
    ------
    UnknownLayoutError
        If it must be read through zarr-python.
    """
    for name in METADATA:
        path = os.path.join(directory, name)
        if os.path.exists(path):
            identity = FileIdentity.of(path)
            with open(path, "rb") as file:
                layout = layout_of(name, file.read())
            keys = Keys.now(directory, layout, metadata=identity)
            source: ChunkSource
            use_mmap = use_mmap if can_map(directory) else False
            if layout.shard_shape is None:
                source = FileChunks(keys, grid=layout.grid, use_mmap=use_mmap)
            else:
                source = ShardChunks(keys, layout=layout, use_mmap=use_mmap)
            return ChunkedArray(
                label=label,
                shape=layout.shape,
                chunk_shape=layout.chunk_shape,
                chain=layout.chain,
                source=source,
                fill=layout.fill,
            )
    raise UnknownLayoutError("it has no metadata in a directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Where the stored objects of an array are.

    Parameters
    ----------
    directory
        The array's directory.
    prefix, separator
        What keys begin with, and what is between their numbers.
    metadata
        The file with the array's metadata, by which a replaced array is known.
    folder
        The directory of all the objects, if it is one: its time of change tells when one came, went or was replaced.
    opened_ns
        When the array was opened, if the files have this machine's clock: an object changed since is refused.
    """

    directory: str
    prefix: str
    separator: str
    metadata: FileIdentity
    folder: FileIdentity | None
    opened_ns: int | None

    @classmethod
    def now(cls, directory: str, layout: Layout, *, metadata: FileIdentity) -> Keys:
        """Return the keys of an array in the state that it is in."""
        folder = None
        if layout.separator != "/" or len(layout.shape) == 1:
            path = os.path.dirname(f"{directory}/{layout.prefix}0")
            folder = FileIdentity.of(path) if os.path.isdir(path) else None
        return cls(
            directory=directory,
            prefix=layout.prefix,
            separator=layout.separator,
            metadata=metadata,
            folder=folder,
            opened_ns=time.time_ns() if can_map(directory) else None,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the time: what opens the same array again pickles to the same, by which Dask names it.
        return _keys, (self.directory, self.prefix, self.separator, self.metadata, self.folder)

    def check(self) -> None:
        """Refuse an array that was replaced, or of which objects came, went or were replaced."""
        self.metadata.check()
        if self.folder is not None:
            self.folder.check()

    def check_object(self, now: FileIdentity) -> None:
        """Refuse an object that was written to after the array was opened."""
        if self.opened_ns is None or now.mtime_ns <= self.opened_ns:
            return
        # A time of change that lies in the future came with the file, from a machine whose clock is ahead; when
        # it was written here, the file system says.
        if os.stat(now.path).st_ctime_ns > self.opened_ns:
            raise CorruptDataError(
                f"{now.path} was changed since it was opened. Open it again, and do not write to it."
            )

    def check_absent(self, path: str) -> None:
        """Refuse that an object is not there, if one may have been removed after the array was opened."""
        folder = os.path.dirname(path)
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        if self.opened_ns is not None and os.stat(folder).st_mtime_ns > self.opened_ns:
            raise CorruptDataError(
                f"{path} is not there, and {folder} was changed since the array was opened. Open it again, and do not "
                "write to it."
            )

    def path(self, numbers: tuple[int, ...]) -> str:
        """Return the file of the object at these numbers of the grid."""
        return f"{self.directory}/{self.prefix}{self.separator.join(map(str, numbers))}"


def _keys(directory: str, prefix: str, separator: str, metadata: FileIdentity, folder: FileIdentity | None) -> Keys:
    return Keys(
        directory=directory, prefix=prefix, separator=separator, metadata=metadata, folder=folder, opened_ns=None
    )


class FileChunks:
    """Chunks of which each is a file.

    Parameters
    ----------
    keys
        Where they are.
    grid
        How many there are along each axis.
    use_mmap
        Whether the files may be mapped.
    """

    def __init__(self, keys: Keys, *, grid: tuple[int, ...], use_mmap: UseMmap) -> None:
        self._keys = keys
        self._grid = grid
        self._use_mmap = use_mmap
        # As they were when this process first read them: to look at all of them on opening would take too long.
        self._seen = Seen[tuple[int, ...], FileIdentity]()

    working_bytes = 0

    def check(self) -> None:
        """Refuse an array that was changed."""
        self._keys.check()

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[Any, int]]:
        """Yield the chunks; see `ChunkSource.read`."""
        buffer = bytearray()
        for at in _unravel(numbers, self._grid):
            with self._opened(at) as chunk:
                if chunk is None:
                    yield None, 0
                    continue
                number, size = chunk
                if len(buffer) < size:
                    buffer = bytearray(size)
                n = read_at(number, 0, memoryview(buffer)[:size])
                yield memoryview(buffer)[:n], 0

    def mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks] | None:
        """Yield the chunks one by one; see `ChunkSource.mapped`."""
        return self._mapped(numbers) if maps(self._use_mmap) else None

    def _mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks]:
        for at in _unravel(numbers, self._grid):
            with self._opened(at) as chunk:
                if chunk is None:
                    yield _NOTHING
                    continue
                number, size = chunk
                data = mmap.mmap(number, size, access=mmap.ACCESS_READ) if size else bytes(1)
            owner = np.frombuffer(data, dtype=np.uint8)
            place = np.array([owner.ctypes.data], dtype=np.uint64)
            yield MappedChunks(at=place, sizes=np.array([size]), owner=owner)

    @contextmanager
    def _opened(self, at: tuple[int, ...]) -> Iterator[tuple[int, int] | None]:
        """Open a chunk's file: its descriptor and its size in bytes; None if it was never written."""
        path = self._keys.path(at)
        with ExitStack() as stack:
            try:
                file = stack.enter_context(open(path, "rb", buffering=0))
            except FileNotFoundError:
                seen = self._seen.get(at)
                if seen is not None:
                    seen.check()
                self._keys.check_absent(path)
                yield None
                return
            now = FileIdentity.of_open(path, file.fileno())
            self._keys.check_object(now)
            self._seen.keep(at, now).compare(now)
            yield file.fileno(), now.size


class ShardChunks:
    """Chunks of which many are in a file, behind an index.

    Parameters
    ----------
    keys
        Where the files are.
    layout
        What the metadata say; it has a `shard_shape`.
    use_mmap
        Whether the files may be mapped.
    """

    def __init__(self, keys: Keys, *, layout: Layout, use_mmap: UseMmap) -> None:
        self._keys = keys
        self._grid = layout.grid
        self._per_shard = layout.per_shard
        self._layout = layout
        self._use_mmap = use_mmap
        self._shards = Seen[tuple[int, ...], tuple[_Shard | None]]()
        # An atlas may have more shards than a process may have files: a few stay open.
        self._files: dict[tuple[int, ...], LocalFile] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}

    working_bytes = 0

    def check(self) -> None:
        """Refuse an array that was changed."""
        self._keys.check()

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[Any, int]]:
        """Yield the chunks; see `ChunkSource.read`."""
        for file, offsets, sizes in self._places(numbers):
            written = offsets >= 0
            chunks: Iterator[Any] = iter(())
            if file is not None:
                chunks = file.ranges(offsets[written], sizes[written], use_mmap=self._use_mmap)
            for is_written in written.tolist():
                yield (next(chunks), 0) if is_written else (None, 0)

    def mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks] | None:
        """Yield the chunks shard by shard; see `ChunkSource.mapped`."""
        return self._mapped(numbers) if maps(self._use_mmap) else None

    def _mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks]:
        for file, offsets, sizes in self._places(numbers):
            if file is None:
                yield MappedChunks(at=np.zeros(len(offsets), dtype=np.uint64), sizes=sizes, owner=None)
            else:
                at, owner = file.mapped_ranges(offsets, sizes)
                yield MappedChunks(at=at, sizes=sizes, owner=owner)

    def _places(
        self, numbers: NDArray[np.int64]
    ) -> Iterator[tuple[LocalFile | None, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the shard (None if it was never written), offsets (-1 likewise) and sizes of runs of chunks."""
        at = np.stack(np.unravel_index(numbers, self._grid))
        per_shard = np.array(self._per_shard)[:, None]
        shards = at // per_shard
        within = np.ravel_multi_index(tuple(at % per_shard), self._per_shard)
        ends = np.flatnonzero((shards[:, 1:] != shards[:, :-1]).any(axis=0)) + 1
        for chunks in np.split(np.arange(len(numbers)), ends):
            shard_at = tuple(shards[:, chunks[0]].tolist())
            shard = self._shard(shard_at)
            if shard is None:
                never = np.full(len(chunks), -1)
                yield None, never, np.zeros_like(never)
                continue
            file = self._files.pop(shard_at, None) or LocalFile(shard.identity)
            file.check()
            self._files[shard_at] = file
            # Threads that race here drop one that another has just looked up, which keeps it while it reads.
            for oldest in list(self._files)[:-_OPEN_SHARDS]:
                self._files.pop(oldest, None)
            offsets, sizes = shard.offsets[within[chunks]], shard.sizes[within[chunks]]
            if (offsets + sizes).max() > shard.identity.size:
                raise CorruptDataError(
                    f"{shard.identity.path}: a chunk ends at byte {(offsets + sizes).max()}, beyond the file's "
                    f"{shard.identity.size}. Copy or download it again."
                )
            yield file, offsets, sizes

    def _shard(self, at: tuple[int, ...]) -> _Shard | None:
        """Return a shard's index, remembered; None if the shard was never written."""
        known = self._shards.get(at)
        if known is None:
            path = self._keys.path(at)
            try:
                identity = FileIdentity.of(path)
            except FileNotFoundError:
                self._keys.check_absent(path)
                known = self._shards.keep(at, (None,))
            else:
                self._keys.check_object(identity)
                shard = self._read_index(identity)
                known = self._shards.keep(at, (shard,), n_bytes=shard.offsets.nbytes + shard.sizes.nbytes)
        return known[0]

    def _read_index(self, identity: FileIdentity) -> _Shard:
        start, stop = index_bytes(self._layout, identity)
        data = bytearray(stop - start)
        LocalFile(identity).read(start, memoryview(data))
        offsets, sizes = index_places(self._layout, identity, data)
        return _Shard(identity=identity, offsets=offsets, sizes=sizes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shard:
    identity: FileIdentity
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]


def _unravel(numbers: NDArray[np.int64], grid: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(zip(*(axis.tolist() for axis in np.unravel_index(numbers, grid)), strict=True))
