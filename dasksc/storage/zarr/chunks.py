"""Layout of a Zarr array (v2 or v3) from its metadata, and its stored chunks, for any kind of storage."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError
from dasksc.storage.arrays import UnknownLayoutError
from dasksc.storage.chunked import ChunkedArray, MappedChunks
from dasksc.storage.codecs import Chain, Codec, Crc32c, codec_of_config
from dasksc.storage.files import FileIdentity, LocalFile
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.remote.remote_file import RemoteFile

T = TypeVar("T")
V = TypeVar("V")

_NUMBERS = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"}
)
# Names of the objects with the metadata of an array, for Zarr v3 and v2.
METADATA = ("zarr.json", ".zarray")
# Size of the facts about the objects of an array that a process keeps, and of an entry without the facts themselves.
_KEPT_BYTES, _ENTRY_BYTES = 2**26, 512
# Value that a shard's index holds as both offset and size of a chunk that was never written.
_NEVER = 2**64 - 1

At: TypeAlias = tuple[int, ...]
"""Indices of an object in the grid of objects, one per axis."""
File: TypeAlias = LocalFile | RemoteFile


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

    def key(self, at: tuple[int, ...]) -> str:
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


class ObjectCache(Generic[V]):
    """Facts about the objects of an array that a process has read; pickled without them."""

    # An array may have millions of objects. The oldest facts are dropped, and their objects are treated as new.

    def __init__(self, fact_bytes: int = 0) -> None:
        self._fact_bytes = fact_bytes
        self._kept = OrderedDict[At, V]()

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectCache, (self._fact_bytes,)

    def get(self, at: At) -> V | None:
        """Return the fact about an object, or None if there is none."""
        return self._kept.get(at)

    def keep(self, at: At, value: V) -> V:
        """Keep a fact about an object unless there is one already; return the kept one."""
        value = self._kept.setdefault(at, value)
        while len(self._kept) * (self._fact_bytes + _ENTRY_BYTES) > _KEPT_BYTES and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return value


class Objects(Protocol):
    """Stored objects of an array, as a source of bytes. Instances can be pickled."""

    # Reads raise a `CorruptDataError` if an object was changed or removed since the array was opened.

    @property
    def working_bytes(self) -> int:
        """See `ChunkSource.working_bytes`."""

    @property
    def can_map(self) -> bool:
        """True if the calling thread may memory-map the objects."""

    def require_unchanged(self) -> None:
        """Raise an error if the array was replaced, unless the reads of its objects check this."""

    def contents(self, ats: list[At], *, n_bytes: int) -> Iterator[Any]:
        """Yield the stored bytes of each object, or None if it is missing."""
        # Each object is one chunk, which decodes to `n_bytes` bytes.

    def mapped(self, ats: list[At]) -> Iterator[MappedChunks]:
        """Yield whole objects, memory-mapped, each as one chunk."""

    def indexed(self, ats: list[At], index_of: Callable[[File], T]) -> Iterator[T | None]:
        """Yield the result of `index_of` for each object, or None if it is missing; callers cache the results."""

    def file(self, at: At, identity: Any) -> File:
        """Return an object that `indexed` has read before."""

    def ranges(self, groups: list[tuple[Any, NDArray[np.int64], NDArray[np.int64]]]) -> Iterator[Any]:
        """Yield the bytes of ranges, valid until the next one is requested; a group is (file, offsets, sizes)."""


def chunked_array(objects: Objects, *, layout: ZarrLayout, label: str) -> ChunkedArray:
    """Return the array with this layout, whose chunks are in stored objects."""
    return ChunkedArray(
        label=label,
        shape=layout.shape,
        chunk_shape=layout.chunk_shape,
        chain=layout.chain,
        source=(_Chunks if layout.shard_shape is None else _Shards)(objects, layout),
        fill=layout.fill,
    )


class _Chunks:
    """Chunks stored as one object each; a `ChunkSource`."""

    def __init__(self, objects: Objects, layout: ZarrLayout) -> None:
        self.working_bytes = objects.working_bytes
        self._objects = objects
        self._grid = layout.grid
        self._n_bytes = math.prod(layout.chunk_shape) * layout.chain.dtype.itemsize

    def require_unchanged(self) -> None:
        self._objects.require_unchanged()

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[Any, int]]:
        for data in self._objects.contents(_tuples(np.unravel_index(numbers, self._grid)), n_bytes=self._n_bytes):
            yield data, 0

    def mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks] | None:
        if not self._objects.can_map:
            return None
        return self._objects.mapped(_tuples(np.unravel_index(numbers, self._grid)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shard:
    identity: FileIdentity | ObjectIdentity
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]


class _Shards(_Chunks):
    """Chunks stored in shards, which are objects with several chunks and an index; a `ChunkSource`."""

    def __init__(self, objects: Objects, layout: ZarrLayout) -> None:
        super().__init__(objects, layout)
        self._layout = layout
        # State of each shard when this process first read it; (None,) if it did not exist.
        self._seen = ObjectCache[tuple[_Shard | None]](16 * math.prod(layout.per_shard))

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[Any, int]]:
        shards = list(self._ranges(numbers))
        groups = [
            (file, offsets[offsets >= 0], sizes[offsets >= 0]) for file, offsets, sizes in shards if file is not None
        ]
        chunks = self._objects.ranges(groups)
        for _, offsets, _ in shards:
            for is_written in (offsets >= 0).tolist():
                yield (next(chunks), 0) if is_written else (None, 0)

    def mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks] | None:
        return self._mapped(numbers) if self._objects.can_map else None

    def _mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks]:
        for file, offsets, sizes in self._ranges(numbers):
            if file is None:
                yield MappedChunks(at=np.zeros(len(offsets), dtype=np.uint64), sizes=sizes, owner=None)
            else:
                assert isinstance(file, LocalFile)
                at, owner = file.mapped_ranges(offsets, sizes)
                yield MappedChunks(at=at, sizes=sizes, owner=owner)

    def _ranges(self, numbers: NDArray[np.int64]) -> Iterator[tuple[File | None, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the shard, offsets and sizes of each run of chunks in the same shard."""
        # A shard that was never written is None. The offset of a chunk that was never written is -1, and its size is 0.
        at = np.stack(np.unravel_index(numbers, self._layout.grid))
        per_shard = np.array(self._layout.per_shard)[:, None]
        shard_at = at // per_shard
        within = np.ravel_multi_index(tuple(at % per_shard), self._layout.per_shard)
        firsts = np.append(True, (shard_at[:, 1:] != shard_at[:, :-1]).any(axis=0)).nonzero()[0][: len(numbers)]
        of_runs = _tuples(shard_at[:, firsts])
        shards = self._shards(of_runs)
        for one, chunks in zip(of_runs, np.split(within, firsts)[1:], strict=True):
            shard = shards[one]
            if shard is None:
                yield None, np.full(len(chunks), -1), np.zeros(len(chunks), dtype=np.int64)
                continue
            offsets, sizes = shard.offsets[chunks], shard.sizes[chunks]
            yield self._objects.file(one, shard.identity), offsets, sizes

    def _shards(self, ats: list[At]) -> dict[At, _Shard | None]:
        """Return the indexes of shards, cached after the first read; None for a shard that was never written."""
        cached = {at: self._seen.get(at) for at in ats}
        unknown = [at for at, shard in cached.items() if shard is None]
        for at, shard in zip(unknown, self._objects.indexed(unknown, self._indexed), strict=True):
            cached[at] = self._seen.keep(at, (shard,))
        return {at: shard and shard[0] for at, shard in cached.items()}

    def _indexed(self, file: File) -> _Shard:
        """Return the offset (-1 if never written) and size of each chunk of a shard in bytes, from its index."""
        layout, identity = self._layout, file.identity
        n_bytes = 16 * math.prod(layout.per_shard) + 4 * layout.index_checksum
        if identity.size < n_bytes:
            raise CorruptDataError(
                f"{identity.path} is truncated: it has no room for the index of its chunks. Copy or download it again."
            )
        start = 0 if layout.index_first else identity.size - n_bytes
        data: Any = file.fetch(start, start + n_bytes)
        if layout.index_checksum:
            try:
                data = Crc32c().decode(data, len(data))
            except ValueError as error:
                raise CorruptDataError(
                    f"{identity.path}: the index of its chunks is corrupt: {error}. Copy or download it again."
                ) from error
        table = np.frombuffer(data, dtype="<u8").reshape(-1, 2)
        # Offsets beyond int64 are clipped to an offset beyond the end of the shard.
        ranges = np.minimum(table, identity.size + 1).astype(np.int64)
        ranges[table[:, 0] == _NEVER] = -1, 0
        if (end := int(ranges.sum(axis=1).max())) > identity.size:
            raise CorruptDataError(
                f"{identity.path}: a chunk ends at byte {end}, but the shard has {identity.size} bytes. Copy, download "
                "or upload it again."
            )
        return _Shard(identity=identity, offsets=ranges[:, 0].copy(), sizes=ranges[:, 1].copy())


def _tuples(axes: Any) -> list[At]:
    return list(zip(*(axis.tolist() for axis in axes), strict=True))
