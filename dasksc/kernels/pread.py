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
    """Call the function ``ssize_t pread(int, void*, size_t, off_t)``, all of 64 bits, at an address."""
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
    """Read at least `enough` bytes of each range to its address; return the first range that failed, or -1."""
    for i in range(len(offsets)):
        done = 0
        while done < enough[i]:
            n = call_pread(function, descriptor, addresses[i] + np.uint64(done), sizes[i] - done, offsets[i] + done)
            if n <= 0:
                return i
            done += n
    return -1
