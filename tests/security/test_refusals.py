"""Rejection of malicious files with a reason, without running code, reading other files or filling memory.

For each guard, the tests use few malicious files, and valid files that resemble them. `test_hostile` covers many more
malicious files.
"""

from __future__ import annotations

import errno
import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import dask
import h5py
import numcodecs
import numpy as np
import pytest
import zarr
from anndata import AnnData

import dasksc
from dasksc.atlas import element_sizes
from dasksc.errors import CorruptDataError, StorageError
from dasksc.sampling.arrays import array_of
from dasksc.storage import open_matrix
from dasksc.storage.remote.connecting import client_of
from dasksc.storage.safety import zarr_metadata as zarr_guard
from dasksc.storage.safety.decompression_limits import check_decompressed_size
from tests.support.data import make_adata, write_store
from tests.support.hostile import (
    BOMB_BYTES,
    VALUES,
    array_at,
    bomb_of,
    bounded,
    column_of_zarr3,
    edited,
    full,
    h5ad_whose_values_are_elsewhere,
    h5ad_whose_x_decodes_to_too_much,
    h5ad_whose_x_is_elsewhere,
    h5ad_with_bombs,
    h5ad_without_room,
    memory_of,
    opener,
    overwritten,
    rechunked,
    recompressed,
    small,
    store_of_many_arrays,
    store_of_shape,
    store_with_a_column_called,
    store_with_bombs,
    store_with_pickles,
)
from tests.support.servers import serving

# Warnings about future formats.
pytestmark = [
    pytest.mark.programs,
    pytest.mark.filterwarnings("ignore:Writing zarr v2"),
    pytest.mark.filterwarnings("ignore:Consolidated"),
]


def test_pickles_in_arrays_are_not_loaded(tmp_path: Path) -> None:
    mark = tmp_path / "unpickled"
    path = store_with_pickles(tmp_path, "obs/int8", mark)
    with pytest.raises(StorageError, match="pickle"):
        dasksc.open(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("format", "where", "n"), [("h5ad", "obs/int8", 2**40), ("zarr2", "X", 2**62), ("zarr3", "obs/int8", 2**62)]
)
def test_shapes_beyond_any_memory_are_refused(tmp_path: Path, format: str, where: str, n: int) -> None:
    path = store_of_shape(tmp_path, format, where, n)
    with bounded(), pytest.raises(dasksc.DaskscError):
        dasksc.open(path).X.compute()


# dasksc decodes one codec and zarr-python the other.
@pytest.mark.parametrize("codec", ["zstd", "bz2"])
def test_chunks_that_decode_to_too_much_are_refused(tmp_path: Path, codec: str) -> None:
    compressor, bomb = bomb_of(codec)
    group = zarr.open_group(tmp_path / "store", mode="w", zarr_format=2)
    group.create_array("X", data=VALUES, chunks=(50, 6), compressors=compressor)
    (tmp_path / "store" / "X" / "0.0").write_bytes(bomb)
    matrix = open_matrix(tmp_path / "store", "X")
    with bounded(), pytest.raises(StorageError, match="rows 0 to 49"):
        matrix.fetch(np.arange(50))


def test_chunks_of_tables_that_decode_to_too_much_are_refused(tmp_path: Path) -> None:
    path = store_with_bombs(tmp_path, "obs/n", "zstd")
    with bounded(), pytest.raises(StorageError, match=r"decode \(zstd\) to more than"):
        dasksc.open(path)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_chunks_of_tables_of_zarr_3_that_decode_to_too_much_are_refused(tmp_path: Path, is_sharded: bool) -> None:
    path, values, enlarge = column_of_zarr3(tmp_path, "zstd", is_sharded=is_sharded)
    np.testing.assert_array_equal(dasksc.open(path).obs["n"], values)
    enlarge()
    with bounded(), pytest.raises(StorageError, match=r"decode \(zstd\) to more than"):
        dasksc.open(path)


def test_chunks_of_tables_of_hdf5_that_decode_to_too_much_are_refused(tmp_path: Path) -> None:
    path = h5ad_with_bombs(tmp_path, "obs/n", "zstd")
    with bounded(), pytest.raises(StorageError, match=r"decode \(\w+\) to more than"):
        dasksc.open(path)


def test_chunks_of_matrices_that_h5py_reads_and_that_decode_to_too_much_are_refused(tmp_path: Path) -> None:
    adata = dasksc.open(h5ad_whose_x_decodes_to_too_much(tmp_path, "gzip"))
    with bounded(), pytest.raises(StorageError, match=r"decode \(\w+\) to more than"):
        adata.X[:3].compute()


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
def test_filters_with_unbounded_output_are_refused(tmp_path: Path, filters: list[dict[str, Any]]) -> None:
    path = write_store(full(), tmp_path, "zarr2")
    recompressed(path, "obs/n", compressor=None, filters=filters)
    overwritten(path, "obs/n", b'[0, "<f8", [134217728]]' if filters[0]["id"] == "json2" else bytes(20))
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
    with bounded(), pytest.raises(StorageError, match=r"claims to contain 1073741824 strings"):
        dasksc.open(path)


