"""Chunk index parsed by dasksc, compared with the one that HDF5 reads."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from dasksc.errors import CorruptDataError
from dasksc.storage import open_matrix
from dasksc.storage.arrays import UnknownLayoutError
from dasksc.storage.chunked import ChunkedArray, ChunkTable
from dasksc.storage.files import FileIdentity, LocalFile
from dasksc.storage.hdf5 import chunk_index as hdf5_index
from dasksc.storage.hdf5.chunk_index import chunk_table
from dasksc.storage.hdf5.direct import direct_array
from dasksc.storage.uncompressed import PlainArray
from tests.support.data import rows_of

pytestmark = pytest.mark.core

# Versions of HDF5 for which a file is written; for those before 1.10, the index is a B-tree of version 1.
OLD = ["earliest", ("earliest", "v108"), ("v108", "v108"), None]
NEW = [("v110", "v112"), "latest"]
# A node of a one-dimensional dataset: a header of 24 bytes, 64 records of 32 bytes and a key of 24 bytes.
NODE_BYTES, RECORD_BYTES, HEADER_BYTES = 2096, 32, 24


@contextmanager
def whose(by_hdf5: bool) -> Iterator[None]:
    """Check that the index is read by HDF5 if `by_hdf5` is True, and by dasksc otherwise."""
    with mock.patch.object(hdf5_index, "_fill_by_hdf5", wraps=hdf5_index._fill_by_hdf5) as calls:
        yield
        assert calls.called == by_hdf5


def ours(path: Path, name: str = "X") -> ChunkTable:
    with h5py.File(path) as file:
        return chunk_table(file[name], LocalFile(FileIdentity.of(str(path))))


def theirs(path: Path, name: str = "X") -> ChunkTable:
    """Return the table of chunks of a dataset, as reported by HDF5."""
    with h5py.File(path) as file:
        dataset = file[name]
        grid = [-(-n // length) for n, length in zip(dataset.shape, dataset.chunks, strict=True)]
        n_chunks = int(np.prod(grid))
        offsets, sizes = np.full(n_chunks, -1, dtype=np.int64), np.zeros(n_chunks, dtype=np.int64)
        skipped = np.zeros(n_chunks, dtype=np.uint32)

        def note(chunk: Any) -> None:
            location = [at // length for at, length in zip(chunk.chunk_offset, dataset.chunks, strict=True)]
            if all(at < n for at, n in zip(location, grid, strict=True)):
                number = int(np.ravel_multi_index(location, grid))
                offsets[number], sizes[number] = chunk.byte_offset, chunk.size
                skipped[number] = chunk.filter_mask

        if n_chunks:
            dataset.id.chunk_iter(note)
        return ChunkTable(offsets=offsets, sizes=sizes, skipped=skipped)


def same(one: ChunkTable, other: ChunkTable) -> None:
    np.testing.assert_array_equal(one.offsets, other.offsets)
    np.testing.assert_array_equal(one.sizes, other.sizes)
    np.testing.assert_array_equal(one.skipped, other.skipped)
    assert (one.offsets.dtype, one.sizes.dtype, one.skipped.dtype) == (np.int64, np.int64, np.uint32)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File whose tree has three levels; the second half of its chunks was written in random order."""
    path = tmp_path_factory.mktemp("index") / "deep.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        dataset = file.create_dataset("X", (30_000,), chunks=(3,), dtype="i4", shuffle=True)
        dataset[:15_000] = np.arange(15_000)
        for number in np.random.default_rng(0).permutation(np.arange(5_000, 10_000)).tolist():
            dataset.id.write_direct_chunk((3 * number,), bytes(12), filter_mask=number % 2)
    return path


def test_a_tree_of_three_levels_is_walked(deep: Path) -> None:
    assert len(nodes_of(deep.read_bytes(), 2)) == 1
    with whose(by_hdf5=False):
        same(ours(deep), theirs(deep))
    assert ours(deep).skipped.sum() == 2_500


