"""Index of the chunks of an HDF5 dataset, read level by level instead of node by node.

HDF5 reads the nodes of a tree one after the other. Behind a URL, each read is a round trip, and a large atlas has
hundreds of thousands of nodes. This module requests all nodes of a level at once. On local files, it needs a tenth of
the time of `chunk_iter`, which calls Python for every chunk (benchmarks/README.md has the measurements).

The module reads B-trees of version 1, which HDF5 uses unless a file was written for new versions of HDF5 only. The
layouts follow the HDF5 File Format Specification, version 3.0 (sections II.A superblock, III.A B-trees, IV.A object
headers). HDF5 itself reads any other index.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError
from dasksc.storage.arrays import UnknownLayoutError
from dasksc.storage.chunked import ChunkTable
from dasksc.storage.files import LocalFile
from dasksc.storage.hdf5.reader import BlockReader
from dasksc.storage.remote.remote_file import RemoteFile

# Minimum size of the metadata of a chunk in an HDF5 file.
_RECORD_BYTES = 8
_NOWHERE = 2**64 - 1
# Types of messages in object headers.
_LAYOUT, _CONTINUATION, _TREE_SIZES = 0x08, 0x10, 0x13
_IS_SHARED = 2
# Maximum size of an object header, and maximum number of its blocks. Larger headers, which hold many attributes, are
# left to HDF5.
_MOST_HEADER_BYTES = 2**22
_MOST_HEADER_BLOCKS = 256
# Default value of "K" in the specification, which is half the maximum number of children of a node.
_USUAL_HALF = 32
_NODE_HEADER_BYTES = 24
# Maximum total size of the nodes that are read together. The entries of the level above are in memory as well.
_BATCH_BYTES = 2**25


def chunk_table(dataset: h5py.Dataset, file: LocalFile | RemoteFile) -> ChunkTable:
    """Read the locations of the chunks of a dataset."""
    # Behind a URL, the cost is one round trip per level of the tree. The table takes 20 bytes of memory per chunk.
    grid = tuple(-(-n // length) for n, length in zip(dataset.shape, dataset.chunks, strict=True))
    n_chunks = math.prod(grid)
    if n_chunks > max(2**20, file.identity.size // _RECORD_BYTES):
        raise CorruptDataError(
            f"{file.path}:{dataset.name} should have {n_chunks} chunks according to its shape, {dataset.shape}, but a "
            f"file of {file.identity.size} bytes has no room for them. The file is corrupt, or incompletely written."
        )
    table = ChunkTable(
        offsets=np.full(n_chunks, -1, dtype=np.int64),
        sizes=np.zeros(n_chunks, dtype=np.int64),
        skipped=np.zeros(n_chunks, dtype=np.uint32),
    )
    try:
        tree = _Tree.of(dataset, file) if n_chunks else None
        if tree is not None:
            _fill(table, grid, tree)
        elif n_chunks:
            _fill_by_hdf5(table, grid, dataset)
    finally:
        if isinstance(file, LocalFile):
            file.close()  # opening a thousand atlases must not keep a thousand files open
    return table


def _fill(table: ChunkTable, grid: tuple[int, ...], tree: _Tree) -> None:
    chunks = np.array(tree.chunks, dtype=np.uint64)
    last = -1
    for records in tree.leaves():
        at = records["at"]
        places = at[:, :-1] // chunks
        if (places * chunks != at[:, :-1]).any() or at[:, -1].any():
            raise tree.broken("a chunk begins at an impossible position")
        # After a dataset was shortened, chunks outside its shape remain in the file.
        inside = (places < np.array(grid, dtype=np.uint64)).all(axis=1)
        numbers = np.ravel_multi_index(tuple(places[inside].astype(np.int64).T), grid)
        # Strictly ascending numbers also rule out repeated chunks and nodes.
        if (np.diff(numbers, prepend=last) <= 0).any():
            raise tree.broken("its chunks are not in order")
        last = int(numbers[-1]) if len(numbers) else last
        offsets = records["child"][inside]
        if (offsets >= tree.file.identity.size).any():
            raise tree.broken(f"a chunk begins beyond the end of the file, which has {tree.file.identity.size} bytes")
        table.offsets[numbers] = offsets
        table.sizes[numbers] = records["size"][inside]
        table.skipped[numbers] = records["skipped"][inside]


def _fill_by_hdf5(table: ChunkTable, grid: tuple[int, ...], dataset: h5py.Dataset) -> None:
    chunks = dataset.chunks
    first, *others = dataset.maxshape
    if first is not None and None in others:
        raise UnknownLayoutError("HDF5 reports wrong positions of chunks if only a later axis is unlimited")

    def note(chunk: Any) -> None:
        number = 0
        for at, length, n in zip(chunk.chunk_offset, chunks, grid, strict=True):
            if at // length >= n:  # the chunk remained in the file after the dataset was shortened
                return
            number = number * n + at // length
        table.offsets[number] = chunk.byte_offset
        table.sizes[number] = chunk.size
        table.skipped[number] = chunk.filter_mask

    dataset.id.chunk_iter(note)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tree:
    """B-tree of version 1 over the chunks of a dataset."""

    file: LocalFile | RemoteFile  # File of the tree
    label: str  # Name of the dataset in error messages
    root: int  # Address of the root; `_NOWHERE` if no chunk was ever written
    chunks: tuple[int, ...]  # Shape of a chunk
    half: int  # Half the maximum number of children of a node

    @classmethod
    def of(cls, dataset: h5py.Dataset, file: LocalFile | RemoteFile) -> _Tree | None:
        """Return the tree of a dataset; None if its index has another format, or the file is open for writing."""
        # Addresses are relative to the end of a user block, which is not supported.
        readable = dataset.file.mode == "r" and not dataset.file.userblock_size
        half = _half_of(file) if readable else None
        # `h5py.h5o.get_info` would traverse the tree to sum the sizes of its nodes.
        low, high = h5py.h5g.get_objinfo(dataset.id).objno
        header = low + (high << 32)
        layout = None if half is None else next(_messages(file, header, _LAYOUT), None)
        n_dims = len(dataset.shape) + 1
        # Version 3 of the layout message, class "chunked".
        if half is None or layout is None or layout[:3] != bytes((3, 2, n_dims)) or len(layout) < 11 + 4 * n_dims:
            return None
        root, *chunks = struct.unpack_from(f"<Q{n_dims}I", layout, 3)
        if tuple(chunks) != (*dataset.chunks, dataset.dtype.itemsize):
            return None
        return cls(file=file, label=f"{file.path}:{dataset.name}", root=root, chunks=dataset.chunks, half=half)

    @property
    def record(self) -> np.dtype[Any]:
        """Data type of an entry: a key, which describes the first chunk below a child, and the address of the child."""
        # The child is a node or, in a leaf, a chunk.
        at = ("at", "<u8", (len(self.chunks) + 1,))
        return np.dtype([("size", "<u4"), ("skipped", "<u4"), at, ("child", "<u8")])

    @property
    def node_bytes(self) -> int:
        """Size of a node in the file, in bytes; it does not depend on the number of children."""
        return _NODE_HEADER_BYTES + (2 * self.half + 1) * self.record.itemsize - 8

    def leaves(self) -> Iterator[NDArray[np.void]]:
        """Yield the entries of all chunks in order, some nodes at a time."""
        if self.root == _NOWHERE:
            return
        # The root was created with the dataset, so it is often in a block that HDF5 has read already.
        if len(root := _read(self.file, self.root, self.node_bytes)) < self.node_bytes:
            raise self.broken(f"its root is beyond the end of the file, at {self.root}")
        nodes = np.frombuffer(root, dtype=np.uint8)[None, :]
        level = int(nodes[0, 5])
        records = self._records(nodes, level)
        n_nodes = 1
        while level:
            level -= 1
            nodes_at = records["child"]
            n_nodes += len(nodes_at)
            if n_nodes > self.file.identity.size // self.node_bytes:
                raise self.broken("it has more nodes than the file has room for")
            below = (self._records(nodes, level) for nodes in self._nodes(nodes_at))
            if level == 0:
                yield from below
                return
            records = np.concatenate([records[:0], *below])
        yield records

    def _nodes(self, at: NDArray[np.uint64]) -> Iterator[NDArray[np.uint8]]:
        """Yield nodes in groups, shape (n, node_bytes)."""
        if len(at) and at.max() > self.file.identity.size - self.node_bytes:
            raise self.broken("a node is beyond the end of the file")
        # Nodes are scattered, so they are neither mapped nor cached.
        file = LocalFile(self.file.identity) if isinstance(self.file, LocalFile) else self.file.uncached()
        n_together = max(1, _BATCH_BYTES // self.node_bytes)
        for first in range(0, len(at), n_together):
            offsets = at[first : first + n_together].astype(np.int64)
            order = np.argsort(offsets)
            nodes = np.empty((len(offsets), self.node_bytes), dtype=np.uint8)
            sizes = np.full(len(offsets), self.node_bytes)
            read = file.ranges(offsets[order], sizes)
            for number, node in zip(order.tolist(), read, strict=True):
                nodes[number] = node
            yield nodes

    def _records(self, nodes: NDArray[np.uint8], level: int) -> NDArray[np.void]:
        """Return the entries of nodes of one level, in order."""
        heads = nodes[:, :8]
        # Signature, type of node (chunks) and level.
        if (heads[:, :6] != np.frombuffer(b"TREE\x01" + bytes((level,)), dtype=np.uint8)).any():
            raise self.broken(f"expected a node of level {level}, but its address holds other data")
        n_used = heads[:, 6:8].copy().view("<u2")
        if (n_used > 2 * self.half).any():
            raise self.broken(f"a node has more than {2 * self.half} children")
        records = nodes[:, _NODE_HEADER_BYTES : _NODE_HEADER_BYTES + 2 * self.half * self.record.itemsize]
        used: NDArray[np.void] = records.view(self.record)[np.arange(2 * self.half) < n_used]
        return used

    def broken(self, reason: str) -> CorruptDataError:
        """Return the error for a damaged tree."""
        return CorruptDataError(
            f"{self.label}: the index of its chunks is corrupt: {reason}. Copy or download the file again."
        )


def _half_of(file: LocalFile | RemoteFile) -> int | None:
    """Return half the maximum number of children of chunk nodes; None if addresses do not have 8 bytes."""
    start = _read(file, 0, 48)
    if len(start) < 48:
        return None
    version = start[8]
    if version < 2:
        if start[13:15] != b"\x08\x08":
            return None
        return int.from_bytes(start[24:26], "little") if version == 1 else _USUAL_HALF
    extension = int.from_bytes(start[20:28], "little")
    if version > 3 or start[9:11] != b"\x08\x08":
        return None
    sizes = None if extension == _NOWHERE else next(_messages(file, extension, _TREE_SIZES), None)
    return _USUAL_HALF if sizes is None else int.from_bytes(sizes[1:3], "little")


def _messages(file: LocalFile | RemoteFile, address: int, kind: int) -> Iterator[bytes]:
    """Yield the messages of one type in an object header; yield nothing for unsupported headers."""
    # HDF5 has opened the object, so its header is complete.
    start = _read(file, address, 64)
    if start[:4] == b"OHDR" and start[4:5] == b"\x02":
        flags = start[5]
        # Optional timestamps, and thresholds for the storage of attributes.
        at = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width = 1 << (flags & 3)
        n_bytes = int.from_bytes(start[at : at + width], "little")
        # Type, size and flags, optionally followed by the creation order.
        head, is_new = struct.Struct("<BHB2x" if flags & 4 else "<BHB"), True
        blocks = [(address + at + width, n_bytes)]
    elif start[:1] == b"\x01" and len(start) >= 16:
        head, is_new = struct.Struct("<HHB3x"), False
        blocks = [(address + 16, int.from_bytes(start[8:12], "little"))]
    else:
        return
    n_bytes_left = _MOST_HEADER_BYTES
    for block_at, n_bytes in blocks:  # continuation messages append blocks
        n_bytes_left -= n_bytes
        if n_bytes_left < 0 or len(blocks) > _MOST_HEADER_BLOCKS:
            return
        block = _read(file, block_at, n_bytes)
        at = 0
        while at + head.size <= len(block):
            found, size, flags = head.unpack_from(block, at)
            message = block[at + head.size : at + head.size + size]
            at += head.size + size
            if found == kind and not flags & _IS_SHARED:
                yield message
            elif found == _CONTINUATION and len(message) >= 16:
                place, n_bytes = struct.unpack_from("<QQ", message)
                # Continuation blocks of version 2 start with a signature and end with a checksum.
                blocks.append((place + 4, max(0, n_bytes - 8)) if is_new else (place, n_bytes))


def _read(file: LocalFile | RemoteFile, offset: int, n_bytes: int) -> bytes:
    """Read `n_bytes` of a file, fewer at its end; remote blocks that h5py has read are not requested again."""
    data = bytearray(max(0, min(n_bytes, file.identity.size - offset)))
    if isinstance(file, LocalFile):
        file.read(offset, memoryview(data))
    elif data:
        reader = BlockReader(file)
        reader.seek(offset)
        reader.readinto(data)
    return bytes(data)
