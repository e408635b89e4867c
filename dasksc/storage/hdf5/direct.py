"""Reading of HDF5 datasets without HDF5: locations of the bytes of numbers, and strings of variable length.

HDF5 stores variable-length strings in global heap collections, and datasets hold references to them. The layouts
follow the HDF5 File Format Specification, version 3.0 (sections III.E and VIII.B). Other layouts are left to h5py,
which needs half as much time again for strings.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from dasksc.kernels import files as kernels
from dasksc.storage.arrays import StoredArray, UnknownLayoutError
from dasksc.storage.chunked import ChunkedArray, ChunkTable, TableChunks
from dasksc.storage.codecs import Chain, Codec, Deflate, H5Lzf, codec_of_config
from dasksc.storage.files import LocalFile
from dasksc.storage.hdf5.chunk_index import chunk_table
from dasksc.storage.hdf5.reader import check_item
from dasksc.storage.remote.remote_file import RemoteFile
from dasksc.storage.uncompressed import PlainArray

_REFERENCE_BYTES = 16
# Number of strings to create at a time.
_PIECE = 2**20


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


def read_strings(dataset: h5py.Dataset, path: str) -> NDArray[Any] | None:
    """Read all strings of a dataset; return None if they must be read through h5py."""
    result = np.empty(len(dataset), dtype=object)
    start = 0
    for piece in strings_in_pieces(dataset, path, _PIECE):
        if piece is None:
            return None
        result[start : start + len(piece)] = piece
        start += len(piece)
    return result


def strings_in_pieces(dataset: h5py.Dataset, path: str, n_together: int) -> Iterator[list[str] | None]:
    """Yield the strings of `read_strings`, `n_together` at a time; end with None if they must be read through h5py."""
    offset = dataset.id.get_offset()
    kind = h5py.check_string_dtype(dataset.dtype)
    if (
        kind is None
        or kind.length is not None
        or dataset.ndim != 1
        or offset is None
        or dataset.is_virtual
        or dataset.external
        or dataset.file.userblock_size
        or dataset.id.get_storage_size() != _REFERENCE_BYTES * len(dataset)
        or not os.path.samefile(dataset.file.filename, path)
    ):
        yield None
        return
    file = LocalFile.of(path, "auto")
    if not file.is_mapped or offset + _REFERENCE_BYTES * len(dataset) > file.identity.size:
        yield None
        return
    data = file.mapped()
    for first in range(0, len(dataset), n_together):
        n = min(n_together, len(dataset) - first)
        found = packed_strings(data, offset + first * _REFERENCE_BYTES, n)
        if found is None:
            yield None
            return
        yield split_strings(*found)


def packed_strings(data: NDArray[np.uint8], offset: int, n: int) -> tuple[bytes, NDArray[np.int64]] | None:
    """Return `n` strings of a file, concatenated, and their sizes in bytes; None if one cannot be found."""
    # The references to the strings begin at `offset`.
    references = data[offset : offset + n * _REFERENCE_BYTES]
    starts, sizes = np.empty((2, n), dtype=np.int64)
    if len(references) < n * _REFERENCE_BYTES:
        return None
    if kernels.locate_strings(references.reshape(n, _REFERENCE_BYTES), data, starts, sizes) >= 0:
        return None
    return _packed_at(data, starts, sizes), sizes


def strings_at(data: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[str]:
    """Return the strings in given byte ranges."""
    return split_strings(_packed_at(data, starts, sizes), sizes)


def _packed_at(data: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> bytes:
    """Return the concatenated bytes of given ranges."""
    packed = np.empty(int(sizes.sum()), dtype=np.uint8)
    kernels.copy_strings(data, starts, sizes, packed)
    return packed.tobytes()


def split_strings(packed: bytes, sizes: NDArray[np.int64]) -> list[str]:
    """Return strings of given sizes in bytes; surrogates stand for bytes that are not UTF-8."""
    ends = np.cumsum(sizes)
    places = zip((ends - sizes).tolist(), ends.tolist(), strict=True)
    if packed.isascii():
        text = packed.decode("ascii")
        return [text[start:end] for start, end in places]
    return [packed[start:end].decode("utf-8", "surrogateescape") for start, end in places]
