"""Catalogues of many objects at URLs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import dasksc
from tests.support.data import same
from tests.support.servers import Bucket, HTTPServer, relaying, serving, touch_later

obstore = pytest.importorskip("obstore")

pytestmark = pytest.mark.programs


def write(path: Path, number: int, compression: Any = None) -> Path:
    x = sp.csr_matrix(np.arange(12, dtype=np.float32).reshape(3, 4) * number)
    obs = pd.DataFrame({"kind": pd.Categorical(["a", "b", "a"])}, index=[f"{number}-{i}" for i in range(3)])
    anndata.AnnData(X=x, obs=obs, var=pd.DataFrame(index=list("wxyz"))).write_h5ad(path, compression=compression)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in range(4):
        write(folder / f"{number}.h5ad", number, "gzip" if number % 2 else None)
    return folder


@pytest.fixture
def web(folder: Path) -> Iterator[HTTPServer]:
    with serving(folder) as server:
        yield server


def bucket_of(bucket: Bucket, folder: Path, n_objects: int) -> Bucket:
    """Put copies of one small file below ``parts/``, with obstore, which takes less time than boto3."""
    content = write(folder / "one.h5ad", 1).read_bytes()
    store = obstore.store.S3Store(bucket.name, **bucket.options, client_options={"allow_http": True})
    for number in range(n_objects):
        obstore.put(store, f"parts/{number:04}.h5ad", content)
    return bucket


def test_objects_are_requested_once_and_checked_by_listing_while_the_requester_pays(
    s3: Callable[[str], Bucket], tmp_path: Path
) -> None:
    bucket, catalog = bucket_of(s3("paid"), tmp_path, 40), tmp_path / "all.catalog"
    with relaying(bucket.options["endpoint"]) as server:
        options = bucket.options | {"endpoint": server.url, "request_payer": True}
        dasksc.index(f"s3://{bucket.name}/parts/*.h5ad", catalog, storage_options=options)
        paths = [path for _, path, _ in server.faults.requests]
        assert len(paths) == len(set(paths)) + 1  # the folder is listed by the pattern, and again for the versions
        del server.faults.requests[:]
        assert dasksc.open(catalog, storage_options=options).n_obs == 120
        assert len(server.faults.requests) == 1
        assert set(server.faults.payers) == {"requester"}


def test_a_catalogue_of_urls_opens_as_the_files(folder: Path, web: HTTPServer, tmp_path: Path) -> None:
    urls = [f"{web.url}/{number}.h5ad" for number in range(4)]
    dasksc.index(urls, tmp_path / "all.catalog")
    local = dasksc.open(folder)
    same(dasksc.open(urls), local)
    same(dasksc.open(tmp_path / "all.catalog"), local)


@pytest.mark.parametrize("etags", [True, False])
@pytest.mark.parametrize("name", ["0.h5ad", "1.h5ad"])
def test_an_object_that_changed_or_is_gone_is_named(
    folder: Path, web: HTTPServer, tmp_path: Path, name: str, etags: bool
) -> None:
    web.faults.etags = etags
    dasksc.index([f"{web.url}/{number}.h5ad" for number in range(4)], tmp_path / "all.catalog")
    adata = dasksc.open(tmp_path / "all.catalog")
    touch_later(folder / name)
    with pytest.raises(dasksc.CorruptDataError, match=name):
        dasksc.open(tmp_path / "all.catalog")
    with pytest.raises(dasksc.CorruptDataError, match=name):
        adata.X.compute()
    (folder / name).unlink()
    with pytest.raises(dasksc.MissingPathError, match=name):
        dasksc.open(tmp_path / "all.catalog")