def test_lzma_without_a_header_is_refused(tmp_path: Path) -> None:
    path = write_store(full(), tmp_path, "zarr2")
    raw = {"id": "lzma", "format": 3, "check": -1, "preset": None, "filters": [{"id": 0x21, "preset": 1}]}
    recompressed(path, "obs/n", compressor=raw)
    overwritten(path, "obs/n", numcodecs.get_codec(dict(raw)).encode(bytes(BOMB_BYTES)))
    with bounded(), pytest.raises(StorageError, match="LZMA without its header"):
        dasksc.open(path)


def test_chunks_of_tables_that_are_compressed_twice_are_refused(tmp_path: Path) -> None:
    path = write_store(full(), tmp_path, "zarr2")
    recompressed(path, "obs/n", compressor={"id": "zlib", "level": 1}, filters=[{"id": "zlib", "level": 1}])
    overwritten(path, "obs/n", numcodecs.Zlib(9).encode(numcodecs.Zlib(9).encode(bytes(BOMB_BYTES))))
    with bounded(), pytest.raises(StorageError, match="compressed twice"):
        dasksc.open(path)


def test_datasets_of_hdf5_that_are_compressed_twice_are_refused(tmp_path: Path) -> None:
    path = write_store(full(), tmp_path, "h5ad")
    with h5py.File(path, "r+") as file:
        twice = numcodecs.Zlib(9).encode(numcodecs.Zlib(9).encode(bytes(BOMB_BYTES)))
        rechunked(file, "obs/n", 1, 1).id.write_direct_chunk((0,), twice)
    with bounded(), pytest.raises(StorageError, match="only the last of its filters may compress the data"):
        dasksc.open(path)


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
    with bounded(), pytest.raises(StorageError, match="which are far too large for its shape"):
        dasksc.open(path)


# Every pair of values of any two parameters.
@pytest.mark.parametrize(
    ("compression", "shuffle", "fletcher32"),
    [
        ("gzip", True, False),
        ("gzip", False, True),
        ("lzf", True, True),
        ("lzf", False, False),
        (None, True, True),
        (None, False, False),
    ],
)
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


