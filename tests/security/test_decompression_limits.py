"""Upper bounds on the decoded size of stored bytes, computed without decoding."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tracemalloc
import zlib
from collections.abc import Callable

import numcodecs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasksc.storage.codecs import zstd
from dasksc.storage.safety.decompression_limits import DECOMPRESSED_SIZES, check_decompressed_size
from tests.support.data import lzf

pytestmark = pytest.mark.core


ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "bz2": bz2.compress,
    "lzma": lzma.compress,
    "zstd": numcodecs.Zstd().encode,
    "blosc": numcodecs.Blosc().encode,
    "lz4": numcodecs.LZ4().encode,
    "h5-lzf": lzf,
}
# The bytes repeat, so that compression makes them smaller.
texts = st.tuples(st.binary(min_size=1, max_size=400), st.integers(1, 300)).map(lambda one: one[0] * one[1])


@pytest.mark.parametrize("codec", ENCODERS)
@given(text=texts)
def test_chunks_that_decode_to_the_expected_size_pass(codec: str, text: bytes) -> None:
    check_decompressed_size(codec, ENCODERS[codec](text), at_most=len(text))


@pytest.mark.parametrize("codec", ENCODERS)
@given(text=texts)
def test_a_byte_more_is_refused(codec: str, text: bytes) -> None:
    encoded = ENCODERS[codec](text)
    if encoded:
        with pytest.raises(ValueError, match=rf"\({codec}\).*{len(text) - 1}"):
            check_decompressed_size(codec, encoded, at_most=len(text) - 1)


@pytest.mark.parametrize("codec", ["gzip", "bz2", "lzma", "zstd"])
def test_all_parts_count(codec: str) -> None:
    encode, text = ENCODERS[codec], bytes(1000)
    with pytest.raises(ValueError, match="more than"):
        check_decompressed_size(codec, encode(text) + encode(text), at_most=1999)
    check_decompressed_size(codec, encode(text) + encode(text), at_most=2000)


def test_zstandard_frames_without_a_size_are_bounded_by_their_blocks() -> None:
    # Four blocks: incompressible blocks are counted exactly, and others as the maximum of 128 KiB.
    noise = np.random.default_rng(0).bytes(2**19)
    unsaid = {zstd.CompressionParameter.content_size_flag: 0}
    raw = zstd.compress(noise, options=unsaid)
    check_decompressed_size("zstd", raw, at_most=len(noise))
    with pytest.raises(ValueError, match="more than"):
        check_decompressed_size("zstd", raw, at_most=len(noise) - 1)
    zeros = zstd.compress(bytes(2**19 + 1), options=unsaid | {zstd.CompressionParameter.checksum_flag: 1})
    check_decompressed_size("zstd", zeros, at_most=2**19 + 2**17)
    with pytest.raises(ValueError, match="more than"):
        check_decompressed_size("zstd", zeros, at_most=2**19)
    skipped = b"\x53\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    with pytest.raises(ValueError, match="more than"):
        check_decompressed_size("zstd", skipped + zeros, at_most=2**19)


@pytest.mark.parametrize("codec", ["gzip", "zlib", "bz2", "lzma", "h5-lzf"])
def test_counting_takes_little_memory(codec: str) -> None:
    bomb = ENCODERS[codec](bytes(2**25))
    tracemalloc.start()
    with pytest.raises(ValueError, match="more than"):
        check_decompressed_size(codec, bomb, at_most=2**25 - 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24  # LZMA's dictionary takes part of these 16 MiB


@pytest.mark.parametrize("codec", DECOMPRESSED_SIZES)
@given(junk=st.binary(max_size=300), n_kept=st.integers(0, 300))
def test_damaged_bytes_are_left_to_the_decoder(codec: str, junk: bytes, n_kept: int) -> None:
    encoded = ENCODERS.get(codec, zlib.compress)(bytes(300))
    for damaged in (junk, encoded[:n_kept] + junk):
        check_decompressed_size(codec, damaged, at_most=2**64)
