"""Decoding of zlib and gzip chunks (the gzip filter of HDF5), with one call for all chunks of a fetch.

The kernel calls libdeflate by its addresses. A Python loop would allocate memory for every chunk, and would hold the
GIL between chunks.
"""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.foreign import call, copy_bytes


@kernel
def decode_pieces(functions, sources, sizes, chunk_bytes, chunks, starts, stops, to, scratch, out):
    """Decode pieces of chunks into `out`, uint8; return the number of the first piece that failed, or -1."""
    # The arguments are those of `dasksc.kernels.blosc.getitems`, with addresses of
    # `dasksc._compat.deflate_addresses`. Chunks of several gzip members fail.
    allocate, free, decompress = functions
    n_bytes, any_size = np.uint64(chunk_bytes), np.uint64(0)
    decompressor = call(allocate, ())
    first, failed = 0, -1
    while first < len(chunks):
        chunk = chunks[first]
        after = first + 1
        while after < len(chunks) and chunks[after] == chunk:
            after += 1
        is_whole = stops[first] - starts[first] == chunk_bytes
        target = np.uint64(out.ctypes.data) + np.uint64(to[first]) if is_whole else np.uint64(scratch.ctypes.data)
        # Without an address for the decoded size, the function fails for any other size than that of the chunk.
        given = (decompressor, sources[chunk], np.uint64(sizes[chunk]), target, n_bytes, any_size)
        if decompressor == 0 or np.int32(call(decompress, given)) != 0:
            failed = first
            break
        if not is_whole:
            for i in range(first, after):
                copy_bytes(scratch[starts[i] : stops[i]], out[to[i] :])
        first = after
    call(free, (decompressor,))
    return failed
