"""Stores of zarr-python, for metadata and for elements that dasksc does not read itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, Store
from zarr.storage import LocalStore, WrapperStore

from dasksc.errors import DaskscError, StorageError
from dasksc.storage.arrays import caused_by_data
from dasksc.storage.remote.client import pauses
from dasksc.storage.remote.urls import RemoteLocation
from dasksc.storage.zarr.zipped import ZippedStore, is_zip, members_of

T = TypeVar("T")

_METADATA = ("zarr.json", ".zarray", ".zmetadata")
_CODE = ("pickle", "numcodecs.pickle")


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
