"""Read many byte ranges of a file, one call for all of them.

Called from Python, ``os.preadv`` takes the GIL again after each range, for which threads that read short ranges wait
longer than for the disk.
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
    """Call ``ssize_t pread(int, void*, size_t, off_t)`` at an address, where these are 64 bits wide."""
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
    """Fill memory with ranges of a file; return which range failed or met the end of the file first, or -1.

    Parameters
    ----------
    function
        Address of ``pread``, uint64.
    descriptor
        Number of the open file.
    offsets, sizes
        Of each range, shape (n_ranges,), int64.
    enough
        How many bytes each must give at least, shape (n_ranges,), int64.
    addresses
        Where each goes, shape (n_ranges,), uint64.
    """
    for i in range(len(offsets)):
        done = 0
        while done < enough[i]:
            n = call_pread(function, descriptor, addresses[i] + np.uint64(done), sizes[i] - done, offsets[i] + done)
            if n <= 0:
                return i
            done += n
    return -1