@pytest.mark.parametrize("format", ["zarr2", "zarr3"])
def test_other_threads_decode_as_they_configured_zarr_while_a_store_is_read(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_store(full(), tmp_path, format)
    if format == "zarr2":  # X is also read through zarr-python
        group = zarr.open_group(path, mode="r+", use_consolidated=False)
        group.create_array("X", data=VALUES[:20], chunks=(7, 6), compressors=numcodecs.BZ2(1), overwrite=True)
        group["X"].attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
        zarr.consolidate_metadata(path)
    of_user = zarr.create_array(tmp_path / "user", data=np.arange(9), chunks=(3,))
    before = str(zarr.config.get("codec_pipeline.path"))
    seen, get = [], zarr_guard.GuardedLocalStore.get

    async def watched(self: Any, *arguments: Any, **named: Any) -> Any:
        # Record the setting that another thread of the program sees while the store is read.
        with ThreadPoolExecutor(1) as thread:
            seen.append(thread.submit(lambda: str(zarr.config.get("codec_pipeline.path"))).result())
        return await get(self, *arguments, **named)

    monkeypatch.setattr(zarr_guard.GuardedLocalStore, "get", watched)
    adata = dasksc.open(path)
    assert adata.X[:3].compute().shape == (3, 6)
    assert len(seen) > 20
    assert set(seen) == {before}
    np.testing.assert_array_equal(of_user[:], np.arange(9))


# Zarr 3.4 warns about such a chain before it builds the codec.
@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed` codec")
@pytest.mark.parametrize("format", ["zarr2", "zarr3"])
def test_stores_that_name_the_codec_with_a_bound_themselves_are_refused(tmp_path: Path, format: str) -> None:
    path = write_store(full(), tmp_path, format)
    if format == "zarr2":
        no_bound = {"codec": None, "dtype": "|V999999999", "chunks": [20], "is_counted": False, "refused": None}
        recompressed(path, "obs/n", compressor={"id": "dasksc_bounded"} | no_bound)
    else:
        document = json.loads((path / "obs/n/zarr.json").read_text())
        named = {"name": "dasksc_bounded", "configuration": {"codecs": [], "is_counted": False, "refused": None}}
        edited(path / "obs/n/zarr.json", codecs=[*document["codecs"], named])
        zarr.consolidate_metadata(path)
    with pytest.raises(StorageError, match="dasksc_bounded"):
        dasksc.open(path)


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
        pytest.raises(StorageError, match=r"at most \d+ are expected|index of its chunks"),
    ):
        dasksc.open(f"{server.url}/atlas.zarr").X.compute()
    assert sum(stop is None for _, path, stop in server.faults.requests if path.endswith(file.name)) >= 1


@pytest.mark.parametrize(("format", "place"), [(2, "remote"), (3, "local")])
def test_keys_that_lead_elsewhere_are_refused(tmp_path: Path, format: int, place: str) -> None:
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
    with (
        opener(tmp_path, place) as opened,
        pytest.raises(StorageError, match=r"separator|chunk_key_encoding|cannot be read"),
    ):
        opened(path.name).X.compute()


def test_columns_whose_names_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    path = store_with_a_column_called(tmp_path, "h5ad", "../../secret")
    with pytest.raises(StorageError, match="cannot be read"):
        dasksc.open(path)


@pytest.mark.parametrize(
    ("how", "place"), [("absolute", "local"), ("upwards", "remote"), ("virtual", "local"), ("external", "remote")]
)
def test_hdf5_that_leads_to_files_elsewhere_is_refused(tmp_path: Path, how: str, place: str) -> None:
    path = h5ad_whose_x_is_elsewhere(tmp_path, how)
    with opener(tmp_path, place) as opened, pytest.raises(StorageError, match=r"another file|other file"):
        opened(path.name)


def test_tables_whose_values_are_elsewhere_are_refused(tmp_path: Path) -> None:
    path = h5ad_whose_values_are_elsewhere(tmp_path, "uns/n", "external")
    with pytest.raises(StorageError, match="another file"):
        dasksc.open(path)


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


# dtypes that dasksc reads, leaves to h5py, or byte-swaps.
@pytest.mark.parametrize(("where", "dtype"), [("X", "f4"), ("X", "f2"), ("obs/n", ">i2")])
def test_files_that_hdf5_would_look_for_in_the_working_directory_are_refused(
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


def test_arrays_that_are_too_large_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_of(2**30, monkeypatch)
    path = store_of_many_arrays(tmp_path, "h5ad", "uns")
    with (
        bounded(),
        pytest.raises(
            StorageError, match=r"bytes.* of them in uns\), but this process may use only 1073741824 bytes of memory"
        ),
    ):
        dasksc.open(path)


@pytest.mark.parametrize("how", ["never written", "many names of one chunk"])
def test_arrays_larger_than_their_file_are_refused(tmp_path: Path, how: str) -> None:
    path = h5ad_without_room(tmp_path, "uns/huge", how)
    with (
        bounded(),
        pytest.raises(StorageError, match=r"claims \d+ bytes .* stored in \d+ bytes, less than 1/1032 of that"),
    ):
        dasksc.open(path)


@pytest.mark.parametrize(("format", "where"), [("zarr2", "uns/huge"), ("zarr3", "obs/huge")])
def test_arrays_of_a_zarr_store_that_are_never_written_are_refused(tmp_path: Path, format: str, where: str) -> None:
    path = write_store(full(), tmp_path, format)
    shape = (20, 2**28 // 20)
    group = zarr.open_group(path, mode="r+", use_consolidated=False)
    array = group.create_array(where, shape=shape, chunks=(1, 2**20), dtype="f8")
    array.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    zarr.consolidate_metadata(path)
    with (
        bounded(),
        pytest.raises(StorageError, match=r"claims \d+ bytes .* stored in \d+ bytes, less than 1/1032 of that"),
    ):
        dasksc.open(path)


@pytest.mark.parametrize(("format", "place"), [("h5ad", "local"), ("zarr2", "remote"), ("zarr3", "local")])
def test_large_tables_that_compress_well_are_read(
    tmp_path: Path, format: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(element_sizes, "_ROOM_BYTES", 2**20)
    adata = full()
    adata.uns["zeros"] = np.zeros(2**19)
    adata.uns["names"] = np.array([f"a name {i}" for i in range(2000)], dtype=object)
    path = write_store(adata, tmp_path, format)
    with opener(tmp_path, place) as opened:
        assert not opened(path.name).uns["zeros"].any()


def test_a_container_has_less_memory_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_store(full(), tmp_path, "h5ad")
    with h5py.File(path, "r+") as file:
        file["uns/large"] = np.ones(2**18)
    monkeypatch.setattr(element_sizes, "_ROOM_BYTES", 2**20)
    memory_of(2**20, monkeypatch)
    with pytest.raises(StorageError, match="this process may use only 1048576 bytes of memory"):
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


@pytest.mark.parametrize("kind", ["h5ad", "zarr"])
@pytest.mark.parametrize(
    "raised",
    [
        MemoryError("no room"),
        ImportError("no module"),
        AttributeError("module has no attribute 'f'", name="f", obj=np),
        NameError("f is not defined"),
        AssertionError(),
    ],
    ids=lambda raised: type(raised).__name__,
)
def test_other_errors_are_not_blamed_on_files(tmp_path: Path, kind: str, raised: Exception) -> None:
    path = write_store(make_adata(50), tmp_path, "h5ad" if kind == "h5ad" else "zarr2")
    with (
        mock.patch("dasksc.atlas.tables.read_elem", side_effect=raised),
        pytest.raises(type(raised)) as caught,
    ):
        dasksc.open(path)
    assert caught.value is raised
    assert any(str(path) in note for note in raised.__notes__)
    with (
        mock.patch("dasksc.storage.opening._matrix", side_effect=raised),
        pytest.raises(type(raised)) as caught,
    ):
        open_matrix(path, "X")
    assert caught.value is raised


def test_lack_of_memory_is_not_reported_as_a_damaged_row(tmp_path: Path) -> None:
    path = tmp_path / "gzip.h5ad"
    make_adata(50).write_h5ad(path, compression="gzip")
    matrix = open_matrix(path, "X")
    with (
        mock.patch("dasksc.storage.codecs.Chain.decode", side_effect=MemoryError("no room")),
        pytest.raises(MemoryError, match="no room"),
    ):
        matrix.fetch(np.arange(50))


class _Short:
    """Object that raises MemoryError in its operations."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    def __reduce__(self) -> Any:
        raise MemoryError("no room")


def _ask_a_store(path: Path) -> None:
    client_of(f"file://{path}", {}).stat("x")


def _ask_a_file_system(path: Path) -> None:
    client_of("memory://short", {}).stat("x")


def _read_edges_without_filters(path: Path) -> None:
    with h5py.File(path / "x.h5ad", "w") as file:
        file.create_dataset("X", data=np.ones((50, 30)), chunks=(7, 30), shuffle=True)
    open_matrix(path / "x.h5ad", "X")


def _convert_tables(path: Path) -> None:
    dasksc.convert(make_adata(20), path / "out.zarr")


@pytest.mark.parametrize(
    ("failing", "act"),
    [
        (None, lambda path: array_of("labels", _Short())),
        (None, lambda path: client_of("memory://short", {"token": _Short()})),
        ("pandas.DataFrame.eval", lambda path: dasksc.rows_where(make_adata(20).obs, "float32 > 1")),
        ("obstore.head", _ask_a_store),
        ("fsspec.implementations.memory.MemoryFileSystem.info", _ask_a_file_system),
        ("dasksc.storage.codecs.Chain.decode", _read_edges_without_filters),
        ("gzip.GzipFile", lambda path: check_decompressed_size("gzip", bytes(9), at_most=1)),
        ("dasksc.conversion.tables.write_elem", _convert_tables),
    ],
    ids=["labels", "options", "filter", "obstore", "fsspec", "edges", "decoded", "tables"],
)
def test_lack_of_memory_is_not_blamed_on_files(tmp_path: Path, failing: str | None, act: Any) -> None:
    with (
        nullcontext() if failing is None else mock.patch(failing, side_effect=MemoryError("no room")) as mocked,
        dask.config.set({"dasksc.retry-timeout": "1s"}),
        pytest.raises(MemoryError, match="no room"),
    ):
        act(tmp_path)
    assert failing is None or mocked.call_count == 1


def test_errors_of_the_operating_system_are_not_reported_as_corruption(tmp_path: Path) -> None:
    path = write_store(make_adata(50), tmp_path, "h5ad")
    refused = PermissionError(errno.EACCES, "Permission denied")
    with (
        mock.patch("dasksc.storage.opening._open_hdf5", side_effect=refused),
        pytest.raises(StorageError, match="cannot be read: .*Permission denied") as caught,
    ):
        open_matrix(path, "X")
    assert not isinstance(caught.value, CorruptDataError)


@pytest.mark.parametrize("metadata", ["3", "[]", '"text"'])
def test_metadata_of_the_wrong_type_are_blamed_on_the_file(tmp_path: Path, metadata: str) -> None:
    path = write_store(make_adata(50), tmp_path, "zarr2")
    for name in (".zattrs", ".zmetadata"):
        (path / name).unlink(missing_ok=True)
    (path / "X" / ".zattrs").write_text(metadata)
    with pytest.raises(StorageError, match="cannot be read"):
        open_matrix(path, "X")
