"""Bytes of files: reading of many ranges with one call.

In Python, ``os.preadv`` reacquires the GIL after each range. Threads that read short ranges then wait longer for the
GIL than for the disk.
"""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.intrinsics import call

_WILLNEED = 3  # MADV_WILLNEED on Linux and macOS


@kernel
def read_ranges(function, descriptor, offsets, sizes, enough, addresses):
    """Read at least `enough` bytes of each range to its address; return the first range that failed, or -1."""
    for i in range(len(offsets)):
        done = np.int64(0)
        while done < enough[i]:
            to = addresses[i] + np.uint64(done)
            n = np.int64(call(function, (descriptor, to, sizes[i] - done, offsets[i] + done)))
            if n <= 0:
                return i
            done += n
    return -1


@kernel
def advise_ranges(function, addresses, sizes, gap, most, page):
    """Request mapped ranges with ``madvise``, at most `most` bytes at a time."""
    # A range that begins inside the previous one or at most `gap` bytes after it is requested with it.
    i = 0
    while i < len(addresses):
        start, stop = addresses[i], addresses[i] + sizes[i]
        i += 1
        while i < len(addresses) and start <= addresses[i] <= stop + gap:
            stop = max(stop, addresses[i] + sizes[i])
            i += 1
        start -= start % page
        while start < stop:
            call(function, (start, min(stop - start, most), _WILLNEED))
            start += most
