"""Zarr stores (directories and zip files, v2 and v3) through zarr-python: metadata, and arrays in any layout."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, Store
from zarr.storage import LocalStore, WrapperStore, ZipStore

from dasksc.errors import CorruptDataError, DaskscError, StorageError
from dasksc.storage.arrays import ReadSlice, SlicedArray, caused_by_data
from dasksc.storage.files import FileIdentity, UseMmap
from dasksc.storage.remote.client import ObjectIdentity, pauses
from dasksc.storage.remote.remote_file import Cache
from dasksc.storage.remote.urls import RemoteLocation
from dasksc.storage.zarr.direct import metadata_of
from dasksc.storage.zarr.layout import METADATA

T = TypeVar("T")

# Runs with smaller gaps are read as one, since each selection costs zarr-python about a millisecond.
_GAP_BYTES = 2**20
_METADATA = (*METADATA, ".zmetadata")
_CODE = ("pickle", "numcodecs.pickle")


class ZarrFile:
    """Zarr store, opened in each process on first use."""

    def __init__(self, path: str | RemoteLocation, *, use_mmap: UseMmap = "auto", cache: Cache | None = None) -> None:
        self.path = path
        self.use_mmap = use_mmap
        self.cache = cache
        self._opened: tuple[int, Store] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def store(self) -> Store:
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            # If threads race, the store is opened twice, which is harmless.
            opened = self._opened = os.getpid(), store_at(self.path)
        return opened[1]

    def root(self) -> zarr.Group:
        try:
            return zarr.open_group(self.store(), mode="r")
        except DaskscError:
            raise
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError) as error:
            raise StorageError(
                f"{self.path} is not a Zarr store: it has no group at its root (no zarr.json, no .zgroup). "
                "Give the directory that AnnData's write_zarr made, a zip file of what is in it, or an .h5ad file."
            ) from error

    def identity(self, name: str) -> FileIdentity | ObjectIdentity:
        """Return the identity of the array `name`, which changes if the array is replaced."""
        if isinstance(self.path, RemoteLocation):
            return metadata_of(self.path.below(name))[0].identity
        if os.path.isfile(self.path):
            return FileIdentity.of(self.path)
        for metadata in METADATA:
            path = os.path.join(self.path, name, metadata)
            if os.path.exists(path):
                return FileIdentity.of(path)
        raise StorageError(
            f"{self.path}:/{name} has no metadata (no zarr.json, no .zarray), so the store is "
            "incomplete. Copy or download it again."
        )


class ZarrArray(SlicedArray):
    """Zarr array, read with zarr-python."""

    def __init__(self, file: ZarrFile, name: str) -> None:
        array = zarr.open_array(file.store(), path=name, mode="r")
        dtype = np.dtype(array.dtype)
        super().__init__(
            label=f"{file.path}:/{name}",
            shape=array.shape,
            # Strings of variable length have no byte order. Arrays of strings are rejected where numbers are required.
            dtype=dtype.newbyteorder("=") if dtype.kind in "biufc" else dtype,
            chunk=int(array.chunks[0]) if array.chunks else 1,
            gap_bytes=_GAP_BYTES,
        )
        self._file = file
        self._name = name
        self._identity: Any = file.identity(name)

    def reader(self) -> ReadSlice:
        self._identity.compare(self._file.identity(self._name))
        array = zarr.open_array(self._file.store(), path=self._name, mode="r")

        def read(start: int, stop: int, into: NDArray[Any]) -> None:
            into[...] = array[start:stop]

        return read


def store_at(place: str | RemoteLocation) -> Store:
    """Return the store at a local path or a location."""
    if isinstance(place, RemoteLocation):
        store, prefix = place.client.zarr_store(place.key)
        return _CheckedStore(store, place, prefix)
    if is_zip(place):
        members_of(place)  # an error names the archive
        return _CheckedStore(ZippedStore(place), place)
    return _CheckedStore(LocalStore(place, read_only=True), place)


class _CheckedStore(WrapperStore[Store]):
    """Store whose metadata must not run code, and whose errors name the place and contain no credentials."""

    def __init__(self, store: Store, place: str | RemoteLocation, prefix: str = "") -> None:
        super().__init__(store)
        self._place = place
        self._prefix = prefix  # what precedes the keys in `store`
        self._turns = asyncio.Semaphore(place.client.zarr_requests if isinstance(place, RemoteLocation) else 1)

    def with_read_only(self, read_only: bool = False) -> _CheckedStore:
        return self

    def __str__(self) -> str:
        return str(self._place)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        data = await self._answer(key, lambda: self._store.get(self._prefix + key, prototype, byte_range))
        if data is not None and key.endswith(_METADATA):
            _refuse_pickles(f"{self._place}/{key}", data.to_bytes())
        return data

    async def exists(self, key: str) -> bool:
        return await self._answer(key, lambda: self._store.exists(self._prefix + key))

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        async def names() -> list[str]:
            return [name async for name in self._store.list_dir(self._prefix + prefix)]

        for name in await self._answer(prefix, names, is_listing=True):
            yield name

    async def getsize_prefix(self, prefix: str) -> int:
        return await self._answer(prefix, lambda: self._store.getsize_prefix(self._prefix + prefix), is_listing=True)

    async def _answer(self, key: str, request: Callable[[], Awaitable[T]], *, is_listing: bool = False) -> T:
        """Return the result of a request; remote requests are repeated after errors, as by `retry`."""
        if not isinstance(self._place, RemoteLocation):
            return await request()
        place, waits = self._place.below(key), pauses()
        if is_listing:
            place.require_listing()
        while True:
            async with self._turns:
                try:
                    return await request()
                except Exception as error:
                    if isinstance(error, DaskscError) or not caused_by_data(error):
                        raise
                    pause = next(waits, None)
                    if pause is None or place.client.is_final(error):
                        raise place.client.translated(error, place.key) from None
                    # The connection of the store may be broken.
                    self._store, self._prefix = place.client.zarr_store(self._place.key)
            await asyncio.sleep(pause)


def _refuse_pickles(path: str, content: bytes) -> None:
    """Raise `StorageError` for metadata with a codec that runs code stored with the data."""
    try:
        document = json.loads(content)
    except ValueError:
        return  # zarr-python reports the error
    if _names_code(document):
        raise StorageError(
            f"{path} uses the codec 'pickle', which runs code stored with the data. It is not read: write the array as "
            "strings or numbers."
        )


def _names_code(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("id") in _CODE or value.get("name") in _CODE or any(map(_names_code, value.values()))
    return isinstance(value, list) and any(map(_names_code, value))


def is_zip(path: str) -> bool:
    """Return True if a local path is that of a file with the ending ``.zip``."""
    return path.endswith(".zip") and os.path.isfile(path)


def members_of(path: str) -> list[zipfile.ZipInfo]:
    """Return the members of a zip file; raise `CorruptDataError` if it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.infolist()
    # zipfile raises several types of errors if the directory is damaged.
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError) as error:
        raise CorruptDataError(
            f"{path} ({os.path.getsize(path)} bytes) is not a zip file, or is truncated: {error}. Copy or download it "
            "again."
        ) from error


class ZippedStore(ZipStore):
    """Store of zarr-python whose sizes come from the directory of the archive."""

    async def getsize_prefix(self, prefix: str) -> int:
        inside = f"{prefix.strip('/')}/"
        return sum(one.compress_size for one in members_of(str(self.path)) if one.filename.startswith(inside))
