"""Operations on vectors of neighboring elements, used in loops that LLVM does not vectorize by itself.

LLVM compiles vectors of any width for any processor, so these functions do not depend on the instruction set of the
processor.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = [
    "N_STEPS",
    "descent_bits",
    "hash_columns",
    "hashed",
    "n_below",
    "n_sums_below",
    "nonzero_bits",
    "sum_of",
    "thin_small",
]

N_STEPS = 16
"""Number of elements of a vector, except in functions that process 64 elements."""

# Shifts and factors of the hash triple32 of https://github.com/skeeto/hash-prospector.
_ROUNDS = (17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)
_LAST_SHIFT = 14


@intrinsic
def hashed(typingctx: Any, x: Any) -> Any:
    """Return the uint32 hash of a uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _hash(builder, args[0])

    return types.uint32(types.uint32), codegen


@intrinsic
def hash_columns(
    typingctx: Any, columns_at: Any, words_at: Any, index: Any, like: Any, factor: Any, offset: Any
) -> Any:
    """Write the hashes of ``column * factor + offset`` for `N_STEPS` columns from `index` on.

    Columns are read from the array of `like`'s type at `columns_at`. Their hashes, uint32, are written to the same
    positions at `words_at`. `factor` and `offset` are uint32.
    """
    signature = types.void(types.uint64, types.uint64, types.int64, like, types.uint32, types.uint32)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> None:
        words = ir.VectorType(ir.IntType(32), N_STEPS)
        element = context.get_data_type(signature.args[3].dtype)
        columns = builder.load(_vector_pointer(builder, element, args[0], args[2], N_STEPS), align=1)
        if element.width > 32:
            columns = builder.trunc(columns, words)
        elif element.width < 32:
            columns = builder.zext(columns, words)
        numbers = builder.add(builder.mul(columns, _repeated(builder, args[4])), _repeated(builder, args[5]))
        to = _vector_pointer(builder, words.element, args[1], args[2], N_STEPS)
        builder.store(_hash(builder, numbers), to, align=1)

    return signature, codegen


