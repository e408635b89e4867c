"""LZF, a filter of HDF5, which otherwise only libhdf5 decodes, under its lock."""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel

__all__ = ["decode_lzf"]


@kernel
def decode_lzf(data, out):
    """Decode into `out`; return how many bytes that is, or -1 if `data` is corrupt or more than `out` holds.

    Parameters
    ----------
    data
        As stored, uint8.
    out
        Memory for the result, uint8; bytes behind it are left as they are.
    """
    # Unsigned where they are indices: numba need not look whether they count from the end, and may copy many at once.
    at = to = np.int64(0)
    while at < len(data):
        control = np.int64(data[np.uint64(at)])
        at += 1
        if control < 32:
            # So many bytes and one, as they are.
            n = control + 1
            if at + n > len(data) or to + n > len(out):
                return -1
            for i in range(n):
                out[np.uint64(to + i)] = data[np.uint64(at + i)]
            at += n
        else:
            # Bytes that were decoded before, those among them that this very copy writes.
            n = control >> 5
            if n == 7 and at < len(data):
                n += data[at]
                at += 1
            n += 2
            if at >= len(data):
                return -1
            back = ((control & 31) << 8) + data[at] + 1
            at += 1
            if back > to or to + n > len(out):
                return -1
            for i in range(n):
                out[np.uint64(to + i)] = out[np.uint64(to + i - back)]
        to += n
    return to
