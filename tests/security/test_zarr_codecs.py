"""Zarr arrays read through codecs that limit the decoded size: their values equal those read without the limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec

import dasksc
from dasksc.readers.anndata import codec_of
from dasksc.storage.safety.zarr_codecs import bounded_metadata, codecs_within
from dasksc.storage.safety.zarr_metadata import GuardedLocalStore

pytestmark = [
    pytest.mark.core,
    pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in"),
    pytest.mark.filterwarnings("ignore:Consolidated"),
    pytest.mark.filterwarnings("ignore:The data type"),
    pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification"),
]

NUMBERS = np.arange(20, dtype=np.int32).reshape(10, 2)
STRINGS = np.array(["", "é", "x" * 5000, *"abcdefg"], dtype=np.dtypes.StringDType())
FIXED = np.array(["", "é", "xyz", *"abcdefg"])
RECORDS = np.array([(i, f"n{i}") for i in range(10)], dtype=[("i", "<i4"), ("name", "<U9")])
FLAGS = np.arange(10) % 3 == 0


def _numcodec(name: str, **configuration: Any) -> dict[str, Any]:
    """Return the Zarr 3 metadata of a numcodecs codec; creating the codec here would warn before any test."""
    return {"name": f"numcodecs.{name}", "configuration": configuration}


V3: list[tuple[Any, dict[str, Any]]] = [
    (NUMBERS, {"compressors": None}),
    (NUMBERS, {"compressors": ZstdCodec()}),
    (NUMBERS, {"compressors": GzipCodec()}),
    (NUMBERS, {"compressors": [BloscCodec(), Crc32cCodec()]}),
    (NUMBERS, {"compressors": [_numcodec("shuffle"), ZstdCodec(), GzipCodec()]}),
    (NUMBERS, {"compressors": [_numcodec("bz2")]}),
    (NUMBERS, {"compressors": [_numcodec("lz4")]}),
    (NUMBERS, {"compressors": [_numcodec("lzma")]}),
    (NUMBERS, {"compressors": [_numcodec("zlib")], "filters": [_numcodec("delta", dtype="<i4")]}),
    (NUMBERS, {"filters": [TransposeCodec(order=(1, 0))]}),
    (NUMBERS, {"shards": (8, 2), "compressors": ZstdCodec()}),
    (NUMBERS, {"shards": (8, 2), "compressors": None}),
    (STRINGS, {"compressors": ZstdCodec()}),
    (STRINGS, {"compressors": None}),
    (STRINGS, {"shards": (8,), "compressors": GzipCodec()}),
    (FIXED, {"compressors": ZstdCodec()}),
    (FLAGS, {"compressors": BloscCodec()}),
    (np.array(3.5), {"compressors": ZstdCodec()}),
]
V2: list[tuple[Any, dict[str, Any]]] = [
    *(
        (NUMBERS, {"compressors": codec})
        for codec in (
            None,
            numcodecs.Zstd(),
            numcodecs.Blosc(),
            numcodecs.GZip(),
            numcodecs.Zlib(),
            numcodecs.BZ2(),
            numcodecs.LZ4(),
            numcodecs.LZMA(),
            numcodecs.Shuffle(4),
        )
    ),
    (NUMBERS, {"compressors": numcodecs.Zlib(), "filters": [numcodecs.Delta("<i4")]}),
    (NUMBERS, {"compressors": None, "filters": [numcodecs.Delta("<i4"), numcodecs.Zlib()]}),
    (NUMBERS, {"compressors": numcodecs.Zstd(), "order": "F"}),
    (STRINGS, {"compressors": numcodecs.Zstd()}),
    (STRINGS, {"compressors": None}),
    (FIXED, {"compressors": numcodecs.Zstd()}),
    (RECORDS, {"compressors": numcodecs.Zstd()}),
    (FLAGS, {"compressors": numcodecs.Blosc()}),
    (np.array(3.5), {"compressors": numcodecs.Zstd()}),
]


@pytest.mark.parametrize(("format", "values", "options"), [(n, *case) for n, all in ((2, V2), (3, V3)) for case in all])
def test_arrays_with_bounded_codecs_are_those_without(
    tmp_path: Path, format: int, values: Any, options: dict[str, Any]
) -> None:
    group = zarr.open_group(tmp_path / "store", mode="w", zarr_format=format)
    chunks = (4, *values.shape[1:]) if values.shape else ()
    group.create_array("values", data=values, chunks=chunks, **options)
    zarr.consolidate_metadata(tmp_path / "store")
    expected = zarr.open_array(tmp_path / "store" / "values", mode="r")
    for consolidated in (True, False):
        store = GuardedLocalStore(tmp_path / "store", read_only=True)
        found = zarr.open_group(store, mode="r", use_consolidated=consolidated)["values"]
        np.testing.assert_array_equal(found[...], expected[...])
        if values.shape:
            np.testing.assert_array_equal(found[3:6], expected[3:6])
        assert found.dtype == expected.dtype
        assert found.fill_value == expected.fill_value
        assert codec_of(found) == codec_of(expected)


@pytest.mark.parametrize("format", [2, 3])
def test_only_codecs_of_arrays_are_rewritten(tmp_path: Path, format: int) -> None:
    group = zarr.open_group(tmp_path / "store", mode="w", zarr_format=format)
    # Attributes may look like the metadata of an array.
    looks = {"zarr_format": 2, "shape": [3], "chunks": [3], "dtype": "<i4", "compressor": {"id": "zlib"}}
    group.attrs.update(looks)
    group.create_array("plain", data=NUMBERS, compressors=None).attrs.update(looks)
    group.create_array("packed", data=NUMBERS)
    zarr.consolidate_metadata(tmp_path / "store")
    store = GuardedLocalStore(tmp_path / "store", read_only=True)
    for consolidated in (True, False):
        found = zarr.open_group(store, mode="r", use_consolidated=consolidated)
        assert dict(found.attrs) == looks
        assert dict(found["plain"].attrs) == looks
        (bounded,) = found["packed"].compressors
        (within,) = codecs_within(bounded)
        assert within == group["packed"].compressors[0]
    name = ".zarray" if format == 2 else "zarr.json"
    plain = json.loads((tmp_path / "store" / "plain" / name).read_text())
    assert bounded_metadata(plain) == plain


@pytest.mark.parametrize("codecs", [7, [7], [{"configuration": {}}], [{"name": "zstd", "configuration": 7}]])
def test_codecs_with_invalid_metadata_are_refused(tmp_path: Path, codecs: Any) -> None:
    group = zarr.open_group(tmp_path / "store", mode="w", zarr_format=3)
    group.create_array("values", data=NUMBERS)
    file = tmp_path / "store" / "values" / "zarr.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"codecs": codecs}))
    store = GuardedLocalStore(tmp_path / "store", read_only=True)
    with pytest.raises(dasksc.DaskscError, match=r"values/zarr\.json"):
        zarr.open_array(store, path="values", mode="r")
