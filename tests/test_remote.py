"""Atlases behind URLs: the same values as from the local file, whatever the network does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

import dasksc
from tests.data import FORMATS, dense, make_adata, write_store
from tests.servers import Bucket, HTTPServer, s3_bucket, serving

pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remote")
    for layout in ("csr", "dense"):
        for format in FORMATS:
            write_store(make_adata(200, 30, layout=layout), folder, format, name=layout)
    return folder


@pytest.fixture(scope="module")
def bucket(folder: Path) -> Iterator[Bucket]:
    with s3_bucket() as bucket:
        for path in folder.iterdir():
            bucket.put(path)
        yield bucket


@pytest.fixture
def server(folder: Path) -> Iterator[HTTPServer]:
    with serving(folder) as server:
        yield server


def same(remote: AnnData, local: AnnData) -> None:
    pd.testing.assert_frame_equal(remote.obs, local.obs)
    pd.testing.assert_frame_equal(remote.var, local.var)
    np.testing.assert_array_equal(dense(remote.X.compute()), dense(local.X.compute()))
    for name in ("layers", "obsm", "obsp"):
        assert set(getattr(remote, name)) == set(getattr(local, name))
        for key, array in getattr(local, name).items():
            if not isinstance(array, pd.DataFrame):
                np.testing.assert_array_equal(dense(getattr(remote, name)[key].compute()), dense(array.compute()))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_an_atlas_on_s3_is_the_local_one(folder: Path, bucket: Bucket, layout: str, format: str) -> None:
    name = f"{layout}.h5ad" if format == "h5ad" else f"{layout}.{format}.zarr"
    remote = dasksc.open(f"s3://{bucket.name}/{name}", storage_options=bucket.options)
    same(remote, dasksc.open(folder / name))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_an_atlas_on_a_web_server_is_the_local_one(folder: Path, server: HTTPServer, layout: str, format: str) -> None:
    name = f"{layout}.h5ad" if format == "h5ad" else f"{layout}.{format}.zarr"
    same(dasksc.open(f"{server.url}/{name}"), dasksc.open(folder / name))
