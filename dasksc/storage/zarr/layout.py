"""Where the chunks of a Zarr array lie in a directory, so that they can be read without zarr-python."""

from __future__ import annotations

import json
import math
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError
from dasksc.storage.arrays import StoredArray, UnknownLayoutError
from dasksc.storage.chunked import ChunkedArray, ChunkSource, MappedChunks
from dasksc.storage.codecs import Chain, Codec, Crc32c, codec_of_config
from dasksc.storage.files import LocalFile, UseMmap, can_map, maps, read_at
from dasksc.storage.identity import FileIdentity
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.remote.seen import Seen

__all__ = ["METADATA", "Layout", "direct_array", "index_bytes", "index_places", "layout_of"]

_NUMBERS = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"}
)
# What a shard's index holds for a chunk that was never written.
_NEVER = 2**64 - 1
_OPEN_SHARDS = 16


# The objects that describe an array, of Zarr v3 and v2.
METADATA = ("zarr.json", ".zarray")

_NOTHING = MappedChunks(at=np.zeros(1, dtype=np.uint64), sizes=np.zeros(1, dtype=np.int64), owner=None)


def direct_array(directory: str, *, label: str, use_mmap: UseMmap) -> StoredArray:
    """Return a Zarr array as one that is read without zarr-python.

    Parameters
    ----------
    directory
        The directory of the array, with its ``zarr.json`` or ``.zarray``.
    label
        What to call it in errors.
    use_mmap
        Whether files of this machine may be mapped.

    Raises
    ------
    UnknownLayoutError
        If it must be read through zarr-python.
    """
    for name in METADATA:
        path = os.path.join(directory, name)
        if os.path.exists(path):
            identity = FileIdentity.of(path)
            with open(path, "rb") as file:
                layout = layout_of(name, file.read())
            keys = Keys.now(directory, layout, metadata=identity)
            source: ChunkSource
            use_mmap = use_mmap if can_map(directory) else False
            if layout.shard_shape is None:
                source = FileChunks(keys, grid=_grid(layout.shape, layout.chunk_shape), use_mmap=use_mmap)
            else:
                source = ShardChunks(keys, layout=layout, use_mmap=use_mmap)
            return ChunkedArray(
                label=label,
                shape=layout.shape,
                chunk_shape=layout.chunk_shape,
                chain=layout.chain,
                source=source,
                fill=layout.fill,
            )
    raise UnknownLayoutError("it has no metadata in a directory")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """What the metadata of a Zarr array say.

    Parameters
    ----------
    shape, chunk_shape
        Lengths of the array, and of what is decoded at once.
    shard_shape
        Lengths of what is stored in one file, if that holds several chunks.
    chain
        How a chunk is decoded.
    fill
        What is read where nothing was written.
    prefix, separator
        What the keys of stored objects begin with, and what is between their numbers.
    index_checksum, index_first
        Whether a shard's index ends in a CRC32C, and whether it is at the start of the shard.
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    shard_shape: tuple[int, ...] | None
    chain: Chain
    fill: Any
    prefix: str
    separator: str
    index_checksum: bool = False
    index_first: bool = False

    def __post_init__(self) -> None:
        if self.separator not in (".", "/"):
            raise UnknownLayoutError(f"its keys are separated by {self.separator!r}")
        if len(self.shape) not in (1, 2) or len(self.chunk_shape) != len(self.shape) or min(self.chunk_shape) < 1:
            raise UnknownLayoutError(f"its shape is {self.shape} in chunks of {self.chunk_shape}")

    @property
    def grid(self) -> tuple[int, ...]:
        """How many chunks there are along each axis."""
        return _grid(self.shape, self.chunk_shape)

    @property
    def per_shard(self) -> tuple[int, ...]:
        """How many chunks a shard has along each axis."""
        shard_shape = self.shard_shape or self.chunk_shape
        return tuple(shard // chunk for shard, chunk in zip(shard_shape, self.chunk_shape, strict=True))

    def key(self, at: tuple[int, ...]) -> str:
        """Return the key of the object at these numbers of the grid, below the array's."""
        return f"{self.prefix}{self.separator.join(map(str, at))}"


