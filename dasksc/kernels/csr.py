"""Gathering of rows from arbitrary memory addresses into a minibatch.

A row is given by the address of its first element and its length. The same kernel therefore reads memory-mapped files,
decoded chunks and NumPy arrays, writable or not, and aligned or not (HDF5 stores chunks at any byte). Addresses also
keep the number of compiled variants small: variants differ only in the data types of the elements, such as values and
column indices.

The caller guarantees valid addresses (`dasksc.storage.arrays.RowPointers` computes them and checks their bounds).
The data at the addresses are not trusted: a column outside [0, n_vars) ends the kernel, which returns the position of
the row among the fetched rows. Without such an error, a kernel returns -1.

Common parameters
-----------------
positions
    Positions of the requested rows among the fetched rows, in output order, shape (n_rows,), int64.
lengths
    Number of nonzeros in each fetched row, shape (n_fetched,), int64.
data_at, indices_at, rows_at
    Address of the first element of each fetched row, shape (n_fetched,), uint64.
like_data, like_indices, like
    Empty arrays of the data type stored at the addresses. With `rounded(like, to)`, the kernels write the bits of
    values rounded to bfloat16 or float16, which numba lacks, into an `out` or `data` of type uint16, unless they sum
    columns.
drops
    True if a lookup drops a column.
maps, lookups
    `maps` holds the row of `lookups` that applies to each fetched row, shape (n_fetched,), int32. `lookups` holds
    the output column of each stored column, shape (n_maps, n_columns), int32; -1 marks a dropped column, and a value
    below -1 marks a column that no row may contain.
any_order
    If True, the columns of a row may be unsorted and repeated. If False, the first row whose columns are not
    strictly ascending ends the kernel, which returns `UNORDERED`.
"""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.intrinsics import STRIDE, count_bits, descent_bits, load, lowest_bit, nonzero_bits, prefetch

# Results of a kernel for a row whose columns are not strictly ascending, and for values that become infinite.
UNORDERED, INFINITE = -2, -3
# Markers in `sources` for output columns without a stored column: `NOWHERE` yields a fill value, `ZERO` yields 0.
NOWHERE, ZERO = -1, -2

# Number of elements of a dense row that are cleared at a time if the columns of the CSR row are not ascending.
_CLEARED_AHEAD = np.uint64(2048)
# Number of values checked between two tests for early exit.
_TRIED = 4096
# Number of positions of set bits that are written at a time. Writing a fixed number avoids a branch for each bit.
_BITS_AT_ONCE = 8
_WORD_BITS = 64
# Bits of a number of two bytes apart from its sign.
_SIZE_BITS = np.uint16(0x7FFF)
_ONE, _WORD_SHIFT, _WORD_MASK = np.uint64(1), np.uint64(6), np.uint64(63)


@kernel
def _is_ascending_at(columns_at, start, stop, like_indices):
    if stop - start == STRIDE + 1:
        return descent_bits(columns_at, start, like_indices) == 0
    # A loop without branches is vectorized.
    ascending = True
    for k in range(start + 1, stop):
        ascending &= load(columns_at, k - 1, like_indices) < load(columns_at, k, like_indices)
    return ascending


