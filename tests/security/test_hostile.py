"""Broad coverage of malicious files; `test_refusals` has one test for each guard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

import dasksc
from dasksc.errors import StorageError
from dasksc.storage import open_matrix
from tests.support.hostile import (
    VALUES,
    bomb_of,
    bounded,
    column_of_zarr3,
    h5ad_whose_values_are_elsewhere,
    h5ad_whose_x_decodes_to_too_much,
    h5ad_whose_x_is_elsewhere,
    h5ad_with_bombs,
    h5ad_without_room,
    memory_of,
    opener,
    store_of_many_arrays,
    store_of_shape,
    store_with_a_column_called,
    store_with_bombs,
    store_with_pickles,
)

# Warnings about future formats.
pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore:Writing zarr v2"),
    pytest.mark.filterwarnings("ignore:Consolidated"),
]


# Every array at a URL; on disk, only the arrays that are read first and last.
@pytest.mark.parametrize(
    ("where", "place"),
    [("X", "local"), ("X", "remote"), ("obs/int8", "remote"), ("obs/_index", "local"), ("obs/_index", "remote")],
)
def test_pickles_in_arrays_are_not_loaded(tmp_path: Path, where: str, place: str) -> None:
    mark = tmp_path / "unpickled"
    path = store_with_pickles(tmp_path, where, mark)
    with opener(tmp_path, place) as opened, pytest.raises(StorageError, match="pickle"):
        opened(path.name).X.compute()
    assert not mark.exists()


# Every pair of values of any two parameters.
@pytest.mark.parametrize(
    ("format", "where", "n", "place"),
    [
        ("h5ad", "X", 2**62, "local"),
        ("h5ad", "obs/_index", 2**40, "remote"),
        ("h5ad", "obs/int8", 2**62, "remote"),
        ("zarr2", "X", 2**40, "remote"),
        ("zarr2", "obs/_index", 2**62, "local"),
        ("zarr2", "obs/int8", 2**40, "local"),
        ("zarr3", "X", 2**62, "remote"),
        ("zarr3", "obs/_index", 2**40, "local"),
        ("zarr3", "obs/int8", 2**40, "local"),
    ],
)
def test_shapes_beyond_any_memory_are_refused(tmp_path: Path, format: str, where: str, n: int, place: str) -> None:
    path = store_of_shape(tmp_path, format, where, n)
    with opener(tmp_path, place) as opened, bounded(), pytest.raises(dasksc.DaskscError):
        opened(path.name).X.compute()


@pytest.mark.parametrize("codec", ["gzip", "zlib", "zstd", "lz4", "bz2", "lzma", "blosc"])
def test_chunks_that_decode_to_too_much_are_refused(tmp_path: Path, codec: str) -> None:
    compressor, bomb = bomb_of(codec)
    group = zarr.open_group(tmp_path / "store", mode="w", zarr_format=2)
    group.create_array("X", data=VALUES, chunks=(50, 6), compressors=compressor)
    (tmp_path / "store" / "X" / "0.0").write_bytes(bomb)
    matrix = open_matrix(tmp_path / "store", "X")
    with bounded(), pytest.raises(StorageError, match="rows 0 to 49"):
        matrix.fetch(np.arange(50))


# Every codec, and every kind of array.
@pytest.mark.parametrize(
    ("codec", "where"),
    [
        ("gzip", "obs/n"),
        ("zlib", "obs/_index"),
        ("zstd", "var/n"),
        ("lz4", "uns/deep/n"),
        ("bz2", "obsm/n/n"),
        ("lzma", "varm/n"),
        ("blosc", "obs/_index"),
    ],
)
def test_chunks_of_tables_that_decode_to_too_much_are_refused(tmp_path: Path, codec: str, where: str) -> None:
    path = store_with_bombs(tmp_path, where, codec)
    with bounded(), pytest.raises(StorageError, match=rf"decode \({codec}\) to more than"):
        dasksc.open(path)


# Every pair of values of any two parameters.
@pytest.mark.parametrize(
    ("codec", "is_sharded", "place"),
    [
        ("gzip", False, "local"),
        ("gzip", True, "remote"),
        ("zstd", False, "remote"),
        ("zstd", True, "local"),
        ("blosc", False, "local"),
        ("blosc", True, "remote"),
    ],
)
def test_chunks_of_tables_of_zarr_3_that_decode_to_too_much_are_refused(
    tmp_path: Path, codec: str, is_sharded: bool, place: str
) -> None:
    path, values, enlarge = column_of_zarr3(tmp_path, codec, is_sharded=is_sharded)
    with opener(tmp_path, place) as opened:
        np.testing.assert_array_equal(opened(path.name).obs["n"], values)
        enlarge()
        with bounded(), pytest.raises(StorageError, match=rf"decode \({codec}\) to more than"):
            opened(path.name)


# Every pair of codec and location, and every kind of array.
@pytest.mark.parametrize(
    ("codec", "where", "place"),
    [
        ("gzip", "obs/n", "local"),
        ("gzip", "obs/_index", "remote"),
        ("blosc", "var/n", "local"),
        ("blosc", "uns/deep/n", "remote"),
        ("zstd", "obsm/n/n", "local"),
        ("zstd", "varm/n", "remote"),
        ("bz2", "obs/_index", "local"),
        ("bz2", "obs/n", "remote"),
    ],
)
def test_chunks_of_tables_of_hdf5_that_decode_to_too_much_are_refused(
    tmp_path: Path, codec: str, where: str, place: str
) -> None:
    path = h5ad_with_bombs(tmp_path, where, codec)
    with (
        opener(tmp_path, place) as opened,
        bounded(),
        pytest.raises(StorageError, match=r"decode \(\w+\) to more than"),
    ):
        opened(path.name)


@pytest.mark.parametrize(("codec", "place"), [("bz2", "local"), ("gzip", "remote")])
def test_chunks_of_matrices_that_h5py_reads_and_that_decode_to_too_much_are_refused(
    tmp_path: Path, codec: str, place: str
) -> None:
    path = h5ad_whose_x_decodes_to_too_much(tmp_path, codec)
    with opener(tmp_path, place) as opened:
        adata = opened(path.name)
        with bounded(), pytest.raises(StorageError, match=r"decode \(\w+\) to more than"):
            adata.X[:3].compute()


# Every pair of values of any two parameters.
@pytest.mark.parametrize(
    ("format", "name", "place"),
    [
        ("h5ad", "../../secret", "remote"),
        ("h5ad", "/etc/passwd", "local"),
        ("zarr2", "../../secret", "local"),
        ("zarr2", "/etc/passwd", "remote"),
        ("zarr3", "../../secret", "remote"),
        ("zarr3", "/etc/passwd", "local"),
    ],
)
def test_columns_whose_names_lead_elsewhere_are_refused(tmp_path: Path, format: str, name: str, place: str) -> None:
    path = store_with_a_column_called(tmp_path, format, name)
    with opener(tmp_path, place) as opened, pytest.raises(StorageError, match="cannot be read"):
        opened(path.name)


# With the cases of test_refusals, every kind of reference to another file, on disk and at a URL.
@pytest.mark.parametrize(
    ("how", "place"), [("absolute", "remote"), ("upwards", "local"), ("virtual", "remote"), ("external", "local")]
)
def test_hdf5_that_leads_to_files_elsewhere_is_refused(tmp_path: Path, how: str, place: str) -> None:
    path = h5ad_whose_x_is_elsewhere(tmp_path, how)
    with opener(tmp_path, place) as opened, pytest.raises(StorageError, match=r"another file|other file"):
        opened(path.name)


# Every pair of way and location, and every array that is read as a whole.
@pytest.mark.parametrize(
    ("where", "how", "place"),
    [
        ("obs/n", "virtual", "local"),
        ("var/n", "external", "local"),
        ("varm/n", "beside", "local"),
        ("varp/n", "virtual", "remote"),
        ("obsm/n/n", "external", "remote"),
        ("uns/n", "beside", "remote"),
        ("uns/deep/n", "virtual", "local"),
    ],
)
def test_tables_whose_values_are_elsewhere_are_refused(tmp_path: Path, where: str, how: str, place: str) -> None:
    path = h5ad_whose_values_are_elsewhere(tmp_path, where, how)
    with opener(tmp_path, place) as opened, pytest.raises(StorageError, match="another file"):
        opened(path.name)


# Every pair of format and location, and every group that is read as a whole.
@pytest.mark.parametrize(
    ("where", "format", "place"),
    [
        ("varm", "h5ad", "local"),
        ("varp", "zarr2", "local"),
        ("uns", "zarr3", "local"),
        ("uns/deep", "h5ad", "remote"),
        ("obs", "zarr2", "remote"),
        ("var", "zarr3", "remote"),
        ("obsm", "zarr2", "local"),
    ],
)
def test_arrays_that_are_too_large_together_are_refused(
    tmp_path: Path, where: str, format: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_of(2**30, monkeypatch)
    path = store_of_many_arrays(tmp_path, format, where)
    message = f"bytes.* of them in {where.partition('/')[0]}\\), but"
    with opener(tmp_path, place) as opened, bounded(), pytest.raises(StorageError, match=message):
        opened(path.name)


# Every pair of values of any two parameters.
@pytest.mark.parametrize(
    ("how", "where", "place"),
    [
        ("never written", "uns/huge", "local"),
        ("never written", "obs/huge", "remote"),
        ("never written", "varm/huge", "local"),
        ("written in part", "uns/huge", "remote"),
        ("written in part", "obs/huge", "local"),
        ("written in part", "varm/huge", "remote"),
        ("contiguous", "uns/huge", "local"),
        ("contiguous", "obs/huge", "remote"),
        ("contiguous", "varm/huge", "local"),
        ("many names of one chunk", "uns/huge", "remote"),
        ("many names of one chunk", "obs/huge", "local"),
        ("many names of one chunk", "varm/huge", "remote"),
    ],
)
def test_arrays_larger_than_their_file_are_refused(tmp_path: Path, how: str, where: str, place: str) -> None:
    path = h5ad_without_room(tmp_path, where, how)
    with (
        opener(tmp_path, place) as opened,
        bounded(),
        pytest.raises(StorageError, match=r"claims \d+ bytes .* stored in \d+ bytes, less than 1/1032 of that"),
    ):
        opened(path.name)
