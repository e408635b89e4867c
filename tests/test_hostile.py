"""Files made to do harm: refused with a reason, without running code, reading elsewhere or filling memory."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pandas as pd
import pytest
import zarr
from anndata import AnnData

import dasksc
from dasksc import collection
from dasksc.errors import StorageError
from dasksc.storage import open_matrix, zarr_guard
from tests.support.data import write_store
from tests.support.servers import serving

# Of formats that are to come.
pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore:Writing zarr v2"),
    pytest.mark.filterwarnings("ignore:Consolidated"),
]

VALUES = np.arange(300.0, dtype=np.float32).reshape(50, 6)
BOMB_BYTES = 2**26


@pytest.fixture(params=["local", "remote"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Opens what is in the folder by its name: from the disk, or from a web server."""
    if request.param == "local":
        yield lambda name: dasksc.open(tmp_path / name)
        return
    pytest.importorskip("obstore")
    with serving(tmp_path) as server:
        yield lambda name: dasksc.open(f"{server.url}/{name}")


def small() -> AnnData:
    """A dense atlas of 20 cells and 6 genes."""
    obs = pd.DataFrame({"int8": np.arange(20, dtype=np.int8)}, index=[f"cell{i}" for i in range(20)])
    return AnnData(X=VALUES[:20], obs=obs)


def array_at(path: Path, where: str) -> str:
    """The name of an array; newer versions of AnnData store strings as a group with values."""
    is_array = any((path / where / name).exists() for name in (".zarray",)) or (
        (path / where / "zarr.json").exists() and not (path / where / "values").exists()
    )
    return where if is_array else f"{where}/values"


