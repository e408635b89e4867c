"""Codecs: a part is what it is of the whole, and what lies about itself is refused."""

from __future__ import annotations

import os
import zlib
from typing import Any
from unittest import mock

import h5py
import numcodecs
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given
from hypothesis import strategies as st

from dasksc.errors import CorruptDataError
from dasksc.kernels import blosc as kernels
from dasksc.storage import chunked, codecs, open_matrix
from dasksc.storage.codecs import Blosc, Chain, Codec, Crc32c, Deflate, Zstd, blosc_getitem

pytestmark = pytest.mark.core

getitem = blosc_getitem()
needs_blosc2 = pytest.mark.skipif(getitem is None, reason="blosc2 is not installed")
needs_zstandard = pytest.mark.skipif(codecs._zstandard() is None, reason="zstandard is not installed")

N = 200_000
VALUES = np.random.default_rng(0).poisson(3, N).astype(np.int32)


def blosc_chunk(values: np.ndarray, block_bytes: int = 2**16) -> bytes:
    return numcodecs.Blosc(cname="lz4", clevel=3, shuffle=1, blocksize=block_bytes).encode(values)


def zstd_chunk(values: np.ndarray, **options: Any) -> bytes:
    return numcodecs.Zstd(level=1, **options).encode(values)


CHUNKS = {
    "blosc": (Blosc(), blosc_chunk(VALUES)),
    "zstd": (Zstd(), zstd_chunk(VALUES)),
    "zstd with a checksum": (Zstd(), zstd_chunk(VALUES, checksum=True)),
    "zlib": (Deflate(wbits=15), zlib.compress(VALUES.tobytes())),
    "gzip": (Deflate(wbits=31), numcodecs.GZip().encode(VALUES)),
}


@pytest.fixture(params=["fast", "plain"])
def libraries(request: pytest.FixtureRequest) -> Any:
    """With the libraries of the `fast` extra, and as if they were not installed."""
    if request.param == "plain":
        absent = mock.Mock(return_value=None)
        with mock.patch.multiple(codecs, _imagecodecs=absent, _zstandard=absent):
            yield
    else:
        yield


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("codec", "stored"), CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("rows", [(0, N), (0, 1), (17, 70_003), (N - 1, N)], ids=str)
def test_a_part_is_that_of_the_whole(codec: Codec, stored: bytes, rows: tuple[int, int]) -> None:
    chain = Chain(codecs=(codec,), dtype=np.dtype(np.int32))
    np.testing.assert_array_equal(chain.decode(stored, shape=(N,), skipped=0, rows=rows), VALUES[slice(*rows)])
    np.testing.assert_array_equal(chain.decode(VALUES, shape=(N,), skipped=1, rows=rows), VALUES[slice(*rows)])


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("codec", "stored"), CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("length", [N - 1, N + 1])
def test_a_chunk_of_another_length_is_refused(codec: Codec, stored: bytes, length: int) -> None:
    chain = Chain(codecs=(codec,), dtype=np.dtype(np.int32))
    with pytest.raises(Exception):  # noqa: B017 - of whatever kind
        chain.decode(stored, shape=(length,), skipped=0, rows=(0, length))


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("name", ["zstd with a checksum", "zlib", "gzip"])
def test_checksums_are_of_the_whole_and_always_checked(name: str, part: bool) -> None:
    codec, stored = CHUNKS[name]
    wrong = bytearray(stored)
    # The checksum itself: the last bytes, but for gzip, which ends in the length.
    wrong[-5 if name == "gzip" else -1] ^= 1
    chain = Chain(codecs=(codec,), dtype=np.dtype(np.int32))
    with pytest.raises(Exception):  # noqa: B017 - of whatever kind
        chain.decode(bytes(wrong), shape=(N,), skipped=0, rows=(0, 10 if part else N))


