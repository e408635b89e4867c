"""Stored chunks of a Zarr array, one or more per stored object, for any kind of storage."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError
from dasksc.storage.chunked import ChunkedArray, MappedChunks
from dasksc.storage.codecs import Crc32c
from dasksc.storage.file_identity import FileIdentity
from dasksc.storage.files import LocalFile
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.remote.remote_file import RemoteFile
from dasksc.storage.zarr.layout import ZarrLayout

T = TypeVar("T")
V = TypeVar("V")

# Size of the facts about the objects of an array that a process keeps, and of an entry without the facts themselves.
_KEPT_BYTES, _ENTRY_BYTES = 2**26, 512
# Value that a shard's index holds as both offset and size of a chunk that was never written.
_NEVER = 2**64 - 1

At: TypeAlias = tuple[int, ...]
"""Indices of an object in the grid of objects, one per axis."""
File: TypeAlias = LocalFile | RemoteFile


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


class Objects(Protocol):
    """Stored objects of an array, as a source of bytes. Instances can be pickled."""

    # Reads raise a `CorruptDataError` if an object was changed or removed since the array was opened.

    @property
    def working_bytes(self) -> int:
        """See `ChunkSource.working_bytes`."""

    @property
    def can_map(self) -> bool:
        """True if the calling thread may memory-map the objects."""

    def require_unchanged(self) -> None:
        """Raise an error if the array was replaced, unless the reads of its objects check this."""

    def contents(self, ats: list[At], *, n_bytes: int) -> Iterator[Any]:
        """Yield the stored bytes of each object, or None if it is missing."""
        # Each object is one chunk, which decodes to `n_bytes` bytes.

    def mapped(self, ats: list[At]) -> Iterator[MappedChunks]:
        """Yield whole objects, memory-mapped, each as one chunk."""

    def indexed(self, ats: list[At], index_of: Callable[[File], T]) -> Iterator[T | None]:
        """Yield the result of `index_of` for each object, or None if it is missing; callers cache the results."""

    def file(self, at: At, identity: Any) -> File:
        """Return an object that `indexed` has read before."""

    def ranges(self, groups: list[tuple[Any, NDArray[np.int64], NDArray[np.int64]]]) -> Iterator[Any]:
        """Yield the bytes of ranges, valid until the next one is requested; a group is (file, offsets, sizes)."""


def chunked_array(objects: Objects, *, layout: ZarrLayout, label: str) -> ChunkedArray:
    """Return the array with this layout, whose chunks are in stored objects."""
    return ChunkedArray(
        label=label,
        shape=layout.shape,
        chunk_shape=layout.chunk_shape,
        chain=layout.chain,
        source=(_Chunks if layout.shard_shape is None else _Shards)(objects, layout),
        fill=layout.fill,
    )


class _Chunks:
    """Chunks stored as one object each; a `ChunkSource`."""

    def __init__(self, objects: Objects, layout: ZarrLayout) -> None:
        self.working_bytes = objects.working_bytes
        self._objects = objects
        self._grid = layout.grid
        self._n_bytes = math.prod(layout.chunk_shape) * layout.chain.dtype.itemsize

    def require_unchanged(self) -> None:
        self._objects.require_unchanged()

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[Any, int]]:
        for data in self._objects.contents(_tuples(np.unravel_index(numbers, self._grid)), n_bytes=self._n_bytes):
            yield data, 0

    def mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks] | None:
        if not self._objects.can_map:
            return None
        return self._objects.mapped(_tuples(np.unravel_index(numbers, self._grid)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shard:
    identity: FileIdentity | ObjectIdentity
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]


class _Shards(_Chunks):
    """Chunks stored in shards, which are objects with several chunks and an index; a `ChunkSource`."""

    def __init__(self, objects: Objects, layout: ZarrLayout) -> None:
        super().__init__(objects, layout)
        self._layout = layout
        # State of each shard when this process first read it; (None,) if it did not exist.
        self._seen = ObjectCache[tuple[_Shard | None]](16 * math.prod(layout.per_shard))

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
        of_runs = _tuples(shard_at[:, firsts])
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


def _tuples(axes: Any) -> list[At]:
    return list(zip(*(axis.tolist() for axis in axes), strict=True))
