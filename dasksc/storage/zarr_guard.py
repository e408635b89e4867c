"""What zarr-python must not be given: metadata that make it run code, archives that swell."""

from __future__ import annotations

import json
import zipfile
from typing import Any

from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore, ZipStore

from dasksc.errors import StorageError
from dasksc.storage.client import WHOLE_BYTES

__all__ = ["GuardedLocalStore", "GuardedZipStore", "check_metadata", "check_zip"]

_METADATA = ("zarr.json", ".zarray", ".zmetadata")
_CODE = ("pickle", "numcodecs.pickle")
# An entry of a zip file is read whole.
_ENTRY_BYTES = 2**31


def check_metadata(store: str, key: str, content: bytes) -> None:
    """Refuse metadata by which loading an array runs code that comes with it.

    Raises
    ------
    StorageError
        If a codec is one that unpickles.
    """
    if not key.endswith(_METADATA) or b"pickle" not in content:
        return
    try:
        document = json.loads(content)
    except ValueError:
        return  # zarr-python says what is wrong with it
    if _names_code(document):
        raise StorageError(
            f"{store}/{key} asks for the codec 'pickle', which runs code that comes with the data. It is not read: "
            "write the array as strings or numbers."
        )


def _names_code(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("id") in _CODE or value.get("name") in _CODE or any(map(_names_code, value.values()))
    return isinstance(value, list) and any(map(_names_code, value))


def check_zip(path: str) -> None:
    """Refuse a zip file with an entry that would fill memory.

    Raises
    ------
    StorageError
        If there is one; the message names it.
    """
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            longest = WHOLE_BYTES if entry.filename.endswith((*_METADATA, ".zattrs", ".zgroup")) else _ENTRY_BYTES
            if entry.file_size > longest:
                raise StorageError(
                    f"{path}: {entry.filename!r} unpacks to {entry.file_size} bytes, where at most {longest} belong"
                )


class GuardedLocalStore(LocalStore):
    """A directory; see `check_metadata`."""

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return an object, after a look at what it asks for."""
        data = await super().get(key, prototype, byte_range)  # type: ignore[arg-type, unused-ignore]
        if data is not None and key.endswith(_METADATA):
            check_metadata(str(self.root), key, data.to_bytes())
        return data


class GuardedZipStore(ZipStore):
    """A zip file; see `check_metadata`."""

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return an object, after a look at what it asks for."""
        data = await super().get(key, prototype, byte_range)
        if data is not None and key.endswith(_METADATA):
            check_metadata(str(self.path), key, data.to_bytes())
        return data
