"""Serialization of fetched rows between the processes of a Dask cluster.

Dask determines the memory of a result with `sizeof`. Its serializers convert a result to a small header and to
frames, which are written to the socket without a copy. Without the functions registered here, Dask would pickle
fetched rows. Memory-mapped rows would count as zero bytes, and the worker's event loop would copy them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
from dask.sizeof import sizeof
from distributed.protocol import dask_deserialize, dask_serialize, deserialize, serialize
from numpy.typing import NDArray

from dasksc.executor.tasks import FetchedMatrices
from dasksc.storage.fetched_csr import CSRRowBuffer
from dasksc.storage.fetched_dense import DenseRowBuffer
from dasksc.storage.read_timing import ThreadTimes

__all__: list[str] = []

Header = dict[str, Any]
Frames = list[memoryview]


def _held_bytes(fetched: CSRRowBuffer | DenseRowBuffer | FetchedMatrices) -> int:
    return fetched.nbytes


def _dump_csr(fetched: CSRRowBuffer) -> tuple[Header, Frames]:
    header, frames = _dump_arrays([fetched.rows, *fetched.block])
    return header | {"label": fetched.label, "n_vars": fetched.shape[1], "dtype": fetched.dtype.str}, frames


def _load_csr(header: Header, frames: Frames) -> CSRRowBuffer:
    rows, indptr, indices, data = _load_arrays(header, frames)
    dtype = np.dtype(header["dtype"])
    return CSRRowBuffer.of_block(header["label"], rows, header["n_vars"], dtype, (indptr, indices, data))


def _dump_dense(fetched: DenseRowBuffer) -> tuple[Header, Frames]:
    header, frames = _dump_arrays([fetched.rows, fetched.block])
    return header | {"label": fetched.label, "n_vars": fetched.shape[1], "dtype": fetched.dtype.str}, frames


def _load_dense(header: Header, frames: Frames) -> DenseRowBuffer:
    rows, block = _load_arrays(header, frames)
    block = block.reshape(len(rows), header["n_vars"])
    return DenseRowBuffer.of_block(header["label"], rows, np.dtype(header["dtype"]), block)


def _dump_matrices(fetched: FetchedMatrices) -> tuple[Header, Frames]:
    dumped = [serialize(part, on_error="raise") for part in fetched.parts.values()]
    header = {
        "names": list(fetched.parts),
        "headers": [part_header for part_header, _ in dumped],
        "n_frames": [len(part_frames) for _, part_frames in dumped],
        "spent": None if fetched.spent is None else astuple(fetched.spent),
    }
    return header, [frame for _, part_frames in dumped for frame in part_frames]


def _load_matrices(header: Header, frames: Frames) -> FetchedMatrices:
    parts, first = {}, 0
    for name, part_header, n_frames in zip(header["names"], header["headers"], header["n_frames"], strict=True):
        parts[name] = deserialize(part_header, frames[first : first + n_frames])
        first += n_frames
    return FetchedMatrices(parts, None if header["spent"] is None else ThreadTimes(*header["spent"]))


def _dump_arrays(arrays: Sequence[NDArray[Any]]) -> tuple[Header, Frames]:
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    return {"dtypes": [array.dtype.str for array in flat]}, [array.view(np.uint8).data for array in flat]


def _load_arrays(header: Header, frames: Frames) -> list[NDArray[Any]]:
    # A frame may begin at any byte, so the arrays may be unaligned, like those of memory-mapped files. The Numba
    # kernels accept them.
    return [np.frombuffer(frame, dtype=dtype) for frame, dtype in zip(frames, header["dtypes"], strict=True)]


sizeof.register((CSRRowBuffer, DenseRowBuffer, FetchedMatrices), _held_bytes)
for kind, dump, load in (
    (CSRRowBuffer, _dump_csr, _load_csr),
    (DenseRowBuffer, _dump_dense, _load_dense),
    (FetchedMatrices, _dump_matrices, _load_matrices),
):
    dask_serialize.register(kind, dump)
    dask_deserialize.register(kind, load)
