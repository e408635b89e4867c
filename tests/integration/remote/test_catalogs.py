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

pytest.importorskip("obstore")

pytestmark = pytest.mark.programs

N_OBJECTS = 2_000


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


def test_thousands_of_objects_are_listed_indexed_and_read(s3: Callable[[str], Bucket], tmp_path: Path) -> None:
    bucket = s3("thousands")
    bucket.put(write(tmp_path / "one.h5ad", 1), "parts/0000.h5ad")
    source = {"Bucket": bucket.name, "Key": "parts/0000.h5ad"}
    for number in range(1, N_OBJECTS):
        bucket.client.copy_object(Bucket=bucket.name, Key=f"parts/{number:04}.h5ad", CopySource=source)
    catalog = tmp_path / "all.catalog"
    with relaying(bucket.options["endpoint"]) as server:
        options = bucket.options | {"endpoint": server.url, "request_payer": True}
        n = dasksc.index(f"s3://{bucket.name}/parts/*.h5ad", catalog, names=False, storage_options=options)
        # The objects are requested once, and otherwise listed.
        assert n == N_OBJECTS
        assert len(server.faults.requests) < 1.01 * N_OBJECTS + 10
        del server.faults.requests[:]
        adata = dasksc.open(catalog, names=False, storage_options=options)
        assert len(server.faults.requests) < 10
        assert adata.n_obs == 3 * N_OBJECTS
        dataset = dasksc.scDataset(adata, dasksc.BlockShuffling(1), 64, layout="csr", seed=0, obs=["kind"])
        batch = next(iter(dataset))
        assert batch.X.shape == (64, 4)
        # The buckets' owners let others pay if each request says so.
        assert set(server.faults.payers) == {"requester"}
    bucket.put(write(tmp_path / "one.h5ad", 2), "parts/0007.h5ad")
    with pytest.raises(dasksc.CorruptDataError, match=r"1 of 2000 .*parts/0007\.h5ad"):
        dasksc.open(catalog, storage_options=bucket.options).X.compute()


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