def edited(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("where", ["X", "obs/int8", "obs/_index"])
def test_pickles_in_arrays_are_not_loaded(tmp_path: Path, opened: Any, where: str) -> None:
    path = write_store(small(), tmp_path, "zarr2")
    mark, where = tmp_path / "unpickled", array_at(path, where)
    metadata = path / where / ".zarray"
    edited(metadata, filters=[{"id": "pickle", "protocol": 5}], compressor=None)
    everything = json.loads((path / ".zmetadata").read_text())
    everything["metadata"][f"{where}/.zarray"] = json.loads(metadata.read_text())
    (path / ".zmetadata").write_text(json.dumps(everything))
    for chunk in (path / where).glob("[0-9]*"):
        chunk.write_bytes(pickle.dumps([Bomb(mark)]))
    with pytest.raises(StorageError, match="pickle"):
        opened(path.name).X.compute()
    assert not mark.exists()


@pytest.mark.parametrize("n", [2**62, 2**40])
@pytest.mark.parametrize("where", ["X", "obs/_index", "obs/int8"])
@pytest.mark.parametrize("format", ["zarr2", "zarr3"])
def test_shapes_beyond_any_memory_are_refused(tmp_path: Path, opened: Any, format: str, where: str, n: int) -> None:
    path = write_store(small(), tmp_path, format)
    where = array_at(path, where)
    metadata = path / where / (".zarray" if format == "zarr2" else "zarr.json")
    shape = json.loads(metadata.read_text())["shape"]
    edited(metadata, shape=[n, *shape[1:]])
    everything = path / (".zmetadata" if format == "zarr2" else "zarr.json")
    document = json.loads(everything.read_text())
    if format == "zarr2":
        document["metadata"][f"{where}/.zarray"]["shape"] = [n, *shape[1:]]
    else:
        document["consolidated_metadata"]["metadata"][where]["shape"] = [n, *shape[1:]]
    everything.write_text(json.dumps(document))
    with bounded(), pytest.raises(dasksc.DaskscError):
        opened(path.name).X.compute()


@pytest.mark.parametrize("n", [2**62, 2**40])
@pytest.mark.parametrize("where", ["X", "obs/_index", "obs/int8"])
def test_shapes_beyond_any_memory_are_refused_in_hdf5(tmp_path: Path, opened: Any, where: str, n: int) -> None:
    path = write_store(small(), tmp_path, "h5ad")
    with h5py.File(path, "r+") as file:
        where = where if isinstance(file[where], h5py.Dataset) else f"{where}/values"
        old = file[where]
        attributes, dtype, shape = dict(old.attrs), old.dtype, (n, *old.shape[1:])
        del file[where]
        new = file.create_dataset(where, shape, dtype, chunks=(1024, *shape[1:]))
        for name, value in attributes.items():
            new.attrs[name] = value
    with bounded(), pytest.raises(dasksc.DaskscError):
        opened(path.name).X.compute()


class bounded:
    """Fails if much memory was taken inside."""

    def __enter__(self) -> None:
        tracemalloc.start()

    def __exit__(self, *error: object) -> None:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < BOMB_BYTES // 2, f"{peak} bytes"


def bombs() -> dict[str, tuple[Any, bytes]]:
    zeros = bytes(BOMB_BYTES)
    return {
        "gzip": (numcodecs.GZip(), gzip.compress(zeros, 1)),
        "zlib": (numcodecs.Zlib(), numcodecs.Zlib(1).encode(zeros)),
        "zstd": (numcodecs.Zstd(), numcodecs.Zstd().encode(zeros)),
        "lz4": (numcodecs.LZ4(), numcodecs.LZ4().encode(zeros)),
        "bz2": (numcodecs.BZ2(), bz2.compress(zeros, 9)),
        "lzma": (numcodecs.LZMA(), lzma.compress(zeros, preset=0)),
        "blosc": (numcodecs.Blosc(), numcodecs.Blosc(cname="zstd").encode(zeros)),
    }


@pytest.fixture(scope="module")
def bomb_files() -> dict[str, tuple[Any, bytes]]:
    return bombs()


@pytest.mark.parametrize("codec", ["gzip", "zlib", "zstd", "lz4", "bz2", "lzma", "blosc"])
def test_chunks_that_swell_are_refused(tmp_path: Path, bomb_files: Any, codec: str) -> None:
    compressor, bomb = bomb_files[codec]
    group = zarr.open_group(tmp_path / "store", mode="w", zarr_format=2)
    group.create_array("X", data=VALUES, chunks=(50, 6), compressors=compressor)
    (tmp_path / "store" / "X" / "0.0").write_bytes(bomb)
    matrix = open_matrix(tmp_path / "store", "X")
    with bounded(), pytest.raises(StorageError, match="rows 0 to 49"):
        matrix.fetch(np.arange(50))


def arrays_read_whole() -> list[str]:
    return ["obs/n", "obs/_index", "var/n", "uns/deep/n", "obsm/n/n", "varm/n"]


@pytest.mark.parametrize("where", arrays_read_whole())
@pytest.mark.parametrize("codec", ["gzip", "zlib", "zstd", "lz4", "bz2", "lzma", "blosc"])
def test_chunks_of_tables_that_swell_are_refused(tmp_path: Path, bomb_files: Any, codec: str, where: str) -> None:
    compressor, bomb = bomb_files[codec]
    path = write_store(full(), tmp_path, "zarr2")
    where = array_at(path, where)
    recompressed(path, where, compressor=compressor.get_config())
    for chunk in (path / where).glob("[0-9]*"):
        chunk.write_bytes(bomb)
    with bounded(), pytest.raises(StorageError, match=rf"decode \({codec}\) to more than"):
        dasksc.open(path)


@pytest.mark.parametrize(
    "filters",
    [
        [{"id": "astype", "encode_dtype": "|u1", "decode_dtype": "<U13421772"}],
        [{"id": "fixedscaleoffset", "offset": 0, "scale": 1, "dtype": "<U13421772", "astype": "|u1"}],
        [{"id": "categorize", "labels": ["a"], "dtype": "<U13421772", "astype": "|u1"}],
        [{"id": "json2", "encoding": "utf-8"}],
    ],
    ids=lambda filters: filters[0]["id"],
)
def test_filters_that_make_anything_of_bytes_are_refused(tmp_path: Path, filters: list[dict[str, Any]]) -> None:
    path = write_store(full(), tmp_path, "zarr2")
    recompressed(path, "obs/n", compressor=None, filters=filters)
    for chunk in (path / "obs/n").glob("[0-9]*"):
        chunk.write_bytes(b'[0, "<f8", [134217728]]' if filters[0]["id"] == "json2" else bytes(20))
    with bounded(), pytest.raises(StorageError, match=r"are not read|is not a Zarr store"):
        dasksc.open(path)


@pytest.mark.parametrize("format", ["zarr2", "zarr3"])
def test_chunks_that_say_they_hold_very_many_strings_are_refused(tmp_path: Path, format: str) -> None:
    path = write_store(full(), tmp_path, format)
    where = array_at(path, "obs/_index")
    stated = (2**30).to_bytes(4, "little") + bytes(100)
    if format == "zarr2":
        recompressed(path, where, compressor=None)
    else:
        group = zarr.open_group(path)
        attributes, values = dict(group[where].attrs), group[where][:]
        new = group.create_array(where, data=values, chunks=values.shape, compressors=None, overwrite=True)
        new.attrs.update(attributes)
        zarr.consolidate_metadata(path)
        assert dasksc.open(path).obs_names[3] == "cell3"
    for chunk in [*(path / where).glob("[0-9]*"), *(path / where).glob("c/*")]:
        chunk.write_bytes(stated)
    with bounded(), pytest.raises(StorageError, match=r"holds 1073741824 strings"):
        dasksc.open(path)


def test_lzma_without_a_header_is_refused(tmp_path: Path) -> None:
    path = write_store(full(), tmp_path, "zarr2")
    raw = {"id": "lzma", "format": 3, "check": -1, "preset": None, "filters": [{"id": 0x21, "preset": 1}]}
    recompressed(path, "obs/n", compressor=raw)
    for chunk in (path / "obs/n").glob("[0-9]*"):
        chunk.write_bytes(numcodecs.get_codec(dict(raw)).encode(bytes(BOMB_BYTES)))
    with bounded(), pytest.raises(StorageError, match="LZMA without its header"):
        dasksc.open(path)


def test_a_child_of_a_fork_opens_and_leaves_zarr_as_it_was(tmp_path: Path) -> None:
    path = write_store(full(), tmp_path, "zarr3")
    before = zarr.config.get("codec_pipeline.path")
    with zarr_guard.chunks_that_fit(), zarr_guard._setting:
        pid = os.fork()
        if pid == 0:
            # Not pytest's: what fails here must not go on there.
            os._exit(zarr.config.get("codec_pipeline.path") != before or not zarr_guard._setting.acquire(timeout=5))
        assert os.waitpid(pid, 0)[1] == 0
    assert zarr.config.get("codec_pipeline.path") == before
    assert dasksc.open(path).n_obs == 20


def recompressed(path: Path, where: str, **changes: Any) -> None:
    """Change what an array of Zarr 2 says of its codecs."""
    everything = json.loads((path / ".zmetadata").read_text())
    everything["metadata"][f"{where}/.zarray"] |= changes
    (path / ".zmetadata").write_text(json.dumps(everything))
    edited(path / where / ".zarray", **changes)


def test_chunks_of_tables_that_are_compressed_twice_are_refused(tmp_path: Path) -> None:
    path = write_store(full(), tmp_path, "zarr2")
    recompressed(path, "obs/n", compressor={"id": "zlib", "level": 1}, filters=[{"id": "zlib", "level": 1}])
    for chunk in (path / "obs/n").glob("[0-9]*"):
        chunk.write_bytes(numcodecs.Zlib(9).encode(numcodecs.Zlib(9).encode(bytes(BOMB_BYTES))))
    with bounded(), pytest.raises(StorageError, match="compressed twice"):
        dasksc.open(path)


V3_CODECS = {"gzip": zarr.codecs.GzipCodec(), "zstd": zarr.codecs.ZstdCodec(), "blosc": zarr.codecs.BloscCodec()}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("codec", V3_CODECS)
def test_chunks_of_tables_of_zarr_3_that_swell_are_refused(
    tmp_path: Path, opened: Any, bomb_files: Any, codec: str, sharded: bool
) -> None:
    path = write_store(full(), tmp_path, "zarr3")
    _, bomb = bomb_files[codec]
    with zarr.config.set({"array.write_empty_chunks": True}):
        array = zarr.open_group(path)["obs/n"]
        attributes, values = dict(array.attrs), array[:]
        new = zarr.open_group(path).create_array(
            "obs/n",
            data=values,
            chunks=(10,),
            shards=(20,) if sharded else None,
            compressors=V3_CODECS[codec],
            overwrite=True,
        )
        new.attrs.update(attributes)
    zarr.consolidate_metadata(path)
    np.testing.assert_array_equal(opened(path.name).obs["n"], values)
    chunk = path / "obs" / "n" / "c" / "0"
    if sharded:  # two chunks, then where they are and a checksum
        index = np.array([0, len(bomb), 0, len(bomb)], "<u8").tobytes()
        chunk.write_bytes(bomb + numcodecs.CRC32C(location="end").encode(index).tobytes())
    else:
        chunk.write_bytes(bomb)
    with bounded(), pytest.raises(StorageError, match=rf"decode \({codec}\) to more than"):
        opened(path.name)


H5_FILTERS = {"gzip": 1, "blosc": 32001, "zstd": 32015, "bz2": 307}


@pytest.mark.parametrize("where", arrays_read_whole())
@pytest.mark.parametrize("codec", H5_FILTERS)
def test_chunks_of_tables_of_hdf5_that_swell_are_refused(
    tmp_path: Path, opened: Any, bomb_files: Any, codec: str, where: str
) -> None:
    bomb = bomb_files["zlib" if codec == "gzip" else codec][1]
    path = write_store(full(), tmp_path, "h5ad")
    with h5py.File(path, "r+") as file:
        where = where if isinstance(file[where], h5py.Dataset) else f"{where}/values"
        rechunked(file, where, H5_FILTERS[codec]).id.write_direct_chunk((0,) * file[where].ndim, bomb)
    with bounded(), pytest.raises(StorageError, match=r"decode \(\w+\) to more than"):
        opened(path.name)


@pytest.mark.parametrize("codec", ["bz2", "gzip"])
def test_chunks_of_matrices_that_h5py_reads_and_that_swell_are_refused(
    tmp_path: Path, opened: Any, bomb_files: Any, codec: str
) -> None:
    path = write_store(small(), tmp_path, "h5ad")
    with h5py.File(path, "r+") as file:
        # Of two bytes floats are read through h5py.
        dtype = np.float16 if codec == "gzip" else np.float32
        attributes = dict(file["X"].attrs)
        del file["X"]
        file.create_dataset("X", (20, 6), dtype).attrs.update(attributes)
        bomb = bomb_files["zlib" if codec == "gzip" else codec][1]
        rechunked(file, "X", H5_FILTERS[codec]).id.write_direct_chunk((0, 0), bomb)
    adata = opened(path.name)
    with bounded(), pytest.raises(StorageError, match=r"decode \(\w+\) to more than"):
        adata.X[:3].compute()


@pytest.mark.parametrize("format", ["zarr2", "h5ad"])
def test_chunks_far_larger_than_their_array_are_refused(tmp_path: Path, format: str) -> None:
    path = write_store(full(), tmp_path, format)
    if format == "zarr2":
        recompressed(path, "obs/n", chunks=[2**29], compressor={"id": "zlib", "level": 1})
    else:
        with h5py.File(path, "r+") as file:
            attributes = dict(file["obs/n"].attrs)
            del file["obs/n"]
            new = file.create_dataset("obs/n", (20,), "f8", maxshape=(None,), chunks=(2**28,), compression="gzip")
            new.attrs.update(attributes)
    with bounded(), pytest.raises(StorageError, match="far larger ones than it needs"):
        dasksc.open(path)


def rechunked(file: h5py.File, name: str, *filters: int) -> h5py.Dataset:
    """Replace a dataset by an empty one of a single chunk."""
    attributes, dtype, shape = dict(file[name].attrs), file[name].dtype, file[name].shape
    del file[name]
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk(shape)
    for number in filters:
        plist.set_filter(number, h5py.h5z.FLAG_OPTIONAL, (5,))
    type_ = h5py.h5t.py_create(dtype, logical=True)
    dataset = h5py.Dataset(h5py.h5d.create(file.id, name.encode(), type_, h5py.h5s.create_simple(shape), plist))
    dataset.attrs.update(attributes)
    return dataset


def test_datasets_of_hdf5_that_are_compressed_twice_are_refused(tmp_path: Path) -> None:
    path = write_store(full(), tmp_path, "h5ad")
    with h5py.File(path, "r+") as file:
        twice = numcodecs.Zlib(9).encode(numcodecs.Zlib(9).encode(bytes(BOMB_BYTES)))
        rechunked(file, "obs/n", 1, 1).id.write_direct_chunk((0,), twice)
    with bounded(), pytest.raises(StorageError, match="one that compresses must be the last"):
        dasksc.open(path)


@pytest.mark.parametrize("compression", ["gzip", "lzf", None])
@pytest.mark.parametrize("fletcher32", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_tables_of_large_chunks_are_read_as_before(
    tmp_path: Path, compression: str | None, shuffle: bool, fletcher32: bool
) -> None:
    path = write_store(full(), tmp_path, "h5ad")
    values = np.random.default_rng(0).standard_normal(200_000)
    with h5py.File(path, "r+") as file:
        file.create_dataset(
            "uns/large",
            data=values,
            chunks=(100_000,),
            compression=compression,
            shuffle=shuffle,
            fletcher32=fletcher32,
        )
        file["uns/large"].attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    np.testing.assert_array_equal(dasksc.open(path).uns["large"], values)


@pytest.mark.parametrize("swollen", ["chunk", "metadata"])
def test_objects_that_are_far_too_long_are_not_fetched(tmp_path: Path, swollen: str) -> None:
    pytest.importorskip("obstore")
    AnnData(X=VALUES).write_zarr(tmp_path / "atlas.zarr")
    file = tmp_path / "atlas.zarr" / ("X/c/0/0" if swollen == "chunk" else "zarr.json")
    if not file.exists():
        file = tmp_path / "atlas.zarr" / ("X/0.0" if swollen == "chunk" else ".zmetadata")
    with file.open("r+b") as grown:
        grown.truncate(2**33)
    with (
        serving(tmp_path) as server,
        bounded(),
        pytest.raises(StorageError, match=r"at most \d+ belong|index of its chunks"),
    ):
        dasksc.open(f"{server.url}/atlas.zarr").X.compute()
    assert sum(stop is None for _, path, stop in server.faults.requests if path.endswith(file.name)) >= 1


@pytest.mark.parametrize("format", [2, 3])
def test_keys_that_lead_elsewhere_are_refused(tmp_path: Path, opened: Any, format: int) -> None:
    path = write_store(small(), tmp_path, f"zarr{format}")
    away = "/../../../../"
    if format == 2:
        edited(path / "X" / ".zarray", dimension_separator=away)
    else:
        edited(
            path / "X" / "zarr.json",
            chunk_key_encoding={"name": "default", "configuration": {"separator": away}},
        )
    (tmp_path / "0").write_bytes(bytes(10**4))
    with pytest.raises(StorageError, match=r"separator|chunk_key_encoding|cannot be read"):
        opened(path.name).X.compute()


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd"])
@pytest.mark.parametrize("format", ["h5ad", "zarr2", "zarr3"])
def test_columns_whose_names_lead_elsewhere_are_refused(tmp_path: Path, opened: Any, format: str, name: str) -> None:
    path = write_store(small(), tmp_path, format)
    if format == "h5ad":
        with h5py.File(path, "r+") as file:
            file["obs"].attrs["column-order"] = [name]
    else:
        file = path / "obs" / (".zattrs" if format == "zarr2" else "zarr.json")
        document = json.loads(file.read_text())
        (document if format == "zarr2" else document["attributes"])["column-order"] = [name]
        file.write_text(json.dumps(document))
        zarr.consolidate_metadata(path)
    with pytest.raises(StorageError, match="cannot be read"):
        opened(path.name)


@pytest.mark.parametrize("how", ["absolute", "upwards", "virtual", "external"])
def test_hdf5_that_leads_to_files_elsewhere_is_refused(tmp_path: Path, opened: Any, how: str) -> None:
    path = write_store(small(), tmp_path, "h5ad")
    outside = tmp_path.parent / f"{tmp_path.name}-outside.h5"
    with h5py.File(outside, "w") as file:
        file["X"] = VALUES[:20]
    with h5py.File(path, "r+") as file:
        del file["X"]
        match how:
            case "absolute":
                file["X"] = h5py.ExternalLink(str(outside), "/X")
            case "upwards":
                file["X"] = h5py.ExternalLink(f"../{outside.name}", "/X")
            case "virtual":
                layout = h5py.VirtualLayout((20, 6), "f4")
                layout[:] = h5py.VirtualSource(str(outside), "X", shape=(20, 6))
                file.create_virtual_dataset("X", layout)
            case "external":
                file.create_dataset("X", (20, 6), "f4", external=[(str(outside), 0, 480)])
    with pytest.raises(StorageError, match=r"another file|other file"):
        opened(path.name)


def full() -> AnnData:
    """A dense atlas that has an array of 20 or 6 numbers in every group whose arrays are read as a whole."""
    adata = small()
    adata.obs["n"] = np.arange(20.0)
    adata.var["n"] = np.arange(6.0)
    adata.varm["n"] = np.arange(12.0).reshape(6, 2)
    adata.varp["n"] = np.arange(36.0).reshape(6, 6)
    adata.obsm["n"] = pd.DataFrame({"n": np.arange(20.0)}, index=adata.obs_names)
    adata.uns |= {"n": np.arange(20.0), "deep": {"n": np.arange(20.0)}}
    return adata


READ_WHOLE = ["obs/n", "var/n", "varm/n", "varp/n", "obsm/n/n", "uns/n", "uns/deep/n"]


@pytest.mark.parametrize("how", ["virtual", "external", "beside"])
@pytest.mark.parametrize("where", READ_WHOLE)
def test_tables_whose_values_are_elsewhere_are_refused(tmp_path: Path, opened: Any, where: str, how: str) -> None:
    path = write_store(full(), tmp_path, "h5ad")
    outside = tmp_path.parent / f"{tmp_path.name}-secret.h5"
    with h5py.File(outside, "w") as file:
        file["n"] = np.full(36, 42.0)
    with h5py.File(path, "r+") as file, h5py.File(tmp_path / "beside.h5", "w") as beside:
        shape, attributes = file[where].shape, dict(file[where].attrs)
        del file[where]
        into, name = (beside, "n") if how == "beside" else (file, where)
        if how == "virtual":
            layout = h5py.VirtualLayout(shape, "f8")
            layout[:] = h5py.VirtualSource(str(outside), "n", shape=shape)
            into.create_virtual_dataset(name, layout)
        else:
            into.create_dataset(name, shape, "f8", external=[(str(outside), 0, 8 * int(np.prod(shape)))])
        into[name].attrs.update(attributes)
        if how == "beside":
            file[where] = h5py.ExternalLink("beside.h5", "/n")
    with pytest.raises(StorageError, match="another file"):
        opened(path.name)


@pytest.mark.parametrize("where", ["X", "uns/n"])
def test_links_that_a_linked_file_has_are_looked_at_too(tmp_path: Path, where: str) -> None:
    path = write_store(full(), tmp_path, "h5ad")
    outside = tmp_path.parent / f"{tmp_path.name}-outside.h5"
    with h5py.File(path, "r+") as file, h5py.File(outside, "w") as other, h5py.File(tmp_path / "b.h5", "w") as beside:
        file.copy(where, other, "it")
        beside["it"] = h5py.ExternalLink(str(outside), "/it")
        beside["soft"] = h5py.SoftLink("/it")
        del file[where]
        file[where] = h5py.ExternalLink("b.h5", "/soft")
    with pytest.raises(StorageError, match="another file"):
        dasksc.open(path)


@pytest.mark.parametrize("dtype", ["f4", ">i2", "f2"])
@pytest.mark.parametrize("where", ["X", "obs/n"])
def test_what_hdf5_would_seek_where_the_process_runs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, dtype: str
) -> None:
    (tmp_path / "atlas").mkdir()
    path = write_store(full(), tmp_path / "atlas", "h5ad")
    (tmp_path / "secret").write_bytes(bytes(480))
    monkeypatch.chdir(tmp_path)
    with h5py.File(path, "r+") as file:
        shape, attributes = file[where].shape, dict(file[where].attrs)
        del file[where]
        file.create_dataset(where, shape, dtype, external=[("secret", 0, 480)]).attrs.update(attributes)
    with pytest.raises(StorageError, match="another file"):
        dasksc.open(path)


def test_values_and_tables_beside_a_file_are_read(tmp_path: Path) -> None:
    path = write_store(full(), tmp_path, "h5ad")
    with h5py.File(path, "r+") as file, h5py.File(tmp_path / "b.h5", "w") as beside:
        beside["n"] = np.arange(100.0, 120.0)
        file.copy("var", beside, "var")
        for name in ("uns/n", "var"):
            del file[name]
        layout = h5py.VirtualLayout((20,), "f8")
        layout[:] = h5py.VirtualSource("b.h5", "n", shape=(20,))
        file.create_virtual_dataset("uns/n", layout).attrs.update(
            {"encoding-type": "array", "encoding-version": "0.2.0"}
        )
        file["var"] = h5py.ExternalLink("b.h5", "/var")
    adata = dasksc.open(path)
    np.testing.assert_array_equal(adata.uns["n"], np.arange(100.0, 120.0))
    np.testing.assert_array_equal(adata.var["n"], np.arange(6.0))


def test_a_file_that_is_itself_reached_by_a_link_is_read(tmp_path: Path) -> None:
    path = write_store(full(), tmp_path, "h5ad")
    link = tmp_path / "elsewhere" / "atlas.h5ad"
    link.parent.mkdir()
    link.symlink_to(path)
    np.testing.assert_array_equal(dasksc.open(link).X.compute(), VALUES[:20])


@pytest.mark.parametrize("where", ["varm", "varp", "uns", "uns/deep", "obs", "var", "obsm"])
@pytest.mark.parametrize("format", ["h5ad", "zarr2", "zarr3"])
def test_arrays_that_only_together_are_too_large_are_refused(
    tmp_path: Path, opened: Any, format: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.sysconf
    pages = {"SC_PHYS_PAGES": 2**30 // real("SC_PAGE_SIZE")}
    monkeypatch.setattr(os, "sysconf", lambda name: pages.get(name) or real(name))
    path = write_store(full(), tmp_path, format)
    length = 20 if where in ("obs", "obsm") else 6
    attributes = {"encoding-type": "string-array" if where == "obsm" else "array", "encoding-version": "0.2.0"}
    shape = (length, 2**27 // length // 8)
    if format == "h5ad":
        with h5py.File(path, "r+") as file:
            for i in range(10):
                file[where].create_dataset(f"many{i}", shape, "f8", chunks=(1, 1024)).attrs.update(attributes)
    else:
        group = zarr.open_group(path, mode="r+", use_consolidated=False)
        for i in range(10):
            group[where].create_array(f"many{i}", shape=shape, chunks=(1, 1024), dtype="f8").attrs.update(attributes)
        zarr.consolidate_metadata(path)
    with (
        bounded(),
        pytest.raises(StorageError, match=f"bytes.* of them in {where.partition('/')[0]}, and this machine"),
    ):
        opened(path.name)


@pytest.mark.parametrize("how", ["never written", "written in part", "contiguous", "many names of one chunk"])
@pytest.mark.parametrize("where", ["uns/huge", "obs/huge", "varm/huge"])
def test_arrays_for_which_a_file_has_no_room_are_refused(tmp_path: Path, opened: Any, how: str, where: str) -> None:
    path = write_store(full(), tmp_path, "h5ad")
    length = {"obs": 20, "varm": 6}.get(where.partition("/")[0], 1)
    with h5py.File(path, "r+") as file:
        chunk = (1, 2**22)
        layout = {} if how == "contiguous" else {"chunks": chunk, "compression": "gzip"}
        n_bytes = 2**28 if how == "many names of one chunk" else 2**31
        dataset = file.create_dataset(where, (length, n_bytes // length), "i1", **layout)
        dataset.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
        if how not in ("never written", "contiguous"):
            dataset[0, : 2**22] = 0
        if how == "many names of one chunk":
            for i in range(6):
                file[f"uns/again{i}"] = dataset
    with bounded(), pytest.raises(StorageError, match=r"claims \d+ bytes .* no room"):
        opened(path.name)


@pytest.mark.parametrize("format", ["zarr2", "zarr3"])
@pytest.mark.parametrize("where", ["uns/huge", "obs/huge"])
def test_arrays_of_a_zarr_store_that_are_never_written_are_refused(tmp_path: Path, format: str, where: str) -> None:
    path = write_store(full(), tmp_path, format)
    shape = (20, 2**28 // 20)
    group = zarr.open_group(path, mode="r+", use_consolidated=False)
    array = group.create_array(where, shape=shape, chunks=(1, 2**20), dtype="f8")
    array.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    zarr.consolidate_metadata(path)
    with bounded(), pytest.raises(StorageError, match=r"claims \d+ bytes .* no room"):
        dasksc.open(path)


@pytest.mark.parametrize("format", ["h5ad", "zarr2", "zarr3"])
def test_large_tables_that_compress_well_are_read(
    tmp_path: Path, opened: Any, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "_ROOM_BYTES", 2**20)
    adata = full()
    adata.uns["zeros"] = np.zeros(2**19)
    adata.uns["names"] = np.array([f"a name {i}" for i in range(2000)], dtype=object)
    path = write_store(adata, tmp_path, format)
    assert not opened(path.name).uns["zeros"].any()


def test_a_container_has_less_memory_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_store(full(), tmp_path, "h5ad")
    with h5py.File(path, "r+") as file:
        file["uns/large"] = np.ones(2**18)
    monkeypatch.setattr(collection, "_ROOM_BYTES", 2**20)
    monkeypatch.setattr("distributed.system.MEMORY_LIMIT", 2**20)
    with pytest.raises(StorageError, match="and this machine 1048576 bytes of memory"):
        dasksc.open(path)


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "X/../../escaped"])
def test_zipped_stores_write_nothing_anywhere(tmp_path: Path, name: str) -> None:
    write_store(small(), tmp_path, "zarr3")
    folder = tmp_path / "inside"
    folder.mkdir()
    archive = folder / "atlas.zarr.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for one in (tmp_path / "atlas.zarr3.zarr").rglob("*"):
            if one.is_file():
                file.write(one, one.relative_to(tmp_path / "atlas.zarr3.zarr"))
        file.writestr(name, "harm")
    before = sorted(tmp_path.rglob("*"))
    matrix = open_matrix(archive, "X")
    matrix.fetch(np.arange(20))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_zip_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zarr_guard, "WHOLE_BYTES", 2**20)
    archive = tmp_path / "atlas.zarr.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("zarr.json", " " * 2**21)
    with bounded(), pytest.raises(StorageError, match="bytes"):
        open_matrix(archive, "X")
