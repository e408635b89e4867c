"""Codecs: a decoded part equals that part of the whole, and data with false metadata is refused."""

from __future__ import annotations

import gzip
import sys
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import anndata as ad
import google_crc32c
import numcodecs
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given
from hypothesis import strategies as st

from dasksc.errors import CorruptDataError
from dasksc.kernels import blosc, inflate
from dasksc.kernels import zstd as zstd_kernels
from dasksc.kernels.lzf import decode_lzf
from dasksc.storage import chunked, open_matrix
from dasksc.storage.codecs import (
    Blosc,
    Chain,
    Codec,
    Crc32c,
    Deflate,
    H5Lzf,
    Zstd,
    blosc_getitem,
    codec_of_config,
    deflate_functions,
    zstd,
    zstd_functions,
)
from tests.support.data import lzf

pytestmark = pytest.mark.core

getitem = blosc_getitem()
decode_blosc = partial(blosc.getitems, getitem)
decode_zstd = partial(zstd_kernels.decode_pieces, zstd_functions())
needs_getitem = pytest.mark.skipif(sys.platform == "win32", reason="numcodecs does not export blosc_getitem there")

N = 200_000
VALUES = np.random.default_rng(0).poisson(3, N).astype(np.int32)


def blosc_chunk(values: np.ndarray, block_bytes: int = 2**16) -> bytes:
    return numcodecs.Blosc(cname="lz4", clevel=3, shuffle=1, blocksize=block_bytes).encode(values)


def zstd_chunk(values: np.ndarray, **options: Any) -> bytes:
    return numcodecs.Zstd(level=1, **options).encode(values)


def zstd_frames(values: np.ndarray) -> bytes:
    """Return two Zstandard frames without the size of their content."""
    unsaid = {zstd.CompressionParameter.content_size_flag: 0}
    return b"".join(zstd.compress(half.tobytes(), options=unsaid) for half in np.array_split(values, 2))


def gzip_members(values: np.ndarray) -> bytes:
    return b"".join(gzip.compress(half.tobytes(), 1) for half in np.array_split(values, 2))


CHUNKS = {
    "blosc": (Blosc(), blosc_chunk(VALUES)),
    "zstd": (Zstd(), zstd_chunk(VALUES)),
    "zstd with a checksum": (Zstd(), zstd_chunk(VALUES, checksum=True)),
    "zlib": (Deflate(wbits=15), zlib.compress(VALUES.tobytes())),
    "gzip": (Deflate(wbits=31), numcodecs.GZip().encode(VALUES)),
    "zstd of two frames": (Zstd(), zstd_frames(VALUES)),
    "gzip of two members": (Deflate(wbits=31), gzip_members(VALUES)),
    "lzf": (H5Lzf(), lzf(VALUES.tobytes())),
    "crc32c": (Crc32c(), VALUES.tobytes() + google_crc32c.value(VALUES.tobytes()).to_bytes(4, "little")),
}
LZF = lzf(VALUES[:1000].tobytes())


