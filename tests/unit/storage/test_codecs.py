"""Codecs: a decoded part equals that part of the whole, and data with false metadata is refused."""

from __future__ import annotations

import gzip
import tempfile
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import anndata as ad
import google_crc32c
import numcodecs
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from dasksc.errors import CorruptDataError
from dasksc.kernels import decoding
from dasksc.kernels.decoding import decode_lzf
from dasksc.storage import Matrix, open_matrix
from dasksc.storage.codecs import Blosc, Chain, Codec, Crc32c, Deflate, H5Lzf, Zstd, codec_of_config, zstd
from tests.support.data import lzf, rows_of

pytestmark = pytest.mark.core

N = 200_000
VALUES = np.random.default_rng(0).poisson(3, N).astype(np.int32)
LZF = lzf(VALUES[:1000].tobytes())


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


# The compressor of a Zarr array, and how it encodes a chunk.
ENCODED: dict[str, tuple[Any, Callable[[np.ndarray], bytes]]] = {
    "blosc": (numcodecs.Blosc(), blosc_chunk),
    "blosc of small blocks": (numcodecs.Blosc(), partial(blosc_chunk, block_bytes=2**12)),
    "blosc of a large block": (numcodecs.Blosc(), partial(blosc_chunk, block_bytes=2**20)),
    "zstd": (numcodecs.Zstd(), zstd_chunk),
    "zstd with a checksum": (numcodecs.Zstd(), partial(zstd_chunk, checksum=True)),
    "zstd of two frames": (numcodecs.Zstd(), zstd_frames),
    "zlib": (numcodecs.Zlib(), zlib.compress),
    "gzip": (numcodecs.GZip(), lambda values: gzip.compress(values.tobytes(), 1)),
    "gzip of two members": (numcodecs.GZip(), gzip_members),
}


