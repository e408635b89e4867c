"""HDF5 files through h5py: location of arrays, arrays in any layout, remote files block by block, checks of links."""

from __future__ import annotations

import contextlib
import io
import os
import re
import weakref
from collections import OrderedDict
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import h5py
import numpy as np
from numpy.typing import NDArray

from dasksc._compat import without_collection
from dasksc.errors import CorruptDataError, StorageError
from dasksc.storage.arrays import ReadSlice, SlicedArray
from dasksc.storage.files import LocalFile
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.remote.remote_file import REQUEST_BYTES, RemoteFile

# Runs closer than this are read as one. A separate HDF5 selection costs tens of microseconds. In that time, this many
# bytes can be copied from the page cache.
_GAP_BYTES = 64 * 2**10
# Matches the part of HDF5's error message that gives the file size stored in the header.
_STATED = re.compile(r"stored_eof = (\d+)")
# The metadata of arrays are scattered over a file, in clusters of pieces of a few hundred bytes.
_BLOCK_BYTES = 2**18
_KEPT_BLOCKS = 256
# Number of blocks from which `read_missing` reads no more, since several objects are read at a time.
_MOST_BLOCKS_AHEAD = 64
# Columns of obs and names of cells lie in regions of many blocks, which HDF5 reads in various orders. If a neighbor of
# a block is in memory, the whole group of the block is therefore read, which takes about one round trip.
_GROUP_BLOCKS = REQUEST_BYTES // _BLOCK_BYTES


class H5File:
    """HDF5 file, which each process opens at its first read."""

    def __init__(self, file: LocalFile | RemoteFile) -> None:
        self.file = file
        self.path = file.path
        self._opened: tuple[int, h5py.File] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def close(self) -> None:
        """Close the handle of this process; the next call of `root` opens the file again."""
        opened, self._opened = self._opened, None
        if opened is not None and opened[0] == os.getpid():
            opened[1].close()

    def root(self) -> h5py.File:
        """Check that the file has not changed, and return the handle of this process."""
        self.file.require_unchanged()
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            # If threads race, the file is opened more than once, which is harmless. There is no lock, since another
            # thread could hold it during a fork. A handle inherited by a fork belongs to the parent and is not used.
            opened = os.getpid(), _open(self.file)
            weakref.finalize(self, opened[1].close)
            self._opened = opened
        return opened[1]


def _open(file: LocalFile | RemoteFile) -> h5py.File:
    try:
        root = h5py.File(BlockReader(file) if isinstance(file, RemoteFile) else file.path, "r")
    except StorageError:
        raise
    except OSError as error:
        raise _open_error(file.path, file.identity.size, error) from error
    try:
        if isinstance(file, RemoteFile):
            check_links(root, file.path, folder=None)
    except StorageError:
        root.close()
        raise
    return root


def _open_error(path: str, n_bytes: int, error: OSError) -> StorageError:
    """Return the error that explains the `error` raised on opening a file of `n_bytes` bytes."""
    text = str(error)
    if "truncated" in text:
        stated = _STATED.search(text)
        size = f"{n_bytes:,} of {int(stated[1]):,} bytes" if stated else f"only {n_bytes:,} bytes"
        return CorruptDataError(f"{path} is truncated: it has {size}. Copy or download it again.")
    if "unable to lock file" in text:
        return StorageError(
            f"{path} is locked: another program has it open for writing, such as a notebook with backed='r+'. Close "
            "it there, then open it again. On a file system that has no locks, set HDF5_USE_FILE_LOCKING=FALSE in the "
            f"environment ({error})"
        )
    if "signature not found" in text:
        return StorageError(
            f"{path} is not an HDF5 file, and not a Zarr group either (nothing is at {path}/zarr.json or "
            f"{path}/.zgroup). Give the URL of an .h5ad file or of a Zarr store; a zipped store must be unpacked."
        )
    return StorageError(f"{path} cannot be opened as HDF5: {error}")


