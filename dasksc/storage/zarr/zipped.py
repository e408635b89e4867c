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
from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from zarr.storage import ZipStore

from dasksc.errors import CorruptDataError
from dasksc.storage.arrays import StoredArray, UnknownLayoutError
from dasksc.storage.chunked import ChunkTable, TableChunks
from dasksc.storage.file_identity import FileIdentity
from dasksc.storage.files import LocalFile, UseMmap
from dasksc.storage.zarr.chunks import chunk_ranges, chunked_array
from dasksc.storage.zarr.layout import METADATA, ZarrLayout, layout_of

__all__ = ["ZipArchive", "direct_array", "is_zip"]

_HEADER = struct.Struct("<4s22x2H")
_SIGNATURE = b"PK\x03\x04"
_ENCRYPTED = 0x1
# Maximum size of a chunk. Larger sizes do not fit into the table of `TableChunks`.
_MOST_CHUNK_BYTES = 2**32 - 1
# The shape of an array may imply more chunks than the archive can contain, since chunks that were never written are
# absent. At most this many additional chunks are accepted.
_MOST_ABSENT = 2**20


def is_zip(path: str) -> bool:
    """Return True if a local path is that of a file with the ending ``.zip``."""
    return path.endswith(".zip") and os.path.isfile(path)


class ZipArchive:
    """Members of a zip file."""

    def __init__(self, identity: FileIdentity) -> None:
        self.file = LocalFile(identity)
        try:
            self._archive = zipfile.ZipFile(identity.path)
        # zipfile raises several types of errors if the directory is damaged.
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError) as error:
            raise CorruptDataError(
                f"{identity.path} ({identity.size} bytes) is not a zip file, or is truncated: {error}. Copy or "
                "download it again."
            ) from error
        # If several members have the same name, the last one is used, as in zarr-python.
        self.members = {one.filename: one for one in self._archive.infolist() if not one.is_dir()}

    @classmethod
    def of(cls, path: str) -> ZipArchive:
        """Return the archive that is at a path now; each process reads its directory once."""
        return _archive(FileIdentity.of(os.path.abspath(path)), os.getpid())

    @cached_property
    def store(self) -> ZippedStore:
        """Store of zarr-python with the members."""
        return ZippedStore(self.file.path)

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a member; None if there is no such member."""
        return self._archive.read(self.members[name]) if name in self.members else None

    def data_offsets(self, members: Sequence[zipfile.ZipInfo]) -> NDArray[np.int64]:
        """Return the offset of the first byte of each member, shape (n_members,), int64."""
        headers = np.array([member.header_offset for member in members], dtype=np.int64)
        found = np.empty(len(members), dtype=np.int64)
        order = np.argsort(headers, kind="stable")
        sizes = np.full(len(members), _HEADER.size, dtype=np.int64)
        for number, data in zip(order, self.file.ranges(headers[order], sizes, use_mmap=False), strict=True):
            signature, name_bytes, extra_bytes = _HEADER.unpack(data)
            if signature != _SIGNATURE:
                raise CorruptDataError(
                    f"{self.file.path}: {members[number].filename!r} is not where the directory of the archive says. "
                    "Copy or download the archive again."
                )
            found[number] = headers[number] + _HEADER.size + name_bytes + extra_bytes
        return found


# Each matrix of an atlas opens its archive separately.
@lru_cache(maxsize=8)
def _archive(identity: FileIdentity, pid: int) -> ZipArchive:
    return ZipArchive(identity)


def direct_array(archive: ZipArchive, name: str, *, label: str, use_mmap: UseMmap) -> StoredArray:
    """Open a Zarr array in a zip file for reading without zarr-python."""
    found = ((kind, archive.read(f"{name}/{kind}")) for kind in METADATA)
    layout = next((layout_of(kind, content) for kind, content in found if content is not None), None)
    if layout is None:
        raise UnknownLayoutError("it has no metadata in the archive")
    chunks = TableChunks(archive.file, _chunk_table(archive, name, layout), use_mmap=use_mmap)
    return chunked_array(chunks, layout=layout, label=label)


def _chunk_table(archive: ZipArchive, name: str, layout: ZarrLayout) -> ChunkTable:
    grid = layout.grid
    objects = tuple(-(-n // per_shard) for n, per_shard in zip(grid, layout.per_shard, strict=True))
    # A shard has at least 16 bytes for each of its chunks.
    n_possible = len(archive.members) if layout.shard_shape is None else archive.file.identity.size // 16
    if math.prod(grid) > _MOST_ABSENT + n_possible or math.prod(objects) > _MOST_ABSENT + len(archive.members):
        raise UnknownLayoutError(f"its shape, {layout.shape}, would need {math.prod(grid)} chunks")
    ats = itertools.product(*map(range, objects))
    members = {at: archive.members[key] for at in ats if (key := f"{name}/{layout.key(at)}") in archive.members}
    if any(member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED for member in members.values()):
        raise UnknownLayoutError(
            "its members are compressed or encrypted by the archive; zip -0 stores them as they are"
        )
    offsets = np.full(math.prod(grid), -1, dtype=np.int64)
    sizes = np.zeros(math.prod(grid), dtype=np.int64)
    for (at, member), begin in zip(members.items(), archive.data_offsets([*members.values()]).tolist(), strict=True):
        if layout.shard_shape is None:
            number = np.ravel_multi_index(at, grid)
            offsets[number], sizes[number] = begin, member.file_size
            continue
        shard = FileIdentity(path=f"{archive.file.path}/{member.filename}", size=member.file_size, mtime_ns=0)
        starts, lengths = chunk_ranges(layout, shard, archive.file, begin)
        within = np.stack(np.unravel_index(np.arange(len(starts)), layout.per_shard))
        chunk_at = within + (np.array(at) * layout.per_shard)[:, None]
        inside = (chunk_at < np.array(grid)[:, None]).all(axis=0) & (starts >= 0)
        numbers = np.ravel_multi_index(tuple(chunk_at[:, inside]), grid)
        offsets[numbers], sizes[numbers] = begin + starts[inside], lengths[inside]
    if sizes.max(initial=0) > _MOST_CHUNK_BYTES:
        raise UnknownLayoutError("a chunk has more than 4 GiB")
    return ChunkTable(offsets=offsets, sizes=sizes, skipped=np.zeros(len(sizes), dtype=np.uint32))


class ZippedStore(ZipStore):
    """Store of zarr-python whose sizes come from the directory of the archive."""

    async def getsize_prefix(self, prefix: str) -> int:
        inside = f"{prefix.strip('/')}/"
        members = ZipArchive.of(str(self.path)).members.items()
        return sum(member.compress_size for name, member in members if name.startswith(inside))
