"""What zarr-python must not be given: metadata that make it run code, archives and chunks that swell."""

from __future__ import annotations

import json
import math
import threading
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import zarr
from zarr.abc.store import ByteRequest
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, BufferPrototype, NDBuffer
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.registry import register_pipeline
from zarr.storage import LocalStore, ZipStore

from dasksc.errors import CorruptDataError, StorageError
from dasksc.storage.client import WHOLE_BYTES
from dasksc.storage.swell import ROOM_BYTES, SWELLING, check_swelling

__all__ = [
    "GuardedLocalStore",
    "GuardedPipeline",
    "GuardedZipStore",
    "check_metadata",
    "check_zip",
    "chunks_that_fit",
]

_METADATA = ("zarr.json", ".zarray", ".zmetadata")
_CODE = ("pickle", "numcodecs.pickle")
# An entry of a zip file is read whole.
_ENTRY_BYTES = 2**31
# Strings have any length, but no column of an atlas has so many bytes in a row.
_STRING_BYTES = 2**12


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


class GuardedPipeline(BatchedCodecPipeline):
    """Decodes chunks as zarr-python does, but refuses those that decode to more than can belong there."""

    async def decode_batch(
        self, chunk_bytes_and_specs: Iterable[tuple[Buffer | None, ArraySpec]]
    ) -> Iterable[NDBuffer | None]:
        """Decode chunks, each stage after a look at what it will make."""
        pairs = list(chunk_bytes_and_specs)
        for codec in reversed(self.bytes_bytes_codecs):
            name = type(codec).__name__.removesuffix("Codec").lower()
            _check([getattr(codec, "codec_name", name)], pairs)
            pairs = list(zip(await codec.decode(pairs), [spec for _, spec in pairs], strict=True))
        of_v2 = self.array_bytes_codec
        stages = [*(getattr(of_v2, "filters", None) or ()), getattr(of_v2, "compressor", None)]
        _check([stage.codec_id for stage in stages if stage is not None], pairs)
        rest = replace(self, bytes_bytes_codecs=())
        return await super(GuardedPipeline, rest).decode_batch(pairs)


def _check(stages: list[str], pairs: list[tuple[Buffer | None, ArraySpec]]) -> None:
    """Refuse chunks that swell where they are decoded by `stages`, the last of them first."""
    names = [name.removeprefix("numcodecs.") for name in stages]
    swelling = [name for name in names if name in SWELLING]
    if not swelling:
        return
    if swelling != names[-1:]:
        raise StorageError(f"arrays that are decoded by {names[::-1]} are not read: compression comes last, and once")
    for data, spec in pairs:
        if data is None:
            continue
        view = data.as_numpy_array()
        n_rows = math.prod(spec.shape)
        item_bytes = getattr(spec.dtype, "item_size", None)
        at_most = _STRING_BYTES * n_rows if item_bytes is None else int(item_bytes) * n_rows
        try:
            check_swelling(names[-1], view, at_most=at_most + ROOM_BYTES)
        except ValueError as error:
            raise CorruptDataError(
                f"a chunk of shape {spec.shape} is corrupt: {error}. Copy or download the store again."
            ) from error


register_pipeline(GuardedPipeline)

_setting = threading.Lock()
_set: list[Any] = []
_n_inside = 0


@contextmanager
def chunks_that_fit() -> Iterator[None]:
    """Let arrays that are opened inside, in any thread, refuse chunks that swell.

    zarr-python takes the class that decodes from its configuration, which all threads share.
    """
    global _n_inside
    with _setting:
        if not _n_inside:
            name = f"{GuardedPipeline.__module__}.{GuardedPipeline.__qualname__}"
            _set.append(zarr.config.set({"codec_pipeline.path": name}))
        _n_inside += 1
    try:
        yield
    finally:
        with _setting:
            _n_inside -= 1
            if not _n_inside:
                _set.pop().__exit__(None, None, None)
