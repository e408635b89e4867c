"""What zarr-python must not be given: metadata that make it run code, archives and chunks that swell."""

from __future__ import annotations

import asyncio
import json
import lzma
import math
import os
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import zarr
from zarr.abc.buffer import Buffer, BufferPrototype, NDBuffer
from zarr.abc.store import ByteRequest
from zarr.registry import register_pipeline
from zarr.storage import LocalStore, ZipStore

from dasksc._compat.zarr import ArraySpec, BatchedCodecPipeline, V2Codec, codec_config
from dasksc.errors import CorruptDataError, StorageError
from dasksc.platforms import after_fork
from dasksc.storage.remote.client import WHOLE_BYTES
from dasksc.storage.safety.decompression_limits import ROOM_BYTES, SWELLING, check_swelling

__all__ = [
    "GuardedLocalStore",
    "GuardedPipeline",
    "GuardedZipStore",
    "check_metadata",
    "check_zip",
    "chunks_that_fit",
    "stored_bytes",
]

_METADATA = ("zarr.json", ".zarray", ".zmetadata")
_CODE = ("pickle", "numcodecs.pickle")
# An entry of a zip file is read whole.
_ENTRY_BYTES = 2**31
# Strings have any length, but no column of an atlas has so many bytes in a row.
_STRING_BYTES = 2**12
_NUMBER_BYTES = 16
# Codecs of strings begin with their number; others make objects of any shape.
_OF_OBJECTS = frozenset({"vlen-utf8", "vlen-bytes", "vlen-array", "vlenutf8", "vlenbytes"})
_ANY_OBJECTS = frozenset({"json2", "msgpack2", "categorize"})


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


def stored_bytes(store: str, arrays: Iterable[zarr.Array[Any]], *, enough: int) -> int:
    """Return how many bytes are stored for arrays of a directory; no more is counted once it is `enough`."""
    total = 0
    for array in arrays:
        for folder, _, names in os.walk(os.path.join(store, array.path)):
            for name in names:
                total += os.path.getsize(os.path.join(folder, name))
                if total >= enough:
                    return total
    return total


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


Pairs = list[tuple[Buffer | None, ArraySpec]]


class GuardedPipeline(BatchedCodecPipeline):
    """Decodes chunks as zarr-python does, but refuses those that decode to more than can belong there."""

    async def decode_batch(
        self, chunk_bytes_and_specs: Iterable[tuple[Buffer | None, ArraySpec]]
    ) -> Iterable[NDBuffer | None]:
        """Decode chunks, each stage after a look at what it will make."""
        pairs = list(chunk_bytes_and_specs)
        for codec in reversed(self.bytes_bytes_codecs):
            _check_swelling(_name_of(codec), codec_config(codec), pairs)
            pairs = list(zip(await codec.decode(pairs), [spec for _, spec in pairs], strict=True))
        for step in self.array_array_codecs:
            _check_types(_name_of(step), codec_config(step))
        last: Any = self.array_bytes_codec
        if isinstance(last, V2Codec):
            pairs, last = await _decompressed(last, pairs)
        elif _name_of(last) in _OF_OBJECTS:
            _check_counts(pairs)
        rest = replace(self, bytes_bytes_codecs=(), array_bytes_codec=last)
        return await super(GuardedPipeline, rest).decode_batch(pairs)


async def _decompressed(codec: V2Codec, pairs: Pairs) -> tuple[Pairs, V2Codec]:
    """Do the first steps of decoding chunks of Zarr 2; return what they made, and the codec of those that are left."""
    steps: list[Any] = [*(codec.filters or ()), *([] if codec.compressor is None else [codec.compressor])]
    for step in steps:
        _check_types(step.codec_id, step.get_config())
    if steps and steps[-1].codec_id in SWELLING:
        step = steps.pop()
        _check_swelling(step.codec_id, step.get_config(), pairs)
        pairs = [(await _decoded(step, data, spec), spec) for data, spec in pairs]
    if any(step.codec_id in SWELLING for step in steps):
        raise StorageError("arrays that are compressed twice, or not at the end, are not read")
    of_objects = [step.codec_id in _OF_OBJECTS for step in steps]
    if of_objects == [True]:
        _check_counts(pairs)
    elif any(of_objects):
        raise StorageError("arrays of strings that have filters of other kinds are not read")
    return pairs, replace(codec, filters=tuple(steps), compressor=None)


async def _decoded(step: Any, data: Buffer | None, spec: ArraySpec) -> Buffer | None:
    if data is None:
        return None
    decoded = await asyncio.to_thread(step.decode, data.as_array_like())
    return spec.prototype.buffer.from_bytes(bytes(memoryview(decoded).cast("B")))


def _name_of(codec: Any) -> str:
    name = getattr(codec, "codec_name", type(codec).__name__.removesuffix("Codec").lower())
    return str(name).removeprefix("numcodecs.")


def _check_types(name: str, config: Mapping[str, Any]) -> None:
    """Refuse filters that make of bytes whatever their configuration says."""
    if name in _ANY_OBJECTS:
        raise StorageError(f"arrays that are decoded by {name!r} are not read; write them as AnnData does")
    for key, value in config.items():
        if key in ("dtype", "astype", "encode_dtype", "decode_dtype") and np.dtype(value).itemsize > _NUMBER_BYTES:
            raise StorageError(f"arrays that the filter {name!r} decodes to {value!r} are not read; numbers are")


def _check_swelling(name: str, config: Mapping[str, Any], pairs: Pairs) -> None:
    """Refuse chunks that decode to too much."""
    if name not in SWELLING:
        return
    if name == "lzma" and (config.get("format", lzma.FORMAT_XZ) != lzma.FORMAT_XZ or config.get("filters")):
        raise StorageError("arrays that are compressed by LZMA without its header, or with filters, are not read")
    for data, spec in pairs:
        if data is not None:
            item_bytes = getattr(spec.dtype, "item_size", None)
            at_most = math.prod(spec.shape) * (_STRING_BYTES if item_bytes is None else int(item_bytes))
            with _saying_where(spec):
                check_swelling(name, data.as_numpy_array(), at_most=at_most + ROOM_BYTES)


def _check_counts(pairs: Pairs) -> None:
    """Refuse chunks of strings that say they hold more of them than belong there."""
    for data, spec in pairs:
        if data is not None:
            stated = int.from_bytes(data.as_numpy_array()[:4].tobytes(), "little")
            with _saying_where(spec):
                if stated > math.prod(spec.shape):
                    raise ValueError(f"it says that it holds {stated} strings")


@contextmanager
def _saying_where(spec: ArraySpec) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise CorruptDataError(
            f"a chunk of shape {spec.shape} is corrupt: {error}. Copy or download the store again."
        ) from error


register_pipeline(GuardedPipeline)

_setting = threading.Lock()
_set: list[Any] = []
_n_inside = 0


def _begin_anew_after_fork() -> None:
    """Leave what other threads of the parent were in the middle of: they do not live here."""
    global _setting, _n_inside
    _setting = threading.Lock()
    if _n_inside:
        _set.pop().__exit__(None, None, None)
        _n_inside = 0


after_fork(_begin_anew_after_fork)


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
            _n_inside = max(0, _n_inside - 1)  # after a fork inside, it is none already
            if not _n_inside and _set:
                _set.pop().__exit__(None, None, None)
