"""Checks of Zarr metadata and archives, before zarr-python reads them, for excessive sizes and codecs that run code."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterable
from typing import Any

import zarr
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest
from zarr.storage import LocalStore

from dasksc.errors import CorruptDataError, StorageError
from dasksc.storage.arrays import caused_by_data
from dasksc.storage.remote.client import WHOLE_BYTES
from dasksc.storage.safety.zarr_codecs import bounded_metadata

__all__ = [
    "GuardedLocalStore",
    "check_zip",
    "safe_content",
    "stored_bytes",
]

_METADATA = ("zarr.json", ".zarray", ".zmetadata")
_CODE = ("pickle", "numcodecs.pickle")
# Maximum unpacked size of a compressed entry of a zip file. Such an entry is read as a whole.
_ENTRY_BYTES = 2**31


def safe_content(store: str, key: str, content: bytes) -> bytes:
    """Return the content of an object in a form that is safe for zarr-python, with bounded codecs in metadata."""
    if not key.endswith(_METADATA):
        return content
    try:
        document = json.loads(content)
    except ValueError:
        return content  # zarr-python reports the error
    if b"pickle" in content and _names_code(document):
        raise StorageError(
            f"{store}/{key} uses the codec 'pickle', which runs code stored with the data. It is not read: write the "
            "array as strings or numbers."
        )
    try:
        bounded = bounded_metadata(document)
    except Exception as error:
        if not caused_by_data(error):
            raise
        raise CorruptDataError(
            f"{store}/{key}: the metadata of its codecs cannot be read ({type(error).__name__}: {error}). Copy or "
            "download it again."
        ) from error
    return content if bounded == document else json.dumps(bounded).encode()


def _names_code(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("id") in _CODE or value.get("name") in _CODE or any(map(_names_code, value.values()))
    return isinstance(value, list) and any(map(_names_code, value))


def check_zip(path: str, entries: Iterable[zipfile.ZipInfo]) -> None:
    """Raise an error if an entry of a zip file would fill memory; `entries` are those of its central directory."""
    for entry in entries:
        is_metadata = entry.filename.endswith((*_METADATA, ".zattrs", ".zgroup"))
        longest = WHOLE_BYTES if is_metadata else _ENTRY_BYTES
        # Uncompressed entries are no larger than the file, and can be read in part.
        if entry.file_size > longest and (is_metadata or entry.compress_type != zipfile.ZIP_STORED):
            raise StorageError(
                f"{path}: {entry.filename!r} unpacks to {entry.file_size} bytes, but at most {longest} are expected. "
                "The archive is corrupt or malicious; if you trust it, unpack it and open the folder"
            )


def stored_bytes(store: str, arrays: Iterable[zarr.Array[Any]], *, enough: int) -> int:
    """Return the stored size of arrays in a directory, in bytes; counting stops at `enough`."""
    total = 0
    for array in arrays:
        for folder, _, names in os.walk(os.path.join(store, array.path)):
            for name in names:
                total += os.path.getsize(os.path.join(folder, name))
                if total >= enough:
                    return total
    return total


class GuardedLocalStore(LocalStore):
    """Directory store with safe metadata; see `safe_content`."""

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return an object; `safe_content` makes metadata safe."""
        data = await super().get(key, prototype, byte_range)  # type: ignore[arg-type, unused-ignore]
        return data if data is None else _safe(str(self.root), key, data)


def _safe(store: str, key: str, data: Buffer) -> Buffer:
    return type(data).from_bytes(safe_content(store, key, data.to_bytes())) if key.endswith(_METADATA) else data
