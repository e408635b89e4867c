"""HDF5 (.h5ad) files through h5py: finding arrays, and reading whatever HDF5 can hold."""

from __future__ import annotations

import os
import weakref
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError, StorageError
from dasksc.storage.arrays import BrokenRunError, memory_dtype, row_bytes
from dasksc.storage.identity import FileIdentity
from dasksc.storage.reach import Reached
from dasksc.storage.runs import locate, merge

__all__ = ["H5Array", "H5File"]

# Runs closer than this are read as one: a separate HDF5 selection costs tens of microseconds, in which
# this much is copied from the page cache.
_GAP_BYTES = 64 * 2**10


class H5File:
    """One HDF5 file, opened in each process when it is first read there.

    Parameters
    ----------
    path
        Where it is.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.identity = FileIdentity.of(path)
        self._opened: tuple[int, h5py.File] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def open(self) -> h5py.File:
        """Return the file, open in this process, after checking that it is still the same."""
        self.identity.check()
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            # Threads that race here open it more than once, which is harmless; a lock could be held by
            # another thread while the process forks. A handle inherited through fork is the parent's.
            opened = os.getpid(), _open(self.path)
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


class H5Array:
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
        self._file = file
        self._name = name
        self._field = field
        self.shape: tuple[int, ...] = (*dataset.shape, *dtype.shape)
        self.dtype: np.dtype[Any] = dtype.base.newbyteorder("=")
        self._chunk = dataset.chunks[0] if dataset.chunks else 1

    @property
    def label(self) -> str:
        """What to call it in errors."""
        end = "" if self._field is None else f"/{self._field}"
        return f"{self._file.path}:/{self._name}{end}"

    def held_share(self, run: float) -> float:
        """Return an estimate: gaps between neighbouring runs are read and held as well."""
        return 2.0

    @property
    def working_bytes(self) -> int:
        """Chunks that the library decodes."""
        return 4 * self._chunk * row_bytes(self)

    def reach(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Reached:
        """Read the runs, neighbours together, into one block."""
        file = self._file.open()
        dtype = memory_dtype(self.dtype)
        stride = row_bytes(self)
        run_starts, run_stops = merge(starts, stops, gap=_GAP_BYTES // max(stride, 1), chunk=self._chunk)
        block = np.empty((int((run_stops - run_starts).sum()), *self.shape[1:]), dtype=dtype)
        dataset = file[self._name]
        at = 0
        for start, stop in zip(run_starts.tolist(), run_stops.tolist(), strict=True):
            into = slice(at, at + stop - start)
            try:
                if self._field is not None:
                    block[into] = dataset.fields(self._field)[start:stop]
                elif block[into].size:
                    dataset.read_direct(block, np.s_[start:stop], into)
            except (OSError, ValueError, RuntimeError) as error:
                raise BrokenRunError(self.label, start, stop, str(error)) from error
            at = into.stop
        return Reached.inside(
            (block,),
            dtype=dtype,
            which=0,
            offsets=locate(starts, stops, run_starts, run_stops) * stride,
            sizes=(stops - starts) * stride,
            held_bytes=block.nbytes,
        )
