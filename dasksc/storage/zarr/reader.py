"""Zarr stores (directories and zip files, v2 and v3), read with zarr-python."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.store import Store

from dasksc.errors import DaskscError, StorageError
from dasksc.storage.file_identity import FileIdentity
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.remote.urls import RemoteLocation
from dasksc.storage.sliced import ReadSlice, SlicedArray
from dasksc.storage.zarr.remote import metadata_of
from dasksc.storage.zarr.stores import store_at

# Runs with smaller gaps are read as one, since each selection costs zarr-python about a millisecond.
_GAP_BYTES = 2**20


class ZarrFile:
    """Zarr store, opened in each process on first use."""

    def __init__(self, path: str | RemoteLocation) -> None:
        self.path = path
        self._opened: tuple[int, Store] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def store(self) -> Store:
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            # If threads race, the store is opened twice, which is harmless.
            opened = self._opened = os.getpid(), store_at(self.path)
        return opened[1]

    def root(self) -> zarr.Group:
        try:
            return zarr.open_group(self.store(), mode="r")
        except DaskscError:
            raise
        except (OSError, ValueError, KeyError) as error:
            raise StorageError(
                f"{self.path} is not a Zarr store: it has no group at its root (no zarr.json, no .zgroup). "
                "Give the directory that AnnData's write_zarr made, a zip file of what is in it, or an .h5ad file."
            ) from error

    def identity(self, name: str) -> FileIdentity | ObjectIdentity:
        """Return the identity of the array `name`, which changes if the array is replaced."""
        if isinstance(self.path, RemoteLocation):
            return metadata_of(self.path.below(name))[0].identity
        if os.path.isfile(self.path):
            return FileIdentity.of(self.path)
        for metadata in ("zarr.json", ".zarray"):
            path = os.path.join(self.path, name, metadata)
            if os.path.exists(path):
                return FileIdentity.of(path)
        raise StorageError(
            f"{self.path}:/{name} has no metadata (no zarr.json, no .zarray), so the store is "
            "incomplete. Copy or download it again."
        )


class ZarrArray(SlicedArray):
    """Zarr array, read with zarr-python."""

    def __init__(self, file: ZarrFile, name: str) -> None:
        array = zarr.open_array(file.store(), path=name, mode="r")
        dtype = np.dtype(array.dtype)
        super().__init__(
            label=f"{file.path}:/{name}",
            shape=array.shape,
            # Strings of variable length have no byte order. Arrays of strings are rejected where numbers are required.
            dtype=dtype.newbyteorder("=") if dtype.kind in "biufc" else dtype,
            chunk=int(array.chunks[0]) if array.chunks else 1,
            gap_bytes=_GAP_BYTES,
        )
        self._file = file
        self._name = name
        self._identity: Any = file.identity(name)

    def reader(self) -> ReadSlice:
        self._identity.compare(self._file.identity(self._name))
        array = zarr.open_array(self._file.store(), path=self._name, mode="r")

        def read(start: int, stop: int, into: NDArray[Any]) -> None:
            into[...] = array[start:stop]

        return read
