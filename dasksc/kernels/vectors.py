"""Operations on vectors of neighboring elements, for loops that LLVM does not vectorize by itself.

LLVM compiles vectors of any width for any processor, so these functions do not depend on its instruction set.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["N_STEPS", "n_below", "n_sums_below", "nonzero_bits", "sum_of"]

N_STEPS = 16
"""Number of elements that `n_below`, `n_sums_below` and `sum_of` process."""


@intrinsic
def nonzero_bits(typingctx: Any, address: Any, index: Any, like: Any) -> Any:
    """Return a bit for each of 64 elements from `index` on, set for nonzeros; the first element is the lowest bit.

    The elements are those of the array of `like`'s type that starts at `address`, aligned or not. NaN is not zero.
    """
    signature = types.uint64(types.uint64, types.int64, like)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = _vector(context, builder, signature.args[2], args, 64)
        zeros = ir.Constant(values.type, None)
        if isinstance(values.type.element, ir.IntType):
            found = builder.icmp_unsigned("!=", values, zeros)
        else:
            found = builder.fcmp_unordered("!=", values, zeros)
        return builder.bitcast(found, ir.IntType(64))

    return signature, codegen


@intrinsic
def n_below(typingctx: Any, address: Any, index: Any, like: Any, value: Any) -> Any:
    """Count the elements below `value` among the `N_STEPS` elements from `index` on.

    The elements are those of the array of `like`'s type, unsigned integers, that starts at `address`.
    """
    signature = types.int64(types.uint64, types.int64, like, like.dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _n_below(builder, _vector(context, builder, signature.args[2], args, N_STEPS), args[3])

    return signature, codegen


@intrinsic
def n_sums_below(typingctx: Any, address: Any, index: Any, like: Any, value: Any) -> Any:
    """Count the running sums below `value` of the `N_STEPS` elements from `index` on.

    The elements are those of the array of `like`'s type, unsigned integers, that starts at `address`.
    """
    signature = types.int64(types.uint64, types.int64, like, like.dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums = _vector(context, builder, signature.args[2], args, N_STEPS)
        width = 1
        while width < N_STEPS:
            # The lanes of the zeros come before those of the sums.
            moved = [0 if i < width else N_STEPS + i - width for i in range(N_STEPS)]
            order = ir.Constant(ir.VectorType(ir.IntType(32), N_STEPS), moved)
            sums = builder.add(sums, builder.shuffle_vector(ir.Constant(sums.type, None), sums, order))
            width *= 2
        return _n_below(builder, sums, args[3])

    return signature, codegen


@intrinsic
def sum_of(typingctx: Any, address: Any, index: Any, like: Any) -> Any:
    """Return the sum of `N_STEPS` elements from `index` on.

    The elements are those of the array of `like`'s type, unsigned integers, that starts at `address`.
    """
    signature = like.dtype(types.uint64, types.int64, like)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums = _vector(context, builder, signature.args[2], args, N_STEPS)
        width = N_STEPS
        while width > 1:
            width //= 2
            halves = [ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(i, i + width))) for i in (0, width)]
            sums = builder.add(*(builder.shuffle_vector(sums, sums, half) for half in halves))
        return builder.extract_element(sums, ir.Constant(ir.IntType(32), 0))

    return signature, codegen


def _n_below(builder: Any, values: Any, value: Any) -> Any:
    first, integer = ir.Constant(ir.IntType(32), 0), ir.IntType(N_STEPS)
    one = builder.insert_element(ir.Constant(values.type, ir.Undefined), value, first)
    repeated = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), N_STEPS), None))
    found = builder.bitcast(builder.icmp_unsigned("<", values, repeated), integer)
    return builder.zext(builder.ctpop(found), ir.IntType(64))


def _vector(context: Any, builder: Any, like: Any, args: Any, n: int) -> Any:
    element = context.get_data_type(like.dtype)
    start = builder.gep(builder.inttoptr(args[0], element.as_pointer()), [args[1]])
    return builder.load(builder.bitcast(start, ir.VectorType(element, n).as_pointer()), align=1)