def _hash(builder: Any, x: Any) -> Any:
    def constant(value: int) -> Any:
        return _constant(x.type.element, value) if isinstance(x.type, ir.VectorType) else ir.Constant(x.type, value)

    for shift, factor in _ROUNDS:
        x = builder.mul(builder.xor(x, builder.lshr(x, constant(shift))), constant(factor))
    return builder.xor(x, builder.lshr(x, constant(_LAST_SHIFT)))


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
def descent_bits(typingctx: Any, address: Any, index: Any, like: Any) -> Any:
    """Return a bit for each of 64 elements from `index` on, set unless the element is below the next one.

    The elements are those of the array of `like`'s type, integers, that starts at `address`, aligned or not.
    """
    signature = types.uint64(types.uint64, types.int64, like)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        following = [args[0], builder.add(args[1], ir.Constant(args[1].type, 1))]
        values, others = (_vector(context, builder, signature.args[2], at, 64) for at in (args, following))
        compare = builder.icmp_signed if signature.args[2].dtype.signed else builder.icmp_unsigned
        return builder.bitcast(compare(">=", values, others), ir.IntType(64))

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
    """Return how many running sums of the `N_STEPS` elements from `index` on are below `value`.

    The elements are those of the array of `like`'s type, unsigned integers, that starts at `address`.
    """
    signature = types.int64(types.uint64, types.int64, like, like.dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums = _vector(context, builder, signature.args[2], args, N_STEPS)
        width = 1
        while width < N_STEPS:
            # Indices below `N_STEPS` select from the vector of zeros, and the others from `sums`.
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


@intrinsic
def thin_small(typingctx: Any, values_at: Any, words_at: Any, index: Any, like: Any, steps: Any) -> Any:
    """Thin the values 0 to 3 among 64 values from `index` on; return one bit per value, set if not thinned.

    A value is not thinned if it is not 0, 1, 2 or 3, or if its random word equals a step.

    Parameters
    ----------
    values_at, words_at
        Addresses of an array of `like`'s type, whose values are replaced, and of the random words, uint32.
    index
        Position of the first value and word.
    like
        Array with the data type of the values.
    steps
        Steps of the distribution functions for the values 1, 2 and 3, six uint32. A thinned value is replaced by the
        number of steps that its random word reaches.
    """
    signature = types.uint64(types.uint64, types.uint64, types.int64, like, steps)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element, word, bitmap = context.get_data_type(signature.args[3].dtype), ir.IntType(32), ir.IntType(64)
        is_integer = isinstance(element, ir.IntType)
        counts = [_constant(element, n if is_integer else float(n)) for n in range(4)]
        low, low_2, middle_2, low_3, middle_3, high_3 = (
            _repeated(builder, builder.extract_value(args[4], i)) for i in range(6)
        )
        unreached, remaining = _constant(word, 2**32 - 1), ir.Constant(bitmap, 0)
        for first in range(0, 64, N_STEPS):
            at = builder.add(args[2], ir.Constant(args[2].type, first))
            values_to = _vector_pointer(builder, element, args[0], at, N_STEPS)
            values = builder.load(values_to, align=1)
            drawn = builder.load(_vector_pointer(builder, word, args[1], at, N_STEPS), align=1)
            is_0, is_1, is_2, is_3 = (
                builder.icmp_unsigned("==", values, n) if is_integer else builder.fcmp_ordered("==", values, n)
                for n in counts
            )
            steps_reached = (
                builder.select(is_3, low_3, builder.select(is_2, low_2, builder.select(is_1, low, unreached))),
                builder.select(is_3, middle_3, builder.select(is_2, middle_2, unreached)),
                builder.select(is_3, high_3, unreached),
            )
            kept, distance = counts[0], unreached
            for n, step in enumerate(steps_reached, 1):
                kept = builder.select(builder.icmp_unsigned(">=", drawn, step), counts[n], kept)
                # The smallest distance is 0 if the word equals a step. Comparisons would be slower.
                own = builder.xor(drawn, step)
                distance = builder.select(builder.icmp_unsigned("<", own, distance), own, distance)
            is_small = builder.or_(builder.or_(is_0, is_1), builder.or_(is_2, is_3))
            is_thinned = builder.and_(is_small, builder.icmp_unsigned("!=", distance, _constant(word, 0)))
            builder.store(builder.select(is_thinned, kept, values), values_to, align=1)
            bits = builder.zext(builder.bitcast(builder.not_(is_thinned), ir.IntType(N_STEPS)), bitmap)
            remaining = builder.or_(remaining, builder.shl(bits, ir.Constant(bitmap, first)))
        return remaining

    return signature, codegen


def _n_below(builder: Any, values: Any, value: Any) -> Any:
    found = builder.icmp_unsigned("<", values, _repeated(builder, value))
    return builder.zext(builder.ctpop(builder.bitcast(found, ir.IntType(N_STEPS))), ir.IntType(64))


def _constant(element: Any, value: Any) -> Any:
    return ir.Constant(ir.VectorType(element, N_STEPS), [value] * N_STEPS)


def _repeated(builder: Any, value: Any) -> Any:
    vector, integer = ir.VectorType(value.type, N_STEPS), ir.IntType(32)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(integer, 0))
    return builder.shuffle_vector(one, one, _constant(integer, 0))


def _vector(context: Any, builder: Any, like: Any, args: Any, n: int) -> Any:
    return builder.load(_vector_pointer(builder, context.get_data_type(like.dtype), args[0], args[1], n), align=1)


def _vector_pointer(builder: Any, element: Any, address: Any, index: Any, n: int) -> Any:
    start = builder.gep(builder.inttoptr(address, element.as_pointer()), [index])
    return builder.bitcast(start, ir.VectorType(element, n).as_pointer())