@kernel
def scatter_rows(positions, lengths, data_at, indices_at, n_vars, out, like_data, like_indices, any_order):
    """Write CSR rows into a dense `out`, shape (n_rows, n_vars). Repeated columns are summed, as in SciPy."""
    n_columns = np.uint64(n_vars)
    for i in range(len(positions)):
        row = positions[i]
        following = positions[min(i + 1, len(positions) - 1)]
        n = lengths[row]
        columns_at, values_at = indices_at[row], data_at[row]
        next_columns_at, next_values_at = indices_at[following], data_at[following]
        dense = out[i]
        # Columns are mostly ascending, so elements can be cleared just before they are written. If a whole row were
        # cleared first, its beginning would no longer be in the L1 cache when values are written.
        n_cleared = np.uint64(0)
        ascending = True
        for first in range(0, n, STRIDE):
            prefetch(next_columns_at, first, like_indices)
            prefetch(next_values_at, first, like_data)
            end = min(first + STRIDE, n)
            ascending = _is_ascending_at(columns_at, max(first - 1, 0), end, like_indices)
            if not ascending:
                break
            # The last of these columns is the largest. Each column is checked nevertheless, since the file may change
            # during the read.
            last = np.uint64(load(columns_at, end - 1, like_indices))
            if last >= n_columns:
                return row
            dense[n_cleared : last + _ONE] = 0
            n_cleared = last + _ONE
            for k in range(first, end):
                # A negative column wraps around to a number far above n_vars.
                column = np.uint64(load(columns_at, k, like_indices))
                if column > last:
                    return row
                dense[column] += load(values_at, k, like_data)
        if ascending:
            dense[n_cleared:] = 0
            continue
        if not any_order:
            return UNORDERED
        n_cleared = np.uint64(0)
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
def scatter_rounded(positions, lengths, data_at, indices_at, n_vars, out, like_data, like_indices, infinity):
    """Write CSR rows of ascending columns into a dense `out` of rounded bits; return `INFINITE` if one is infinite."""
    # This kernel is `scatter_rows` with the values rounded 64 at a time, which is vectorized.
    n_columns = np.uint64(n_vars)
    bits = np.empty(STRIDE, np.uint16)
    infinite = False
    for i in range(len(positions)):
        row = positions[i]
        following = positions[min(i + 1, len(positions) - 1)]
        n, columns_at, values_at = lengths[row], indices_at[row], data_at[row]
        next_columns_at, next_values_at = indices_at[following], data_at[following]
        dense = out[i]
        n_cleared = np.uint64(0)
        for first in range(0, n, STRIDE):
            prefetch(next_columns_at, first, like_indices)
            prefetch(next_values_at, first, like_data)
            end = min(first + STRIDE, n)
            if not _is_ascending_at(columns_at, max(first - 1, 0), end, like_indices):
                return UNORDERED
            last = np.uint64(load(columns_at, end - 1, like_indices))
            if last >= n_columns:
                return row
            dense[n_cleared : last + _ONE] = 0
            n_cleared = last + _ONE
            for k in range(end - first):
                bits[k] = load(values_at, first + k, like_data)
            infinite |= has_infinity(bits[: end - first], infinity)
            for k in range(end - first):
                column = np.uint64(load(columns_at, first + k, like_indices))
                if column > last:
                    return row
                dense[column] = bits[np.uint64(k)]
        dense[n_cleared:] = 0
    return INFINITE if infinite else -1


@kernel
def _longest(positions, lengths):
    longest = 0
    for i in range(len(positions)):
        longest = max(longest, lengths[positions[i]])
    return longest


@kernel
def _is_ascending(columns, n):
    # A loop without branches is vectorized.
    ascending = True
    for k in range(1, n):
        ascending &= columns[k - 1] < columns[k]
    return ascending


@kernel
def _keep_columns(columns_at, n, lookup, columns, places, next_columns_at, next_values_at, like_data, like_indices):
    """Write the output columns of a row and their places in it; return their number, or -1 for an invalid column."""
    # The loop has no branch per column that could be predicted wrongly.
    n_columns = np.uint64(len(lookup))
    n_kept = np.uint64(0)
    smallest = np.int32(0)
    for first in range(0, n, STRIDE):
        prefetch(next_columns_at, first, like_indices)
        prefetch(next_values_at, first, like_data)
        for k in range(first, min(first + STRIDE, n)):
            column = np.uint64(load(columns_at, k, like_indices))
            if column >= n_columns:
                return -1
            to = lookup[column]
            columns[n_kept] = to
            places[n_kept] = k
            n_kept += np.uint64(to >= 0)
            smallest = min(smallest, to)
    return -1 if smallest < -1 else np.int64(n_kept)


@kernel
def _renumber(columns_at, n, lookup, columns, next_columns_at, next_values_at, like_data, like_indices):
    """Write the output column of every column of a row; return their number, or -1 for an invalid column."""
    n_columns = np.uint64(len(lookup))
    smallest = np.int32(0)
    for first in range(0, n, STRIDE):
        prefetch(next_columns_at, first, like_indices)
        prefetch(next_values_at, first, like_data)
        for k in range(first, min(first + STRIDE, n)):
            column = np.uint64(load(columns_at, k, like_indices))
            if column >= n_columns:
                return -1
            columns[k] = lookup[column]
            smallest = min(smallest, lookup[column])
    return -1 if smallest < 0 else n


