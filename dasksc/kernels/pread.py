"""Reading of many byte ranges of a file with one call.

In Python, ``os.preadv`` reacquires the GIL after each range. Threads that read short ranges then wait longer for the
GIL than for the disk.
"""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.foreign import call

__all__ = ["read_ranges"]


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
