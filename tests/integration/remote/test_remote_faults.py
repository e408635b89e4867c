"""Atlases at URLs under network and server faults: the same values, or an error that names the fault."""

from __future__ import annotations

import sys
from pathlib import Path

import dask
import numpy as np
import pytest
from anndata import AnnData

import dasksc
from dasksc.errors import StorageError
from tests.support.data import batches, make_adata, write_store
from tests.support.programs import run
from tests.support.servers import HTTPServer, serving, touch_later

pytest.importorskip("obstore")

pytestmark = pytest.mark.faults


@pytest.fixture
def opened(web_stores: HTTPServer) -> AnnData:
    return dasksc.open(f"{web_stores.url}/csr.h5ad")


@pytest.mark.parametrize("name", ["csr.h5ad", "dense.h5ad", "csr.zarr2.zarr", "csr.zarr3.zarr"])
def test_nothing_is_lost_if_requests_fail_and_responses_are_truncated(
    stores: Path, web_stores: HTTPServer, name: str
) -> None:
    web_stores.faults.status = lambda number: {2: 500, 6: 503, 11: 429}.get(number % 14)
    web_stores.faults.cut = lambda number: number % 6 == 4
    remote = batches(dasksc.open(f"{web_stores.url}/{name}", obs=["int8"]))
    for one, other in zip(remote, batches(dasksc.open(stores / name)), strict=True):
        np.testing.assert_array_equal(one, other)
    answers = [web_stores.faults.status(number) for number in range(len(web_stores.faults.requests))]
    assert {500, 503, 429} <= set(answers)
    assert any(map(web_stores.faults.cut, range(len(answers))))


# Open a file at a URL while h5py objects are garbage-collected in every thread in which an allocation may do this.
COLLECTING = """
import gc, sys, threading
from pathlib import Path
import h5py
import dasksc
from dasksc.storage.hdf5 import reader
from dasksc.storage.remote.remote_file import RemoteFile
from tests.support.servers import serving

path, fetch, Reader = Path(sys.argv[1]), RemoteFile.fetch, reader.BlockReader

class Cycle:
    def __init__(self):
        self.me, self.file = self, h5py.File(path)  # only garbage collection frees it

class ReaderAfterGarbage(Reader):
    def __init__(self, file):
        super().__init__(file)
        Cycle()

def collecting_fetch(self, start, stop):
    if gc.isenabled() and threading.current_thread() is not threading.main_thread():
        gc.collect()
    return fetch(self, start, stop)

RemoteFile.fetch, reader.BlockReader = collecting_fetch, ReaderAfterGarbage
with serving(path.parent) as server:
    dasksc.open(f"{server.url}/{path.name}")
assert gc.isenabled()
"""


def test_collecting_open_files_does_not_block_the_requests_of_open(stores: Path) -> None:
    run([sys.executable, "-c", COLLECTING, stores / "csr.h5ad"])


@pytest.mark.parametrize(
    ("status", "says"), [(500, "500"), (503, "503"), (429, "429"), (403, "credentials"), (404, "nothing at")]
)
def test_permanent_errors_of_a_server_are_named(
    opened: AnnData, web_stores: HTTPServer, status: int, says: str
) -> None:
    web_stores.faults.status = lambda number: status
    with dask.config.set({"dasksc.retry-timeout": "200ms"}), pytest.raises(dasksc.DaskscError) as caught:
        batches(opened)
    # The reader's error is the cause of the epoch's error, which names rows and fetch.
    assert isinstance(caught.value.__cause__, StorageError)
    message = str(caught.value)
    assert f"{web_stores.url}/csr.h5ad" in message
    assert says in message
    assert "rows" in message


# Files and stores, each with both signs of a change: ETag and modification time.
@pytest.mark.parametrize(
    ("name", "etags"), [("csr.h5ad", True), ("dense.h5ad", False), ("csr.zarr2.zarr", True), ("csr.zarr3.zarr", False)]
)
def test_an_object_that_was_replaced_is_refused(tmp_path: Path, name: str, etags: bool) -> None:
    layout, _, format = name.removesuffix(".zarr").partition(".")
    path = write_store(make_adata(200, 30, layout=layout), tmp_path, format, name=layout)
    with serving(tmp_path) as server:
        server.faults.etags = etags
        data = dasksc.open(f"{server.url}/{name}")
        assert len(batches(data)) == 13
        for file in [path, *path.rglob("*")]:
            touch_later(file)
        with pytest.raises(dasksc.DaskscError, match="was replaced or changed since it was opened"):
            batches(data)
