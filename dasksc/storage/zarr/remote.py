"""Zarr stores behind a URL: their metadata for zarr-python, their chunks by byte ranges."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest

from dasksc.errors import CorruptDataError, InputError, MissingPathError
from dasksc.storage.arrays import StoredArray, UnknownLayoutError
from dasksc.storage.chunked import ChunkedArray, ChunkSource, MappedChunks
from dasksc.storage.remote.cache import Cache
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.remote.known_objects import Seen
from dasksc.storage.remote.remote_file import AHEAD_BYTES, REQUEST_BYTES, RemoteFile, in_order, ranges_of
from dasksc.storage.remote.urls import Place
from dasksc.storage.safety.zarr_metadata import safe_content
from dasksc.storage.zarr.layout import METADATA, Layout, layout_of
from dasksc.storage.zarr.shard_index import index_bytes, index_places

__all__ = ["PlaceStore", "RemoteMetadata", "direct_array"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMetadata:
    """The object that describes an array, as it was when the array was opened.

    Parameters
    ----------
    place
        Where it is.
    identity
        What it was.
    """

    place: Place
    identity: ObjectIdentity

    @classmethod
    def of(cls, array: Place) -> tuple[RemoteMetadata, bytes]:
        """Return what describes the array at a place, and its content.

        Raises
        ------
        UnknownLayoutError
            If there is none.
        """
        for name in METADATA:
            place = array.below(name)
            try:
                content, identity = place.client.get(place.key)
            except MissingPathError:
                continue
            return cls(place=place, identity=identity), bytes(content)
        raise UnknownLayoutError("it has no metadata of its own")

    def check(self) -> None:
        """Refuse an array that was replaced since; one request."""
        self.identity.compare(self.place.client.stat(self.place.key))


def direct_array(array: Place, *, label: str, cache: Cache | None) -> StoredArray:
    """Return a Zarr array as one that is read without zarr-python.

    Parameters
    ----------
    array
        Where its metadata are.
    label
        What to call it in errors.
    cache
        Where chunks are kept on this machine.

    Raises
    ------
    UnknownLayoutError
        If it must be read through zarr-python.
    """
    metadata, content = RemoteMetadata.of(array)
    layout = layout_of(os.path.basename(metadata.place.key), content)
    kind: Callable[..., ChunkSource] = ObjectChunks if layout.shard_shape is None else ObjectShards
    return ChunkedArray(
        label=label,
        shape=layout.shape,
        chunk_shape=layout.chunk_shape,
        chain=layout.chain,
        source=kind(array, layout=layout, metadata=metadata, cache=cache),
        fill=layout.fill,
    )


class _Objects:
    """The stored objects of an array.

    Parameters
    ----------
    array
        Where its metadata are.
    layout
        What they say.
    metadata
        By which a replaced array is known.
    cache
        Where chunks are kept on this machine.
    """

    working_bytes = AHEAD_BYTES + REQUEST_BYTES

    def __init__(self, array: Place, *, layout: Layout, metadata: RemoteMetadata, cache: Cache | None) -> None:
        self._array = array
        self._layout = layout
        self._metadata = metadata
        self._cache = cache

    def check(self) -> None:
        """Do nothing: `read` checks while it waits for the chunks anyway."""

    def mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks] | None:
        """Return None: nothing is mapped."""
        return None

    def _place(self, at: tuple[int, ...]) -> Place:
        return self._array.below(self._layout.key(at))

    def _checking(self) -> tuple[Callable[[], Any], int]:
        """Return the call that refuses an array that was replaced, for `in_order`."""
        return self._metadata.check, 0


class ObjectChunks(_Objects):
    """Chunks of which each is an object; see `_Objects` and `dasksc.storage.chunked.ChunkSource`."""

    def __init__(self, array: Place, *, layout: Layout, metadata: RemoteMetadata, cache: Cache | None) -> None:
        super().__init__(array, layout=layout, metadata=metadata, cache=cache)
        # As they were when this process first met them.
        self._seen = Seen[tuple[int, ...], ObjectIdentity]()

    @property
    def _chunk_bytes(self) -> int:
        return math.prod(self._layout.chunk_shape) * self._layout.chain.dtype.itemsize

    @property
    def _longest(self) -> int:
        """The size of the longest object that can be one of these chunks: no codec makes them much longer."""
        return 2 * self._chunk_bytes + 2**16

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[Any, int]]:
        """Yield the chunks, those that follow asked for already."""
        size = self._chunk_bytes
        chunks = zip(*(axis.tolist() for axis in np.unravel_index(numbers, self._layout.grid)), strict=True)
        calls: list[tuple[Callable[[], Any], int]] = [(self._getting(at), size) for at in chunks]
        for data in in_order([self._checking(), *calls]):
            # The answer of the check comes first, so that nothing of a replaced array is handed out.
            if data is not None:
                yield data

    def _getting(self, at: tuple[int, ...]) -> Callable[[], tuple[Any, int]]:
        return lambda: (self._get(at), 0)

    def _get(self, at: tuple[int, ...]) -> memoryview | None:
        place, seen = self._place(at), self._seen.get(at)
        try:
            if self._cache is not None:
                if seen is None:  # whether what the cache has is what is there
                    seen = self._seen.keep(at, place.client.stat(place.key))
                if seen.size > self._longest:
                    raise CorruptDataError(f"{place} has {seen.size} bytes, where at most {self._longest} belong")
                return RemoteFile(place, seen, cache=self._cache).fetch(0, seen.size)
            data, identity = place.client.get(place.key, expected=seen, longest=self._longest)
        except MissingPathError:
            if seen is not None:
                raise CorruptDataError(f"{place} was removed since it was opened") from None
            return None
        self._seen.keep(at, identity).compare(identity)
        return data


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shard:
    file: RemoteFile
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]


class ObjectShards(_Objects):
    """Chunks of which many are in an object, behind an index; see `_Objects` and `ChunkSource`."""

    def __init__(self, array: Place, *, layout: Layout, metadata: RemoteMetadata, cache: Cache | None) -> None:
        super().__init__(array, layout=layout, metadata=metadata, cache=cache)
        # As they were when this process first met them, (None,) where there was none.
        self._seen = Seen[tuple[int, ...], tuple[_Shard | None]]()

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[Any, int]]:
        """Yield the chunks, those that follow asked for already."""
        at = np.stack(np.unravel_index(numbers, self._layout.grid))
        per_shard = np.array(self._layout.per_shard)[:, None]
        within = np.ravel_multi_index(tuple(at % per_shard), self._layout.per_shard)
        shard_of = list(zip(*(axis.tolist() for axis in at // per_shard), strict=True))
        shards = {one: self._seen.get(one) for one in shard_of}
        unknown = [one for one, known in shards.items() if known is None]
        calls: list[tuple[Callable[[], Any], int]] = [(self._opening(one), 0) for one in unknown]
        _, *opened = in_order([self._checking(), *calls])
        for one, shard in zip(unknown, opened, strict=True):
            n_bytes = 0 if shard is None else shard.offsets.nbytes + shard.sizes.nbytes
            shards[one] = self._seen.keep(one, (shard,), n_bytes=n_bytes)
        ends = [i for i in range(1, len(shard_of) + 1) if i == len(shard_of) or shard_of[i] != shard_of[i - 1]]
        groups = []
        written = np.zeros(len(numbers), dtype=bool)
        for first, after in zip([0, *ends[:-1]], ends, strict=True):
            (shard,) = shards[shard_of[first]] or (None,)
            if shard is None:
                continue
            offsets, sizes = shard.offsets[within[first:after]], shard.sizes[within[first:after]]
            identity = shard.file.identity
            if (offsets + sizes).max() > identity.size:
                raise CorruptDataError(
                    f"{identity.path}: a chunk ends at byte {(offsets + sizes).max()}, beyond the object's "
                    f"{identity.size}. Upload it again."
                )
            written[first:after] = offsets >= 0
            groups.append((shard.file, offsets[offsets >= 0], sizes[offsets >= 0]))
        chunks = ranges_of(groups)
        for is_written in written.tolist():
            yield (next(chunks), 0) if is_written else (None, 0)

    def _opening(self, at: tuple[int, ...]) -> Callable[[], _Shard | None]:
        return lambda: self._opened(at)

    def _opened(self, at: tuple[int, ...]) -> _Shard | None:
        """Return a shard's index; None if the shard was never written."""
        try:
            file = RemoteFile.of(self._place(at), cache=self._cache)
        except MissingPathError:
            return None
        start, stop = index_bytes(self._layout, file.identity)
        offsets, sizes = index_places(self._layout, file.identity, bytes(file.fetch(start, stop)))
        return _Shard(file=file, offsets=offsets, sizes=sizes)


