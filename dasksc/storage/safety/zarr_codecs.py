"""Codecs for zarr-python with a limit on the decompressed size of chunks.

zarr-python takes the codecs of an array from its metadata. `bounded_metadata` rewrites the metadata before zarr-python
parses them, so that a codec of this module wraps the codecs that decompress stored bytes. Arrays that other code opens
in the process are not affected.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import numcodecs  # type: ignore[import-untyped]
import numcodecs.abc  # type: ignore[import-untyped]
import numpy as np
from numcodecs.registry import register_codec as register_numcodec  # type: ignore[import-untyped]
from zarr.abc.buffer import Buffer
from zarr.abc.codec import ArrayBytesCodec, BytesBytesCodec
from zarr.registry import get_codec_class, register_codec

from dasksc.errors import CorruptDataError, InputError, StorageError
from dasksc.storage.safety.decompression_limits import DECOMPRESSED_SIZES, ROOM_BYTES, check_decompressed_size

__all__ = ["bounded_metadata", "codecs_within"]

_NAME = "dasksc_bounded"
# Assumed maximum size of a string. Strings have no fixed length, but no column of an atlas has this many bytes per row.
_STRING_BYTES = 2**12
_NUMBER_BYTES = 16
# Codecs of strings, whose data start with the number of strings.
_OF_OBJECTS = frozenset({"vlen-utf8", "vlen-bytes", "vlen-array", "vlenutf8", "vlenbytes"})
# Codecs that decode to Python objects of unlimited size. Arrays with these codecs are refused.
_ANY_OBJECTS = frozenset({"json2", "msgpack2", "categorize"})


def bounded_metadata(document: Any) -> Any:
    """Return the metadata of a node, including consolidated metadata, with bounded codecs."""
    if not isinstance(document, dict):
        return document
    if "zarr_consolidated_format" in document:
        return _with_bounded_nodes(document)
    if document.get("zarr_format") == 2 and "shape" in document:
        return _bounded_v2(document)
    if isinstance(document.get("consolidated_metadata"), dict):
        document = document | {"consolidated_metadata": _with_bounded_nodes(document["consolidated_metadata"])}
    if document.get("node_type") == "array":
        return document | {"codecs": _bounded_v3(document["codecs"])}
    return document


def _with_bounded_nodes(consolidated: dict[str, Any]) -> dict[str, Any]:
    nodes = {
        key: node if key.endswith(".zattrs") else bounded_metadata(node)
        for key, node in consolidated["metadata"].items()
    }
    return consolidated | {"metadata": nodes}


def codecs_within(codec: Any) -> tuple[Any, ...]:
    """Return the codecs that a bounded codec wraps, in the order of encoding; for any other codec, only itself."""
    if isinstance(codec, _BoundedV2):
        return () if codec.inner is None else (codec.inner,)
    return codec.codecs if isinstance(codec, _BoundedV3) else (codec,)


def _bounded_v2(array: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a v2 array with a compressor that limits its output."""
    # Filters decode this output, so their input is limited as well.
    steps = [*(array.get("filters") or ()), *filter(None, (array.get("compressor"),))]
    names = [step["id"] for step in steps]
    refused = _refusal_of(zip(names, steps, strict=True))
    last = steps.pop() if steps and names[-1] in DECOMPRESSED_SIZES else None
    of_objects = [name in _OF_OBJECTS for name in names[: len(steps)]]
    if any(name in DECOMPRESSED_SIZES for name in names[: len(steps)]):
        refused = refused or "arrays that are compressed twice, or filtered after compression, are not read"
    elif any(of_objects) and len(of_objects) > 1:
        refused = refused or "arrays of strings are read only with the string codec and at most one compressor"
    if last is None and refused is None and not any(of_objects):
        return array
    bounded = {
        "id": _NAME,
        "codec": None if refused else last,
        "dtype": array["dtype"],
        "chunks": array["chunks"],
        "is_counted": any(of_objects),
        "refused": refused,
    }
    return array | {"filters": steps or None, "compressor": bounded}


