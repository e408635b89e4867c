"""Layout of a Zarr array (v2 or v3) from its metadata."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dasksc.storage.arrays import UnknownLayoutError
from dasksc.storage.codecs import Chain, Codec, codec_of_config

_NUMBERS = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"}
)
# Names of the objects with the metadata of an array, for Zarr v3 and v2.
METADATA = ("zarr.json", ".zarray")


At: TypeAlias = tuple[int, ...]
"""Indices of an object in the grid of objects, one per axis."""


def tuples(axes: Any) -> list[At]:
    """Return the grid indices of objects from an array of indices for each axis."""
    return list(zip(*(axis.tolist() for axis in axes), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ZarrLayout:
    """Layout of a Zarr array."""

    # shape, chunk_shape: Shapes of the array and of a chunk.
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    shard_shape: tuple[int, ...] | None  # Shape of a shard; None if each chunk is an object
    chain: Chain  # Codecs of a chunk
    fill: Any  # Value of elements that were never written
    # prefix, separator: Prefix of the keys of stored objects, and separator of the indices in them.
    prefix: str
    separator: str
    # index_checksum, index_first: Whether the index of a shard ends with a CRC32C checksum, and whether the index is at
    # the start of the shard.
    index_checksum: bool = False
    index_first: bool = False

    def __post_init__(self) -> None:
        if self.separator not in (".", "/"):
            raise UnknownLayoutError(f"its keys are separated by {self.separator!r}")
        if len(self.shape) not in (1, 2) or len(self.chunk_shape) != len(self.shape) or min(self.chunk_shape) < 1:
            raise UnknownLayoutError(f"its shape {self.shape}, in chunks of {self.chunk_shape}, is not supported")

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-n // length) for n, length in zip(self.shape, self.chunk_shape, strict=True))

    @property
    def per_shard(self) -> tuple[int, ...]:
        """Number of chunks of a shard along each axis."""
        shard_shape = self.shard_shape or self.chunk_shape
        return tuple(shard // chunk for shard, chunk in zip(shard_shape, self.chunk_shape, strict=True))

    def places(self, numbers: NDArray[np.int64]) -> list[At]:
        """Return the grid indices of chunks from their row-major numbers."""
        return tuples(np.unravel_index(numbers, self.grid))

    def key(self, at: At) -> str:
        """Return the key of the object with these grid indices, relative to the array."""
        return f"{self.prefix}{self.separator.join(map(str, at))}"


def layout_of(name: str, content: bytes) -> ZarrLayout:
    """Parse the metadata of an array; `name` is the name of the object with the metadata, one of `METADATA`."""
    try:
        return (_layout_v3 if name == "zarr.json" else _layout_v2)(json.loads(content))
    except (KeyError, TypeError, ValueError) as error:
        raise UnknownLayoutError(f"its metadata cannot be parsed ({error!r})") from error


def _layout_v3(metadata: dict[str, Any]) -> ZarrLayout:
    if metadata["node_type"] != "array" or metadata.get("storage_transformers"):
        raise UnknownLayoutError("it is not a plain array")
    if metadata["data_type"] not in _NUMBERS:
        raise UnknownLayoutError(f"its type is {metadata['data_type']!r}")
    dtype = np.dtype(metadata["data_type"])
    grid, encoding = metadata["chunk_grid"], metadata["chunk_key_encoding"]
    if grid["name"] != "regular" or encoding["name"] not in ("default", "v2"):
        raise UnknownLayoutError(f"its chunk grid is {grid['name']!r}, and its key encoding is {encoding['name']!r}")
    v2_keys = encoding["name"] == "v2"
    separator = encoding.get("configuration", {}).get("separator", "." if v2_keys else "/")
    shape = tuple(metadata["shape"])
    chunk_shape = tuple(grid["configuration"]["chunk_shape"])
    shard_shape = None
    codecs = metadata["codecs"]
    index_checksum = index_first = False
    if codecs[0]["name"] == "sharding_indexed":
        if len(codecs) > 1:
            raise UnknownLayoutError("its shards are encoded as a whole")
        sharding = codecs[0]["configuration"]
        index_codecs = [codec["name"] for codec in sharding["index_codecs"]]
        if index_codecs not in (["bytes"], ["bytes", "crc32c"]) or not _is_little(sharding["index_codecs"][0]):
            raise UnknownLayoutError(f"the index of its shards is encoded by {index_codecs}")
        index_checksum = len(index_codecs) == 2
        index_first = sharding.get("index_location", "end") == "start"
        shard_shape, chunk_shape = chunk_shape, tuple(sharding["chunk_shape"])
        codecs = sharding["codecs"]
    return ZarrLayout(
        shape=shape,
        chunk_shape=chunk_shape,
        shard_shape=shard_shape,
        chain=_chain_v3(codecs, dtype),
        fill=_fill(metadata["fill_value"], dtype),
        prefix="" if v2_keys else f"c{separator}",
        separator=separator,
        index_checksum=index_checksum,
        index_first=index_first,
    )


def _layout_v2(metadata: dict[str, Any]) -> ZarrLayout:
    if not isinstance(metadata["dtype"], str):
        raise UnknownLayoutError("its type is compound")
    dtype = np.dtype(metadata["dtype"])
    if dtype.name not in _NUMBERS:
        raise UnknownLayoutError(f"its type is {dtype!r}")
    if metadata.get("order", "C") != "C" and len(metadata["shape"]) > 1:
        raise UnknownLayoutError("it is stored in column-major order")
    configs = [*(metadata.get("filters") or ()), *filter(None, (metadata.get("compressor"),))]
    return ZarrLayout(
        shape=tuple(metadata["shape"]),
        chunk_shape=tuple(metadata["chunks"]),
        shard_shape=None,
        chain=Chain(codecs=tuple(codec_of_config(config) for config in configs), dtype=dtype),
        fill=_fill(metadata["fill_value"], dtype),
        prefix="",
        separator=metadata.get("dimension_separator", "."),
    )


def _chain_v3(codecs: list[dict[str, Any]], dtype: np.dtype[Any]) -> Chain:
    first, *rest = codecs
    if first["name"] != "bytes":
        raise UnknownLayoutError(f"its codec {first['name']!r} is not known")
    if not _is_little(first):
        dtype = dtype.newbyteorder(">")
    return Chain(codecs=tuple(_codec_v3(codec) for codec in rest), dtype=dtype)


def _codec_v3(codec: dict[str, Any]) -> Codec:
    name, configuration = codec["name"], dict(codec.get("configuration") or {})
    if name == "zstd":
        configuration = {"level": configuration.get("level", 0)}
    elif name == "blosc":
        # The header of each chunk contains the compression parameters.
        configuration = {}
    elif name.startswith("numcodecs."):
        name = name.removeprefix("numcodecs.")
    elif name not in ("gzip", "crc32c"):
        raise UnknownLayoutError(f"its codec {name!r} is not known")
    return codec_of_config({"id": name} | configuration)


def _is_little(codec: dict[str, Any]) -> bool:
    return bool((codec.get("configuration") or {}).get("endian", "little") == "little")


def _fill(value: Any, dtype: np.dtype[Any]) -> Any:
    if value is None:
        value = 0
    if isinstance(value, str) and (dtype.kind != "f" or value not in ("NaN", "Infinity", "-Infinity")):
        raise UnknownLayoutError(f"its fill value is {value!r}")
    number = float(value) if isinstance(value, str) else value
    return np.array(number).astype(dtype.newbyteorder("="))[()]