@needs_zstandard
def test_a_part_of_a_zstandard_frame_costs_no_more_than_its_beginning() -> None:
    codec, stored = CHUNKS["zstd"]
    # What is behind the part may be missing.
    chain = Chain(codecs=(codec,), dtype=np.dtype(np.int32))
    part = chain.decode(stored[: len(stored) // 2], shape=(N,), skipped=0, rows=(0, 1000))
    np.testing.assert_array_equal(part, VALUES[:1000])
    with pytest.raises(ValueError, match="it ends after"):
        chain.decode(stored[: len(stored) // 2], shape=(N,), skipped=0, rows=(0, N - 1))


def test_a_checksum_after_the_chunk_is_checked_before_it_is_decoded() -> None:
    chain = Chain(codecs=(Blosc(), Crc32c()), dtype=np.dtype(np.int32))
    stored = numcodecs.CRC32C(location="end").encode(np.frombuffer(blosc_chunk(VALUES), dtype=np.uint8)).tobytes()
    np.testing.assert_array_equal(chain.decode(stored, shape=(N,), skipped=0, rows=(5, 9)), VALUES[5:9])
    with pytest.raises(ValueError, match="CRC32C"):
        chain.decode(stored[:-1] + b"\0", shape=(N,), skipped=0, rows=(5, 9))


# --- Parts of Blosc chunks, all chunks in one call ---------------------------------------------------------


def decode_pieces(
    stored: list[bytes], chunks: list[int], starts: list[int], stops: list[int], chunk_bytes: int
) -> tuple[int, np.ndarray]:
    buffers = [np.frombuffer(data, dtype=np.uint8) for data in stored]
    sizes = np.array(stops, dtype=np.int64) - starts
    out = np.full(int(sizes.sum()) + 8, 99, dtype=np.uint8)
    failed = kernels.getitems(
        np.uint64(getitem),
        np.array([buffer.ctypes.data for buffer in buffers], dtype=np.uint64),
        np.array([len(buffer) for buffer in buffers], dtype=np.int64),
        chunk_bytes,
        np.array(chunks, dtype=np.int64),
        np.array(starts, dtype=np.int64),
        np.array(stops, dtype=np.int64),
        np.cumsum(sizes) - sizes,
        np.empty(chunk_bytes, dtype=np.uint8),
        out,
    )
    assert (out[-8:] == 99).all()
    return failed, out[:-8]


@needs_blosc2
@given(
    cuts=st.lists(st.lists(st.integers(0, N), min_size=2, max_size=12, unique=True), min_size=1, max_size=3),
    block_bytes=st.sampled_from([2**12, 2**16, 2**20]),
)
def test_pieces_of_blosc_chunks_are_what_they_are_of_the_whole(cuts: list[list[int]], block_bytes: int) -> None:
    values = [np.roll(VALUES, i) for i in range(len(cuts))]
    chunks, starts, stops, expected = [], [], [], []
    for i, ends in enumerate(map(sorted, cuts)):
        for start, stop in zip(ends[::2], ends[1::2], strict=False):
            chunks.append(i)
            starts.append(4 * start)
            stops.append(4 * stop)
            expected.append(values[i][start:stop])
    stored = [blosc_chunk(array, block_bytes) for array in values]
    failed, out = decode_pieces(stored, chunks, starts, stops, 4 * N)
    assert failed == -1
    np.testing.assert_array_equal(out.view(np.int32), np.concatenate(expected))


@needs_blosc2
@pytest.mark.parametrize("at", [2, 3, 4, 8, 12, 16, 17, 20], ids=lambda at: f"byte {at}")
@pytest.mark.parametrize("value", [0, 1, 127, 255])
def test_any_byte_of_a_blosc_header_may_lie(at: int, value: int) -> None:
    stored = bytearray(blosc_chunk(VALUES))
    stored[at] = value
    decode_pieces([bytes(stored)], [0, 0], [40, 400_000], [4000, 4 * N], 4 * N)  # must return


@needs_blosc2
@pytest.mark.parametrize("header", [{2: 111}, {1: 118, 2: 111}, {1: 0}, {8: 1, 9: 0, 10: 127}], ids=str)
def test_a_blosc_header_that_contradicts_itself_is_refused(header: dict[int, int]) -> None:
    stored = bytearray(blosc_chunk(VALUES))
    for at, value in header.items():
        stored[at] = value
    assert decode_pieces([bytes(stored)], [0], [0], [4 * N], 4 * N)[0] == 0


@needs_blosc2
def test_values_that_blosc_only_copied_are_decoded() -> None:
    random = np.random.default_rng(0).integers(0, 2**31, N, dtype=np.int32)
    stored = blosc_chunk(random)
    assert stored[2] & 2
    failed, out = decode_pieces([stored], [0], [400], [4 * N], 4 * N)
    assert failed == -1
    np.testing.assert_array_equal(out.view(np.int32), random[100:])


@needs_blosc2
@pytest.mark.parametrize("size", [0, 8, 16, 40, 5000])
def test_a_blosc_chunk_cut_short_is_refused(size: int) -> None:
    stored = blosc_chunk(VALUES)[:size]
    assert decode_pieces([stored], [0], [0], [4 * N], 4 * N)[0] == 0


def write_blosc(path: Any, *, shards: int | None) -> np.ndarray:
    dense = np.random.default_rng(1).poisson(1, (900, 50)).astype(np.float32)
    compressor = zarr.codecs.BloscCodec(cname="lz4", blocksize=4096)
    group = zarr.open_group(path, mode="w", zarr_format=3)
    array = group.create_array(
        "X", shape=dense.shape, chunks=(100, 50), shards=shards and (shards, 50), dtype="f4", compressors=compressor
    )
    array[:] = dense
    array[300:400] = 0
    dense[300:400] = 0
    return dense


@needs_blosc2
@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("shards", [None, 300], ids=["files", "shards"])
def test_blosc_is_decoded_in_place_only_where_files_may_be_mapped(tmp_path: Any, shards: Any, use_mmap: bool) -> None:
    dense = write_blosc(tmp_path / "x.zarr", shards=shards)
    matrix = open_matrix(tmp_path / "x.zarr", "X", use_mmap=use_mmap)
    rows = np.array([0, 1, 1, 5, 99, 100, 250, 301, 302, 399, 400, 899])
    out = np.empty((len(rows), 50), dtype=np.float32)
    with mock.patch.object(chunked.blosc, "getitems", wraps=kernels.getitems) as called:
        matrix.fetch(rows).gather(np.arange(len(rows)), out=out)
    assert called.called == use_mmap
    np.testing.assert_array_equal(out, dense[rows])


@needs_blosc2
@pytest.mark.parametrize("shards", [None, 300], ids=["files", "shards"])
def test_a_corrupt_blosc_chunk_is_named(tmp_path: Any, shards: Any) -> None:
    write_blosc(tmp_path / "x.zarr", shards=shards)
    matrix = open_matrix(tmp_path / "x.zarr", "X")
    file = tmp_path / "x.zarr/X/c/0/0"
    stored = bytearray(file.read_bytes())
    stored[4:8] = b"\1\1\1\1"
    status = file.stat()
    file.write_bytes(stored)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(CorruptDataError, match=r"x\.zarr:/X: rows 0 to 9 .*Blosc's header"):
        matrix.fetch(np.arange(10))


@needs_blosc2
def test_blosc_chunks_of_hdf5_are_decoded_in_place(tmp_path: Any) -> None:
    hdf5plugin = pytest.importorskip("hdf5plugin")
    dense = np.random.default_rng(1).poisson(1, (900, 50)).astype(np.float32)
    with h5py.File(tmp_path / "x.h5ad", "w") as file:
        file.create_dataset("X", data=dense, chunks=(100, 50), **hdf5plugin.Blosc())
    rows = np.array([3, 250, 899])
    out = np.empty((3, 50), dtype=np.float32)
    with mock.patch.object(chunked.blosc, "getitems", wraps=kernels.getitems) as called:
        open_matrix(tmp_path / "x.h5ad", "X").fetch(rows).gather(np.arange(3), out=out)
    assert called.called
    np.testing.assert_array_equal(out, dense[rows])


# --- Column numbers in two bytes ---------------------------------------------------------------------------


def write_csr(path: Any, *, n_vars: int, dtype: str, chunk: int) -> sp.csr_matrix:
    # As many columns of each row, ascending, with the last one of all.
    n_rows, n_columns = 400, min(n_vars // 2, 2000)
    step = n_vars // n_columns
    rng = np.random.default_rng(0)
    indices = np.arange(n_columns) * step + rng.integers(0, step, (n_rows, n_columns))
    indices[:, -1] = n_vars - 1
    data = rng.random(indices.size, dtype=np.float32)
    matrix = sp.csr_matrix((data, indices.ravel(), np.arange(n_rows + 1) * n_columns), shape=(n_rows, n_vars))
    group = zarr.open_group(path, mode="w", zarr_format=3).create_group("X")
    group.attrs.update({"encoding-type": "csr_matrix", "shape": list(matrix.shape)})
    for name, values in (("data", matrix.data), ("indices", matrix.indices.astype(dtype)), ("indptr", matrix.indptr)):
        array = group.create_array(
            name, shape=values.shape, chunks=(chunk,), dtype=values.dtype, compressors=zarr.codecs.ZstdCodec(level=1)
        )
        array[:] = values
    return matrix


@pytest.mark.parametrize(
    ("n_vars", "dtype", "chunk", "held"),
    [
        (3000, "int32", 300_000, "uint16"),
        (3000, "int64", 300_000, "uint16"),
        (65_536, "uint32", 300_000, "uint16"),
        (65_537, "int32", 300_000, "int32"),
        (3000, "uint16", 600_000, "uint16"),
        (3000, "int32", 30_000, "int32"),
    ],
)
def test_columns_of_large_chunks_are_held_in_two_bytes(
    tmp_path: Any, n_vars: int, dtype: str, chunk: int, held: str
) -> None:
    expected = write_csr(tmp_path / "x.zarr", n_vars=n_vars, dtype=dtype, chunk=chunk)
    rows = np.array([0, 3, 3, 150, 399])
    fetched = open_matrix(tmp_path / "x.zarr", "X").fetch(rows)
    assert fetched._indices.dtype == held
    for one in (fetched, fetched.compact()):
        indptr, indices, data = one.gather_csr(np.arange(5))
        assert indices.dtype == np.int32
        found = sp.csr_matrix((data, indices, indptr), shape=(5, n_vars))
        assert (found != expected[rows]).nnz == 0


@pytest.mark.parametrize("wrong", [-1, 65_536, 2**20])
def test_a_column_that_two_bytes_cannot_hold_is_refused(tmp_path: Any, wrong: int) -> None:
    matrix = write_csr(tmp_path / "x.zarr", n_vars=3000, dtype="int32", chunk=300_000)
    zarr.open_array(tmp_path / "x.zarr", path="X/indices", mode="r+")[matrix.indptr[7]] = wrong
    opened = open_matrix(tmp_path / "x.zarr", "X")
    opened.fetch(np.arange(7))
    with pytest.raises(CorruptDataError, match=r"X/indices: row.* numbers outside \[0, 65536\)"):
        opened.fetch(np.array([7]))
