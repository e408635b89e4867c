#!/usr/bin/env python
"""Open an h5ad file at a URL while h5py objects are garbage-collected in every thread in which this can happen.

python tests/programs/collecting_requests.py atlas.h5ad
"""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import h5py

import dasksc
from dasksc.storage.hdf5 import reader
from dasksc.storage.hdf5.remote import BlockReader
from dasksc.storage.remote.remote_file import RemoteFile
from tests.support.servers import serving


class Cycle:
    """Open file in a reference cycle, which only garbage collection frees."""

    def __init__(self, path: Path) -> None:
        self.me = self
        self.file = h5py.File(path)


fetch = RemoteFile.fetch


def collecting_fetch(self: RemoteFile, start: int, stop: int) -> memoryview:
    """Collect garbage before a request, as an allocation at this point may."""
    if gc.isenabled() and threading.current_thread() is not threading.main_thread():
        gc.collect()
    return fetch(self, start, stop)


def main(path: Path) -> None:
    """Open the file and print its shape."""

    class ReaderAfterGarbage(BlockReader):
        def __init__(self, file: RemoteFile) -> None:
            super().__init__(file)
            Cycle(path)

    RemoteFile.fetch = collecting_fetch
    reader.BlockReader = ReaderAfterGarbage
    with serving(path.parent) as server:
        adata = dasksc.open(f"{server.url}/{path.name}")
    assert gc.isenabled()
    print(adata.shape)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
