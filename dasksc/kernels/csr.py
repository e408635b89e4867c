"""Gather rows into a minibatch, wherever in memory each of them lies.

A row is given by the address of its first element and its length, so a kernel neither knows nor cares
whether it reads a memory-mapped file, a decoded chunk or a numpy array, whether that memory is
writable, and whether it is aligned (HDF5 stores chunks at any byte). Addresses also keep the number of
compiled variants down to the types of the values.

The caller vouches for the addresses (`dasksc.storage.row_pointers.Reached` computes and bounds them). What
they point at is not trusted: a column outside [0, n_vars) ends the kernel, which returns the row's
number among the rows fetched, or -1 when all is well.

Parameters that recur
---------------------
positions
    Which rows, and in which order, shape (n_rows,), int64; positions among the rows fetched.
lengths
    Nonzeros of each row fetched, shape (n_fetched,), int64.
data_at, indices_at, rows_at
    Address of the first element of each row fetched, shape (n_fetched,), uint64.
like_data, like_indices, like
    Empty arrays that carry the type of what lies at the addresses.
maps, lookups
    Which row of `lookups` holds for each row fetched, shape (n_fetched,), int32; and where each column goes,
    shape (n_maps, n_columns), int32: -1 where it is left out, below that where no row may have one.
any_order
    Whether the columns of a row may come in any order and repeat. If not, the first row in which they do not
    strictly ascend ends the kernel, which returns `UNORDERED`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dasksc.kernels.compiled import kernel

__all__ = [
    "add_up",
    "ascends",
    "copy_columns",
    "copy_columns_csr",
    "copy_rows",
    "copy_rows_csr",
    "count_bytes",
    "merge_columns_csr",
    "narrow",
    "renumber_rows",
    "renumber_rows_csr",
    "row_starts",
    "rows_ascend",
    "count_columns",
    "count_nonzeros",
    "scatter_columns",
    "scatter_rows",
    "squeeze",
    "stitch",
]


LEFT_OUT, KEPT, REFUSED = 0, 1, 2
UNORDERED = -2
# Where dense columns come from that no column of the matrix goes to.
NOWHERE, ZERO = -1, -2

_CLEARED_AHEAD = np.uint64(2048)
# Elements worked on between two looks ahead.
_STRIDE = 64
# Values judged between two looks whether to go on.
_TRIED = 4096
_LINE_BYTES = 64
_HALF, _LOW_HALF = np.uint64(32), np.uint64(2**32 - 1)
# Bits of a word are found this many at a time, so that few branches depend on how many there are.
_BITS_AT_ONCE = 8
_ONE, _WORD_SHIFT, _WORD_MASK = np.uint64(1), np.uint64(6), np.uint64(63)


@intrinsic
def load(typingctx: Any, address: Any, index: Any, like: Any) -> Any:
    """Return element `index` of the array of `like`'s type that starts at `address`, aligned or not."""
    signature = like.dtype(types.uint64, types.int64, like)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        model = context.data_model_manager[signature.return_type]
        start = builder.inttoptr(args[0], model.get_data_type().as_pointer())
        value = builder.load(builder.gep(start, [args[1]]), align=1)
        return model.from_data(builder, value)

    return signature, codegen


@intrinsic
def _look_ahead(typingctx: Any, address: Any, first: Any, like: Any) -> Any:
    """Have elements ``first ... first + _STRIDE`` of what lies at `address` brought, without waiting; any will do.

    Rows are short and lie anywhere, so the processor does not see by itself which comes next, and while it works on
    one the memory would rest.
    """
    signature = types.void(types.uint64, types.int64, like)
    dtype = like.dtype

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element, byte, number = context.get_data_type(dtype), ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
        # To be read, kept in every cache, data.
        options = [ir.Constant(number, option) for option in (0, 3, 1)]
        start = builder.gep(builder.inttoptr(args[0], element.as_pointer()), [args[1]])
        for offset in range(0, _STRIDE * context.get_abi_sizeof(element), _LINE_BYTES):
            line = builder.gep(builder.bitcast(start, byte), [ir.Constant(ir.IntType(64), offset)])
            builder.call(prefetch, [line, *options])
        return context.get_dummy_value()

    return signature, codegen


@kernel
def _ascending(columns_at, n, like_indices):
    # Without a branch in it, it is done on several at a time.
    ascending = True
    for k in range(1, n):
        ascending &= load(columns_at, k - 1, like_indices) < load(columns_at, k, like_indices)
    return ascending