class PlaceStore(Store):
    """A store for zarr-python that reads as everything here does: with retries, and errors that name the place.

    Parameters
    ----------
    place
        Where the root of the hierarchy is.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = True
    supports_partial_writes = False

    def __init__(self, place: Place) -> None:
        super().__init__(read_only=True)
        self._place = place

    def __eq__(self, value: object) -> bool:
        return isinstance(value, PlaceStore) and value._place == self._place

    def __str__(self) -> str:
        return str(self._place)

    def __repr__(self) -> str:
        return f"PlaceStore({self._place})"

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return an object, or a range of it; None if there is none."""
        try:
            data = await asyncio.to_thread(self._get, key, byte_range)
        except MissingPathError:
            return None
        return prototype.buffer.from_bytes(data)

    def _get(self, key: str, byte_range: ByteRequest | None) -> bytes:
        client, name = self._place.client, self._place.below(key).key
        if byte_range is None:
            return safe_content(str(self._place), key, bytes(client.get(name)[0]))
        if isinstance(byte_range, RangeByteRequest):
            start, stop = byte_range.start, byte_range.end
        else:
            stop = client.stat(name).size
            suffix = byte_range.suffix if isinstance(byte_range, SuffixByteRequest) else stop - byte_range.offset
            start = max(0, stop - suffix)
        return bytes(client.get(name, start, stop)[0])

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return several ranges."""
        return list(await asyncio.gather(*(self.get(key, prototype, wanted) for key, wanted in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Return whether there is an object."""
        try:
            await asyncio.to_thread(self._place.client.stat, self._place.below(key).key)
        except MissingPathError:
            return False
        return True

    async def set(self, key: str, value: Buffer) -> None:
        """Refuse: nothing is written."""
        raise InputError(f"{self._place} is read only")

    async def delete(self, key: str) -> None:
        """Refuse: nothing is written."""
        raise InputError(f"{self._place} is read only")

    async def list(self) -> AsyncIterator[str]:
        """Yield all keys."""
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield all keys below a prefix."""
        root = self._place.key
        for key in await asyncio.to_thread(self._place.client.listed, self._place.below(prefix).key):
            yield key.removeprefix(f"{root}/")

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names directly below a prefix."""
        for name in await asyncio.to_thread(self._place.client.children, self._place.below(prefix).key):
            yield name
