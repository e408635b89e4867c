"""Locations other than one file: patterns, folders, collections and catalogues at URLs; file systems of fsspec."""

from __future__ import annotations

import itertools
import pickle
import shutil
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import dask
import fsspec
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from anndata import AnnData
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from fsspec.utils import infer_storage_options

import dasksc
from dasksc.errors import CorruptDataError, InputError, MissingPathError, StorageError
from dasksc.storage.remote import fsspec_client, remote_file
from dasksc.storage.remote.remote_file import RemoteFile
from dasksc.storage.remote.urls import RemoteLocation
from tests.support.data import batches, make_adata, same, write_store
from tests.support.servers import SECRET, Bucket, HTTPServer, google_options, relaying, serving, touch_later

obstore = pytest.importorskip("obstore")

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three atlases, other files, and a collection of eleven atlases in the format of annbatch."""
    folder = tmp_path_factory.mktemp("places")
    parts = folder / "parts"
    parts.mkdir()
    for number, kind in enumerate(["h5ad", "zarr3", "h5ad"]):
        part = make_adata(30 + number, 12)
        path = write_store(part, folder, kind, name=f"one{number}")
        path.rename(parts / f"part{number}{path.suffix}")
    (parts / "notes.txt").write_text("no atlas")
    (parts / ".hidden.h5ad").write_text("no atlas")
    for run in ("run[3]", "run3"):  # the first name is also a pattern that the second one matches
        (folder / run).mkdir()
        for number in range(2):
            write_store(make_adata(5 + number, 12), folder / run, "h5ad", name=f"of_{run[-1]}_{number}")
    zarr.open_group(folder / "collection.zarr", mode="w", zarr_format=3)
    for number in range(11):
        part = AnnData(make_adata(5 + number, 12).X, var=pd.DataFrame(index=[f"gene{i}" for i in range(12)]))
        write_store(part, folder, "zarr3", name="one").rename(folder / "collection.zarr" / f"dataset_{number}")
    return folder


@pytest.fixture(scope="module")
def bucket(folder: Path, s3: Callable[[str], Bucket]) -> Bucket:
    bucket = s3("places")
    for name in ("parts", "collection.zarr", "run[3]", "run3"):
        bucket.put(folder / name)
    # Some programs create empty objects for folders.
    bucket.client.put_object(Bucket=bucket.name, Key="parts/", Body=b"")
    bucket.put(folder / "parts/part0.h5ad", "odd/a[1].h5ad")
    return bucket


@pytest.fixture(scope="module")
def memory(folder: Path) -> Iterator[str]:
    """Write the same files to the memory file system of fsspec."""
    system = fsspec.filesystem("memory")
    system.put(str(folder), "/places", recursive=True)
    yield "memory://places"
    system.rm("/places", recursive=True)


@pytest.fixture(scope="module")
def places(folder: Path, bucket: Bucket, memory: str) -> dict[str, tuple[str, dict[str, Any] | None]]:
    """Return the locations of the same atlases by kind, and the options to read them."""
    return {"file": (folder.as_uri(), None), "memory": (memory, None), "s3": (f"s3://{bucket.name}", bucket.options)}


@pytest.mark.parametrize(
    ("kind", "what", "n_parts"),
    [
        ("file", "parts", 3),
        ("file", "parts/**/part?.*", 3),
        ("memory", "pa*/part[02].h5ad", 2),
        ("memory", "**/part*.h5ad", 2),
        ("memory", "run[3]/of*", 2),
        ("s3", "parts/", 3),
        ("s3", "**/parts/*.zarr", 1),
        ("s3", "par*", 3),
        ("s3", "collection.zarr", 11),
    ],
)
def test_patterns_folders_and_collections_are_those_of_local_paths(
    folder: Path, places: dict[str, Any], kind: str, what: str, n_parts: int
) -> None:
    root, options = places[kind]
    join_options: dict[str, Any] = {"label": "part", "index_unique": "-"}
    remote = dasksc.open(f"{root}/{what}", storage_options=options, **join_options)
    same(remote, dasksc.open(str(folder / what), **join_options))
    assert remote.obs["part"].nunique() == n_parts


def test_a_name_that_looks_like_a_pattern_is_a_name(folder: Path, bucket: Bucket) -> None:
    adata = dasksc.open(f"s3://{bucket.name}/odd/a[1].h5ad", storage_options=bucket.options)
    same(adata, dasksc.open(folder / "parts/part0.h5ad"))


@pytest.mark.parametrize("what", ["parts/part*.h5ad", "parts"])
def test_a_web_server_cannot_list_its_files(folder: Path, what: str) -> None:
    with (
        serving(folder) as server,
        pytest.raises(StorageError, match=r"does not list .*as a list|as a list, since web servers do not list"),
    ):
        dasksc.open(f"{server.url}/{what}")


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_a_collection_on_a_web_server_needs_consolidated_metadata(folder: Path, tmp_path: Path) -> None:
    with serving(folder) as server, pytest.raises(StorageError, match="consolidate_metadata"):
        dasksc.open(f"{server.url}/collection.zarr")
    shutil.copytree(folder / "collection.zarr", tmp_path / "collection.zarr")
    zarr.consolidate_metadata(tmp_path / "collection.zarr")
    with serving(tmp_path) as server:
        url = f"{server.url}/collection.zarr"
        local, *remote = (
            dasksc.open(path, index_unique="-") for path in (folder / "collection.zarr", url, f"{url}?token=a")
        )
        for one in remote:
            same(one, local)


def test_atlases_on_google_cloud_storage_are_the_local_ones(folder: Path, bucket: Bucket) -> None:
    root, options = f"gs://{bucket.name}", google_options(bucket, "parts")
    for name in ("part0.h5ad", "part1.zarr"):
        remote = dasksc.open(f"{root}/parts/{name}", storage_options=options)
        local = dasksc.open(folder / "parts" / name)
        same(remote, local)
        for one, other in zip(batches(remote), batches(local), strict=True):
            np.testing.assert_array_equal(one, other)
    several = dasksc.open(f"{root}/parts/part*", storage_options=options, index_unique="-")
    same(several, dasksc.open(folder / "parts", index_unique="-"))
    with pytest.raises(MissingPathError, match=f"{root}/nothing.h5ad"):
        dasksc.open(f"{root}/nothing.h5ad", storage_options=options)


class Counted(AbstractBufferedFile):
    """File of `Faulty` that counts the bytes read."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        self.fs.asked(start, end)
        return self.fs.folder.joinpath(self.path).read_bytes()[start:end]