def layout_of(name: str, content: bytes) -> Layout:
    """Return what the metadata of an array say, which are in an object of this name, one of `METADATA`.

    Raises
    ------
    UnknownLayoutError
        If it must be read through zarr-python.
    """
    try:
        return (_layout_v3 if name == "zarr.json" else _layout_v2)(json.loads(content))
    except (KeyError, TypeError, ValueError) as error:
        raise UnknownLayoutError(f"its metadata is not understood ({error!r})") from error


def _layout_v3(metadata: dict[str, Any]) -> Layout:
    if metadata["node_type"] != "array" or metadata.get("storage_transformers"):
        raise UnknownLayoutError("it is no plain array")
    if metadata["data_type"] not in _NUMBERS:
        raise UnknownLayoutError(f"its type is {metadata['data_type']!r}")
    dtype = np.dtype(metadata["data_type"])
    grid, encoding = metadata["chunk_grid"], metadata["chunk_key_encoding"]
    if grid["name"] != "regular" or encoding["name"] not in ("default", "v2"):
        raise UnknownLayoutError(f"its chunks are laid out by {grid['name']!r} and {encoding['name']!r}")
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
    return Layout(
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


def _layout_v2(metadata: dict[str, Any]) -> Layout:
    if not isinstance(metadata["dtype"], str):
        raise UnknownLayoutError("its type is compound")
    dtype = np.dtype(metadata["dtype"])
    if dtype.name not in _NUMBERS:
        raise UnknownLayoutError(f"its type is {dtype!r}")
    if metadata.get("order", "C") != "C" and len(metadata["shape"]) > 1:
        raise UnknownLayoutError("it is stored column by column")
    configs = [*(metadata.get("filters") or ()), *filter(None, (metadata.get("compressor"),))]
    return Layout(
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
        # How it was compressed is in each chunk's own header.
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


def _grid(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-n // length) for n, length in zip(shape, chunk_shape, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Where the stored objects of an array are.

    Parameters
    ----------
    directory
        The array's directory.
    prefix, separator
        What keys begin with, and what is between their numbers.
    metadata
        The file with the array's metadata, by which a replaced array is known.
    folder
        The directory of all the objects, if it is one: its time of change tells when one came, went or was replaced.
    opened_ns
        When the array was opened, if the files have this machine's clock: an object changed since is refused.
    """

    directory: str
    prefix: str
    separator: str
    metadata: FileIdentity
    folder: FileIdentity | None
    opened_ns: int | None

    @classmethod
    def now(cls, directory: str, layout: Layout, *, metadata: FileIdentity) -> Keys:
        """Return the keys of an array in the state that it is in."""
        folder = None
        if layout.separator != "/" or len(layout.shape) == 1:
            path = os.path.dirname(f"{directory}/{layout.prefix}0")
            folder = FileIdentity.of(path) if os.path.isdir(path) else None
        return cls(
            directory=directory,
            prefix=layout.prefix,
            separator=layout.separator,
            metadata=metadata,
            folder=folder,
            opened_ns=time.time_ns() if can_map(directory) else None,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the time: what opens the same array again pickles to the same, by which Dask names it.
        return _keys, (self.directory, self.prefix, self.separator, self.metadata, self.folder)

    def check(self) -> None:
        """Refuse an array that was replaced, or of which objects came, went or were replaced."""
        self.metadata.check()
        if self.folder is not None:
            self.folder.check()

    def check_object(self, now: FileIdentity) -> None:
        """Refuse an object that was written to after the array was opened."""
        if self.opened_ns is None or now.mtime_ns <= self.opened_ns:
            return
        # A time of change that lies in the future came with the file, from a machine whose clock is ahead; when
        # it was written here, the file system says.
        if os.stat(now.path).st_ctime_ns > self.opened_ns:
            raise CorruptDataError(
                f"{now.path} was changed since it was opened. Open it again, and do not write to it."
            )

    def check_absent(self, path: str) -> None:
        """Refuse that an object is not there, if one may have been removed after the array was opened."""
        folder = os.path.dirname(path)
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        if self.opened_ns is not None and os.stat(folder).st_mtime_ns > self.opened_ns:
            raise CorruptDataError(
                f"{path} is not there, and {folder} was changed since the array was opened. Open it again, and do not "
                "write to it."
            )

    def path(self, numbers: tuple[int, ...]) -> str:
        """Return the file of the object at these numbers of the grid."""
        return f"{self.directory}/{self.prefix}{self.separator.join(map(str, numbers))}"


def _keys(directory: str, prefix: str, separator: str, metadata: FileIdentity, folder: FileIdentity | None) -> Keys:
    return Keys(
        directory=directory, prefix=prefix, separator=separator, metadata=metadata, folder=folder, opened_ns=None
    )


class FileChunks:
    """Chunks of which each is a file.

    Parameters
    ----------
    keys
        Where they are.
    grid
        How many there are along each axis.
    use_mmap
        Whether the files may be mapped.
    """

    def __init__(self, keys: Keys, *, grid: tuple[int, ...], use_mmap: UseMmap) -> None:
        self._keys = keys
        self._grid = grid
        self._use_mmap = use_mmap
        # As they were when this process first read them: to look at all of them on opening would take too long.
        self._seen = Seen[tuple[int, ...], FileIdentity]()

    working_bytes = 0

    def check(self) -> None:
        """Refuse an array that was changed."""
        self._keys.check()

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[Any, int]]:
        """Yield the chunks; see `ChunkSource.read`."""
        buffer = bytearray()
        for at in _unravel(numbers, self._grid):
            with self._opened(at) as chunk:
                if chunk is None:
                    yield None, 0
                    continue
                number, size = chunk
                if len(buffer) < size:
                    buffer = bytearray(size)
                n = read_at(number, 0, memoryview(buffer)[:size])
                yield memoryview(buffer)[:n], 0

    def mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks] | None:
        """Yield the chunks one by one; see `ChunkSource.mapped`."""
        return self._mapped(numbers) if maps(self._use_mmap) else None

    def _mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks]:
        for at in _unravel(numbers, self._grid):
            with self._opened(at) as chunk:
                if chunk is None:
                    yield _NOTHING
                    continue
                number, size = chunk
                data = mmap.mmap(number, size, access=mmap.ACCESS_READ) if size else bytes(1)
            owner = np.frombuffer(data, dtype=np.uint8)
            place = np.array([owner.ctypes.data], dtype=np.uint64)
            yield MappedChunks(at=place, sizes=np.array([size]), owner=owner)

    @contextmanager
    def _opened(self, at: tuple[int, ...]) -> Iterator[tuple[int, int] | None]:
        """Open a chunk's file: its descriptor and its size in bytes; None if it was never written."""
        path = self._keys.path(at)
        with ExitStack() as stack:
            try:
                file = stack.enter_context(open(path, "rb", buffering=0))
            except FileNotFoundError:
                seen = self._seen.get(at)
                if seen is not None:
                    seen.check()
                self._keys.check_absent(path)
                yield None
                return
            now = FileIdentity.of_open(path, file.fileno())
            self._keys.check_object(now)
            self._seen.keep(at, now).compare(now)
            yield file.fileno(), now.size


class ShardChunks:
    """Chunks of which many are in a file, behind an index.

    Parameters
    ----------
    keys
        Where the files are.
    layout
        What the metadata say; it has a `shard_shape`.
    use_mmap
        Whether the files may be mapped.
    """

    def __init__(self, keys: Keys, *, layout: Layout, use_mmap: UseMmap) -> None:
        self._keys = keys
        self._grid = _grid(layout.shape, layout.chunk_shape)
        self._per_shard = layout.per_shard
        self._layout = layout
        self._use_mmap = use_mmap
        self._shards = Seen[tuple[int, ...], tuple[_Shard | None]]()
        # An atlas may have more shards than a process may have files: a few stay open.
        self._files: dict[tuple[int, ...], LocalFile] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}

    working_bytes = 0

    def check(self) -> None:
        """Refuse an array that was changed."""
        self._keys.check()

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[Any, int]]:
        """Yield the chunks; see `ChunkSource.read`."""
        for file, offsets, sizes in self._places(numbers):
            written = offsets >= 0
            chunks: Iterator[Any] = iter(())
            if file is not None:
                chunks = file.ranges(offsets[written], sizes[written], use_mmap=self._use_mmap)
            for is_written in written.tolist():
                yield (next(chunks), 0) if is_written else (None, 0)

    def mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks] | None:
        """Yield the chunks shard by shard; see `ChunkSource.mapped`."""
        return self._mapped(numbers) if maps(self._use_mmap) else None

    def _mapped(self, numbers: NDArray[np.int64]) -> Iterator[MappedChunks]:
        for file, offsets, sizes in self._places(numbers):
            if file is None:
                yield MappedChunks(at=np.zeros(len(offsets), dtype=np.uint64), sizes=sizes, owner=None)
            else:
                at, owner = file.mapped_ranges(offsets, sizes)
                yield MappedChunks(at=at, sizes=sizes, owner=owner)

    def _places(
        self, numbers: NDArray[np.int64]
    ) -> Iterator[tuple[LocalFile | None, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the shard (None if it was never written), offsets (-1 likewise) and sizes of runs of chunks."""
        at = np.stack(np.unravel_index(numbers, self._grid))
        per_shard = np.array(self._per_shard)[:, None]
        shards = at // per_shard
        within = np.ravel_multi_index(tuple(at % per_shard), self._per_shard)
        ends = np.flatnonzero((shards[:, 1:] != shards[:, :-1]).any(axis=0)) + 1
        for chunks in np.split(np.arange(len(numbers)), ends):
            shard_at = tuple(shards[:, chunks[0]].tolist())
            shard = self._shard(shard_at)
            if shard is None:
                never = np.full(len(chunks), -1)
                yield None, never, np.zeros_like(never)
                continue
            file = self._files.pop(shard_at, None) or LocalFile(shard.identity)
            file.check()
            self._files[shard_at] = file
            # Threads that race here drop one that another has just looked up, which keeps it while it reads.
            for oldest in list(self._files)[:-_OPEN_SHARDS]:
                self._files.pop(oldest, None)
            offsets, sizes = shard.offsets[within[chunks]], shard.sizes[within[chunks]]
            if (offsets + sizes).max() > shard.identity.size:
                raise CorruptDataError(
                    f"{shard.identity.path}: a chunk ends at byte {(offsets + sizes).max()}, beyond the file's "
                    f"{shard.identity.size}. Copy or download it again."
                )
            yield file, offsets, sizes

    def _shard(self, at: tuple[int, ...]) -> _Shard | None:
        """Return a shard's index, remembered; None if the shard was never written."""
        known = self._shards.get(at)
        if known is None:
            path = self._keys.path(at)
            try:
                identity = FileIdentity.of(path)
            except FileNotFoundError:
                self._keys.check_absent(path)
                known = self._shards.keep(at, (None,))
            else:
                self._keys.check_object(identity)
                shard = self._read_index(identity)
                known = self._shards.keep(at, (shard,), n_bytes=shard.offsets.nbytes + shard.sizes.nbytes)
        return known[0]

    def _read_index(self, identity: FileIdentity) -> _Shard:
        start, stop = index_bytes(self._layout, identity)
        data = bytearray(stop - start)
        LocalFile(identity).read(start, memoryview(data))
        offsets, sizes = index_places(self._layout, identity, data)
        return _Shard(identity=identity, offsets=offsets, sizes=sizes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shard:
    identity: FileIdentity
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]


def index_bytes(layout: Layout, identity: FileIdentity | ObjectIdentity) -> tuple[int, int]:
    """Return where in a shard its index lies, [start, stop) in bytes."""
    n_bytes = 16 * math.prod(layout.per_shard) + 4 * layout.index_checksum
    if identity.size < n_bytes:
        raise CorruptDataError(f"{identity.path} is truncated: it has no room for the index of its chunks")
    return (0, n_bytes) if layout.index_first else (identity.size - n_bytes, identity.size)


def index_places(
    layout: Layout, identity: FileIdentity | ObjectIdentity, data: Any
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return offset (-1 if it was never written) and size in bytes of each chunk of a shard, from its index."""
    if layout.index_checksum:
        try:
            data = Crc32c().decode(data, len(data))
        except ValueError as error:
            raise CorruptDataError(f"{identity.path}: the index of its chunks is corrupt: {error}") from error
    table = np.frombuffer(data, dtype="<u8").reshape(-1, 2)
    # What lies beyond any file is kept as lying beyond this one, to be refused when it is asked for.
    places = np.minimum(table, identity.size + 1).astype(np.int64)
    places[table[:, 0] == _NEVER] = -1, 0
    return places[:, 0].copy(), places[:, 1].copy()


def _unravel(numbers: NDArray[np.int64], grid: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(zip(*(axis.tolist() for axis in np.unravel_index(numbers, grid)), strict=True))