@kernel
def scatter_rows(positions, lengths, data_at, indices_at, n_vars, out, like_data, like_indices, any_order=True):
    """Write CSR rows into `out`, dense, shape (n_rows, n_vars). Repeated columns add up, as in scipy."""
    n_columns = np.uint64(n_vars)
    for i in range(len(positions)):
        row = positions[i]
        following = positions[min(i + 1, len(positions) - 1)]
        n = lengths[row]
        columns_at, values_at = indices_at[row], data_at[row]
        next_columns_at, next_values_at = indices_at[following], data_at[following]
        dense = out[i]
        # Cleared just ahead of the columns, which mostly ascend: a whole row would leave the nearest cache
        # before it is written to.
        n_cleared = np.uint64(0)
        if _ascending(columns_at, n, like_indices):
            # The last column of a stride is its largest. Each is judged all the same: somebody may write to the file.
            for first in range(0, n, _STRIDE):
                _look_ahead(next_columns_at, first, like_indices)
                _look_ahead(next_values_at, first, like_data)
                end = min(first + _STRIDE, n)
                last = np.uint64(load(columns_at, end - 1, like_indices))
                if last >= n_columns:
                    return row
                dense[n_cleared : last + _ONE] = 0
                n_cleared = last + _ONE
                for k in range(first, end):
                    # A negative column wraps to a number far beyond n_vars.
                    column = np.uint64(load(columns_at, k, like_indices))
                    if column > last:
                        return row
                    dense[column] += load(values_at, k, like_data)
            dense[n_cleared:] = 0
            continue
        if not any_order:
            return UNORDERED
        for k in range(n):
            column = np.uint64(load(columns_at, k, like_indices))
            if column >= n_cleared:
                if column >= n_columns:
                    return row
                stop = min(column + _CLEARED_AHEAD, n_columns)
                dense[n_cleared:stop] = 0
                n_cleared = stop
            dense[column] += load(values_at, k, like_data)
        dense[n_cleared:] = 0
    return -1


@kernel
def renumber_rows(
    positions, lengths, data_at, indices_at, maps, renumbered, out, like_data, like_indices, any_order=True
):
    """Write CSR rows into `out`, dense, shape (n_rows, n_kept), every column renumbered and none left out."""
    n_columns, n_kept = np.uint64(renumbered.shape[1]), np.uint64(out.shape[1])
    for i in range(len(positions)):
        row = positions[i]
        following = positions[min(i + 1, len(positions) - 1)]
        n = lengths[row]
        columns_at, values_at = indices_at[row], data_at[row]
        next_columns_at, next_values_at = indices_at[following], data_at[following]
        lookup = renumbered[maps[row]]
        dense = out[i]
        if not (any_order or _ascending(columns_at, n, like_indices)):
            return UNORDERED
        dense[:] = 0
        for first in range(0, n, _STRIDE):
            _look_ahead(next_columns_at, first, like_indices)
            _look_ahead(next_values_at, first, like_data)
            for k in range(first, min(first + _STRIDE, n)):
                column = np.uint64(load(columns_at, k, like_indices))
                if column >= n_columns:
                    return row
                to = np.uint64(lookup[column])
                if to >= n_kept:
                    return row
                dense[to] += load(values_at, k, like_data)
    return -1


@kernel
def _longest(positions, lengths):
    longest = 0
    for i in range(len(positions)):
        longest = max(longest, lengths[positions[i]])
    return longest


@kernel
def _ascend(columns, n):
    # Without a branch in it, it is done on several at a time.
    ascending = True
    for k in range(1, n):
        ascending &= columns[k - 1] < columns[k]
    return ascending


@kernel
def _choose(columns_at, n, kinds, columns, places, next_columns_at, next_values_at, like_data, like_indices):
    # Write the kept columns of a row, and which of its elements they are, into `columns` and `places`; return how
    # many there are, or -1. Nothing is decided column by column: what is kept is as good as random.
    largest = np.uint64(0)
    for k in range(n):
        column = np.uint64(load(columns_at, k, like_indices))
        largest = max(largest, column)
        columns[k] = column
    if n > 0 and largest >= np.uint64(len(kinds)):
        return -1
    n_kept = np.uint64(0)
    every = np.uint8(0)
    for first in range(0, n, _STRIDE):
        _look_ahead(next_columns_at, first, like_indices)
        _look_ahead(next_values_at, first, like_data)
        for k in range(first, min(first + _STRIDE, n)):
            column = columns[np.uint64(k)]
            kind = kinds[np.uint64(column)]
            columns[n_kept] = column
            places[n_kept] = k
            n_kept += np.uint64(kind & 1)
            every |= kind
    return -1 if every & 2 else np.int64(n_kept)


