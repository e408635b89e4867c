"""HDF5 files: AnnData, MuData and the matrices of Cell Ranger."""

from __future__ import annotations

import os

import h5py

from dasksc.readers.anndata import AnnDataStore
from dasksc.readers.cell_ranger import CellRangerStore
from dasksc.readers.interface import Reader, Store
from dasksc.readers.mudata import MuDataStore
from dasksc.readers.options import OpenOptions
from dasksc.storage import HDF5_ENDINGS, RemoteLocation
from dasksc.storage.opening import hdf5_file
from dasksc.storage.safety.hdf5_links import check_links


class Hdf5Reader(Reader):
    """Reader of ``.h5ad``, ``.h5mu`` and 10x ``.h5`` files; their content tells them apart."""

    suffixes = HDF5_ENDINGS
    listed_suffixes = (".h5ad",)

    def matches(self, path: str | RemoteLocation) -> bool:
        """Return True for an HDF5 file, and for any object at a URL."""
        if isinstance(path, RemoteLocation):
            return path.key.endswith(self.suffixes) or path.exists()
        return bool(h5py.is_hdf5(path))

    def open(self, path: str | RemoteLocation, options: OpenOptions) -> Store:
        """Open a file; its links are checked here, once for all elements."""
        file = hdf5_file(path, cache=options.cache_of(path))
        try:
            root = file.root()
            if isinstance(path, str):  # remote files are checked when they are opened
                check_links(root, path, folder=os.path.dirname(path))
            for kind in (MuDataStore, CellRangerStore):
                if kind.holds(root):
                    return kind(path, file, root, options)
            return AnnDataStore(path, file, root, options)
        except BaseException:
            file.close()
            raise
