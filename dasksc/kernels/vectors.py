"""Operations on bits, and on vectors of neighboring elements in loops that LLVM does not vectorize by itself.

LLVM compiles vectors of any width for any processor, so these functions do not depend on the instruction set of the
processor.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def lowest_bit(typingctx: Any, word: Any) -> Any:
    """Return the position of the lowest set bit of a word; undefined if no bit is set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), codegen


@intrinsic
def count_bits(typingctx: Any, word: Any) -> Any:
    """Return the number of set bits of a word."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


@intrinsic
def nonzero_bits(typingctx: Any, address: Any, index: Any, like: Any) -> Any:
    """Return a bit for each of 64 elements from `index` on, set for nonzeros; the first element is the lowest bit.

    The elements are those of the array of `like`'s type that starts at `address`, aligned or not. NaN is not zero.
    """
    signature = types.uint64(types.uint64, types.int64, like)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = _vector(context, builder, signature.args[2], args)
        zeros = ir.Constant(values.type, None)
        if isinstance(values.type.element, ir.IntType):
            found = builder.icmp_unsigned("!=", values, zeros)
        else:
            found = builder.fcmp_unordered("!=", values, zeros)
        return builder.bitcast(found, ir.IntType(64))

    return signature, codegen


@intrinsic
def descent_bits(typingctx: Any, address: Any, index: Any, like: Any) -> Any:
    """Return a bit for each of 64 elements from `index` on, set unless the element is below the next one.

    The elements are those of the array of `like`'s type, integers, that starts at `address`, aligned or not.
    """
    signature = types.uint64(types.uint64, types.int64, like)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        following = [args[0], builder.add(args[1], ir.Constant(args[1].type, 1))]
        values, others = (_vector(context, builder, signature.args[2], at) for at in (args, following))
        compare = builder.icmp_signed if signature.args[2].dtype.signed else builder.icmp_unsigned
        return builder.bitcast(compare(">=", values, others), ir.IntType(64))

    return signature, codegen


def _vector(context: Any, builder: Any, like: Any, args: Any) -> Any:
    element = context.get_data_type(like.dtype)
    start = builder.gep(builder.inttoptr(args[0], element.as_pointer()), [args[1]])
    return builder.load(builder.bitcast(start, ir.VectorType(element, 64).as_pointer()), align=1)
