"""Reading of many byte ranges of a file with one call.

In Python, ``os.preadv`` reacquires the GIL after each range. Threads that read short ranges then wait longer for the
GIL than for the disk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dasksc.kernels.compiled import kernel

__all__ = ["read_ranges"]


@intrinsic
def call_pread(typingctx: Any, function: Any, descriptor: Any, address: Any, size: Any, offset: Any) -> Any:
    """Call the function ``ssize_t pread(int, void*, size_t, off_t)`` at an address.

    `ssize_t`, `size_t` and `off_t` must have 64 bits.
    """
    signature = types.int64(types.uint64, types.int64, types.uint64, types.int64, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide, pointer = ir.IntType(64), ir.IntType(8).as_pointer()
        called_type = ir.FunctionType(wide, [ir.IntType(32), pointer, wide, wide])
        called = builder.inttoptr(args[0], called_type.as_pointer())
        given = [builder.trunc(args[1], ir.IntType(32)), builder.inttoptr(args[2], pointer), args[3], args[4]]
        return builder.call(called, given)

    return signature, codegen


@kernel
def read_ranges(function, descriptor, offsets, sizes, enough, addresses):
    """Read ranges of a file into memory; return the first range that failed or met the end of the file, or -1.

    Parameters
    ----------
    function
        Address of ``pread``, uint64.
    descriptor
        File descriptor.
    offsets, sizes
        Offset and size of each range in bytes, shape (n_ranges,), int64.
    enough
        Minimum number of bytes to read from each range, shape (n_ranges,), int64.
    addresses
        Destination address of each range, shape (n_ranges,), uint64.
    """
    for i in range(len(offsets)):
        done = 0
        while done < enough[i]:
            n = call_pread(function, descriptor, addresses[i] + np.uint64(done), sizes[i] - done, offsets[i] + done)
            if n <= 0:
                return i
            done += n
    return -1