@pytest.mark.parametrize(("codec", "stored"), CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("rows", [(0, N), (17, 70_003), (N - 1, N)], ids=str)
def test_a_decoded_part_equals_that_of_the_whole(codec: Codec, stored: bytes, rows: tuple[int, int]) -> None:
    chain = Chain(codecs=(codec,), dtype=np.dtype(np.int32))
    np.testing.assert_array_equal(chain.decode(stored, shape=(N,), skipped=0, rows=rows), VALUES[slice(*rows)])
    np.testing.assert_array_equal(chain.decode(VALUES, shape=(N,), skipped=1, rows=rows), VALUES[slice(*rows)])


@pytest.mark.parametrize(("codec", "stored"), CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("length", [N - 1, N + 1])
def test_a_chunk_of_another_length_is_refused(codec: Codec, stored: bytes, length: int) -> None:
    chain = Chain(codecs=(codec,), dtype=np.dtype(np.int32))
    with pytest.raises(Exception):  # noqa: B017 - of whatever kind
        chain.decode(stored, shape=(length,), skipped=0, rows=(0, length))


@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("name", ["zstd with a checksum", "zlib", "gzip", "crc32c"])
def test_checksums_are_of_the_whole_and_always_checked(name: str, part: bool) -> None:
    codec, stored = CHUNKS[name]
    wrong = bytearray(stored)
    # Damage the checksum, which is at the end; in gzip the length follows it.
    wrong[-5 if name == "gzip" else -1] ^= 1
    chain = Chain(codecs=(codec,), dtype=np.dtype(np.int32))
    with pytest.raises(Exception):  # noqa: B017 - of whatever kind
        chain.decode(bytes(wrong), shape=(N,), skipped=0, rows=(0, 10 if part else N))


@pytest.mark.parametrize("codec", [Deflate(wbits=15), Deflate(wbits=31), Zstd()], ids=["zlib", "gzip", "zstd"])
def test_bytes_added_by_another_codec_are_decoded_too(codec: Codec) -> None:
    crc = numcodecs.CRC32()
    encode = {15: zlib.compress, 31: gzip.compress}.get(getattr(codec, "wbits", 0), zstd_chunk)
    chain = Chain(codecs=(codec_of_config(crc.get_config()), codec), dtype=np.dtype(np.int32))
    stored = encode(crc.encode(VALUES).tobytes())
    np.testing.assert_array_equal(chain.decode(stored, shape=(N,), skipped=0, rows=(5, 9)), VALUES[5:9])


@given(st.lists(st.integers(0, 255), min_size=40, max_size=4000), st.integers(1, 64), st.integers(0, 9))
def test_lzf_is_decoded_as_libhdf5_encoded_it(alphabet: list[int], n_repeats: int, seed: int) -> None:
    # Short repeats, long repeats, repeats that overlap themselves, and noise in between.
    values = np.tile(np.array(alphabet, dtype=np.uint8), 3)
    values = np.repeat(values, np.random.default_rng(seed).integers(1, n_repeats + 1, len(values)))
    if stored := lzf(values.tobytes()):
        np.testing.assert_array_equal(H5Lzf().decode(stored, len(values)), values)


@given(st.data())
def test_corrupt_lzf_writes_nothing_outside(data: st.DataObject) -> None:
    stored = bytearray(LZF)
    for _ in range(data.draw(st.integers(1, 3))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    stored = stored[: data.draw(st.integers(0, len(stored)))]
    whole = np.full(4 * 1000 + 8, 99, dtype=np.uint8)
    n_decoded = decode_lzf(np.frombuffer(bytes(stored), dtype=np.uint8), whole[:-8])
    assert -1 <= n_decoded <= len(whole) - 8
    assert (whole[-8:] == 99).all()


@pytest.mark.parametrize(
    "stored",
    [b"\x03abc", b"\x00a\x20", b"\x00a\xe0", b"\x00a\x20\x01", b"\x00a\xe0\xff\x00"],
    ids=["literals end", "no offset", "no length", "before the beginning", "more than belongs there"],
)
def test_lzf_that_cannot_be_decoded_is_refused(stored: bytes) -> None:
    with pytest.raises(ValueError, match="LZF.*40"):
        H5Lzf().decode(stored, 40)


def decode_pieces(
    stored: list[bytes],
    chunks: list[int],
    starts: list[int],
    stops: list[int],
    chunk_bytes: int,
    decode: Callable[..., int] = decode_blosc,
) -> tuple[int, np.ndarray]:
    buffers = [np.frombuffer(data, dtype=np.uint8) for data in stored]
    sizes = np.array(stops, dtype=np.int64) - starts
    out = np.full(int(sizes.sum()) + 8, 99, dtype=np.uint8)
    failed = decode(
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


ENCODED = {
    "blosc": (decode_blosc, blosc_chunk),
    "blosc of small blocks": (decode_blosc, partial(blosc_chunk, block_bytes=2**12)),
    "blosc of a large block": (decode_blosc, partial(blosc_chunk, block_bytes=2**20)),
    "zstd": (decode_zstd, zstd_chunk),
    "zstd with a checksum": (decode_zstd, partial(zstd_chunk, checksum=True)),
    "zlib": (partial(inflate.decode_pieces, deflate_functions(15)), partial(zlib.compress, level=1)),
    "gzip": (partial(inflate.decode_pieces, deflate_functions(31)), partial(zlib.compress, level=1, wbits=31)),
}


@needs_getitem
@given(
    cuts=st.lists(st.lists(st.integers(0, N), min_size=2, max_size=12, unique=True), min_size=1, max_size=3),
    how=st.sampled_from(sorted(ENCODED)),
)
def test_pieces_of_chunks_equal_those_of_the_whole(cuts: list[list[int]], how: str) -> None:
    decode, encode = ENCODED[how]
    values = [np.roll(VALUES, i) for i in range(len(cuts))]
    chunks, starts, stops, expected = [], [], [], []
    for i, ends in enumerate(map(sorted, cuts)):
        for start, stop in zip(ends[::2], ends[1::2], strict=False):
            chunks.append(i)
            starts.append(4 * start)
            stops.append(4 * stop)
            expected.append(values[i][start:stop])
    stored = [encode(array) for array in values]
    failed, out = decode_pieces(stored, chunks, starts, stops, 4 * N, decode)
    assert failed == -1
    np.testing.assert_array_equal(out.view(np.int32), np.concatenate(expected))


@needs_getitem
@pytest.mark.parametrize("header", [{2: 111}, {1: 118, 2: 111}, {1: 0}, {8: 1, 9: 0, 10: 127}], ids=str)
def test_a_blosc_header_that_contradicts_itself_is_refused(header: dict[int, int]) -> None:
    stored = bytearray(blosc_chunk(VALUES))
    for at, value in header.items():
        stored[at] = value
    assert decode_pieces([bytes(stored)], [0], [0], [4 * N], 4 * N)[0] == 0


@needs_getitem
@pytest.mark.parametrize("how", ["blosc", "zstd", "zstd with a checksum", "zlib", "gzip"])
@pytest.mark.parametrize("size", [0, 4, 8, 16, 40, 5000])
def test_a_chunk_cut_short_is_refused(how: str, size: int) -> None:
    decode, encode = ENCODED[how]
    assert decode_pieces([encode(VALUES)[:size]], [0], [0], [4 * N], 4 * N, decode)[0] == 0


@needs_getitem
def test_zstandard_chunks_of_another_kind_are_left_to_the_codec() -> None:
    whole, checked = zstd_chunk(VALUES), bytearray(zstd_chunk(VALUES, checksum=True))
    checked[-1] ^= 1
    for stored in (zstd_frames(VALUES), whole + whole, whole + b"0", bytes(checked), zstd_chunk(VALUES[:-1])):
        assert decode_pieces([whole, stored], [0, 1], [0, 0], [8, 4 * N], 4 * N, decode_zstd)[0] == 1
    assert decode_pieces([bytes(checked)], [0], [0], [8], 4 * N, decode_zstd)[0] == 0


@pytest.mark.parametrize("how", ["zlib", "gzip"])
def test_deflated_chunks_of_another_kind_are_left_to_the_codec(how: str) -> None:
    decode, encode = ENCODED[how]
    whole, checked = encode(VALUES), bytearray(encode(VALUES))
    checked[-5] ^= 1  # in the checksum of both formats
    halves = [encode(half) for half in np.array_split(VALUES, 2)]
    for stored in (
        b"".join(halves),
        bytes(checked),
        encode(VALUES[:-1]),
        encode(np.append(VALUES, 0)),
        VALUES.tobytes(),
    ):
        assert decode_pieces([whole, stored], [0, 1], [0, 0], [8, 4 * N], 4 * N, decode)[0] == 1


@needs_getitem
@given(st.data())
def test_corrupt_zstandard_chunks_write_nothing_outside(data: st.DataObject) -> None:
    stored = bytearray(zstd_chunk(VALUES[:20_000]))
    for _ in range(data.draw(st.integers(1, 3))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    failed, _ = decode_pieces([bytes(stored)], [0, 0], [0, 70_000], [40, 80_000], 80_000, decode_zstd)
    assert failed in (-1, 0)


@needs_getitem
def test_each_chunk_of_a_store_of_anndata_is_decoded_once(tmp_path: Any) -> None:
    X = sp.random(3000, 200, density=0.5, format="csr", dtype=np.float32, random_state=0)
    with warnings.catch_warnings(action="ignore"), ad.settings.override(zarr_write_format=3, auto_shard_zarr_v3=True):
        ad.AnnData(X=X).write_zarr(tmp_path / "x.zarr")
    matrix = open_matrix(tmp_path / "x.zarr", "X")
    rows = np.array([3, 700, 701, 1500, 2999])
    with mock.patch.object(chunked.zstd, "decode_pieces", wraps=zstd_kernels.decode_pieces) as called:
        fetched = matrix.fetch(rows)
    # One call for each of indptr, data and indices; pieces of the same chunk follow each other.
    assert [call.args[4].tolist() for call in called.call_args_list] == [[0], [0, 0, 1, 2], [0, 0, 1, 2]]
    indptr, indices, data = fetched.gather_csr(np.arange(5))
    assert (sp.csr_matrix((data, indices, indptr), shape=(5, 200)) != X[rows]).nnz == 0


def write_csr(path: Any, *, n_vars: int, dtype: str, chunk: int) -> sp.csr_matrix:
    # Each row stores the same number of values. Their columns are ascending and end with the last column of the matrix.
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
    assert fetched.indices.dtype == held
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
    with pytest.raises(CorruptDataError, match="X/indices.*65536"):
        opened.fetch(np.array([7]))
