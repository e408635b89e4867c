"""Operations that numba lacks: elements at addresses, bits, vectors of neighboring elements, and calls of C libraries.

Vectors serve loops that LLVM does not vectorize by itself. It compiles vectors of any width for any processor, so these
functions do not depend on the instruction set of the processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

STRIDE = 64
"""Number of elements that a prefetch covers."""

_LINE_BYTES = 64


def rounded(like: NDArray[Any], to: str) -> NDArray[Any]:
    """Return an empty array that tells the kernels to round values of `like`'s type, `to` "bfloat16" or "float16"."""
    return np.empty(0, dtype=[(to, like.dtype)])


@intrinsic
def load(typingctx: Any, address: Any, index: Any, like: Any) -> Any:
    """Return element `index` of the array of `like`'s type that starts at `address`, aligned or not."""
    is_rounded = isinstance(like.dtype, types.Record)
    to = next(iter(like.dtype.fields)) if is_rounded else None
    dtype = like.dtype.typeof(to) if is_rounded else like.dtype
    signature = (types.uint16 if is_rounded else dtype)(types.uint64, types.int64, like)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        model = context.data_model_manager[dtype]
        start = builder.inttoptr(args[0], model.get_data_type().as_pointer())
        value = model.from_data(builder, builder.load(builder.gep(start, [args[1]]), align=1))
        if not is_rounded:
            return value
        # Adding 0 turns -0.0 into 0.0, as the sum of a dense element does.
        single = builder.fadd(context.cast(builder, value, dtype, types.float32), ir.Constant(_SINGLE, 0.0))
        bits = _bfloat16_bits if to == "bfloat16" else _float16_bits
        return builder.trunc(bits(builder, single), ir.IntType(16))

    return signature, codegen


_SINGLE, _WORD = ir.FloatType(), ir.IntType(32)


def _bfloat16_bits(builder: Any, single: Any) -> Any:
    """Emit code that rounds a float32 to the bits of bfloat16. Ties go to the even neighbor."""
    bits = builder.bitcast(single, _WORD)
    odd = builder.and_(builder.lshr(bits, _WORD(16)), _WORD(1))
    nearest = builder.lshr(builder.add(bits, builder.add(odd, _WORD(0x7FFF))), _WORD(16))
    # NaN keeps its upper bits, one of which is set lest it become infinity.
    quiet = builder.or_(builder.lshr(bits, _WORD(16)), _WORD(0x40))
    return builder.select(builder.fcmp_unordered("uno", single, single), quiet, nearest)


def _float16_bits(builder: Any, single: Any) -> Any:
    """Emit code that rounds a float32 to the bits of float16. Ties go to the even neighbor."""
    bits = builder.bitcast(single, _WORD)
    size = builder.and_(bits, _WORD(0x7FFFFFFF))
    # The exponent of float16 has a bias of 15 rather than 127.
    odd = builder.and_(builder.lshr(size, _WORD(13)), _WORD(1))
    normal = builder.lshr(builder.add(size, builder.add(odd, _WORD(0xFFF - (112 << 23)))), _WORD(13))
    # In [0.5, 1), float32 has the spacing of the subnormal numbers of float16, 2**-24, so the addition rounds to them.
    raised = builder.fadd(builder.bitcast(size, _SINGLE), ir.Constant(_SINGLE, 0.5))
    subnormal = builder.sub(builder.bitcast(raised, _WORD), _WORD(0x3F000000))
    large = builder.select(builder.icmp_unsigned(">", size, _WORD(0x7F800000)), _WORD(0x7E00), _WORD(0x7C00))
    small = builder.select(builder.icmp_unsigned("<", size, _WORD(113 << 23)), subnormal, normal)
    found = builder.select(builder.icmp_unsigned("<", size, _WORD(143 << 23)), small, large)
    return builder.or_(found, builder.and_(builder.lshr(bits, _WORD(16)), _WORD(0x8000)))


@intrinsic
def prefetch(typingctx: Any, address: Any, first: Any, like: Any) -> Any:
    """Prefetch elements ``[first, first + STRIDE)`` of the array at `address`, which may be any, without waiting."""
    signature = types.void(types.uint64, types.int64, like)
    dtype = like.dtype

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element, byte, number = context.get_data_type(dtype), ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
        # Options of llvm.prefetch: read access, highest temporal locality, data cache.
        options = [ir.Constant(number, option) for option in (0, 3, 1)]
        start = builder.gep(builder.inttoptr(args[0], element.as_pointer()), [args[1]])
        for offset in range(0, STRIDE * context.get_abi_sizeof(element), _LINE_BYTES):
            line = builder.gep(builder.bitcast(start, byte), [ir.Constant(ir.IntType(64), offset)])
            builder.call(prefetch, [line, *options])
        return context.get_dummy_value()

    return signature, codegen


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