def test_a_file_that_is_being_written_is_left_to_hdf5(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("X", data=np.arange(100.0), chunks=(10,), compression="gzip")
        with whose(by_hdf5=True):
            table = chunk_table(file["X"], LocalFile(FileIdentity.of(str(path))))
    same(table, theirs(path))


@given(
    libver=st.sampled_from([*OLD, *NEW]),
    chunks=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    compression=st.sampled_from([None, "gzip"]),
    n_written=st.integers(0, 200),
    seed=st.integers(0, 2**31),
)
def test_whatever_was_done_to_a_dataset_the_index_is_the_one_hdf5_reads(
    tmp_path_factory: pytest.TempPathFactory, libver: Any, chunks: Any, compression: Any, n_written: int, seed: int
) -> None:
    path, rng = tmp_path_factory.getbasetemp() / "history.h5", np.random.default_rng(seed)
    shapes = rng.integers(0, {1: 300, 2: 40, 3: 10, 4: 6}[len(chunks)] + 1, (1 + rng.integers(4), len(chunks))).tolist()
    with h5py.File(path, "w", libver=libver) as file:
        options = {"chunks": tuple(chunks), "maxshape": (None,) * len(chunks), "compression": compression}
        dataset = file.create_dataset("X", shapes[0], "i2", **options)
        for resized in shapes:
            try:
                dataset.resize(resized)
            except RuntimeError:  # resize reads chunks at the edge, and HDF5 ignores their filter mask
                reject()
            grid = [-(-n // length) for n, length in zip(resized, chunks, strict=True)]
            for _ in range(n_written if all(grid) else 0):
                at = tuple(int(rng.integers(n)) * length for n, length in zip(grid, chunks, strict=True))
                data = rng.bytes(2 * int(np.prod(chunks)))
                is_raw = not compression or rng.random() < 0.5
                dataset.id.write_direct_chunk(at, data if is_raw else zlib.compress(data), filter_mask=int(is_raw))
    with whose(by_hdf5=libver in NEW) if all(grid) else mock.MagicMock():
        same(ours(path), theirs(path))


def nodes_of(data: bytes | bytearray, level: int) -> list[int]:
    """Return the offsets of all nodes of a level in chunk B-trees."""
    return [found.start() for found in re.finditer(rb"TREE\x01" + bytes([level]), data)]


def put(data: bytearray, at: int, layout: str, *values: Any) -> None:
    struct.pack_into(layout, data, at, *values)


def record_at(node: int, number: int) -> int:
    return node + HEADER_BYTES + number * RECORD_BYTES


def child_at(node: int, number: int) -> int:
    return record_at(node, number) + 24


# Place, format and value of each change, given the offsets of nodes and the size of the file.
DAMAGES: dict[str, tuple[Callable[[int, int, int, int], tuple[int, str, int]], str]] = {
    "a loop": (lambda root, middle, leaf, size: (child_at(root, 0), "<Q", root), "a node of level 1"),
    "a leaf twice": (lambda root, middle, leaf, size: (child_at(middle, 1), "<Q", leaf), "not in order"),
    "no node": (lambda root, middle, leaf, size: (child_at(middle, 0), "<Q", 0), "a node of level 0"),
    "too many children": (lambda root, middle, leaf, size: (leaf + 6, "<H", 65), "more than 64 children"),
    "a node beyond the end": (
        lambda root, middle, leaf, size: (child_at(middle, 0), "<Q", size - NODE_BYTES + 1),
        "beyond the end",
    ),
    "a chunk beyond the end": (lambda root, middle, leaf, size: (child_at(leaf, 0), "<Q", size), "beyond the end"),
    "a chunk between": (lambda root, middle, leaf, size: (record_at(leaf, 1) + 8, "<Q", 4), "impossible position"),
    "a high root": (lambda root, middle, leaf, size: (root + 5, "<B", 255), "a node of level 254"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_index_that_contradicts_itself_is_refused(deep: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.h5"
    data = bytearray(deep.read_bytes())
    (root,) = nodes_of(data, 2)
    (middle,) = struct.unpack_from("<Q", data, child_at(root, 0))
    (leaf,) = struct.unpack_from("<Q", data, child_at(middle, 0))
    change, says = DAMAGES[damage]
    at, layout, value = change(root, middle, leaf, len(data))
    put(data, at, layout, value)
    path.write_bytes(data)
    with pytest.raises(CorruptDataError, match=f"x.h5:/X.*{says}"):
        ours(path)


def test_a_tree_that_says_it_is_larger_than_the_file_is_not_walked(deep: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    data = bytearray(deep.read_bytes())
    # Every node claims 64 identical children, which gives 64 * 64 nodes at the last level.
    for level in (1, 2):
        for node in nodes_of(data, level):
            put(data, node + 6, "<H", 64)
            for number in range(64):
                put(data, child_at(node, number), "<Q", struct.unpack_from("<Q", data, child_at(node, 0))[0])
    path.write_bytes(data)
    with (
        mock.patch.object(LocalFile, "ranges", autospec=True, side_effect=LocalFile.ranges) as reads,
        pytest.raises(CorruptDataError, match="more nodes than the file has room for"),
    ):
        ours(path)
    assert sum(len(call.args[1]) for call in reads.call_args_list) <= len(data) // NODE_BYTES


USER_BLOCKED: list[dict[str, Any]] = [{}, {"chunks": (7, 6)}, {"chunks": (7, 20), "compression": "gzip"}]


@pytest.mark.parametrize("how", USER_BLOCKED, ids=str)
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_behind_a_user_block_values_are_read_where_they_lie(how: dict[str, Any], libver: str, tmp_path: Path) -> None:
    path = tmp_path / "blocked.h5mu"
    values = np.arange(1200, dtype=np.float32).reshape(60, 20)
    with h5py.File(path, "w", userblock_size=512, libver=libver) as file:
        file.create_dataset("before", data=values[::-1])
        file.create_dataset("X", data=values, **how)
    matrix = open_matrix(path, "X")
    assert isinstance(matrix.arrays[0], PlainArray | ChunkedArray)
    rows = np.array([0, 3, 6, 7, 59])
    np.testing.assert_array_equal(rows_of(matrix, rows), values[rows])


@pytest.mark.parametrize("how", USER_BLOCKED, ids=str)
def test_values_that_are_not_where_hdf5_says_are_left_to_it(
    how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "blocked.h5"
    with h5py.File(path, "w", userblock_size=512) as file:
        file.create_dataset("X", data=np.arange(1200.0).reshape(60, 20), **how)
    # Some versions of HDF5 ignore the user block in offsets.
    read = LocalFile.read
    monkeypatch.setattr(LocalFile, "read", lambda self, offset, into: read(self, offset - 512, into))
    with h5py.File(path) as file, pytest.raises(UnknownLayoutError, match="user block"):
        direct_array(LocalFile(FileIdentity.of(str(path))), file["X"], label="X")
