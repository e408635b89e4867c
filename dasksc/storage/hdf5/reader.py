"""HDF5 (.h5ad) files through h5py: finding arrays, and reading whatever HDF5 can hold."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError, StorageError
from dasksc.storage.files import LocalFile
from dasksc.storage.hdf5.remote import open_remote
from dasksc.storage.remote.remote_file import RemoteFile
from dasksc.storage.safety.hdf5_chunks import check_chunks
from dasksc.storage.sliced import ReadSlice, SlicedArray

__all__ = ["H5Array", "H5File"]

# Runs closer than this are read as one: a separate HDF5 selection costs tens of microseconds, in which
# this much is copied from the page cache.
_GAP_BYTES = 64 * 2**10


class H5File:
    """One HDF5 file, opened in each process when it is first read there.

    Parameters
    ----------
    file
        Where its bytes are.
    """

    def __init__(self, file: LocalFile | RemoteFile) -> None:
        self.file = file
        self.path = file.path
        self._opened: tuple[int, h5py.File] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def open(self) -> h5py.File:
        """Return the file, open in this process, after checking that it is still the same."""
        self.file.check()
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            # Threads that race here open it more than once, which is harmless; a lock could be held by
            # another thread while the process forks. A handle inherited through fork is the parent's.
            opened = os.getpid(), open_remote(self.file) if isinstance(self.file, RemoteFile) else _open(self.path)
            weakref.finalize(self, opened[1].close)
            self._opened = opened
        return opened[1]


def _open(path: str) -> h5py.File:
    try:
        return h5py.File(path, "r")
    except OSError as error:
        if "truncated" in str(error):
            raise CorruptDataError(
                f"{path} is truncated: it holds {os.path.getsize(path)} bytes, fewer than its header says. "
                "Copy or download it again."
            ) from error
        raise StorageError(f"{path} cannot be opened as HDF5: {error}") from error


def _check_filters(dataset: h5py.Dataset, label: str) -> None:
    """Refuse what HDF5 lacks a filter for, after a look for the package that has most of them."""
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
    """An HDF5 dataset (or one field of a compound one), read through h5py.

    Parameters
    ----------
    file
        The file it is in.
    name
        Its path in the file.
    field
        The field to read, where the dataset is compound; AnnData before 0.7 stored `obsm` so.
    """

    def __init__(self, file: H5File, name: str, *, field: str | None = None) -> None:
        dataset = file.open()[name]
        dtype = dataset.dtype if field is None else dataset.dtype[field]
        super().__init__(
            label=f"{file.path}:/{name}" + ("" if field is None else f"/{field}"),
            shape=(*dataset.shape, *dtype.shape),
            dtype=dtype.base.newbyteorder("="),
            chunk=dataset.chunks[0] if dataset.chunks else 1,
            gap_bytes=_GAP_BYTES,
        )
        self._file = file
        self._name = name
        self._field = field

    def reader(self) -> ReadSlice:
        """Return what reads, after a check that the file is the one that was opened."""
        dataset = self._file.open()[self._name]
        _check_filters(dataset, self.label)

        def read(start: int, stop: int, *, into: NDArray[Any]) -> None:
            if dataset.chunks is not None:
                check_chunks(dataset, self.label, rows=(start, stop))
            if self._field is not None:
                into[...] = dataset.fields(self._field)[start:stop]
            elif into.size:
                dataset.read_direct(into, np.s_[start:stop])

        return read