def check_filters(dataset: h5py.Dataset, label: str) -> None:
    """Raise `StorageError` if HDF5 lacks a filter of a dataset, after an attempt to import hdf5plugin."""
    plist = dataset.id.get_create_plist()
    filters = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    lacking = [(number, name) for number, _, _, name in filters if not h5py.h5z.filter_avail(number)]
    if lacking:
        with contextlib.suppress(ImportError):
            import hdf5plugin  # type: ignore[import-untyped, unused-ignore]  # noqa: F401
    for number, name in lacking:
        if not h5py.h5z.filter_avail(number):
            raise StorageError(
                f"{label} is stored with HDF5's filter {number} ({name.decode(errors='replace')}), which is not "
                "installed: pip install hdf5plugin"
            )


class H5Array(SlicedArray):
    """HDF5 dataset, read through h5py."""

    def __init__(self, file: H5File, name: str) -> None:
        dataset = file.root()[name]
        super().__init__(
            label=f"{file.path}:/{name}",
            shape=dataset.shape,
            dtype=dataset.dtype.newbyteorder("="),
            chunk=dataset.chunks[0] if dataset.chunks else 1,
            gap_bytes=_GAP_BYTES,
        )
        self._file = file
        self._name = name

    def reader(self) -> ReadSlice:
        dataset = self._file.root()[self._name]
        check_filters(dataset, self.label)

        def read(start: int, stop: int, into: NDArray[Any]) -> None:
            if into.size:
                dataset.read_direct(into, np.s_[start:stop])

        return read


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


def check_links(root: h5py.File, path: str, *, folder: str | None) -> None:
    """Raise an error if a file has links to files outside a folder."""
    # A file from an untrusted source may refer to any path on this machine.

    def look(name: str, link: Any) -> tuple[str, str] | None:
        if isinstance(link, h5py.ExternalLink):
            return None if _is_inside(link.filename, folder) else (name, link.filename)
        if folder is None and not isinstance(link, h5py.SoftLink):
            item = root[name]
            other = next(iter(_sources_of(item) + _external_of(item)), None) if isinstance(item, h5py.Dataset) else None
            return None if other is None else (name, other)
        return None

    # An error raised in the callback would be lost in HDF5, so it is raised afterwards.
    found = root.visititems_links(look)
    if found is not None:
        _refuse(path, found[0], found[1], folder)


def check_item(item: h5py.Dataset | h5py.Group, path: str) -> None:
    """Raise an error if `item` or any of its values are in a file outside the folder of `path`; see `check_links`."""
    folder = os.path.dirname(path)
    found = item.file.filename
    if not os.path.samefile(found, path) and not _is_inside(found, folder):
        _refuse(path, item.name.strip("/"), found, folder)
    if not isinstance(item, h5py.Dataset):
        return
    parent = os.path.dirname(found)
    # HDF5 looks for virtual sources next to the file first, and for external storage in the working directory.
    for other in _sources_of(item):
        if not _is_inside(other, parent):
            _refuse(path, item.name.strip("/"), other, folder)
    for other in _external_of(item):
        if not _is_inside(os.path.abspath(other) if os.path.exists(other) else other, parent):
            _refuse(path, item.name.strip("/"), other, folder)


def _sources_of(dataset: h5py.Dataset) -> list[str]:
    if not dataset.is_virtual:
        return []
    return [source.file_name for source in dataset.virtual_sources() if source.file_name != "."]


def _external_of(dataset: h5py.Dataset) -> list[str]:
    return [name for name, _, _ in dataset.external or ()]


def _is_inside(other: str, folder: str | None) -> bool:
    if folder is None:
        return False
    real = os.path.realpath(folder)
    found = os.path.join(real, other)
    # If a file does not exist in this folder, HDF5 looks for it in the working directory.
    if not os.path.exists(found) and os.path.exists(other):
        found = os.path.abspath(other)
    return os.path.realpath(found).startswith(real.rstrip("/") + "/")


def _refuse(path: str, name: str, other: str, folder: str | None) -> NoReturn:
    raise StorageError(
        f"{path}: /{name} lies in another file, {other!r}, which is not read: "
        + (
            "links are followed only within the folder of the file."
            if folder
            else "a link in a remote file would be followed on this machine, to a local file."
        )
        + " Open that file itself, or write the atlas as one file."
    )
