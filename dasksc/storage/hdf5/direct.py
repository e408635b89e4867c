"""Reading of numbers in HDF5 datasets without HDF5, which only tells where their bytes lie."""

from __future__ import annotations

import math
import os
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from dasksc.storage.arrays import StoredArray, UnknownLayoutError
from dasksc.storage.chunked import ChunkedArray, ChunkTable, TableChunks
from dasksc.storage.codecs import Chain, Codec, Deflate, H5Lzf, codec_of_config
from dasksc.storage.files import LocalFile
from dasksc.storage.hdf5.chunk_index import chunk_table
from dasksc.storage.hdf5.reader import check_item
from dasksc.storage.remote.remote_file import RemoteFile
from dasksc.storage.uncompressed import PlainArray


def direct_array(
    file: LocalFile | RemoteFile, dataset: h5py.Dataset, *, label: str, is_checked: bool = False
) -> StoredArray:
    """Return a dataset as an array that is read without HDF5; `is_checked` is True if its links have been checked."""
    if isinstance(file, LocalFile) and not is_checked:  # remote files are checked when they are opened
        check_item(dataset, file.path)
    dtype = dataset.dtype
    if dtype.kind not in "biuf" or not dtype.isnative or dtype == np.float16:
        raise UnknownLayoutError(f"its type is {dtype!r}")
    if not dataset.id.get_type().equal(h5py.h5t.py_create(dtype, logical=True)):
        raise UnknownLayoutError("its type has padding")
    plist = dataset.id.get_create_plist()
    # Remote files have no links to other files, since remote files with such links are refused when they are opened.
    if isinstance(file, LocalFile) and not is_checked and not os.path.samefile(dataset.file.filename, file.path):
        raise UnknownLayoutError("it is a link to another file")
    if dataset.is_virtual or plist.get_external_count():
        raise UnknownLayoutError("its values lie in other files")
    layout = plist.get_layout()
    fill = np.zeros(1, dtype=dtype)
    plist.get_fill_value(fill)
    if layout == h5py.h5d.CHUNKED and (plist.get_nfilters() or dataset.chunks[1:] != dataset.shape[1:]):
        chain = Chain(
            codecs=tuple(_codec(plist.get_filter(i), dtype) for i in range(plist.get_nfilters())), dtype=dtype
        )
        table = chunk_table(dataset, file)
        _check_offsets(dataset, file, table.offsets)
        if chain.codecs and _may_have_raw_edges(dataset, table):
            raise UnknownLayoutError("chunks at its edges are stored without its filters")
        return ChunkedArray(
            label=label,
            shape=dataset.shape,
            chunk_shape=dataset.chunks,
            chain=chain,
            source=TableChunks(file, table),
            fill=fill[0],
        )
    if layout == h5py.h5d.CONTIGUOUS:
        offset = dataset.id.get_offset()
        firsts, offsets = np.zeros(1, dtype=np.int64), np.array([-1 if offset is None else offset], dtype=np.int64)
    elif layout == h5py.h5d.CHUNKED:
        offsets = chunk_table(dataset, file).offsets
        firsts = np.arange(len(offsets), dtype=np.int64) * dataset.chunks[0]
    else:
        raise UnknownLayoutError("it is stored in its object header")
    _check_offsets(dataset, file, offsets)
    return PlainArray(
        label=label,
        shape=dataset.shape,
        dtype=dtype,
        file=file,
        firsts=firsts,
        offsets=offsets,
        fill=fill[0],
    )


def _check_offsets(dataset: h5py.Dataset, file: LocalFile | RemoteFile, offsets: NDArray[np.int64]) -> None:
    """Raise `UnknownLayoutError` if `offsets` disregard the user block, as they do in some versions of HDF5."""
    written = np.flatnonzero(offsets >= 0)
    if not dataset.file.userblock_size or not len(written):
        return
    if dataset.chunks is None:
        stored = np.ascontiguousarray(dataset[:1]).tobytes()
    else:
        grid = [-(-n // length) for n, length in zip(dataset.shape, dataset.chunks, strict=True)]
        places = np.unravel_index(int(written[0]), grid)
        start = tuple(int(at) * length for at, length in zip(places, dataset.chunks, strict=True))
        _, stored = dataset.id.read_direct_chunk(start)
    found = file.fetch(int(offsets[written[0]]), int(offsets[written[0]]) + len(stored))
    if isinstance(file, LocalFile):
        file.close()
    if found != stored:
        raise UnknownLayoutError(
            "the file has a user block, which this version of HDF5 does not count in the positions of values"
        )


def _may_have_raw_edges(dataset: h5py.Dataset, table: ChunkTable) -> bool:
    """Return True if edge chunks may be stored without filters, as requested by an option of HDF5."""
    # h5py does not expose this option, and such chunks do not record that filters were skipped.
    grid = [-(-n // length) for n, length in zip(dataset.shape, dataset.chunks, strict=True)]
    edges = np.zeros(grid, dtype=bool)
    for axis, (n, length) in enumerate(zip(dataset.shape, dataset.chunks, strict=True)):
        if n % length:
            edges[(slice(None),) * axis + (-1,)] = True
    raw_bytes = math.prod(dataset.chunks) * dataset.dtype.itemsize
    return bool((edges.ravel() & (table.sizes == raw_bytes) & (table.skipped == 0)).any())


def _codec(filter_info: tuple[int, int, tuple[int, ...], bytes], dtype: np.dtype[Any]) -> Codec:
    number, _, _, name = filter_info
    match number:
        case h5py.h5z.FILTER_DEFLATE:
            return Deflate(wbits=15)
        case h5py.h5z.FILTER_SHUFFLE:
            return codec_of_config({"id": "shuffle", "elementsize": dtype.itemsize})
        case h5py.h5z.FILTER_FLETCHER32:
            return codec_of_config({"id": "fletcher32"})
        case h5py.h5z.FILTER_LZF:
            return H5Lzf()
        case 32001:
            return codec_of_config({"id": "blosc"})
        case 32015:
            return codec_of_config({"id": "zstd"})
    raise UnknownLayoutError(f"its filter {name.decode(errors='replace') or number} is not known")


def strings_at(data: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[str]:
    """Return the strings in given byte ranges; surrogates stand for bytes that are not UTF-8."""
    view = data.data
    places = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
    return [str(view[start:stop], "utf-8", "surrogateescape") for start, stop in places]
