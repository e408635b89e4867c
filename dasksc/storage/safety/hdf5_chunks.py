"""Limits on the decompressed size of HDF5 chunks, since HDF5 filters allocate as much as the stored bytes request."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import h5py

from dasksc.errors import CorruptDataError, StorageError
from dasksc.storage.safety.decompression_limits import DEFLATE_RATIO, LZF_RATIO, ROOM_BYTES, check_decompressed_size
from dasksc.storage.safety.hdf5_links import others_of

__all__ = ["check_chunks", "stored_bytes"]

# Compression filters by number: name of the codec, and its maximum expansion if there is one.
_COMPRESSION_FILTERS: dict[int, tuple[str, int | None]] = {
    h5py.h5z.FILTER_DEFLATE: ("zlib", DEFLATE_RATIO),
    h5py.h5z.FILTER_LZF: ("h5-lzf", LZF_RATIO),
    307: ("bz2", None),
    32001: ("blosc", None),
    32004: ("h5-lz4", None),
    32008: ("h5-bitshuffle", None),
    32015: ("zstd", None),
}
# Number of the bitshuffle filter, and index of its parameter that selects the compressor.
_BITSHUFFLE, _BITSHUFFLE_COMPRESSION = 32008, 4


def check_chunks(dataset: h5py.Dataset, label: str, *, rows: tuple[int, int] | None = None) -> None:
    """Raise an error if h5py would decompress a chunk of a dataset to far more than its shape allows."""
    # With gzip and LZF, the check skips small chunks: these codecs have a maximum expansion, so small chunks cannot
    # exceed the limit.
    plist = dataset.id.get_create_plist()
    filters = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    compressing = [i for i, one in enumerate(filters) if one[0] in _COMPRESSION_FILTERS and _compresses(one)]
    if not compressing:
        return
    at = compressing[0]
    if compressing[1:] or any(number != h5py.h5z.FILTER_FLETCHER32 for number, *_ in filters[at + 1 :]):
        names = ", ".join(name.decode(errors="replace") for *_, name in filters)
        raise StorageError(
            f"{label} is not read: only the last of its filters may compress the data, but its filters are {names}. "
            "Write the file again with one compression filter, such as adata.write_h5ad(path, compression='gzip')"
        )
    codec, ratio = _COMPRESSION_FILTERS[filters[at][0]]
    at_most = math.prod(dataset.chunks) * dataset.id.get_type().get_size() + ROOM_BYTES
    if ratio is not None and dataset.id.get_storage_size() * ratio <= at_most:
        return
    suspicious: list[tuple[int, ...]] = []

    def look(chunk: Any) -> None:
        if chunk.size and not chunk.filter_mask >> at & 1 and (ratio is None or chunk.size * ratio > at_most):
            suspicious.append(chunk.chunk_offset)

    if rows is None:
        dataset.id.chunk_iter(look)
    else:
        for offset in _offsets(dataset, rows):
            look(dataset.id.get_chunk_info_by_coord(offset))
    for offset in suspicious:
        try:
            check_decompressed_size(codec, dataset.id.read_direct_chunk(offset)[1], at_most=at_most)
        except ValueError as error:
            raise CorruptDataError(
                f"{label}: its chunk at {offset} is corrupt: {error}. Copy or download the file again."
            ) from error


def stored_bytes(datasets: Iterable[h5py.Dataset]) -> int:
    """Return the stored size of datasets, in bytes."""
    # Each file contributes at most its own size, since chunks that several datasets share would otherwise be counted
    # repeatedly.
    sizes: dict[str, int] = {}
    stored: dict[str, int] = {}
    for dataset in datasets:
        file, others = dataset.file, others_of(dataset)
        name = str(file.filename)
        sizes[name] = file.id.get_filesize()
        # HDF5 does not report the stored size of a virtual dataset.
        stored[name] = stored.get(name, 0) + (sizes[name] if dataset.is_virtual else dataset.id.get_storage_size())
        for other in others:
            sizes[other] = stored[other] = os.path.getsize(other)
    return sum(min(stored[name], sizes[name]) for name in sizes)


def _offsets(dataset: h5py.Dataset, rows: tuple[int, int]) -> Iterator[tuple[int, ...]]:
    """Return the offsets of the chunks that contain rows [start, stop)."""
    first = range(rows[0] // dataset.chunks[0] * dataset.chunks[0], rows[1], dataset.chunks[0])
    others = (range(0, n, length) for n, length in zip(dataset.shape[1:], dataset.chunks[1:], strict=True))
    return itertools.product(first, *others)


def _compresses(one: tuple[int, int, tuple[int, ...], bytes]) -> bool:
    number, _, values, _ = one
    return number != _BITSHUFFLE or (len(values) > _BITSHUFFLE_COMPRESSION and values[_BITSHUFFLE_COMPRESSION] != 0)