@kernel
def scatter_columns(
    positions, lengths, data_at, indices_at, maps, lookups, drops, out, like_data, like_indices, any_order
):
    """Write the kept columns of CSR rows into a dense `out`, shape (n_rows, n_kept)."""
    longest = _longest(positions, lengths) if drops else 0
    columns, places = np.empty(longest + 1, dtype=np.int32), np.empty(longest + 1, dtype=np.int32)
    n_columns = np.uint64(lookups.shape[1])
    for i in range(len(positions)):
        row = positions[i]
        following = positions[min(i + 1, len(positions) - 1)]
        n, columns_at, values_at = lengths[row], indices_at[row], data_at[row]
        next_columns_at, next_values_at = indices_at[following], data_at[following]
        lookup, dense = lookups[maps[row]], out[i]
        if not (any_order or _is_ascending_at(columns_at, 0, n, like_indices)):
            return UNORDERED
        dense[:] = 0
        if drops:
            nexts = next_columns_at, next_values_at, like_data, like_indices
            n_kept = _keep_columns(columns_at, n, lookup, columns, places, *nexts)
            if n_kept < 0:
                return row
            for j in range(np.uint64(n_kept)):
                dense[np.uint64(columns[j])] += load(values_at, np.int64(places[j]), like_data)
            continue
        for first in range(0, n, STRIDE):
            prefetch(next_columns_at, first, like_indices)
            prefetch(next_values_at, first, like_data)
            for k in range(first, min(first + STRIDE, n)):
                column = np.uint64(load(columns_at, k, like_indices))
                if column >= n_columns:
                    return row
                to = lookup[column]
                if to < 0:
                    return row
                dense[np.uint64(to)] += load(values_at, k, like_data)
    return -1


@kernel
def row_starts(positions, lengths, indptr):
    """Write the offsets of concatenated rows into `indptr`; return their total length, or -1 for a wrong position."""
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
    positions, lengths, data_at, indices_at, n_vars, indptr, indices, data, like_data, like_indices, any_order
):
    """Copy CSR rows into `indices` and `data`; row i begins at ``indptr[i]``."""
    for i in range(len(positions)):
        row = positions[i]
        n = lengths[row]
        if n == 0:
            continue
        columns_at = indices_at[row]
        values_at = data_at[row]
        row_indices = indices[indptr[i] : indptr[i] + n]
        row_data = data[indptr[i] : indptr[i] + n]
        # Two plain passes are vectorized. The first pass also checks the order of the columns: if it is ascending, the
        # first and last columns bound the others.
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
        for k in range(n):
            row_data[k] = load(values_at, k, like_data)
    return -1


@kernel
def count_columns(positions, lengths, indices_at, maps, lookups, counts, like_indices):
    """Write the number of nonzeros in kept columns of each row into `counts`, shape (n_rows,)."""
    n_columns = np.uint64(lookups.shape[1])
    for i in range(len(positions)):
        row = positions[i]
        following = positions[min(i + 1, len(positions) - 1)]
        n = lengths[row]
        columns_at, next_columns_at = indices_at[row], indices_at[following]
        lookup = lookups[maps[row]]
        n_kept = 0
        for first in range(0, n, STRIDE):
            prefetch(next_columns_at, first, like_indices)
            for k in range(first, min(first + STRIDE, n)):
                column = np.uint64(load(columns_at, k, like_indices))
                if column >= n_columns:
                    return row
                n_kept += lookup[column] >= 0
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
    drops,
    indptr,
    indices,
    data,
    like_data,
    like_indices,
    any_order,
):
    """Copy and renumber the kept columns of CSR rows; row i begins at ``indptr[i]``, as `count_columns` counts."""
    longest = _longest(positions, lengths) if drops else 0
    columns, places = np.empty(longest + 1, dtype=np.int32), np.empty(longest + 1, dtype=np.int32)
    for i in range(len(positions)):
        row = positions[i]
        following = positions[min(i + 1, len(positions) - 1)]
        n, columns_at, values_at = lengths[row], indices_at[row], data_at[row]
        nexts = indices_at[following], data_at[following], like_data, like_indices
        lookup = lookups[maps[row]]
        row_indices, row_data = indices[indptr[i] :], data[indptr[i] :]
        if drops:
            n_kept = _keep_columns(columns_at, n, lookup, columns, places, *nexts)
            if n_kept < 0:
                return row
            for j in range(np.uint64(n_kept)):
                row_indices[j] = columns[j]
                row_data[j] = load(values_at, np.int64(places[j]), like_data)
        else:
            n_kept = _renumber(columns_at, n, lookup, row_indices, *nexts)
            if n_kept < 0:
                return row
            for k in range(n):
                row_data[k] = load(values_at, k, like_data)
        if not (any_order or _is_ascending(row_indices, n_kept)):
            return UNORDERED
    return -1


