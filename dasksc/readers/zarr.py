"""Zarr stores: directories, zip files and URLs, of versions 2 and 3."""

from __future__ import annotations

import glob
import os

from dasksc.readers.anndata import AnnDataStore
from dasksc.readers.interface import Reader, Store
from dasksc.readers.locations import naming_errors
from dasksc.readers.mudata import MuDataStore
from dasksc.readers.options import OpenOptions
from dasksc.storage import RemoteLocation
from dasksc.storage.remote.urls import ZARR_MARKERS
from dasksc.storage.zarr.reader import ZarrFile
from dasksc.storage.zarr.zipped import is_zip


class ZarrReader(Reader):
    """Reader of AnnData and MuData in Zarr stores."""

    listed_suffixes = (".zarr", ".zarr.zip")

    def matches(self, path: str | RemoteLocation) -> bool:
        """Return True for a group of Zarr; at a URL, this takes up to three requests."""
        if isinstance(path, RemoteLocation):
            return path.is_zarr()
        return is_zip(path) or any(os.path.exists(os.path.join(path, marker)) for marker in ZARR_MARKERS)

    def open(self, path: str | RemoteLocation, options: OpenOptions) -> Store:
        file = ZarrFile(path)
        root = file.root()
        return (MuDataStore if MuDataStore.holds(root) else AnnDataStore)(path, file, root, options)

    def parts(self, path: str | RemoteLocation) -> list[str]:
        """Return the groups ``dataset_*`` of a store, as annbatch writes them."""
        if isinstance(path, RemoteLocation):
            with naming_errors(path):
                root = ZarrFile(path).root()
                names = [] if "obs" in root else [name for name in root if name.startswith("dataset_")]
                return [path.below(name).url for name in sorted(names, key=_by_number)]
        inside = glob.glob(os.path.join(glob.escape(path), "dataset_*"))
        return [] if os.path.exists(os.path.join(path, "obs")) else sorted(inside, key=_by_number)


def _by_number(path: str) -> tuple[int, str]:
    digits = path.rpartition("_")[2]
    return int(digits) if digits.isdigit() else 0, path
