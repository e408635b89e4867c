"""Decoding of parts of Blosc chunks, with one call for all chunks of a fetch.

The kernel calls the decoder of C-Blosc by its address. A Python loop would spend a third of its time between calls of
the decoder, while holding the GIL.
"""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.csr import load
from dasksc.kernels.foreign import call, copy_bytes

_HEADER_BYTES = 16
_CODEC_VERSION = 1  # the format version of every Blosc codec
_IS_COPIED = 2


@kernel
def getitems(function, sources, sizes, chunk_bytes, chunks, starts, stops, to, scratch, out):
    """Decode pieces of chunks into `out`, uint8; return the number of the first piece that failed, or -1."""
    # Piece i consists of decoded bytes [starts[i], stops[i]) of chunk chunks[i], and begins at out[to[i]]. Chunks are
    # ascending, and so are the pieces of a chunk. `scratch` has `chunk_bytes` bytes.
    first = 0
    byte = np.empty(0, dtype=np.uint8)
    word = np.empty(0, dtype=np.int32)
    while first < len(chunks):
        chunk = chunks[first]
        source = sources[chunk]
        # The library trusts the sizes in the header, which come from the file, so they are checked here.
        if sizes[chunk] < _HEADER_BYTES:
            return first
        item = np.int64(load(source, 3, byte))
        block = np.int64(load(source, 2, word))
        stored = load(source, 3, word)
        if load(source, 1, word) != chunk_bytes or stored > sizes[chunk] or not (0 < block <= chunk_bytes) or item < 1:
            return first
        # The library trusts that uncompressed chunks are complete, so their size is checked here.
        if load(source, 1, byte) != _CODEC_VERSION or (
            load(source, 2, byte) & _IS_COPIED and stored != chunk_bytes + _HEADER_BYTES
        ):
            return first
        # Pieces that share a block of the chunk are decoded together, so that each block is decoded once.
        after = first + 1
        while (
            after < len(chunks) and chunks[after] == chunk and starts[after] // block <= (stops[after - 1] - 1) // block
        ):
            after += 1
        start = starts[first]
        n_bytes = stops[after - 1] - start
        if start % item or n_bytes % item:
            return first
        alone = after == first + 1
        target = np.uint64(out.ctypes.data + to[first]) if alone else np.uint64(scratch.ctypes.data)
        if np.int32(call(function, (source, start // item, n_bytes // item, target))) != n_bytes:
            return first
        if not alone:
            for i in range(first, after):
                copy_bytes(scratch[starts[i] - start : stops[i] - start], out[to[i] :])
        first = after
    return -1
