"""Atlases at URLs: values equal those of the local file, and no output contains secrets."""

from __future__ import annotations

import pickle
import shutil
import traceback
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import torch
from distributed import Client

import dasksc
from dasksc.errors import InputError, StorageError
from dasksc.pushdown import gather_block, matrix_of
from dasksc.storage import Matrix
from tests.support.corpora import source, write_parquet, write_soma
from tests.support.data import FORMATS, batches, dense, same
from tests.support.servers import SECRET, Bucket, HTTPServer, serving

pytest.importorskip("obstore")

pytestmark = pytest.mark.programs


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("write", [write_soma, write_parquet])
def test_soma_and_parquet_on_s3_are_the_local_ones(s3_stores: Bucket, tmp_path: Path, write: Any) -> None:
    path, options = write(source(), tmp_path)
    url = s3_stores.put(path)
    remote = dasksc.open(url, storage_options=s3_stores.options, reader_options=options)
    same(remote, dasksc.open(path, reader_options=options))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_an_atlas_on_a_web_server_is_the_local_one(
    stores: Path, web_stores: HTTPServer, layout: str, format: str
) -> None:
    name = f"{layout}.h5ad" if format == "h5ad" else f"{layout}.{format}.zarr"
    same(dasksc.open(f"{web_stores.url}/{name}"), dasksc.open(stores / name))


def test_a_server_that_is_not_there_is_named() -> None:
    with (
        dask.config.set({"dasksc.retry-timeout": "200ms"}),
        pytest.raises(StorageError, match="http://127.0.0.1:9/atlas.h5ad"),
    ):
        dasksc.open("http://127.0.0.1:9/atlas.h5ad")


def test_a_server_that_refuses_head_is_read(stores: Path, web_stores: HTTPServer) -> None:
    web_stores.faults.head = 501
    same(dasksc.open(f"{web_stores.url}/csr.h5ad"), dasksc.open(stores / "csr.h5ad"))


def test_a_presigned_url_without_an_ending_is_read(stores: Path, tmp_path: Path) -> None:
    shutil.copy(stores / "csr.h5ad", tmp_path / "3f9a")
    signature = "X-Amz-Signature=a%2Fb%3D"
    with serving(tmp_path) as server:
        server.faults.head = 405
        server.faults.signature = signature
        server.faults.status = lambda number: None if server.faults.requests[-1][1] == "/3f9a" else 403
        same(dasksc.open(f"{server.url}/3f9a?{signature}"), dasksc.open(stores / "csr.h5ad"))
        with pytest.raises(StorageError, match="403") as refused:
            dasksc.open(f"{server.url}/3f9a?X-Amz-Signature={SECRET}")
    assert SECRET not in str(refused.value)


def test_objects_of_a_server_without_head_and_ranges_are_read_whole(stores: Path, web_stores: HTTPServer) -> None:
    web_stores.faults.head, web_stores.faults.ranges = 501, False
    same(dasksc.open(f"{web_stores.url}/dense.zarr2.zarr"), dasksc.open(stores / "dense.zarr2.zarr"))
    with pytest.raises(StorageError, match="byte ranges"):
        dasksc.open(f"{web_stores.url}/csr.h5ad")


def test_redirects_are_followed(stores: Path, web_stores: HTTPServer) -> None:
    same(dasksc.open(f"{web_stores.url}/moved/csr.h5ad?token=a%2Fb"), dasksc.open(stores / "csr.h5ad"))


@pytest.mark.parametrize(
    ("name", "encoding"), [("csr.h5ad", "gzip"), ("dense.zarr3.zarr", "br"), ("csr.h5ad", "identity")]
)
def test_compressed_answers_are_refused(stores: Path, web_stores: HTTPServer, name: str, encoding: str) -> None:
    web_stores.faults.headers = {"Content-Encoding": encoding}
    if encoding == "identity":
        same(dasksc.open(f"{web_stores.url}/{name}"), dasksc.open(stores / name))
        return
    with pytest.raises(StorageError, match=f"Content-Encoding: {encoding}"):
        dasksc.open(f"{web_stores.url}/{name}")