@kernel
def scatter_columns(
    positions, lengths, data_at, indices_at, maps, lookups, kinds, out, like_data, like_indices, any_order=True
):
    """Write the kept columns of CSR rows into `out`, dense, shape (n_rows, n_kept)."""
    longest = _longest(positions, lengths)
    columns, places = np.empty(longest, dtype=np.int32), np.empty(longest, dtype=np.int32)
    for i in range(len(positions)):
        row = positions[i]
        following = positions[min(i + 1, len(positions) - 1)]
        n = lengths[row]
        values_at = data_at[row]
        lookup = lookups[maps[row]]
        dense = out[i]
        dense[:] = 0
        n_kept = _choose(
            indices_at[row],
            n,
            kinds[maps[row]],
            columns,
            places,
            indices_at[following],
            data_at[following],
            like_data,
            like_indices,
        )
        if n_kept < 0:
            return row
        if not (any_order or _ascend(columns, n_kept)):
            return UNORDERED
        for j in range(np.uint64(n_kept)):
            to = np.uint64(lookup[np.uint64(columns[j])])
            dense[to] += load(values_at, np.int64(places[j]), like_data)
    return -1


@kernel
def row_starts(positions, lengths, indptr):
    """Write where rows begin one after another into `indptr`, shape (n_rows + 1,); return how long all are.

    A position outside the rows fetched ends it: -1 is returned.
    """
    total = 0
    for i in range(len(positions)):
        row = positions[i]
        if row < 0 or row >= len(lengths):
            return -1
        indptr[i] = total
        total += lengths[row]
    indptr[len(positions)] = total
    return total


@kernel
def copy_rows_csr(
    positions, lengths, data_at, indices_at, n_vars, indptr, indices, data, like_data, like_indices, any_order=True
):
    """Write CSR rows into `indices` and `data`, row i at ``indptr[i]``."""
    for i in range(len(positions)):
        row = positions[i]
        following = positions[min(i + 1, len(positions) - 1)]
        n = lengths[row]
        if n == 0:
            continue
        columns_at = indices_at[row]
        values_at = data_at[row]
        row_indices = indices[indptr[i] : indptr[i] + n]
        row_data = data[indptr[i] : indptr[i] + n]
        # Two plain passes, which vectorise; the check of the columns rides on the first: where they ascend, the ends
        # bound them.
        smallest = row_indices[0] = load(columns_at, 0, like_indices)
        ascending = True
        for k in range(1, n):
            column = load(columns_at, k, like_indices)
            ascending &= load(columns_at, k - 1, like_indices) < column
            row_indices[k] = column
        largest = load(columns_at, n - 1, like_indices)
        if not ascending:
            if not any_order:
                return UNORDERED
            for k in range(n):
                column = load(columns_at, k, like_indices)
                smallest = min(smallest, column)
                largest = max(largest, column)
        if smallest < 0 or largest >= n_vars:
            return row
        next_columns_at, next_values_at = indices_at[following], data_at[following]
        for first in range(0, n, _STRIDE):
            _look_ahead(next_columns_at, first, like_indices)
            _look_ahead(next_values_at, first, like_data)
            for k in range(first, min(first + _STRIDE, n)):
                row_data[k] = load(values_at, k, like_data)
    return -1


@kernel
def count_columns(positions, lengths, indices_at, maps, kinds, counts, like_indices):
    """Count the kept nonzeros of each row into `counts`, shape (n_rows,)."""
    n_columns = np.uint64(kinds.shape[1])
    for i in range(len(positions)):
        row = positions[i]
        following = positions[min(i + 1, len(positions) - 1)]
        n = lengths[row]
        columns_at, next_columns_at = indices_at[row], indices_at[following]
        kind_of = kinds[maps[row]]
        n_kept = 0
        every = np.uint8(0)
        for first in range(0, n, _STRIDE):
            _look_ahead(next_columns_at, first, like_indices)
            for k in range(first, min(first + _STRIDE, n)):
                column = np.uint64(load(columns_at, k, like_indices))
                if column >= n_columns:
                    return row
                kind = kind_of[column]
                n_kept += kind & 1
                every |= kind
        if every & 2:
            return row
        counts[i] = n_kept
    return -1


