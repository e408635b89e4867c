"""Readers that bypass h5py and zarr-python, compared with these libraries."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import example, given, reject
from hypothesis import strategies as st
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ZstdCodec

from dasksc.errors import CorruptDataError
from dasksc.storage import RowBuffer, files, open_matrix, opening
from dasksc.storage.arrays import UnknownLayoutError
from dasksc.storage.files import can_map
from tests.support.data import zip_of
from tests.support.recorders import recorded_reads

pytestmark = pytest.mark.core

# Every type of values and every type of indices, but not every pair, since each pair takes time to compile.
DTYPES = [("float32", "int32"), ("float64", "int64"), ("uint16", "uint32"), ("bool", "uint16")]


@contextmanager
def slow_readers() -> Iterator[None]:
    """Read everything through h5py and zarr-python."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnknownLayoutError("it is asked for")

    with mock.patch.object(opening, "direct_array", refuse), mock.patch.object(opening, "local_array", refuse):
        yield


class Random:
    """Random matrix, as the three CSR arrays and one dense array."""

    def __init__(self, *, shape: tuple[int, int], dtype: str, index_dtype: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.shape = shape
        self.dense = (rng.random(shape) < 0.3) * rng.integers(1, 100, shape)
        if shape[0] > 3:
            self.dense[shape[0] // 2] = 0
        self.dense = self.dense.astype(dtype)
        rows, columns = np.nonzero(self.dense)
        self.arrays = {
            "data": self.dense[rows, columns],
            "indices": columns.astype(index_dtype),
            "indptr": np.searchsorted(rows, np.arange(shape[0] + 1)).astype(index_dtype),
        }


randoms = st.builds(
    lambda shape, dtypes, seed: Random(shape=shape, dtype=dtypes[0], index_dtype=dtypes[1], seed=seed),
    shape=st.tuples(st.sampled_from([0, 1, 2, 7, 60]), st.sampled_from([0, 1, 5, 23])),
    dtypes=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)


def write_h5(path: Path, random: Random, **kwargs: Any) -> None:
    """Write the CSR and the dense matrix; empty arrays have no filters, as HDF5 requires."""

    def write(group: Any, name: str, values: NDArray[Any]) -> None:
        options = {key: value for key, value in kwargs.items() if values.size or key == "track_times"}
        if "chunks" in options:
            options["chunks"] = tuple(min(options["chunks"], n) for n in values.shape)
        group.create_dataset(name, data=values, **options)

    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": random.shape})
        for name, values in random.arrays.items():
            write(group, name, values)
        write(file, "layers/dense", random.dense)


def write_zarr(path: Path, random: Random, *, chunk: int, zarr_format: int, shard: int = 1, **kwargs: Any) -> None:
    root = zarr.open_group(path, mode="w", zarr_format=zarr_format)

    def write(group: Any, name: str, values: NDArray[Any]) -> None:
        options = dict(kwargs)
        if shard > 1:
            index = "start" if chunk == 3 else "end"
            options["shards"] = {"shape": (shard * chunk,) * values.ndim, "index_location": index}
        # Chunks of ones alone are not written.
        array = group.create_array(
            name, shape=values.shape, dtype=values.dtype, chunks=(chunk,) * values.ndim, fill_value=1, **options
        )
        array[...] = values

    group = root.create_group("X", attributes={"encoding-type": "csr_matrix", "shape": random.shape})
    for name, values in random.arrays.items():
        write(group, name, values)
    write(root.create_group("layers"), "dense", random.dense)


def gathered(fetched: RowBuffer, dtype: np.dtype[Any]) -> NDArray[Any]:
    out = np.full(fetched.shape, 3).astype(dtype)
    fetched.gather(np.arange(fetched.shape[0]), out=out)
    return out


def check_same(path: Path, random: Random, *, seed: int = 0, **kwargs: Any) -> None:
    """Check that the fast readers return the same values as the slow ones, and the values written."""
    n_obs = random.shape[0]
    rows = np.sort(np.random.default_rng(seed).integers(0, max(n_obs, 1), min(2 * n_obs, 50)))
    for key in ("X", "layers/dense"):
        fast = open_matrix(path, key, **kwargs)
        with slow_readers():
            slow = open_matrix(path, key)
        assert (fast.shape, fast.dtype, fast.layout) == (slow.shape, slow.dtype, slow.layout)
        expected = random.dense[rows]
        np.testing.assert_array_equal(gathered(slow.fetch(rows), fast.dtype), expected)
        np.testing.assert_array_equal(gathered(fast.fetch(rows), fast.dtype), expected)
        again = pickle.loads(pickle.dumps(fast)).fetch(rows)
        for ours, theirs in zip(
            again.gather_csr(np.arange(len(rows))), slow.fetch(rows).gather_csr(np.arange(len(rows))), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)


H5_FILTERS: list[dict[str, Any]] = [
    {},
    {"compression": "gzip"},
    {"compression": "gzip", "shuffle": True},
    {"compression": "gzip", "shuffle": True, "fletcher32": True},
    {"compression": "lzf"},
    {"shuffle": True},
]
try:
    import hdf5plugin
except ImportError:
    pass
else:
    H5_FILTERS += [
        dict(hdf5plugin.Zstd()),
        dict(hdf5plugin.Blosc(cname="lz4")),
        dict(hdf5plugin.LZ4(nbytes=64)),
        dict(hdf5plugin.Bitshuffle()),
    ]


V2_CODECS: list[dict[str, Any]] = [
    {"compressors": None},
    {"compressors": numcodecs.Blosc("lz4", 3, numcodecs.Blosc.SHUFFLE)},
    {"compressors": numcodecs.Blosc("zstd", 3, numcodecs.Blosc.BITSHUFFLE)},
    {"compressors": numcodecs.Zstd(1)},
    {"compressors": numcodecs.LZ4()},
    {"compressors": numcodecs.GZip(1)},
    {"compressors": numcodecs.Zlib(1), "filters": [numcodecs.Shuffle(4)]},
    {"compressors": None, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
]


V3_CODECS: list[dict[str, Any]] = [
    {"compressors": ()},
    {"compressors": ZstdCodec(level=1)},
    {"compressors": BloscCodec(cname="lz4", clevel=3)},
    {"compressors": GzipCodec(level=1)},
    {"compressors": [ZstdCodec(level=1, checksum=True), Crc32cCodec()]},
    {"compressors": (), "serializer": BytesCodec(endian="big")},
    {"compressors": (), "chunk_key_encoding": {"name": "v2", "separator": "."}},
    {"compressors": (), "chunk_key_encoding": {"name": "default", "separator": "."}},
]


def write(path: Path, random: Random, codecs: dict[str, Any], chunk: int | None = 16, shard: int = 1) -> Path:
    """Write a store with one of the filters or codecs above; a chunk of None is a contiguous HDF5 dataset."""
    if codecs in H5_FILTERS:
        write_h5(path / "x.h5ad", random, **(codecs | {"chunks": chunk} if chunk else {}))
        return path / "x.h5ad"
    version = 2 if codecs in V2_CODECS else 3
    write_zarr(path / "x.zarr", random, chunk=chunk, shard=1 if version == 2 else shard, zarr_format=version, **codecs)
    return path / "x.zarr"


BOOLEANS = Random(shape=(7, 5), dtype="bool", index_dtype="uint16", seed=0)


# Chunks of ones are never written, and the values that a matrix of booleans stores are ones.
@example(random=BOOLEANS, codecs=V3_CODECS[2], chunk=3, shard=1, use_mmap=True, seed=0)
@example(random=BOOLEANS, codecs=V3_CODECS[2], chunk=3, shard=3, use_mmap=False, seed=0)
@example(random=BOOLEANS, codecs=V3_CODECS[0], chunk=3, shard=1, use_mmap=False, seed=0)
@given(
    random=randoms,
    codecs=st.sampled_from([*H5_FILTERS, *V2_CODECS, *V3_CODECS]),
    chunk=st.sampled_from([1, 3, 16, 1000, None]),
    shard=st.sampled_from([1, 3]),
    use_mmap=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_store_reads_as_through_its_library(
    random: Random, codecs: dict[str, Any], chunk: int | None, shard: int, use_mmap: bool, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            store = write(Path(folder), random, codecs, chunk if codecs in H5_FILTERS else chunk or 10, shard)
        except ValueError as error:  # numcodecs can shuffle only whole elements
            if "Shuffle buffer" not in str(error):
                raise
            reject()
        check_same(store, random, seed=seed, use_mmap=use_mmap)
        if store.suffix == ".zarr":
            check_same(zip_of(store), random, seed=seed, use_mmap=use_mmap)


@pytest.fixture
def random() -> Random:
    return Random(shape=(60, 23), dtype="float32", index_dtype="int32", seed=0)


# Those that are not left to h5py.
USUAL_FILTERS = [one for one in H5_FILTERS if one.get("compression", bool(one)) not in (32004, 32008, True)]


# Default test ids, because the repr of zarr-python's codecs contains sets, whose order differs between processes.
@pytest.mark.parametrize("shard", [1, 3])
@pytest.mark.parametrize("codecs", [*USUAL_FILTERS, *V2_CODECS, *V3_CODECS])
def test_no_library_reads_once_a_matrix_is_open(
    random: Random, codecs: dict[str, Any], shard: int, tmp_path: Path
) -> None:
    path = write(tmp_path, random, codecs, shard=shard)
    for key in ("X", "layers/dense"):
        matrix = open_matrix(path, key)
        with (
            recorded_reads() as reads,
            mock.patch("h5py.File", side_effect=AssertionError("HDF5 was used")),
            mock.patch("zarr.open_array", side_effect=AssertionError("zarr was used")),
        ):
            matrix.fetch(np.arange(20))
        assert reads.h5py_names == reads.zarr_keys == []


@pytest.mark.parametrize("chunks", [None, 16])
def test_uncompressed_h5ad_is_gathered_from_where_it_lies(random: Random, chunks: int | None, tmp_path: Path) -> None:
    write_h5(tmp_path / "x.h5ad", random, **({"chunks": chunks} if chunks else {}))
    fetched = open_matrix(tmp_path / "x.h5ad", "X").fetch(np.arange(60))
    n_bytes = sum(random.arrays[name].nbytes for name in ("data", "indices"))
    # A row is copied only if it spans chunks that are not adjacent in the file; here, that is true of few rows or none.
    assert fetched.nbytes <= (0 if chunks is None else n_bytes // 2)


# Chunks that are smaller and larger than a page.
@pytest.mark.parametrize("n_vars", [3, 1200])
def test_rows_across_chunks_that_lie_apart_or_were_never_written_are_read(n_vars: int, tmp_path: Path) -> None:
    values = np.arange(40 * n_vars, dtype=np.float32).reshape(40, n_vars)
    length = 7 * n_vars // 3
    with h5py.File(tmp_path / "x.h5ad", "w") as file:
        dense = file.create_dataset("X", values.shape, "float32", chunks=(4, n_vars), fillvalue=-7)
        group = file.create_group("layers/csr")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": values.shape})
        data = group.create_dataset("data", (values.size,), "float32", chunks=(length,), fillvalue=-7)
        group["indices"] = np.tile(np.arange(n_vars), 40)
        group["indptr"] = np.arange(41) * n_vars
        # Write chunks out of order with other data between them, and leave some unwritten.
        for chunk in (5, 2, 9, 3, 0):
            dense[4 * chunk : 4 * chunk + 4] = values[4 * chunk : 4 * chunk + 4]
            data[length * chunk : length * (chunk + 1)] = values.ravel()[length * chunk : length * (chunk + 1)]
            file.flush()
            file[f"between/{chunk}"] = np.zeros(4 * n_vars)
    with h5py.File(tmp_path / "x.h5ad") as file:
        expected = {"X": file["X"][...], "layers/csr": file["layers/csr/data"][...].reshape(40, n_vars)}
    assert (expected["X"] == -7).any()
    # Unmapped, files whose pages are not cached are read directly, here with two ranges a read.
    direct = mock.patch.multiple(files, _SHORT_BYTES=0, _PART_RANGES=2, _seem_cached=lambda *_: False)
    for use_mmap in (True, False, "auto"):
        for key, twin in expected.items():
            for rows in (np.arange(40), np.arange(1, 40, 5)):
                with direct, files.mapping(is_allowed=False):
                    fetched = open_matrix(tmp_path / "x.h5ad", key, use_mmap=use_mmap).fetch(rows)
                np.testing.assert_array_equal(gathered(fetched, np.dtype("float32")), twin[rows])


@pytest.mark.parametrize(
    ("libver", "layout"),
    [
        (None, {"chunks": (7, 9), "maxshape": (None, None)}),  # chunks are wider than the matrix
        ("latest", {"chunks": (7, 2), "maxshape": (60, None)}),  # HDF5 reports these chunks at wrong positions
    ],
)
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_chunks_of_any_width_hold_their_columns(libver: Any, layout: Any, compression: Any, tmp_path: Path) -> None:
    X = np.arange(240, dtype=np.float32).reshape(60, 4)
    with h5py.File(tmp_path / "a.h5ad", "w", libver=libver) as file:
        file.create_dataset("X", data=X, compression=compression, **layout)
    np.testing.assert_array_equal(gathered(open_matrix(tmp_path / "a.h5ad", "X").fetch(np.arange(60)), X.dtype), X)


def test_chunks_that_skipped_a_filter_are_read(random: Random, tmp_path: Path) -> None:
    write_h5(tmp_path / "x.h5ad", random, chunks=16, compression="gzip", shuffle=True)
    with h5py.File(tmp_path / "x.h5ad", "r+") as file:
        data = file["X/data"]
        plain = random.arrays["data"][16:32]
        data.id.write_direct_chunk((16,), plain.tobytes(), filter_mask=0b11)
        # Shuffled, but not compressed.
        shuffled = numcodecs.Shuffle(4).encode(random.arrays["data"][32:48])
        data.id.write_direct_chunk((32,), bytes(shuffled), filter_mask=0b10)
    check_same(tmp_path / "x.h5ad", random)


@pytest.mark.parametrize("change", ["truncated", "garbage", "empty"])
@pytest.mark.parametrize("shard", [1, 3])
def test_a_damaged_zarr_chunk_or_shard_is_an_error(random: Random, change: str, shard: int, tmp_path: Path) -> None:
    path = tmp_path / "x.zarr"
    codecs = BloscCodec(cname="lz4") if shard == 1 else [ZstdCodec(), Crc32cCodec()]
    write_zarr(path, random, chunk=16, shard=shard, zarr_format=3, compressors=codecs)
    for file in (path / "X" / "data" / "c").iterdir():
        whole = file.read_bytes()
        file.write_bytes({"truncated": whole[:-9], "garbage": whole[::-1], "empty": b""}[change])
    with pytest.raises(CorruptDataError, match="X/data.*Copy"):
        open_matrix(path, "X").fetch(np.arange(60))


def test_files_of_this_machine_are_mapped_and_those_of_others_are_not(tmp_path: Path) -> None:
    mounts = "/dev/sda / ext4 rw 0 0\nserver:/data /mnt/data nfs4 rw 0 0\n/dev/sdb /mnt/data/fast\\040disk xfs rw 0 0\n"
    with mock.patch("builtins.open", mock.mock_open(read_data=mounts)):
        assert can_map("/srv/x.h5ad")
        assert not can_map("/mnt/data/x.h5ad")
        assert can_map("/mnt/database.h5ad")
        assert can_map("/mnt/data/fast disk/x.h5ad")


@pytest.mark.parametrize("options", [{}, {"chunks": (2**20,), "compression": "gzip"}, {"chunks": (2**20,)}], ids=str)
@pytest.mark.parametrize("use_mmap", [True, False])
def test_rows_beyond_2_to_the_31_elements_are_read(options: dict[str, Any], use_mmap: bool, tmp_path: Path) -> None:
    far = 2**31 + 5
    with h5py.File(tmp_path / "x.h5ad", "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": (3, 10)})
        # The first row is a hole in the file, which is never read.
        for name, values in (("data", [7, 8, 9]), ("indices", [1, 4, 9])):
            dataset = group.create_dataset(name, (far + 3,), "uint8", fill_time="never", **options)
            dataset[far:] = values
        group["indptr"] = np.array([0, far, far + 2, far + 3])
    fetched = open_matrix(tmp_path / "x.h5ad", "X", use_mmap=use_mmap).fetch(np.array([1, 2, 2]))
    expected = np.zeros((3, 10))
    expected[[0, 0, 1, 2], [1, 4, 9, 9]] = [7, 8, 9, 9]
    np.testing.assert_array_equal(gathered(fetched, np.dtype("float64")), expected)


@pytest.mark.parametrize("name", ["x.h5ad", "x.zarr"])
def test_scattered_rows_that_libraries_read_hold_no_rows_in_between(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(3).integers(0, 1000, (20_000, 25), dtype=np.int32)
    if name == "x.zarr":
        zarr.open_group(tmp_path / name, mode="w").create_array("X", data=values, chunks=(96, 25))
    else:
        with h5py.File(tmp_path / name, "w") as file:
            file.create_dataset("X", data=values, chunks=(96, 25))
    monkeypatch.setattr("dasksc.storage.arrays._SLICE_BYTES", 2**16)
    with slow_readers():
        matrix = open_matrix(tmp_path / name, "X")
    (array,) = matrix.arrays
    slices, reader = [], array.reader()

    def read(start: int, stop: int, into: np.ndarray) -> None:
        slices.append(stop - start)
        reader(start, stop, into)

    monkeypatch.setattr(array, "reader", lambda: read)
    rows = np.arange(0, 20_000, 7)
    fetched = matrix.fetch(rows)
    np.testing.assert_array_equal(gathered(fetched, np.dtype("float64")), values[rows])
    assert fetched.nbytes == len(rows) * 4 * 25
    # Neighboring rows are read together, but no slice exceeds the limit.
    assert len(slices) < len(rows) / 50
    assert max(slices) <= 2**16 // (4 * 25)