class Faulty(AbstractFileSystem):
    """File system as packages register it with fsspec, with connections that serve one thread and fail on demand."""

    protocol = "faulty"
    folder: Path
    numbers = itertools.count()
    fails = staticmethod(lambda number: False)
    error: Exception = OSError("connection lost")
    read_bytes = 0

    def __init__(self, password: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.busy = threading.Lock()
        self.is_broken = False

    def asked(self, start: int = 0, end: int = 0) -> None:
        assert self.busy.acquire(blocking=False), "a connection is used by several threads at once"
        try:
            assert not self.is_broken, "a broken connection is used again"
            if Faulty.fails(next(Faulty.numbers)):
                self.is_broken = True
                raise Faulty.error
            Faulty.read_bytes += end - start
        finally:
            self.busy.release()

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self.asked()
        file = self.folder / path
        status = file.stat()
        kind = "directory" if file.is_dir() else "file"
        return {"name": path, "size": status.st_size, "type": kind, "mtime": status.st_mtime_ns}

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        self.asked()
        names = [f"{path}/{one.name}" for one in sorted((self.folder / path).iterdir())]
        return [self.info(name) for name in names] if detail else names

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Counted:
        return Counted(self, path, mode, **options)


@pytest.fixture
def faulty(folder: Path, monkeypatch: pytest.MonkeyPatch) -> type[Faulty]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    monkeypatch.setattr(Faulty, "folder", folder, raising=False)
    monkeypatch.setattr(Faulty, "numbers", itertools.count())
    monkeypatch.setattr(Faulty, "read_bytes", 0)
    monkeypatch.setattr(Faulty, "fails", staticmethod(lambda number: False))
    monkeypatch.setattr(Faulty, "error", OSError("connection lost"))
    return Faulty


@pytest.mark.parametrize("name", ["part0.h5ad", "part1.zarr"])
def test_registered_file_systems_are_read_and_failed_requests_are_repeated(
    folder: Path, faulty: type[Faulty], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = dasksc.open(folder / "parts" / name)
    monkeypatch.setattr(faulty, "fails", staticmethod(lambda number: number % 5 == 3))
    remote = dasksc.open(f"faulty://parts/{name}", obs=["int8"])
    for one, other in zip(batches(remote), batches(local), strict=True):
        np.testing.assert_array_equal(one, other)
    assert next(faulty.numbers) > 8, "too little was asked for to fail"


def test_permanent_failures_are_named_without_credentials(
    faulty: type[Faulty], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "dasksc")
    url = f"faulty://user:{SECRET}@host/parts/part0.h5ad"
    monkeypatch.setattr(
        faulty, "_strip_protocol", staticmethod(lambda url: infer_storage_options(url)["path"].strip("/"))
    )
    options = {"password": SECRET + "2"}
    adata = dasksc.open(url, storage_options=options)
    assert len(batches(adata)) == 2
    assert SECRET in pickle.dumps(dasksc.pushdown.matrix_of(adata.X)).decode("latin1")
    monkeypatch.setattr(faulty, "fails", staticmethod(lambda number: True))
    monkeypatch.setattr(faulty, "error", OSError(f"550 {url} with {options}"))
    with dask.config.set({"dasksc.retry-timeout": "200ms"}), pytest.raises(dasksc.DaskscError) as caught:
        batches(adata)
    assert "faulty://host/parts/part0.h5ad" in str(caught.value)
    assert "bytes" in str(caught.value)
    text = "".join(traceback.format_exception(caught.value)) + repr(adata) + str(adata.X.dask) + caplog.text
    assert SECRET not in text


def test_a_file_that_was_replaced_in_memory_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_client, "_RECHECK_S", 0.0)
    system = fsspec.filesystem("memory")
    content = (folder / "parts/part0.h5ad").read_bytes()
    system.pipe("/replaced.h5ad", content)
    try:
        adata = dasksc.open("memory://replaced.h5ad")
        assert len(batches(adata)) == 2
        system.pipe("/replaced.h5ad", content)
        with pytest.raises(dasksc.DaskscError, match="was replaced or changed"):
            batches(adata)
        system.pipe("/replaced.h5ad", content[:-100])
        with pytest.raises(CorruptDataError, match="truncated"):
            dasksc.open("memory://replaced.h5ad")
    finally:
        system.rm("/replaced.h5ad")


def test_file_systems_that_need_options_get_them(folder: Path) -> None:
    expected = dasksc.open(folder / "parts/part1.zarr")
    options = {"path": str(folder / "parts"), "target_protocol": "file"}
    same(dasksc.open("dir://part1.zarr", storage_options=options), expected)
    files = [file for file in (folder / "parts/part1.zarr").rglob("*") if file.is_file()]
    references = {file.relative_to(folder / "parts").as_posix(): [str(file)] for file in files}
    options = {"fo": references, "remote_protocol": "file"}
    same(dasksc.open("reference://part1.zarr", storage_options=options), expected)
    same(dasksc.open(f"local://{folder}/parts/part1.zarr"), expected)


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("nosuch://host/atlas.h5ad", None, "s3"),
        ("smb://host/atlas.h5ad", None, "smbprotocol"),
        ("zip://atlas.h5ad::s3://bucket/atlases.zip", None, "chain of URLs"),
        ("ftp://host/", None, "URL of a whole bucket"),
        ("https://host/a/../../atlas.h5ad", None, r"'\.\.' in its path"),
        ("faulty://atlas.h5ad", {"nothing": 1, "skip_instance_cache": 1}, "storage_options"),
    ],
)
def test_urls_that_cannot_be_read_say_why(
    faulty: type[Faulty], url: str, options: dict[str, Any] | None, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        dasksc.open(url, storage_options=options)


def test_a_zipped_store_behind_a_url_is_refused_with_what_to_do(tmp_path: Path) -> None:
    store = write_store(make_adata(30, 12), tmp_path, "zarr3")
    archive = Path(shutil.make_archive(str(store), "zip", store))
    assert archive.name.endswith(".zarr.zip")
    same(dasksc.open(archive), dasksc.open(store))
    with serving(tmp_path) as server:
        url = f"{server.url}/{archive.name}"
        with pytest.raises(InputError, match=archive.name):
            dasksc.open(url)
        with pytest.raises(InputError, match=archive.name):
            dasksc.storage.open_matrix(RemoteLocation.of(url, {}), "X")
    # A directory with such a name is a store like any other.
    store.rename(tmp_path / "unpacked.zip")
    with serving(tmp_path) as server:
        same(dasksc.open(f"{server.url}/unpacked.zip"), dasksc.open(archive))


def write_part(path: Path, number: int, compression: Any = None) -> Path:
    x = sp.csr_matrix(np.arange(12, dtype=np.float32).reshape(3, 4) * number)
    obs = pd.DataFrame({"kind": pd.Categorical(["a", "b", "a"])}, index=[f"{number}-{i}" for i in range(3)])
    AnnData(X=x, obs=obs, var=pd.DataFrame(index=list("wxyz"))).write_h5ad(path, compression=compression)
    return path


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    parts = tmp_path / "parts"
    parts.mkdir()
    for number in range(4):
        write_part(parts / f"{number}.h5ad", number, "gzip" if number % 2 else None)
    return parts


@pytest.fixture
def web(parts: Path) -> Iterator[HTTPServer]:
    with serving(parts) as server:
        yield server


def bucket_of(bucket: Bucket, folder: Path, n_objects: int) -> Bucket:
    """Put copies of one small file below ``parts/``, with obstore, which takes less time than boto3."""
    content = write_part(folder / "one.h5ad", 1).read_bytes()
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
        dasksc.index(f"s3://{bucket.name}/parts/????.h5ad", catalog, storage_options=options)
        paths = [path for _, path, _ in server.faults.requests]
        assert len(paths) == len(set(paths)) + 1  # the folder is listed by the pattern, and again for the versions
        del server.faults.requests[:]
        assert dasksc.open(catalog, storage_options=options).n_obs == 120
        assert len(server.faults.requests) == 1
        assert set(server.faults.payers) == {"requester"}


@pytest.mark.parametrize("are_small", [True, False])
def test_a_catalogue_of_urls_opens_as_the_files(
    parts: Path, web: HTTPServer, tmp_path: Path, are_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not are_small:
        monkeypatch.setattr(remote_file, "_WHOLE_BYTES", 0)
    urls = [f"{web.url}/{number}.h5ad" for number in range(4)]
    dasksc.index(urls, tmp_path / "all.catalog")
    local = dasksc.open(parts)
    same(dasksc.open(urls), local)
    same(dasksc.open(tmp_path / "all.catalog"), local)


def test_large_objects_are_opened_at_the_same_time(
    parts: Path, web: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, "_WHOLE_BYTES", 0)
    met, barrier = [], threading.Barrier(4)

    def block(file: RemoteFile, start: int, stop: int) -> memoryview:
        if start == 0:
            met.append(barrier.wait(timeout=30))
        return file._request(start, stop)

    monkeypatch.setattr(RemoteFile, "fetch", block)
    same(dasksc.open([f"{web.url}/{number}.h5ad" for number in range(4)]), dasksc.open(parts))
    assert sorted(met) == [0, 1, 2, 3]


def test_a_large_object_that_is_damaged_is_named(parts: Path, web: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_file, "_WHOLE_BYTES", 0)
    (parts / "2.h5ad").write_bytes((parts / "2.h5ad").read_bytes()[:3000])
    urls = [f"{web.url}/{number}.h5ad" for number in range(4)]
    with pytest.raises(StorageError, match="2.h5ad"):
        dasksc.open(urls)
    assert dasksc.open(urls, on_error="skip").n_obs == dasksc.open([parts / f"{i}.h5ad" for i in (0, 1, 3)]).n_obs


@pytest.mark.parametrize("format", ["zarr2", "zarr3"])
def test_a_store_of_many_objects_that_changed_or_is_gone_is_named(
    parts: Path, web: HTTPServer, tmp_path: Path, format: str
) -> None:
    store = write_store(make_adata(), parts, format).rename(parts / "50%25 #1.zarr")
    url, catalog = f"{web.url}/{quote(store.name)}", tmp_path / "all.catalog"
    dasksc.index([url], catalog)
    with pytest.raises(dasksc.InputError, match="query"):
        dasksc.index([f"{url}?token=1"], catalog)
    same(dasksc.open(catalog), dasksc.open([store]))
    touch_later(next(path for path in store.iterdir() if path.name in ("zarr.json", ".zgroup")))
    with pytest.raises(dasksc.CorruptDataError, match=store.name):
        dasksc.open(catalog)
    shutil.rmtree(store)
    with pytest.raises(dasksc.MissingPathError, match=store.name):
        dasksc.open(catalog)


@pytest.mark.parametrize("etags", [True, False])
@pytest.mark.parametrize("name", ["0.h5ad", "1.h5ad"])
def test_an_object_that_changed_or_is_gone_is_named(
    parts: Path, web: HTTPServer, tmp_path: Path, name: str, etags: bool
) -> None:
    web.faults.etags = etags
    dasksc.index([f"{web.url}/{number}.h5ad" for number in range(4)], tmp_path / "all.catalog")
    adata = dasksc.open(tmp_path / "all.catalog")
    touch_later(parts / name)
    with pytest.raises(dasksc.CorruptDataError, match=name):
        dasksc.open(tmp_path / "all.catalog")
    with pytest.raises(dasksc.CorruptDataError, match=name):
        adata.X.compute()
    (parts / name).unlink()
    with pytest.raises(dasksc.MissingPathError, match=name):
        dasksc.open(tmp_path / "all.catalog")
