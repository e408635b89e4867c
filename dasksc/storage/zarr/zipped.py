"""Zarr stores in zip files: uncompressed members are read in place, compressed members by zarr-python.

Layout: APPNOTE.TXT of PKWARE, version 6.3, sections 4.3.7 (local header) and 4.3.12 (central directory). `zipfile`
reads the directory; members are read by byte ranges, so that threads and forked processes share no file position.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from zarr.storage import ZipStore

from dasksc.errors import CorruptDataError, StorageError
from dasksc.storage.arrays import StoredArray, UnknownLayoutError
from dasksc.storage.chunked import ChunkedArray, TableChunks
from dasksc.storage.file_identity import FileIdentity
from dasksc.storage.files import LocalFile, UseMmap
from dasksc.storage.zarr.chunks import chunk_ranges, index_bytes
from dasksc.storage.zarr.layout import METADATA, ZarrLayout, layout_of

__all__ = ["ZipArchive", "direct_array", "is_zip", "zip_store"]

_HEADER = struct.Struct("<4s5H3I2H")
_SIGNATURE = b"PK\x03\x04"
_ENCRYPTED = 0x1
# Number of archives whose directories a process keeps, since each matrix of an atlas opens its archive separately.
_MOST_KEPT = 8
# Maximum size of a chunk. Larger sizes do not fit into the table of `TableChunks`.
_MOST_CHUNK_BYTES = 2**32 - 1
# The shape of an array may imply more chunks than the archive can contain, since chunks that were never written are
# absent. At most this many additional chunks are accepted.
_MOST_ABSENT = 2**20


def is_zip(path: str) -> bool:
    """Return True if a local path is that of a file with the ending ``.zip``."""
    return path.endswith(".zip") and os.path.isfile(path)


class _Member(NamedTuple):
    """Entry of the directory of an archive: offset of its header, compression, and sizes in bytes."""

    header_at: int
    is_compressed: bool
    stored_bytes: int
    n_bytes: int
    checksum: int


class ZipArchive:
    """Members of a zip file. Pickles as the identity of the file."""

    def __init__(self, identity: FileIdentity) -> None:
        self.file = LocalFile(identity)
        try:
            with zipfile.ZipFile(identity.path) as archive:
                entries = archive.infolist()
        # zipfile raises several types of errors if the directory is damaged.
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError) as error:
            raise CorruptDataError(
                f"{identity.path} ({identity.size} bytes) is not a zip file, or is truncated: {error}. Copy or "
                "download it again."
            ) from error
        for one in entries:
            if one.flag_bits & _ENCRYPTED or one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                how = "encrypted" if one.flag_bits & _ENCRYPTED else f"compressed by method {one.compress_type}"
                raise StorageError(
                    f"{identity.path}: {one.filename!r} is {how}; only stored and deflated members can be read. "
                    "Write the archive again: zip -0 -r"
                )
        # If several members have the same name, the last one is used, as in zarr-python.
        self.members = {
            one.filename: _Member(
                one.header_offset,
                one.compress_type != zipfile.ZIP_STORED,
                one.compress_size,
                one.file_size,
                one.CRC,
            )
            for one in entries
            if not one.is_dir()
        }

    @classmethod
    def of(cls, path: str) -> ZipArchive:
        """Return the archive that is at a path now; each process reads its directory once."""
        return _archive(FileIdentity.of(os.path.abspath(path)))

    def __reduce__(self) -> tuple[Any, ...]:
        return ZipArchive, (self.file.identity,)

    @property
    def path(self) -> str:
        """Path of the file."""
        return self.file.path

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a member; None if there is no such member."""
        member = self.members.get(name)
        if member is None:
            return None
        at = int(self.data_offsets([name])[0])
        data = bytes(self.file.fetch(at, at + member.stored_bytes))
        if member.is_compressed:
            try:
                # The limit is one byte more than expected, which reveals a member that is too long.
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.n_bytes + 1)
            except zlib.error as error:
                raise self._broken(name, str(error)) from error
        if len(data) != member.n_bytes or zlib.crc32(data) != member.checksum:
            raise self._broken(name, "its length or checksum differs from its header")
        return data

    def data_offsets(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Return the offset of the first byte of each member, shape (n_names,), int64."""
        members = [self.members[name] for name in names]
        headers = np.array([member.header_at for member in members], dtype=np.int64)
        if (headers < 0).any() or (headers + _HEADER.size > self.file.identity.size).any():
            raise self._broken(names[0], "its header lies beyond the end of the file")
        found = np.empty(len(names), dtype=np.int64)
        order = np.argsort(headers, kind="stable")
        sizes = np.full(len(names), _HEADER.size, dtype=np.int64)
        for number, data in zip(order, self.file.ranges(headers[order], sizes, use_mmap=False), strict=True):
            signature, _, flags, method, *_, name_bytes, extra_bytes = _HEADER.unpack(data)
            member = members[number]
            if signature != _SIGNATURE or flags & _ENCRYPTED or bool(method) != member.is_compressed:
                raise self._broken(names[number], "its header belongs to another member")
            found[number] = member.header_at + _HEADER.size + name_bytes + extra_bytes
            if found[number] + member.stored_bytes > self.file.identity.size:
                raise self._broken(names[number], "it ends beyond the end of the file")
        return found

    def stored_bytes(self, folder: str) -> int:
        """Return the stored size of the members below a folder, in bytes."""
        inside = f"{folder.strip('/')}/"
        return sum(member.stored_bytes for name, member in self.members.items() if name.startswith(inside))

    def _broken(self, name: str, reason: str) -> CorruptDataError:
        return CorruptDataError(f"{self.path}: {name!r} is corrupt: {reason}. Copy or download the archive again.")


@lru_cache(maxsize=_MOST_KEPT)
def _archive(identity: FileIdentity) -> ZipArchive:
    return ZipArchive(identity)


def direct_array(archive: ZipArchive, name: str, *, label: str, use_mmap: UseMmap) -> StoredArray:
    """Open a Zarr array in a zip file for reading without zarr-python."""
    found = ((kind, archive.read(f"{name}/{kind}")) for kind in METADATA)
    layout = next((layout_of(kind, content) for kind, content in found if content is not None), None)
    if layout is None:
        raise UnknownLayoutError("it has no metadata in the archive")
    offsets, sizes = _chunk_ranges(archive, name, layout)
    file = archive.file
    return ChunkedArray(
        label=label,
        shape=layout.shape,
        chunk_shape=layout.chunk_shape,
        chain=layout.chain,
        source=TableChunks(
            file,
            offsets=offsets,
            sizes=sizes,
            skipped=np.zeros(len(offsets), dtype=np.uint32),
            use_mmap=use_mmap if file.can_map else False,
        ),
        fill=layout.fill,
    )


def _chunk_ranges(archive: ZipArchive, name: str, layout: ZarrLayout) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the offset in the file (-1 if the chunk was never written) and the size of each chunk, in bytes."""
    grid = layout.grid
    objects = tuple(-(-n // per_shard) for n, per_shard in zip(grid, layout.per_shard, strict=True))
    # A shard has at least 16 bytes for each of its chunks.
    n_possible = len(archive.members) if layout.shard_shape is None else archive.file.identity.size // 16
    if math.prod(grid) > _MOST_ABSENT + n_possible or math.prod(objects) > _MOST_ABSENT + len(archive.members):
        raise UnknownLayoutError(f"its shape, {layout.shape}, would need {math.prod(grid)} chunks")
    ats = itertools.product(*map(range, objects))
    keys = {at: key for at in ats if (key := f"{name}/{layout.key(at)}") in archive.members}
    members = [archive.members[key] for key in keys.values()]
    if any(member.is_compressed for member in members):
        raise UnknownLayoutError("its members are compressed by the archive; zip -0 stores them as they are")
    if any(member.n_bytes > _MOST_CHUNK_BYTES for member in members) and layout.shard_shape is None:
        raise UnknownLayoutError("a chunk has more than 4 GiB")
    begins = archive.data_offsets(list(keys.values())) if keys else np.empty(0, dtype=np.int64)
    offsets = np.full(math.prod(grid), -1, dtype=np.int64)
    sizes = np.zeros(math.prod(grid), dtype=np.int64)
    if layout.shard_shape is None:
        numbers = np.ravel_multi_index(tuple(np.array(list(keys)).T), grid) if keys else np.empty(0, dtype=np.int64)
        offsets[numbers], sizes[numbers] = begins, [member.n_bytes for member in members]
        return offsets, sizes
    for at, key, begin, member in zip(keys, keys.values(), begins.tolist(), members, strict=True):
        starts, lengths = _shard_ranges(archive, key, begin, member, layout)
        within = np.stack(np.unravel_index(np.arange(len(starts)), layout.per_shard))
        chunk_at = within + (np.array(at) * layout.per_shard)[:, None]
        inside = (chunk_at < np.array(grid)[:, None]).all(axis=0) & (starts >= 0)
        numbers = np.ravel_multi_index(tuple(chunk_at[:, inside]), grid)
        offsets[numbers], sizes[numbers] = begin + starts[inside], lengths[inside]
    return offsets, sizes


def _shard_ranges(
    archive: ZipArchive, key: str, begin: int, member: _Member, layout: ZarrLayout
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the offsets and lengths of the chunks in a shard, in bytes."""
    identity = FileIdentity(path=f"{archive.path}/{key}", size=member.n_bytes, mtime_ns=0)
    start, stop = index_bytes(layout, identity)
    starts, lengths = chunk_ranges(layout, identity, archive.file.fetch(begin + start, begin + stop))
    beyond = (starts + lengths > member.n_bytes) | (lengths > _MOST_CHUNK_BYTES)
    if beyond.any():
        raise CorruptDataError(
            f"{identity.path}: a chunk ends at byte {(starts + lengths).max()}, but the member has {member.n_bytes} "
            "bytes. Copy or download the archive again."
        )
    return starts, lengths


class ZippedStore(ZipStore):
    """Store of zarr-python whose sizes come from the directory of the archive."""

    async def getsize_prefix(self, prefix: str) -> int:
        """Return the stored size of the members below a prefix, in bytes."""
        return ZipArchive.of(str(self.path)).stored_bytes(prefix)


@lru_cache(maxsize=_MOST_KEPT)
def _zip_store(identity: FileIdentity, pid: int) -> ZippedStore:
    return ZippedStore(identity.path)


def zip_store(path: str) -> ZippedStore:
    """Return a store of zarr-python with the members of an archive, opened once in each process."""
    return _zip_store(ZipArchive.of(path).file.identity, os.getpid())