@pytest.mark.parametrize("name", ["csr.h5ad", "csr.zarr3.zarr"])
def test_credentials_are_shown_nowhere(s3_stores: Bucket, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    url = f"s3://{s3_stores.name}/{name}"
    data = dasksc.open(url, storage_options=s3_stores.options)
    matrix = matrix_of(data.X)
    texts = [repr(data), repr(data.X), repr(matrix), str(data.X.dask), matrix.label, repr(vars(matrix))]
    assert SECRET in pickle.dumps(matrix).decode("latin1")  # workers need it
    with pytest.raises(StorageError) as missing:
        dasksc.open(f"s3://{s3_stores.name}/nothing.h5ad", storage_options=s3_stores.options)
    wrong = s3_stores.options | {"no_such_option": "1"}
    with pytest.raises(InputError, match="no_such_option") as unknown:
        dasksc.open(url, storage_options=wrong)
    for error in (missing.value, unknown.value):
        texts += ["".join(traceback.format_exception(error)), repr(error)]
    texts.append(caplog.text)
    assert not [text for text in texts if SECRET in text]


def test_tokens_in_urls_are_sent_and_not_shown(web_stores: HTTPServer) -> None:
    url = web_stores.url.replace("://", f"://user:{SECRET}@")
    data = dasksc.open(f"{url}/csr.h5ad?token={SECRET}")
    assert len(batches(data)) == 13
    texts = [repr(data), str(data.X.dask), matrix_of(data.X).label]
    web_stores.faults.status = lambda number: 403
    with pytest.raises(dasksc.DaskscError) as caught:
        batches(data)
    texts.append("".join(traceback.format_exception(caught.value)))
    assert not [text for text in texts if SECRET in text]
    assert web_stores.url in matrix_of(data.X).label


# The tests of Dask worker processes below cover pickling, which spawned workers need as well.
def test_forked_dataloader_workers_are_told_to_spawn(web_stores: HTTPServer) -> None:
    data = dasksc.open(f"{web_stores.url}/csr.h5ad")
    dataset = dasksc.scDataset(data, dasksc.BlockShuffling(8), 16, fetch_factor=2, seed=0, rank=0, world_size=1)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(dasksc.DaskscError, match="forked process.*multiprocessing_context='spawn' or 'forkserver'"):
        next(iter(loader))


def test_dask_workers_in_processes_read_for_themselves(s3_stores: Bucket, two_process_client: Client) -> None:
    client = two_process_client
    data = dasksc.open(f"s3://{s3_stores.name}/csr.h5ad", storage_options=s3_stores.options)
    expected = batches(data)
    with client.as_current():
        for one, other in zip(batches(data), expected, strict=True):
            np.testing.assert_array_equal(one, other)
        logs = [client.get_scheduler_logs(), client.get_worker_logs(), client.story(), repr(data), str(data.X.dask)]
        # Every worker can read, even one that received none of these fetches.
        for rows in client.run(_first_rows, matrix_of(data.X)).values():
            np.testing.assert_array_equal(rows, dense(data.X[:5].compute()))
    assert SECRET not in repr(logs)


def _first_rows(matrix: Matrix) -> np.ndarray:
    return dense(gather_block(matrix.fetch(np.arange(5)), np.arange(5)))


def test_metadata_are_read_by_few_requests(web_stores: HTTPServer) -> None:
    dasksc.open(f"{web_stores.url}/csr.h5ad")
    # The file has more than 60 groups and datasets, but fits in one block. For each matrix, two more requests read the
    # version and the header of the file.
    assert len(web_stores.faults.requests) < 40
    assert sum(wanted != "bytes=0-0" for _, _, wanted in web_stores.faults.requests) < 20