@kernel
def _list_bits(bits, listed):
    # Write the positions of the set bits into `listed` and clear the bits; return their number. Up to
    # `_BITS_AT_ONCE` elements after the last position are overwritten.
    n = np.uint64(0)
    for i in range(len(bits)):
        word = bits[i]
        bits[i] = 0
        to = n
        n += count_bits(word)
        while word:
            for _ in range(_BITS_AT_ONCE):
                listed[to] = (np.uint64(i) << _WORD_SHIFT) + lowest_bit(word)
                to += _ONE
                word &= word - _ONE
    return np.int64(n)


@kernel
def merge_columns_csr(
    positions, lengths, data_at, indices_at, maps, lookups, indptr, indices, data, sums, like_data, like_indices
):
    """Copy, renumber and sort the kept columns of CSR rows; sum repeated columns in stored order."""
    # The offsets of the resulting rows are written into `indptr`, shape (n_rows + 1,). `indices` and `data` have room
    # for as many elements as `count_columns` counts. Sums are computed in `sums`, shape (n_kept,), and in its type.
    longest = _longest(positions, lengths)
    columns, places = np.empty(longest + 1, dtype=np.int32), np.empty(longest + 1, dtype=np.int32)
    merged = np.empty(longest + _BITS_AT_ONCE, dtype=np.int32)
    bits = np.zeros((len(sums) + 63) // 64, dtype=np.uint64)
    total = indptr[0] = 0
    for i in range(len(positions)):
        row = positions[i]
        following = positions[min(i + 1, len(positions) - 1)]
        values_at = data_at[row]
        next_at = indices_at[following], data_at[following]
        n_kept = _keep_columns(
            indices_at[row], lengths[row], lookups[maps[row]], columns, places, *next_at, like_data, like_indices
        )
        if n_kept < 0:
            return row
        row_indices, row_data = indices[total : total + n_kept], data[total : total + n_kept]
        if _is_ascending(columns, n_kept):
            for j in range(np.uint64(n_kept)):
                row_indices[j] = columns[j]
                row_data[j] = sums.dtype.type(load(values_at, np.int64(places[j]), like_data))
            n_merged = n_kept
        else:
            # A bitmap of the columns, read in order, costs less than sorting.
            for j in range(np.uint64(n_kept)):
                to = np.uint64(columns[j])
                value = sums.dtype.type(load(values_at, np.int64(places[j]), like_data))
                bit = _ONE << (to & _WORD_MASK)
                sums[to] = sums[to] + value if bits[to >> _WORD_SHIFT] & bit else value
                bits[to >> _WORD_SHIFT] |= bit
            n_merged = _list_bits(bits, merged)
            for j in range(n_merged):
                row_indices[j] = merged[j]
            for j in range(n_merged):
                row_data[j] = sums[np.uint64(merged[j])]
        total += n_merged
        indptr[i + 1] = total
    return -1


@kernel
def copy_rows(positions, rows_at, out, like):
    """Copy dense rows into `out`, shape (n_rows, n_vars)."""
    for i in range(len(positions)):
        row_at = rows_at[positions[i]]
        dense = out[i]
        for k in range(len(dense)):
            dense[k] = load(row_at, k, like)


@kernel
def copy_columns(positions, rows_at, maps, sources, out, missing, like):
    """Copy columns of dense rows into `out`, shape (n_rows, n_kept), from their `sources`, (n_maps, n_kept)."""
    # Where the source is `NOWHERE`, the output is the single element of `missing`; where it is `ZERO`, 0.
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
    """Write the sums of groups of neighboring columns, group g from ``starts[g]`` on, into `out`."""
    # Values are added from left to right, in the data type of `out`.
    for i in range(len(values)):
        for g in range(len(starts) - 1):
            total = out.dtype.type(values[i, starts[g]])
            for k in range(starts[g] + 1, starts[g + 1]):
                total = out.dtype.type(total + out.dtype.type(values[i, k]))
            out[i, g] = total


@kernel
def count_nonzeros(dense, counts):
    """Write the number of nonzeros in each row of `dense` into `counts`; NaN counts as nonzero."""
    for i in range(dense.shape[0]):
        count = 0
        for k in range(dense.shape[1]):
            count += dense[i, k] != 0
        counts[i] = count


@kernel
def list_nonzeros(row, bits, listed):
    """Write the positions of the nonzeros (NaN is one) of a contiguous row into `listed`, and return their number."""
    # `bits` and `listed` are those of `room_for_nonzeros`; the bits are 0 before and after the call.
    n_whole, rest = len(row) // _WORD_BITS, len(row) % _WORD_BITS
    at = np.uint64(row.ctypes.data)
    for w in range(n_whole):
        bits[np.uint64(w)] = nonzero_bits(at, _WORD_BITS * w, row)
    if rest and n_whole:
        # Read the last 64 elements of the row; the shift drops those that the preceding words contain.
        bits[np.uint64(n_whole)] = nonzero_bits(at, len(row) - _WORD_BITS, row) >> np.uint64(_WORD_BITS - rest)
    else:
        for k in range(rest):
            bits[np.uint64(0)] |= np.uint64(row[k] != 0) << np.uint64(k)
    return np.uint64(_list_bits(bits, listed))


@kernel
def room_for_nonzeros(n_vars):
    """Return the scratch arrays of `list_nonzeros` for rows of `n_vars` elements."""
    return np.zeros(n_vars // _WORD_BITS + 1, np.uint64), np.empty(n_vars + _BITS_AT_ONCE, np.int32)


@kernel
def squeeze(dense, indptr, indices, data):
    """Write the nonzeros (NaN is one) of C-contiguous `dense` as CSR, and return their number."""
    bits, listed = room_for_nonzeros(dense.shape[1])
    n = np.int64(0)
    indptr[0] = 0
    for i in range(dense.shape[0]):
        row = dense[i]
        n_listed = list_nonzeros(row, bits, listed)
        for j in range(n_listed):
            column = listed[j]
            indices[np.uint64(n) + j] = column
            data[np.uint64(n) + j] = row[np.uint64(column)]
        n += np.int64(n_listed)
        indptr[i + 1] = n
    return n


@kernel
def count_bytes(values, bits):
    """Return the bytes of the unsigned type that represents `values` exactly: 1, 2, or 0 for neither."""
    # `bits`, their bit patterns, identify -0.0, which equals 0 but which no integer type represents.
    largest = np.int32(0)
    for first in range(0, len(values), _TRIED):
        wrong = np.int32(0)
        # A loop without branches is vectorized. A value that is too large for int32 is detected, too: its conversion to
        # int32 is either unequal to the value or has high bits set.
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
def has_infinity(bits, infinity):
    """Return True if an element of `bits` is `infinity` or its negative."""
    found = np.uint16(0)
    for i in range(len(bits)):
        found |= np.uint16((bits[i] & _SIZE_BITS) == infinity)
    return found != 0


@kernel
def exceeds(positions, lengths, rows_at, n_bits, is_signed, like):
    """Return True if a value in any of the rows at `positions` has more than `n_bits` bits."""
    # `like` has the type int64, also for uint64 values; then `is_signed` is 0, otherwise -1.
    found = np.int64(0)
    for i in range(len(positions)):
        row = positions[i]
        for k in range(lengths[row]):
            value = load(rows_at[row], k, like)
            found |= value ^ ((value >> np.int64(63)) & is_signed)
    return (np.uint64(found) >> np.uint64(n_bits)) != 0


@kernel
def stitch(starts, stops, extents, firsts, ends, offsets, row_bytes, source, fill, out):
    """Copy runs of rows ``[starts[i], stops[i])`` into `out`, one after the other; they may span several extents."""
    # Run i begins in extent extents[i]. Extent e holds rows [firsts[e], ends[e]) of `row_bytes` bytes each, from byte
    # offsets[e] of `source` on. An offset of -1 marks an extent that is not stored; its rows are filled with `fill`.
    to = 0
    for i in range(len(starts)):
        start = starts[i]
        extent = extents[i]
        while start < stops[i]:
            n = (min(stops[i], ends[extent]) - start) * row_bytes
            # Copying element by element compiles quickly. Slice assignment takes seconds to compile, mostly for its
            # error message.
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


@kernel
def count_triples(ids, rows, at, counts):
    """Find the position of each triple's row among ascending `ids`, and count them; return a row without one, or -1."""
    previous, position = np.int64(-1), 0
    for k in range(rows.shape[0]):
        if rows[k] != previous:
            previous = rows[k]
            position = np.searchsorted(ids, previous)
            if position == ids.shape[0] or ids[position] != previous:
                return previous
        at[k] = position
        counts[position] += 1
    return -1


@kernel
def fill_triples(at, columns, values, to, places, out_columns, out_values):
    """Write triples to the next places of their rows; return the first column that `to` does not map, or -1."""
    for k in range(at.shape[0]):
        column = columns[k]
        if column < 0 or column >= to.shape[0] or to[column] < 0:
            return column
        place = places[at[k]]
        out_columns[place] = to[column]
        out_values[place] = values[k]
        places[at[k]] = place + 1
    return -1
