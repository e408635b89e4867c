"""Codecs of zarr-python with a bound: chunks that decode to more than belongs there are refused.

zarr-python takes what decodes an array from the array's metadata. `bounded_metadata` rewrites metadata before
zarr-python parses them: the codecs between stored bytes and elements become one codec of this module, which holds
them. So nothing changes for arrays that other code of the process opens.
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
from dasksc.storage.safety.decompression_limits import ROOM_BYTES, SWELLING, check_swelling

__all__ = ["bounded_metadata", "codecs_within"]

_NAME = "dasksc_bounded"
# Strings have any length, but no column of an atlas has so many bytes in a row.
_STRING_BYTES = 2**12
_NUMBER_BYTES = 16
# Codecs of strings begin with their number; others make objects of any shape.
_OF_OBJECTS = frozenset({"vlen-utf8", "vlen-bytes", "vlen-array", "vlenutf8", "vlenbytes"})
_ANY_OBJECTS = frozenset({"json2", "msgpack2", "categorize"})


def bounded_metadata(document: Any) -> Any:
    """Return metadata of a node, and of those consolidated in it, with bounded codecs.

    Parameters
    ----------
    document
        The content of a ``zarr.json``, ``.zarray`` or ``.zmetadata``.

    Returns
    -------
    object
        `document` itself where nothing in it needs a bound. Documents that zarr-python cannot parse stay as they
        are: its errors say what is wrong with them.

    Raises
    ------
    Exception
        Of any kind, if the codecs are not described as the format demands.
    """
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
    """Return the codecs that a bounded one holds, in the order of encoding; any other codec by itself."""
    if isinstance(codec, _BoundedV2):
        return () if codec.inner is None else (codec.inner,)
    return codec.codecs if isinstance(codec, _BoundedV3) else (codec,)


def _bounded_v2(array: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of an array whose compressor is bounded, and checks what filters get."""
    steps = [*(array.get("filters") or ()), *filter(None, (array.get("compressor"),))]
    names = [step["id"] for step in steps]
    refused = _refusal_of(zip(names, steps, strict=True))
    last = steps.pop() if steps and names[-1] in SWELLING else None
    of_objects = [name in _OF_OBJECTS for name in names[: len(steps)]]
    if any(name in SWELLING for name in names[: len(steps)]):
        refused = refused or "arrays that are compressed twice, or not at the end, are not read"
    elif any(of_objects) and len(of_objects) > 1:
        refused = refused or "arrays of strings that have filters of other kinds are not read"
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
    """Return codecs of which those that turn bytes into bytes are one, if they need a bound; those in shards, too."""
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
    if not (refused or is_counted or any(name in SWELLING for name in names)):
        return [*before, *of_bytes]
    configuration = {"codecs": [] if refused else of_bytes, "is_counted": is_counted, "refused": refused}
    return [*before, {"name": _NAME, "configuration": configuration}]


def _with_bounded_chunks(sharding: dict[str, Any]) -> dict[str, Any]:
    configuration = sharding["configuration"]
    bounded = {key: _bounded_v3(configuration[key]) for key in ("codecs", "index_codecs") if key in configuration}
    return sharding | {"configuration": configuration | bounded}


def _name_of(kind: type) -> str:
    """Return the name of a class of codecs, by which an alias in the metadata does not matter."""
    name = getattr(kind, "codec_name", kind.__name__.removesuffix("Codec").lower())
    return str(name).removeprefix("numcodecs.")


def _refusal_of(steps: Any) -> str | None:
    """Return why steps of a chain are not taken: bounds of their own, and filters that make anything of bytes."""
    for name, config in steps:
        if name in (_NAME, _name_of(_BoundedV3)):
            return f"arrays that name the codec {_NAME!r}, which dasksc sets itself, are not read"
        if name in _ANY_OBJECTS:
            return f"arrays that are decoded by {name!r} are not read; write them as AnnData does"
        if name == "lzma" and (config.get("format", lzma.FORMAT_XZ) != lzma.FORMAT_XZ or config.get("filters")):
            return "arrays that are compressed by LZMA without its header, or with filters, are not read"
        for key, value in config.items():
            if key in ("dtype", "astype", "encode_dtype", "decode_dtype") and np.dtype(value).itemsize > _NUMBER_BYTES:
                return f"arrays that the filter {name!r} decodes to {value!r} are not read; numbers are"
    return None


