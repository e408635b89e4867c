"""Access to HDF5 (.h5ad) files through h5py: location of arrays, and reading of arrays in any HDF5 layout."""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError, StorageError
from dasksc.storage.files import LocalFile
from dasksc.storage.hdf5.remote import BlockReader
from dasksc.storage.remote.remote_file import RemoteFile
from dasksc.storage.safety.hdf5_links import check_links
from dasksc.storage.sliced import ReadSlice, SlicedArray

# Runs closer than this are read as one. A separate HDF5 selection costs tens of microseconds. In that time, this many
# bytes can be copied from the page cache.
_GAP_BYTES = 64 * 2**10
# Matches the part of HDF5's error message that gives the file size stored in the header.
_STATED = re.compile(r"stored_eof = (\d+)")


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


def _check_filters(dataset: h5py.Dataset, label: str) -> None:
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
        _check_filters(dataset, self.label)

        def read(start: int, stop: int, into: NDArray[Any]) -> None:
            if into.size:
                dataset.read_direct(into, np.s_[start:stop])

        return read