def _bounded_v3(codecs: list[Any]) -> list[Any]:
    """Replace the bytes-to-bytes codecs with one bounded codec where needed, also within shards."""
    steps = [{"name": step} if isinstance(step, str) else step for step in codecs]
    called = [step["name"] for step in steps]
    try:
        kinds = [get_codec_class(name) for name in called]
    except KeyError:
        return codecs
    names = [_name_of(kind) for kind in kinds]
    refused = _refusal_of((name, step.get("configuration") or {}) for name, step in zip(names, steps, strict=True))
    before = [
        _with_bounded_chunks(step) if step["name"] == "sharding_indexed" else step
        for step, kind in zip(steps, kinds, strict=True)
        if not issubclass(kind, BytesBytesCodec)
    ]
    of_bytes = [step for step, kind in zip(steps, kinds, strict=True) if issubclass(kind, BytesBytesCodec)]
    is_counted = any(
        issubclass(kind, ArrayBytesCodec) and name in _OF_OBJECTS for name, kind in zip(names, kinds, strict=True)
    )
    if not (refused or is_counted or any(name in DECOMPRESSED_SIZES for name in names)):
        return [*before, *of_bytes]
    configuration = {"codecs": [] if refused else of_bytes, "is_counted": is_counted, "refused": refused}
    return [*before, {"name": _NAME, "configuration": configuration}]


def _with_bounded_chunks(sharding: dict[str, Any]) -> dict[str, Any]:
    configuration = sharding["configuration"]
    bounded = {key: _bounded_v3(configuration[key]) for key in ("codecs", "index_codecs") if key in configuration}
    return sharding | {"configuration": configuration | bounded}


def _name_of(kind: type) -> str:
    """Return the canonical name of a codec class, since metadata may use an alias."""
    name = getattr(kind, "codec_name", kind.__name__.removesuffix("Codec").lower())
    return str(name).removeprefix("numcodecs.")


def _refusal_of(steps: Any) -> str | None:
    """Return the reason to refuse an array with the codecs `steps`, or None to accept it."""
    # Unsafe codecs are refused. The bounded codecs of this module are refused as well, since only dasksc may add them.
    for name, config in steps:
        if name in (_NAME, _name_of(_BoundedV3)):
            return f"arrays whose metadata contain the codec {_NAME!r}, which is reserved for dasksc, are not read"
        if name in _ANY_OBJECTS:
            return f"arrays that are decoded by {name!r} are not read"
        if name == "lzma" and (config.get("format", lzma.FORMAT_XZ) != lzma.FORMAT_XZ or config.get("filters")):
            return "arrays that are compressed by LZMA without its header, or by LZMA with filters, are not read"
        for key, value in config.items():
            if key in ("dtype", "astype", "encode_dtype", "decode_dtype") and np.dtype(value).itemsize > _NUMBER_BYTES:
                return f"arrays with the filter {name!r}, which decodes to {value!r} instead of numbers, are not read"
    return None


