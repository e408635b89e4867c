"""Calls of functions of C libraries by their addresses, and copies of the bytes that they return."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dasksc.kernels.compiled import kernel


@intrinsic
def call(typingctx: Any, function: Any, words: Any) -> Any:
    """Call the function at an address with integers and addresses of 64 bits; return a word of 64 bits."""
    # The calling conventions pass shorter integers in the low half of a word, and return them there.
    signature = types.uint64(types.uint64, words)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given = cgutils.unpack_tuple(builder, args[1])
        called_type = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * len(given))
        return builder.call(builder.inttoptr(args[0], called_type.as_pointer()), given)

    return signature, codegen


@kernel
def copy_bytes(source, out):
    """Copy `source` to the beginning of `out`, both uint8."""
    # Assigning slices, or indices that may be negative, is ten times slower, since it is not vectorized.
    for i in range(len(source)):
        out[i] = source[i]
