"""Decoding of parts of Zstandard frames.

The kernels decode block by block, straight into place, and stop after the last block that is needed. A streaming
decompressor would copy each block twice, and would allocate its window again for every frame.
"""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.csr import load
from dasksc.kernels.foreign import call, copy_bytes

_FIRST_ERROR = np.uint64(2**64 - 120)  # larger results are error codes
_HAS_CHECKSUM = 0x04  # in the byte after the magic number


@kernel
def decode_pieces(functions, sources, sizes, chunk_bytes, chunks, starts, stops, to, scratch, out):
    """Decode pieces of chunks into `out`, uint8; return the number of the first piece that failed, or -1."""
    # The arguments are those of `dasksc.kernels.blosc.getitems`, with the addresses of
    # `dasksc._compat.zstd_addresses`. Frames fail if they do not state their size, or if there are
    # several.
    context = call(functions[0], ())
    first, failed = 0, -1
    while first < len(chunks):
        chunk = chunks[first]
        after = first + 1
        while after < len(chunks) and chunks[after] == chunk:
            after += 1
        is_whole = stops[first] - starts[first] == chunk_bytes
        target = np.uint64(out.ctypes.data) + np.uint64(to[first]) if is_whole else np.uint64(scratch.ctypes.data)
        if not _decode(functions, context, sources[chunk], sizes[chunk], stops[after - 1], target, chunk_bytes):
            failed = first
            break
        if not is_whole:
            for i in range(first, after):
                copy_bytes(scratch[starts[i] : stops[i]], out[to[i] :])
        first = after
    call(functions[1], (context,))
    return failed


@kernel
def _decode(functions, context, source, size, n_needed, target, n_bytes):
    """Decode the frame of `size` bytes at `source` to `target`, up to at least `n_needed` of its `n_bytes` bytes."""
    _, _, content_size, begin, next_size, proceed = functions
    size, n_needed, n_bytes = np.uint64(size), np.uint64(n_needed), np.uint64(n_bytes)
    if context == 0 or call(content_size, (source, size)) != n_bytes:
        return False
    # A checksum can be verified only for the whole frame.
    if load(source, 4, np.empty(0, dtype=np.uint8)) & _HAS_CHECKSUM:
        n_needed = n_bytes
    call(begin, (context,))
    done = at = np.uint64(0)
    n = call(next_size, (context,))
    while n != 0 and n <= size - at and (done < n_needed or n_needed == n_bytes):
        got = call(proceed, (context, target + done, n_bytes - done, source + at, n))
        if got > _FIRST_ERROR:
            return False
        done += got
        at += n
        n = call(next_size, (context,))
    # The end of a frame that is decoded whole must be that of the chunk.
    return done >= n_needed and (n_needed < n_bytes or (n == 0 and at == size))