class _BoundedV2(numcodecs.abc.Codec):
    """Compressor of a Zarr v2 array with a limit on the decompressed size."""

    codec_id = _NAME

    def __init__(
        self, *, codec: dict[str, Any] | None, dtype: Any, chunks: list[int], is_counted: bool, refused: str | None
    ) -> None:
        self.codec = codec
        self.dtype = dtype
        self.chunks = chunks
        self.is_counted = is_counted
        self.refused = refused

    @property
    def inner(self) -> Any:
        """Compressor, or None."""
        return None if self.codec is None else numcodecs.get_codec(self.codec)

    def encode(self, buf: Any) -> Any:
        """Raise an error, since arrays that are opened with limits on decompression are read-only."""
        raise InputError("arrays that are opened with limits on decompression are read-only")

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Decode a chunk after a check of its decompressed size."""
        if self.refused:
            raise StorageError(f"{self.refused}. Write them as AnnData does")
        if self.codec is not None:
            _check_size(self.codec["id"], buf, tuple(self.chunks), _item_bytes(self.dtype))
            buf = self.inner.decode(buf, out)
        if self.is_counted:
            _check_count(buf, tuple(self.chunks))
        return buf


def _item_bytes(dtype: Any) -> int | None:
    """Return the size of an element in bytes for a data type of Zarr v2; None if it is variable."""
    if isinstance(dtype, str):
        parsed = np.dtype(dtype)
        return None if parsed.hasobject else parsed.itemsize
    fields = ((_item_bytes(kind), math.prod(shape[0]) if shape else 1) for _, kind, *shape in dtype)
    return sum((_STRING_BYTES if n_bytes is None else n_bytes) * n for n_bytes, n in fields)


@dataclass(frozen=True)
class _BoundedV3(BytesBytesCodec):
    """Bytes-to-bytes codecs of a Zarr v3 array, with a limit on the decompressed size."""

    codecs: tuple[BytesBytesCodec, ...]  # Codecs in the order of encoding
    is_counted: bool  # True if the decompressed bytes start with the number of strings
    refused: str | None  # Reason to raise an error instead of decoding, or None

    is_fixed_size = False

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Create the codec from its metadata."""
        configuration = data["configuration"]
        codecs: Any = tuple(get_codec_class(step["name"]).from_dict(step) for step in configuration["codecs"])
        return cls(codecs=codecs, is_counted=configuration["is_counted"], refused=configuration["refused"])

    def to_dict(self) -> dict[str, Any]:
        """Return the metadata of the codec."""
        codecs = [codec.to_dict() for codec in self.codecs]
        configuration = {"codecs": codecs, "is_counted": self.is_counted, "refused": self.refused}
        return {"name": _NAME, "configuration": configuration}

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        """Return the encoded size of `input_byte_length` bytes, if all codecs have a fixed output size."""
        for codec in self.codecs:
            input_byte_length = codec.compute_encoded_size(input_byte_length, chunk_spec)
        return input_byte_length

    def evolve_from_array_spec(self, array_spec: Any) -> Self:
        """Return the codec with parameters completed from the array."""
        return replace(self, codecs=tuple(codec.evolve_from_array_spec(array_spec) for codec in self.codecs))

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: Any) -> Buffer:
        """Decode a chunk, with a check of the decompressed size before each codec."""
        if self.refused:
            raise StorageError(f"{self.refused}. Write them as AnnData does")
        data = chunk_data
        for codec in reversed(self.codecs):
            name = _name_of(type(codec))
            if name in DECOMPRESSED_SIZES:
                item_bytes = getattr(chunk_spec.dtype, "item_size", None)
                _check_size(name, data.as_numpy_array(), chunk_spec.shape, item_bytes)
            (decoded,) = await codec.decode([(data, chunk_spec)])
            assert decoded is not None
            data = decoded
        if self.is_counted:
            _check_count(data.as_numpy_array(), chunk_spec.shape)
        return data


def _check_size(name: str, data: Any, shape: tuple[int, ...], item_bytes: int | None) -> None:
    """Raise an error if a chunk decompresses to more than its shape allows."""
    at_most = math.prod(shape) * (_STRING_BYTES if item_bytes is None else int(item_bytes))
    with _naming_shape(shape):
        check_decompressed_size(name, data, at_most=at_most + ROOM_BYTES)


def _check_count(data: Any, shape: tuple[int, ...]) -> None:
    """Raise an error if a chunk states that it contains more strings than its shape allows."""
    stated = int.from_bytes(memoryview(data).cast("B")[:4], "little")
    with _naming_shape(shape):
        if stated > math.prod(shape):
            raise ValueError(f"it claims to contain {stated} strings")


@contextmanager
def _naming_shape(shape: tuple[int, ...]) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise CorruptDataError(
            f"a chunk of shape {shape} is corrupt: {error}. Copy or download the store again."
        ) from error


register_codec(_NAME, _BoundedV3)
register_numcodec(_BoundedV2)
