"""Block-wise reading of remote HDF5 files, for the metadata that h5py needs to locate arrays."""

from __future__ import annotations

import contextlib
import io
import os
from collections import OrderedDict
from weakref import WeakValueDictionary

from dasksc._compat import without_collection
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.remote.remote_file import REQUEST_BYTES, RemoteFile

# The metadata of arrays are scattered over a file, in clusters of pieces of a few hundred bytes.
_BLOCK_BYTES = 2**18
_KEPT_BLOCKS = 256
# Number of blocks from which `read_missing` reads no more, since several objects are read at a time.
_MOST_BLOCKS_AHEAD = 64
# Columns of obs and names of cells lie in regions of many blocks, which HDF5 reads in various orders. If a neighbor of
# a block is in memory, the whole group of the block is therefore read, which takes about one round trip.
_GROUP_BLOCKS = REQUEST_BYTES // _BLOCK_BYTES


class _Blocks(OrderedDict[int, memoryview]):
    """Most recently read blocks of one object, by block number; at most 64 MiB."""


# Blocks of each object that is being read. All readers of an object share them, since each matrix of an atlas opens the
# file separately.
_blocks_of: WeakValueDictionary[tuple[int, str, ObjectIdentity], _Blocks] = WeakValueDictionary()


class BlockReader(io.RawIOBase):
    """File-like reader of a remote object, for libraries with small scattered reads."""

    # A reader serves one thread at a time, as h5py does. Several readers of an object share their blocks. While a block
    # is requested, h5py holds its global lock, so objects are opened one after another. A reader that does not wait
    # raises an error instead; after `read_missing`, which needs no lock, the work is begun again.

    def __init__(self, file: RemoteFile, *, waits: bool = True) -> None:
        self._file = file
        self._waits = waits
        self._missing: int | None = None
        self._at = 0
        self._blocks = _blocks_of.setdefault((os.getpid(), file.location.root, file.identity), _Blocks())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        """Return the current position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Change the current position and return it."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.identity.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, into: memoryview | bytearray) -> int:  # type: ignore[override]
        """Fill `into` from the current position, up to the end of the object; return the number of bytes read."""
        view = memoryview(into).cast("B")
        n_bytes = max(0, min(len(view), self._file.identity.size - self._at))
        done = 0
        while done < n_bytes:
            number, skipped = divmod(self._at, _BLOCK_BYTES)
            piece = self._block(number)[skipped : skipped + n_bytes - done]
            view[done : done + len(piece)] = piece
            done += len(piece)
            self._at += len(piece)
        return n_bytes

    def _block(self, number: int) -> memoryview:
        block = self._blocks.get(number)
        if block is not None:
            with contextlib.suppress(KeyError):  # another reader of the object has evicted it
                self._blocks.move_to_end(number)
            return block
        if not self._waits:
            self._missing = number
            raise BlockingIOError(f"block {number} of {self._file.path} has not been read")
        start, stop = self._span(number)
        data = memoryview(bytearray(stop - start))
        # h5py holds its global lock while it waits for a block, which another thread requests. If garbage collection in
        # that other thread freed an h5py object, the thread would wait for the lock forever.
        with without_collection():
            self._file.read(start, data)
        self._keep(start, data)
        return data[number * _BLOCK_BYTES - start :][:_BLOCK_BYTES]

    def read_missing(self) -> bool:
        """Read the block that was missing; return False if none was, or if the object needs too many."""
        number, self._missing = self._missing, None
        if number is None or len(self._blocks) > _MOST_BLOCKS_AHEAD:
            return False
        start, stop = self._span(number)
        self._keep(start, self._file.fetch(start, stop))
        return True

    def _span(self, number: int) -> tuple[int, int]:
        """Return the bytes to read for a block, alone or with its group."""
        first, n_blocks = number, 1
        if number - 1 in self._blocks or number + 1 in self._blocks:
            first, n_blocks = number // _GROUP_BLOCKS * _GROUP_BLOCKS, _GROUP_BLOCKS
        return first * _BLOCK_BYTES, min((first + n_blocks) * _BLOCK_BYTES, self._file.identity.size)

    def _keep(self, start: int, data: memoryview) -> None:
        for at in range(0, len(data), _BLOCK_BYTES):
            # Blocks are copied, so that each one can be freed separately.
            self._blocks[(start + at) // _BLOCK_BYTES] = memoryview(bytes(data[at : at + _BLOCK_BYTES]))
        while len(self._blocks) > _KEPT_BLOCKS:
            self._blocks.popitem(last=False)
