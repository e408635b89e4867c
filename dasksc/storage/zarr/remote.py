"""Zarr arrays behind URLs, with chunks read without zarr-python."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from dasksc.errors import CorruptDataError, MissingPathError
from dasksc.storage.arrays import StoredArray, UnknownLayoutError
from dasksc.storage.chunked import MappedChunks
from dasksc.storage.remote.cache import Cache
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.remote.remote_file import AHEAD_BYTES, REQUEST_BYTES, RemoteFile, in_order, ranges_of
from dasksc.storage.remote.urls import RemoteLocation
from dasksc.storage.zarr.chunks import At, File, ObjectCache, chunked_array
from dasksc.storage.zarr.layout import METADATA, ZarrLayout, layout_of

T = TypeVar("T")


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


def direct_array(array: RemoteLocation, *, label: str, cache: Cache | None) -> StoredArray:
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