@kernel
def copy_columns_csr(
    positions,
    lengths,
    data_at,
    indices_at,
    maps,
    lookups,
    kinds,
    indptr,
    indices,
    data,
    like_data,
    like_indices,
    any_order=True,
):
    """Write the kept columns of CSR rows, renumbered, row i at ``indptr[i]``; `count_columns` ran before."""
    longest = _longest(positions, lengths)
    columns, places = np.empty(longest, dtype=np.int32), np.empty(longest, dtype=np.int32)
    for i in range(len(positions)):
        row = positions[i]
        following = positions[min(i + 1, len(positions) - 1)]
        n = lengths[row]
        values_at = data_at[row]
        lookup = lookups[maps[row]]
        n_kept = _choose(
            indices_at[row],
            n,
            kinds[maps[row]],
            columns,
            places,
            indices_at[following],
            data_at[following],
            like_data,
            like_indices,
        )
        if n_kept < 0:
            return row
        row_indices = indices[indptr[i] : indptr[i] + n_kept]
        row_data = data[indptr[i] : indptr[i] + n_kept]
        for j in range(np.uint64(n_kept)):
            row_indices[j] = lookup[np.uint64(columns[j])]
            row_data[j] = load(values_at, np.int64(places[j]), like_data)
        if not (any_order or _ascend(row_indices, n_kept)):
            return UNORDERED
    return -1


@intrinsic
def _lowest_bit(typingctx: Any, word: Any) -> Any:
    """Return the number of the lowest bit that is set in a word; any number if none is."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), codegen


@intrinsic
def _count_bits(typingctx: Any, word: Any) -> Any:
    """Return how many bits of a word are set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


@kernel
def _list_bits(bits, listed):
    # Write the numbers of the bits that are set into `listed`, and clear them; return how many there are. Up to
    # `_BITS_AT_ONCE` elements beyond those are overwritten.
    n = np.uint64(0)
    for i in range(len(bits)):
        word = bits[i]
        bits[i] = 0
        to = n
        n += _count_bits(word)
        while word:
            for _ in range(_BITS_AT_ONCE):
                listed[to] = (np.uint64(i) << _WORD_SHIFT) + _lowest_bit(word)
                to += _ONE
                word &= word - _ONE
    return np.int64(n)