def stored_in(folder: Path, how: str, content: bytes) -> Matrix:
    """Return a matrix of one chunk with the given bytes."""
    group = zarr.open_group(folder / "x.zarr", mode="w", zarr_format=2)
    group.create_array("X", shape=(N // 4, 4), chunks=(N // 4, 4), dtype="i4", compressors=ENCODED[how][0])
    (folder / "x.zarr" / "X" / "0.0").write_bytes(content)
    return open_matrix(folder / "x.zarr", "X")


@given(
    rows=st.one_of(st.lists(st.integers(0, N // 4 - 1), min_size=1, max_size=12).map(sorted), st.just(range(N // 4))),
    how=st.sampled_from(sorted(ENCODED)),
)
@settings(max_examples=3 * settings.default.max_examples)
def test_rows_of_a_large_chunk_are_those_of_the_whole(rows: Any, how: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        matrix = stored_in(Path(folder), how, ENCODED[how][1](VALUES))
        np.testing.assert_array_equal(rows_of(matrix, rows), VALUES.reshape(-1, 4)[rows])


def with_bytes(stored: bytes, changes: dict[int, int]) -> bytes:
    changed = bytearray(stored)
    for at, byte in changes.items():
        changed[at] = byte
    return bytes(changed)


@pytest.mark.parametrize("how", ["blosc", "zstd", "zstd with a checksum", "zlib", "gzip"])
def test_a_chunk_of_another_length_or_cut_short_or_damaged_is_refused(how: str, tmp_path: Path) -> None:
    encode = ENCODED[how][1]
    whole = encode(VALUES)
    broken = [encode(VALUES[:-4]), encode(np.append(VALUES, np.zeros(4, np.int32))), VALUES.tobytes()]
    broken += [whole[:size] for size in (0, 4, 8, 16, 40, 5000)]
    if how == "blosc":  # headers that contradict themselves
        headers: list[dict[int, int]] = [{2: 111}, {1: 118, 2: 111}, {1: 0}, {8: 1, 9: 0, 10: 127}]
        broken += [with_bytes(whole, header) for header in headers]
    for content in broken:
        with pytest.raises(CorruptDataError):
            rows_of(stored_in(tmp_path, how, content), range(N // 4))
    if how not in ("blosc", "zstd"):  # checksums are of the whole; in gzip, the length follows
        at = -5 if how == "gzip" else -1
        for rows in (range(10), range(N // 4)):
            with pytest.raises(CorruptDataError):
                rows_of(stored_in(tmp_path, how, with_bytes(whole, {at: whole[at] ^ 1})), rows)


# Codecs of HDF5 and of Zarr 3 alone.
@pytest.mark.parametrize(
    ("codec", "stored"),
    [
        (H5Lzf(), lzf(VALUES.tobytes())),
        (Crc32c(), VALUES.tobytes() + google_crc32c.value(VALUES.tobytes()).to_bytes(4, "little")),
    ],
    ids=["lzf", "crc32c"],
)
def test_a_decoded_part_equals_that_of_the_whole_and_another_length_is_refused(codec: Codec, stored: bytes) -> None:
    chain = Chain(codecs=(codec,), dtype=np.dtype(np.int32))
    for rows in ((0, N), (17, 70_003), (N - 1, N)):
        for content, skipped in ((stored, 0), (VALUES, 1)):
            part = chain.decode(content, shape=(N,), skipped=skipped, rows=rows)
            np.testing.assert_array_equal(part, VALUES[slice(*rows)])
    wrong = with_bytes(stored, {-1: stored[-1] ^ 1}) if codec == Crc32c() else stored
    for content, length in ((stored, N - 1), (stored, N + 1), *([(wrong, N)] if codec == Crc32c() else [])):
        with pytest.raises(Exception):  # noqa: B017 - of whatever kind
            chain.decode(content, shape=(length,), skipped=0, rows=(0, 10))


@pytest.mark.parametrize(
    ("codec", "encode"),
    [
        (Deflate(wbits=15), zlib.compress),
        (Deflate(wbits=31), gzip.compress),
        (Zstd(), zstd_chunk),
        (Blosc(), blosc_chunk),
    ],
    ids=["zlib", "gzip", "zstd", "blosc"],
)
def test_bytes_added_by_another_codec_are_decoded_too(codec: Codec, encode: Callable[[bytes], bytes]) -> None:
    crc = numcodecs.CRC32()
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


def test_each_chunk_of_a_store_of_anndata_is_decoded_once(tmp_path: Any) -> None:
    X = sp.random(3000, 200, density=0.5, format="csr", dtype=np.float32, random_state=0)
    store = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=3)
    with warnings.catch_warnings(action="ignore"):
        ad.io.write_elem(store, "X", X)
    for name in ("data", "indices"):  # as AnnData 0.13 shards them
        store["X"].create_array(name, data=getattr(X, name), chunks=(75_000,), shards=(300_000,), overwrite=True)
    matrix = open_matrix(tmp_path / "x.zarr", "X")
    rows = np.array([3, 700, 701, 1500, 2999])
    with mock.patch.object(decoding, "decode_pieces", wraps=decoding.decode_pieces) as called:
        fetched = matrix.fetch(rows)
    # One call for each of indptr, data and indices; pieces of the same chunk follow each other.
    assert [call.args[4].tolist() for call in called.call_args_list] == [[0], [0, 0, 1, 2], [0, 0, 1, 2]]
    indptr, indices, data = fetched.gather_csr(np.arange(5))
    assert (sp.csr_matrix((data, indices, indptr), shape=(5, 200)) != X[rows]).nnz == 0


@pytest.mark.parametrize("codec", [zarr.codecs.ZstdCodec(), zarr.codecs.GzipCodec(), zarr.codecs.BloscCodec()])
@pytest.mark.parametrize("width", [256, 300, 700])
def test_rows_of_chunks_narrower_than_the_matrix_are_decoded_by_a_kernel(
    tmp_path: Path, codec: Any, width: int
) -> None:
    values = np.random.default_rng(0).poisson(1.0, (200, 700)).astype(np.float32)
    values[90:120] = 5  # chunks that are not written
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=3)
    options: dict[str, Any] = {"compressors": codec, "fill_value": 5}
    group.create_array("X", shape=values.shape, dtype="float32", chunks=(30, width), **options)[:90] = values[:90]
    zarr.open_array(tmp_path / "x.zarr", path="X")[120:] = values[120:]
    matrix = open_matrix(tmp_path / "x.zarr", "X")
    rows = np.array([0, 7, 8, 29, 30, 88, 89, 90, 119, 120, 121, 199])
    name = "decode_blosc" if isinstance(codec, zarr.codecs.BloscCodec) else "decode_pieces"
    with mock.patch.object(decoding, name, wraps=getattr(decoding, name)) as called:
        np.testing.assert_array_equal(rows_of(matrix, rows), values[rows])
    assert called.called
    np.testing.assert_array_equal(rows_of(matrix, np.arange(200)), values)
    (chunk,) = (tmp_path / "x.zarr" / "X" / "c" / "0").glob("0")
    chunk.write_bytes(chunk.read_bytes()[:-40])
    with pytest.raises(CorruptDataError, match="rows 0 to 29"):
        rows_of(open_matrix(tmp_path / "x.zarr", "X"), rows)
