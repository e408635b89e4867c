"""Where the bytes of an HDF5 dataset lie, so that they can be read without HDF5."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np

from dasksc.storage.arrays import UnknownLayoutError
from dasksc.storage.files import LocalFile, can_map
from dasksc.storage.mapped import Extents, MappedArray

__all__ = ["direct_array"]


def direct_array(file: LocalFile, dataset: h5py.Dataset, *, label: str, use_mmap: bool) -> MappedArray:
    """Return a dataset as an array that is read without HDF5.

    Parameters
    ----------
    file
        The file that `dataset` is in.
    dataset
        The dataset, open.
    label
        What to call it in errors.
    use_mmap
        Whether files of this machine may be mapped.

    Raises
    ------
    UnknownLayoutError
        If it must be read through h5py.
    CorruptDataError
        If its bytes lie beyond the end of the file.
    """
    dtype = dataset.dtype
    if dtype.kind not in "biuf" or not dtype.isnative or dtype == np.float16:
        raise UnknownLayoutError(f"its type is {dtype!r}")
    if not dataset.id.get_type().equal(h5py.h5t.py_create(dtype, logical=True)):
        raise UnknownLayoutError("its type has padding")
    plist = dataset.id.get_create_plist()
    if dataset.file.userblock_size:
        raise UnknownLayoutError("the file has a user block")
    if dataset.is_virtual or plist.get_external_count():
        raise UnknownLayoutError("its values lie in other files")
    layout = plist.get_layout()
    fill = np.zeros(1, dtype=dtype)
    plist.get_fill_value(fill)
    stride = int(np.prod(dataset.shape[1:], dtype=np.int64)) * dtype.itemsize
    if layout == h5py.h5d.CONTIGUOUS:
        offset = dataset.id.get_offset()
        extents = Extents(
            firsts=np.zeros(1, dtype=np.int64), offsets=np.array([-1 if offset is None else offset], dtype=np.int64)
        )
    elif layout == h5py.h5d.CHUNKED:
        if plist.get_nfilters():
            raise UnknownLayoutError("it is compressed")
        if dataset.chunks[1:] != dataset.shape[1:]:
            raise UnknownLayoutError("its rows are cut into several chunks")
        extents = _chunk_extents(dataset, stride)
    else:
        raise UnknownLayoutError("it is stored in its own header")
    if not use_mmap or not can_map(file.path):
        raise UnknownLayoutError("the file is not to be mapped")
    return MappedArray(label=label, shape=dataset.shape, dtype=dtype, file=file, extents=extents, fill=fill[0])


def _chunk_extents(dataset: h5py.Dataset, stride: int) -> Extents:
    length = dataset.chunks[0]
    n_chunks = -(-dataset.shape[0] // length)
    offsets = np.full(n_chunks, -1, dtype=np.int64)

    def note(chunk: Any) -> None:
        # Chunks beyond the end stay in the file when a dataset is made shorter.
        if chunk.chunk_offset[0] < dataset.shape[0]:
            offsets[chunk.chunk_offset[0] // length] = chunk.byte_offset

    if dataset.size:
        dataset.id.chunk_iter(note)
    firsts = np.arange(n_chunks, dtype=np.int64) * length
    return Extents.joined(firsts=firsts, offsets=offsets, row_bytes=stride)
