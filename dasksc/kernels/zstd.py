"""Decoding of the beginning of a Zstandard frame.

The kernel decodes block by block, straight into place, and stops after the last block that is needed. A streaming
decompressor would copy each block twice, and would allocate its window again for every frame.
"""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.foreign import call

__all__ = ["decode_beginning"]

_FIRST_ERROR = np.uint64(2**64 - 120)  # larger results are error codes


@kernel
def decode_beginning(functions, frame, n_needed, out):
    """Decode a frame into `out`, both uint8, up to at least `n_needed` bytes; return False if that fails."""
    # `functions` are the addresses of `dasksc._compat.numcodecs.zstd_addresses`.
    create, free, begin, next_size, proceed = functions
    context = call(create, ())
    if context == 0:
        return False
    call(begin, (context,))
    done = at = np.uint64(0)
    while done < n_needed:
        n = call(next_size, (context,))
        if n == 0 or n > np.uint64(len(frame)) - at:
            break
        to = np.uint64(out.ctypes.data) + done, np.uint64(len(out)) - done
        got = call(proceed, (context, *to, np.uint64(frame.ctypes.data) + at, n))
        if got > _FIRST_ERROR:
            break
        done += got
        at += n
    call(free, (context,))
    return done >= n_needed