@kernel
def merge_columns_csr(
    positions, lengths, data_at, indices_at, maps, lookups, kinds, indptr, indices, data, sums, like_data, like_indices
):
    """Write the kept columns of CSR rows, renumbered and ascending, the values of each added up in the stored order.

    `indptr`, shape (n_rows + 1,), says where the rows lie in the end, one after the other; `indices` and `data` have
    room for what `count_columns` counts. `sums`, shape (n_kept,), is for work, in the type in which values are added
    up.
    """
    longest = _longest(positions, lengths)
    columns, places = np.empty(longest, dtype=np.int32), np.empty(longest, dtype=np.int32)
    merged = np.empty(longest + _BITS_AT_ONCE, dtype=np.int32)
    bits = np.zeros((len(sums) + 63) // 64, dtype=np.uint64)
    total = indptr[0] = 0
    for i in range(len(positions)):
        row = positions[i]
        following = positions[min(i + 1, len(positions) - 1)]
        values_at = data_at[row]
        lookup = lookups[maps[row]]
        n_kept = _choose(
            indices_at[row],
            lengths[row],
            kinds[maps[row]],
            columns,
            places,
            indices_at[following],
            data_at[following],
            like_data,
            like_indices,
        )
        if n_kept < 0:
            return row
        row_indices, row_data = indices[total : total + n_kept], data[total : total + n_kept]
        for j in range(np.uint64(n_kept)):
            row_indices[j] = lookup[np.uint64(columns[j])]
        if _ascend(row_indices, n_kept):
            for j in range(np.uint64(n_kept)):
                row_data[j] = sums.dtype.type(load(values_at, np.int64(places[j]), like_data))
            n_merged = n_kept
        else:
            # A bit for each column puts them in order in one pass over the bits, which costs less than sorting.
            for j in range(np.uint64(n_kept)):
                to = np.uint64(row_indices[j])
                sums[to] = load(values_at, np.int64(places[j]), like_data)
                bits[to >> _WORD_SHIFT] |= _ONE << (to & _WORD_MASK)
            n_merged = _list_bits(bits, merged)
            if n_merged < n_kept:
                for j in range(np.uint64(n_kept)):
                    to = np.uint64(row_indices[j])
                    value = sums.dtype.type(load(values_at, np.int64(places[j]), like_data))
                    bit = _ONE << (to & _WORD_MASK)
                    sums[to] = sums[to] + value if bits[to >> _WORD_SHIFT] & bit else value
                    bits[to >> _WORD_SHIFT] |= bit
                _list_bits(bits, merged)
            for j in range(n_merged):
                row_indices[j] = merged[j]
            for j in range(n_merged):
                row_data[j] = sums[np.uint64(merged[j])]
        total += n_merged
        indptr[i + 1] = total
    return -1


@kernel
def renumber_rows_csr(
    positions,
    lengths,
    data_at,
    indices_at,
    maps,
    renumbered,
    n_kept,
    indptr,
    indices,
    data,
    like_data,
    like_indices,
    any_order=True,
):
    """Write CSR rows, every column renumbered and none left out, row i at ``indptr[i]``."""
    n_columns = renumbered.shape[1]
    for i in range(len(positions)):
        row = positions[i]
        following = positions[min(i + 1, len(positions) - 1)]
        n = lengths[row]
        if n == 0:
            continue
        columns_at = indices_at[row]
        values_at = data_at[row]
        lookup = renumbered[maps[row]]
        row_indices = indices[indptr[i] : indptr[i] + n]
        row_data = data[indptr[i] : indptr[i] + n]
        # As in `copy_rows_csr`: plain passes, so that none but the lookup has to wait for memory.
        smallest = load(columns_at, 0, like_indices)
        largest = smallest
        for k in range(n):
            column = load(columns_at, k, like_indices)
            smallest = min(smallest, column)
            largest = max(largest, column)
            row_indices[k] = column
        if smallest < 0 or largest >= n_columns:
            return row
        # Two at a time, which saves every other load and store; what is left over at either end, by itself.
        begin = np.int64((row_indices.ctypes.data // 4) % 2)
        end = begin + (n - begin) // 2 * 2
        pairs = row_indices[begin:end].view(np.uint64)
        for first in range(0, n, _STRIDE):
            _look_ahead(values_at, first, like_data)
            _look_ahead(indices_at[following], first, like_indices)
            for k in range(first // 2, min((first + _STRIDE) // 2, len(pairs))):
                pair = pairs[k]
                low, high = lookup[pair & _LOW_HALF], lookup[pair >> _HALF]
                pairs[k] = np.uint64(low) | (np.uint64(high) << _HALF)
        if begin:
            row_indices[0] = lookup[np.uint64(row_indices[0])]
        if end < n:
            row_indices[n - 1] = lookup[np.uint64(row_indices[n - 1])]
        if not (any_order or _ascend(row_indices, n)):
            return UNORDERED
        smallest_to, largest_to = row_indices[0], row_indices[n - 1]
        if any_order:
            for k in range(n):
                smallest_to = min(smallest_to, row_indices[k])
                largest_to = max(largest_to, row_indices[k])
        if smallest_to < 0 or largest_to >= n_kept:
            return row
        for k in range(n):
            row_data[k] = load(values_at, k, like_data)
    return -1


@kernel
def copy_rows(positions, rows_at, out, like):
    """Write dense rows into `out`, shape (n_rows, n_vars)."""
    for i in range(len(positions)):
        row_at = rows_at[positions[i]]
        dense = out[i]
        for k in range(len(dense)):
            dense[k] = load(row_at, k, like)


@kernel
def copy_columns(positions, rows_at, maps, sources, out, missing, like):
    """Write columns of dense rows into `out`, shape (n_rows, n_kept).

    `sources` says where each is taken from, shape (n_maps, n_kept), int64: at `NOWHERE` stands the one element of
    `missing`, at `ZERO` 0.
    """
    zero = missing.dtype.type(0)
    for i in range(len(positions)):
        row = positions[i]
        row_at = rows_at[row]
        columns = sources[maps[row]]
        dense = out[i]
        for k in range(len(columns)):
            column = columns[k]
            if column < 0:
                dense[k] = missing[0] if column == NOWHERE else zero
            else:
                dense[k] = load(row_at, column, like)


@kernel
def add_up(values, starts, out):
    """Add up neighbouring columns of `values` into `out`, shape (n_rows, n_groups), in its type, from left to right.

    Those of group g are ``starts[g] ... starts[g + 1]``, at least one.
    """
    for i in range(len(values)):
        for g in range(len(starts) - 1):
            total = out.dtype.type(values[i, starts[g]])
            for k in range(starts[g] + 1, starts[g + 1]):
                total = out.dtype.type(total + out.dtype.type(values[i, k]))
            out[i, g] = total


@kernel
def count_nonzeros(dense, counts):
    """Count what is not zero in each row of `dense` into `counts`; NaN is not zero."""
    for i in range(dense.shape[0]):
        count = 0
        for k in range(dense.shape[1]):
            count += dense[i, k] != 0
        counts[i] = count


@kernel
def squeeze(dense, indptr, indices, data):
    """Write what is not zero in `dense` into `indices` and `data`, row i at ``indptr[i]``."""
    for i in range(dense.shape[0]):
        to = indptr[i]
        for k in range(dense.shape[1]):
            if dense[i, k] != 0:
                indices[to] = k
                data[to] = dense[i, k]
                to += 1


@kernel
def ascends(indptr_at, n_rows, indices_at, like_indptr, like_indices):
    """Return whether the column numbers of every row ascend, none of them twice.

    Row i has those from ``indptr[i]`` to ``indptr[i + 1]``.
    """
    start = load(indptr_at, 0, like_indptr)
    for i in range(n_rows):
        stop = load(indptr_at, i + 1, like_indptr)
        ascending = True
        # Without a branch in it, it is done on several at a time.
        for k in range(start + 1, stop):
            ascending &= load(indices_at, k - 1, like_indices) < load(indices_at, k, like_indices)
        if not ascending:
            return False
        start = stop
    return True


@kernel
def rows_ascend(positions, lengths, indices_at, like_indices):
    """Return whether the column numbers of every row at `positions` ascend, none of them twice."""
    for i in range(len(positions)):
        columns_at = indices_at[positions[i]]
        ascending = True
        for k in range(1, lengths[positions[i]]):
            ascending &= load(columns_at, k - 1, like_indices) < load(columns_at, k, like_indices)
        if not ascending:
            return False
    return True


@kernel
def narrow(source, out):
    """Copy column numbers into `out`, uint16; return whether all of them fit."""
    fits = True
    for i in range(len(source)):
        value = source[i]
        fits &= (value >= 0) & (value <= 65535)
        out[i] = value
    return fits


@kernel
def count_bytes(values, bits):
    """Return how many bytes an unsigned integer takes that holds each of `values` exactly: 1, 2, or 0 if more.

    `bits` are the same as unsigned integers: -0.0 is none, though it equals one.
    """
    largest = np.int32(0)
    for first in range(0, len(values), _TRIED):
        wrong = np.int32(0)
        # Without a branch in it, it is done on several at a time; what is too large for the number comes back as
        # another, or as one with higher bits.
        tried, tried_bits = values[first : first + _TRIED], bits[first : first + _TRIED]
        for i in range(len(tried)):
            value = tried[i]
            number = np.int32(value)
            wrong |= np.int32(value != values.dtype.type(number)) | (number >> 16)
            wrong |= np.int32((number == 0) != (tried_bits[i] == 0))
            largest |= number
        if wrong:
            return 0
    return 1 if largest <= 255 else 2


@kernel
def stitch(starts, stops, extents, firsts, ends, offsets, row_bytes, source, fill, out):
    """Copy runs that cross extents of a file into `out`, one after the other.

    Run i is ``[starts[i], stops[i])`` of an array whose rows of `row_bytes` lie in `source`, uint8: those of
    extent e, ``[firsts[e], ends[e])``, from byte ``offsets[e]`` on, or nowhere if that is -1. There, `fill`,
    the bytes of one element, is written. ``extents[i]`` is where the run starts.
    """
    to = 0
    for i in range(len(starts)):
        start = starts[i]
        extent = extents[i]
        while start < stops[i]:
            n = (min(stops[i], ends[extent]) - start) * row_bytes
            # Element by element: assigning slices would be compiled for seconds, mostly its error message.
            if offsets[extent] >= 0:
                at = offsets[extent] + (start - firsts[extent]) * row_bytes
                for k in range(n):
                    out[to + k] = source[at + k]
            else:
                for k in range(n):
                    out[to + k] = fill[k % len(fill)]
            to += n
            start = ends[extent]
            extent += 1
