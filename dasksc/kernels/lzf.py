"""Decoder of LZF, a filter of HDF5 that otherwise only libhdf5 decodes, under its global lock."""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel


@kernel
def decode_lzf(data, out):
    """Decode `data` into `out`, both uint8; return the number of bytes, or -1 if it is corrupt or does not fit."""
    # Indices are unsigned, so that numba need not handle negative ones and can vectorize the copies.
    at = to = np.int64(0)
    while at < len(data):
        control = np.int64(data[np.uint64(at)])
        at += 1
        if control < 32:
            # A run of `control + 1` literal bytes.
            n = control + 1
            if at + n > len(data) or to + n > len(out):
                return -1
            for i in range(n):
                out[np.uint64(to + i)] = data[np.uint64(at + i)]
            at += n
        else:
            # A reference to earlier output. It may overlap the bytes that this copy writes, so bytes are copied singly.
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