class _BoundedV2(numcodecs.abc.Codec):
    """The compressor of an array of Zarr 2, with a bound.

    Parameters
    ----------
    codec
        Configuration of the compressor; None if there is none.
    dtype, chunks
        What the array's metadata say of its type and the shape of its chunks.
    is_counted
        Whether the result begins with the number of strings in it.
    refused
        Why nothing is decoded, if that is so.
    """

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
        """The compressor."""
        return None if self.codec is None else numcodecs.get_codec(self.codec)

    def encode(self, buf: Any) -> Any:
        """Refuse: what a bound is put on is read only."""
        raise InputError("arrays with bounded codecs are read only")

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Return what a chunk decodes to, after a look at how much that is."""
        if self.refused:
            raise StorageError(self.refused)
        if self.codec is not None:
            _check_size(self.codec["id"], buf, tuple(self.chunks), _item_bytes(self.dtype))
            buf = self.inner.decode(buf, out)
        if self.is_counted:
            _check_count(buf, tuple(self.chunks))
        return buf


def _item_bytes(dtype: Any) -> int | None:
    """Return the size of an element as metadata of Zarr 2 give its type; None if elements have any size."""
    if isinstance(dtype, str):
        parsed = np.dtype(dtype)
        return None if parsed.hasobject else parsed.itemsize
    fields = ((_item_bytes(kind), math.prod(shape[0]) if shape else 1) for _, kind, *shape in dtype)
    return sum((_STRING_BYTES if n_bytes is None else n_bytes) * n for n_bytes, n in fields)


@dataclass(frozen=True)
class _BoundedV3(BytesBytesCodec):
    """The codecs of an array of Zarr 3 that turn bytes into bytes, with a bound.

    Parameters
    ----------
    codecs
        In the order of encoding.
    is_counted
        Whether the result begins with the number of strings in it.
    refused
        Why nothing is decoded, if that is so.
    """

    codecs: tuple[BytesBytesCodec, ...]
    is_counted: bool
    refused: str | None

    is_fixed_size = False

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Return the codec that metadata describe."""
        configuration = data["configuration"]
        codecs: Any = tuple(get_codec_class(step["name"]).from_dict(step) for step in configuration["codecs"])
        return cls(codecs=codecs, is_counted=configuration["is_counted"], refused=configuration["refused"])

    def to_dict(self) -> dict[str, Any]:
        """Return what metadata say of the codec."""
        codecs = [codec.to_dict() for codec in self.codecs]
        configuration = {"codecs": codecs, "is_counted": self.is_counted, "refused": self.refused}
        return {"name": _NAME, "configuration": configuration}

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        """Return the size of what is stored for a number of bytes, where it is fixed."""
        for codec in self.codecs:
            input_byte_length = codec.compute_encoded_size(input_byte_length, chunk_spec)
        return input_byte_length

    def evolve_from_array_spec(self, array_spec: Any) -> Self:
        """Return the codec with what it takes from the array filled in."""
        return replace(self, codecs=tuple(codec.evolve_from_array_spec(array_spec) for codec in self.codecs))

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: Any) -> Buffer:
        """Return what a chunk decodes to, each codec after a look at how much it makes."""
        if self.refused:
            raise StorageError(self.refused)
        data = chunk_data
        for codec in reversed(self.codecs):
            name = _name_of(type(codec))
            if name in SWELLING:
                item_bytes = getattr(chunk_spec.dtype, "item_size", None)
                _check_size(name, data.as_numpy_array(), chunk_spec.shape, item_bytes)
            (decoded,) = await codec.decode([(data, chunk_spec)])
            assert decoded is not None
            data = decoded
        if self.is_counted:
            _check_count(data.as_numpy_array(), chunk_spec.shape)
        return data


def _check_size(name: str, data: Any, shape: tuple[int, ...], item_bytes: int | None) -> None:
    """Refuse a chunk that decodes to too much."""
    at_most = math.prod(shape) * (_STRING_BYTES if item_bytes is None else int(item_bytes))
    with _saying_where(shape):
        check_swelling(name, data, at_most=at_most + ROOM_BYTES)


def _check_count(data: Any, shape: tuple[int, ...]) -> None:
    """Refuse a chunk of strings that says it holds more of them than belong there."""
    stated = int.from_bytes(memoryview(data).cast("B")[:4], "little")
    with _saying_where(shape):
        if stated > math.prod(shape):
            raise ValueError(f"it says that it holds {stated} strings")


@contextmanager
def _saying_where(shape: tuple[int, ...]) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise CorruptDataError(
            f"a chunk of shape {shape} is corrupt: {error}. Copy or download the store again."
        ) from error


register_codec(_NAME, _BoundedV3)
register_numcodec(_BoundedV2)
