"""Augmentation of a batch: downsampling of counts, and masking of values.

Random numbers are keyed by the row and the number of a column, or by the row and the index of a molecule in the row.
Dense and CSR rows therefore get the same values.

Counts are drawn by binomial thinning. For a small count, one random word is compared with each step of the
distribution function; a larger count is divided into several small ones. The largest counts use the transformed
rejection of Hörmann [1]_ or, if the expected number is small, a sequential search.

A fixed number of molecules is drawn without replacement in two steps. First, all counts are thinned with the same
probability, which leaves about the target number. Whatever this probability is, all samples of the same size are
equally likely. Then the difference is drawn without replacement, from the kept molecules if there are too many,
otherwise from the removed ones. The result is multivariate hypergeometric.

A random word has 53 bits. The first 32 bits come from a hash that uses only 32-bit operations, which processors compute
for many elements at a time. These 32 bits decide a comparison with a step, except with probability 2**-32. The other
bits are drawn only if the first 32 equal those of the step.

.. [1] Hörmann: The generation of binomial random variates, Journal of Statistical Computation and Simulation 46
   (1993), algorithm BTRS.

Common parameters
-----------------
key, number
    Key of all random numbers, uint64, and number of the batch.
rows
    Row numbers of the batch, shape (n_rows,), int64.
first_row
    Position in the batch of the first row of `indptr` or `dense`.
indptr, columns, values
    CSR rows of the batch: shapes (n + 1,), (nnz,) and (nnz,). Values are changed in place, and zeros stay stored.
dense
    C-contiguous dense rows of the batch, shape (n, n_vars). Their nonzeros are changed in place, a few rows at a time,
    so that scratch memory is small and rows stay in the L1 cache of a core.
source
    CSR rows in memory, as in `dasksc.kernels.csr`: ``(positions, lengths, data_at, indices_at, n_vars, like_data,
    like_indices)``. They are copied, changed and written into `dense` a few rows at a time.
"""

from __future__ import annotations

import math

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.csr import _count_bits, _list_bits, copy_rows_csr, densify, put, squeeze
from dasksc.kernels.permute import bits, stream, uniform
from dasksc.kernels.tokens import row_keys
from dasksc.kernels.vectors import N_STEPS, hash_columns, hashed, n_below, n_sums_below, sum_of, thin_small

__all__ = [
    "N_TABLE",
    "N_TABLES",
    "binomial_kept",
    "binomial_table",
    "downsample",
    "downsample_dense",
    "downsample_scattered",
    "mask",
    "mask_dense",
    "mask_scattered",
    "sample",
    "sample_dense",
    "sample_scattered",
    "steps_of",
    "word",
]

N_TABLE = N_STEPS
"""Largest count that is drawn by one comparison with a table."""

N_TABLES = 64
"""Largest count that is drawn in parts, each by the table or by single bits."""

_U11, _U21, _U43 = np.uint64(11), np.uint64(21), np.uint64(43)
_ONE, _ONE_32, _U32 = np.uint64(1), np.uint32(1), np.uint64(32)
_ONE_AS_WORD = 9007199254740992.0  # 2**53
_LARGEST, _LARGEST_FLOAT32 = 2**53, 2**24
_HIGHEST = np.uint32(2**32 - 1)
# The number of a column's random stream is the column number. These are the numbers of the other streams of a row.
_DIFFERENCE, _SINGLE_BITS, _ROUNDS = np.uint64(2**64 - 1), np.uint64(2**64 - 2), np.uint64(2**63)
# Largest count, and largest total of a row, for which `sample` rounds the probability of thinning to `_SHARE_BITS`
# bits.
_MOST, _MOST_IN_ROW = np.uint32(2**20), 2**17
_SHARE_BITS = 10
_N_SHARES = 2**_SHARE_BITS
# Largest difference for which `_reach` draws molecules one by one.
_FEW = 8
# Number of values in a block. A search uses the sums of blocks, so it looks at the values of only one.
_BLOCK, _BLOCKS = N_STEPS, np.uint64(N_STEPS)
# Maximum number of elements of dense rows, and of nonzeros of CSR rows, to change at a time. A larger row is changed as
# a whole.
_DENSE_AT_ONCE, _NONZEROS_AT_ONCE = 2**14, 2**13
_WORD_BITS, _WORDS, _WORD_SHIFT, _WORD_MASK = 64, np.uint64(64), np.uint64(6), np.uint64(63)
# Error of Stirling's formula for the logarithm of k!, for k from 0 to 9; see `_stirling`.
_STIRLING = np.array(
    [
        0.08106146679532726,
        0.04134069595540929,
        0.02767792568499834,
        0.02079067210376509,
        0.01664469118982119,
        0.01387612882307075,
        0.01189670994589177,
        0.01041126526197209,
        0.009255462182712733,
        0.008330563433362871,
    ]
)


@kernel
def word(row_key, column):
    """Return 53 random bits for a column of a row."""
    factor, offset = _affine(row_key)
    head = np.uint64(hashed(np.uint32(np.uint32(column) * factor + offset)))
    return (head << _U21) | (bits(row_key, column) >> _U43)


@kernel
def _affine(row_key):
    # The first 32 bits of a word are the hash of column * factor + offset. Return the factor, which is odd, and the
    # offset.
    return np.uint32(row_key) | _ONE_32, np.uint32(row_key >> _U32)


@kernel
def binomial_table(p, table):
    """Write distribution functions of binomials into `table`, shape ((N_TABLE + 1) * N_TABLE,), uint64.

    If each of n molecules is kept with probability `p`, at most k are kept when 53 random bits are below
    ``table[n * N_TABLE + k]``. From k = n on, the entry is larger than any 53 bits.
    """
    table[:] = np.uint64(_ONE_AS_WORD)
    shares = np.zeros(N_TABLE + 1)
    shares[0] = 1.0
    for n in range(1, N_TABLE + 1):
        for k in range(n, 0, -1):
            shares[k] = shares[k] * (1.0 - p) + shares[k - 1] * p
        shares[0] *= 1.0 - p
        total = 0.0
        for k in range(n):
            total += shares[k]
            table[n * N_TABLE + k] = np.uint64(min(total, 1.0) * _ONE_AS_WORD)


@kernel
def steps_of(p):
    """Return the table of `binomial_table` and the first 32 bits of each step, uint32.

    The value 2**32, which does not fit, is replaced by 2**32 - 1.
    """
    table = np.empty((N_TABLE + 1) * N_TABLE, np.uint64)
    heads = np.empty(len(table), np.uint32)
    binomial_table(p, table)
    for j in range(len(table)):
        heads[j] = min(table[j] >> _U21, np.uint64(_HIGHEST))
    return table, heads


@kernel
def _stirling(k):
    if k < 10:
        return _STIRLING[k]
    square = (k + 1.0) * (k + 1.0)
    return (1.0 / 12 - (1.0 / 360 - 1.0 / 1260 / square) / square) / (k + 1.0)


@kernel
def _few_of(key, n, p):
    # A sequential search, for n * p < 10.
    draw = uniform(key, 0)
    share = math.exp(n * math.log1p(-p))
    k = 0
    while draw >= share and k < n:
        draw -= share
        k += 1
        share *= (n - k + 1) * p / (k * (1.0 - p))
    return k


@kernel
def _many_of(key, n, p):
    # BTRS, for p <= 0.5 and n * p >= 10.
    spread = math.sqrt(n * p * (1.0 - p))
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * p
    center = n * p + 0.5
    squeezed = 0.92 - 4.2 / b
    odds = p / (1.0 - p)
    alpha = (2.83 + 5.1 / b) * spread
    mode = np.int64((n + 1) * p)
    counter = 0
    while True:
        u = uniform(key, counter) - 0.5
        v = uniform(key, counter + 1)
        counter += 2
        near = 0.5 - abs(u)
        if near == 0:
            continue
        place = np.floor((2.0 * a / near + b) * u + center)
        if not 0 <= place <= n:
            continue
        k = np.int64(place)
        if near >= 0.07 and v <= squeezed:
            return k
        bound = (
            (mode + 0.5) * math.log((mode + 1) / (odds * (n - mode + 1)))
            + (n + 1) * math.log((n - mode + 1) / (n - k + 1))
            + (k + 0.5) * math.log(odds * (n - k + 1) / (k + 1))
            + _stirling(mode)
            + _stirling(n - mode)
            - _stirling(k)
            - _stirling(n - k)
        )
        if math.log(v * alpha / (a / (near * near) + b)) <= bound:
            return k


@kernel
def binomial_kept(key, n, p):
    """Draw a binomial number: how many of `n` molecules are kept with probability `p` each. `key` is uint64."""
    if p > 0.5:
        return n - binomial_below(key, n, 1.0 - p)
    return binomial_below(key, n, p)


@kernel
def binomial_below(key, n, p):
    """Draw a binomial number as `binomial_kept` does, for `p` of at most 0.5."""
    if n == 0 or p <= 0.0:
        return np.int64(0)
    if n * p < 10:
        return np.int64(_few_of(key, n, p))
    return _many_of(key, n, p)


@kernel
def _largest_in(values):
    # The largest count that can be drawn from: the data type represents all smaller ones exactly.
    return _LARGEST if values.dtype.type(_LARGEST_FLOAT32 + 1) == _LARGEST_FLOAT32 + 1 else _LARGEST_FLOAT32


@kernel
def _is_count(value, largest):
    count = np.int64(value)
    return (value == count) & (count >= 0) & (count <= largest)


@kernel
def _stepped(table, count, drawn):
    # A loop without branches compares all steps at once.
    steps = np.uint64(count) * np.uint64(N_TABLE)
    found = np.int64(0)
    for j in range(N_TABLE):
        found += drawn >= table[steps + np.uint64(j)]
    return found


@kernel
def _in_parts(key, count, table):
    # A sum of independent binomial numbers with equal `p` is binomial.
    found = np.int64(0)
    for i in range(count // N_TABLE):
        found += _stepped(table, N_TABLE, bits(key, i) >> _U11)
    return found + _stepped(table, count % N_TABLE, bits(key, count // N_TABLE) >> _U11)


@kernel
def _large(row_key, column, count, p, table):
    # Keep each of `count` > N_TABLE molecules with probability `p`.
    key = stream(row_key, column)
    return _in_parts(key, count, table) if count <= N_TABLES else binomial_kept(key, count, p)


@kernel
def _thin(row_key, columns, counts, n, p, table, kept):
    # Thin `n` values of any size, with probability `p` for each molecule.
    for i in range(n):
        k = np.uint64(i)
        if counts[k] <= N_TABLE:
            kept[k] = _stepped(table, counts[k], word(row_key, columns[k]))
        else:
            kept[k] = _large(row_key, columns[k], counts[k], p, table)


@kernel
def _single_bits(key, number, n_shares):
    # Return 64 bits, each set with probability n_shares / _N_SHARES. The loop goes through the binary digits of this
    # probability, beginning with the last.
    found = np.uint64(0)
    for i in range(_SHARE_BITS):
        drawn = bits(key, number * _SHARE_BITS + i)
        found = found | drawn if (n_shares >> i) & 1 else found & drawn
    return found


@kernel
def _take(key, pool, n, n_taken, kept, step, ends, taken):
    # Draw `n_taken` molecules without replacement from the `n` values in `pool`, and add `step` to the entry in `kept`
    # for each. `pool`, uint32, is padded with zeros to a multiple of the size of a block. `taken` has a bit for each
    # molecule in `pool`, which is set when the molecule is drawn; all bits are cleared at the end.
    n_blocks = np.uint64((n + _BLOCK - 1) // _BLOCK)
    n_groups = (n_blocks + _BLOCKS - _ONE) // _BLOCKS
    pool_at, ends_at = pool.ctypes.data, ends.ctypes.data
    size = np.uint32(0)
    for i in range(n_groups * _BLOCKS):
        if i < n_blocks:
            size = np.uint32(size + sum_of(pool_at, np.int64(i) * _BLOCK, pool))
        ends[np.uint64(i)] = size
    n_left, counter = n_taken, 0
    # Draws do not depend on each other, so the processor overlaps several.
    while n_left:
        place = min(np.int64(uniform(key, counter) * size), np.int64(size) - 1)
        counter += 1
        bit = _ONE << (np.uint64(place) & _WORD_MASK)
        if taken[np.uint64(place) >> _WORD_SHIFT] & bit:
            continue
        taken[np.uint64(place) >> _WORD_SHIFT] |= bit
        n_left -= 1
        block = np.int64(0)
        for j in range(n_groups):
            block += n_below(ends_at, np.int64(j * _BLOCKS), ends, np.uint32(place + 1))
        before = np.int64(0) if block == 0 else np.int64(ends[np.uint64(block - 1)])
        k = block * _BLOCK + n_sums_below(pool_at, block * _BLOCK, pool, np.uint32(place - before + 1))
        kept[np.uint64(k)] += step
    for i in range(counter):
        place = min(np.int64(uniform(key, i) * size), np.int64(size) - 1)
        taken[np.uint64(place) >> _WORD_SHIFT] = 0


@kernel
def _reach(row_key, columns, counts, n, target, kept):
    # Keep `target` molecules of `n` values of any size. Each round draws approximately the remaining difference by
    # thinning, and the next round corrects the error.
    pool, drawn = np.empty(n, np.int64), np.empty(n, np.int64)
    table = np.empty((N_TABLE + 1) * N_TABLE, np.uint64)
    difference, number = np.int64(target), _ROUNDS
    kept[:n] = 0
    while difference != 0:
        step = 1 if difference > 0 else -1
        size = np.int64(0)
        for k in range(n):
            pool[k] = counts[k] - kept[k] if step > 0 else kept[k]
            size += pool[k]
        if abs(difference) <= _FEW:
            place = min(np.int64(uniform(row_key, number) * size), size - 1)
            k = 0
            while place >= pool[k]:
                place -= pool[k]
                k += 1
            kept[k] += step
            difference -= step
        else:
            share = abs(difference) / size
            binomial_table(share, table)
            _thin(stream(row_key, number), columns, pool, n, share, table, drawn)
            for k in range(n):
                kept[k] += step * drawn[k]
                difference -= step * drawn[k]
        number += _ONE


@kernel
def _fill_words(row_key, columns, start, stop, words, first):
    # Write the first 32 bits of the random words of `columns` from `start` to `stop` into `words` from `first` on.
    # Columns are hashed in whole vectors. The last vector may extend beyond `stop`, so `words` is padded by one vector.
    # At the end of the array `columns`, elements that do not fill a vector are hashed one by one.
    factor, offset = _affine(row_key)
    columns_at = columns.ctypes.data + np.uint64(columns.itemsize * start)
    words_at = words.ctypes.data + np.uint64(words.itemsize * first)
    n, n_vectors = stop - start, (min(stop + _BLOCK - 1, len(columns)) - start) // _BLOCK
    for i in range(n_vectors):
        hash_columns(columns_at, words_at, _BLOCK * i, columns, factor, offset)
    for k in range(_BLOCK * n_vectors, n):
        words[np.uint64(first + k)] = hashed(np.uint32(np.uint32(columns[np.uint64(start + k)]) * factor + offset))


@kernel
def _thin_small(values, words, n, steps, bitmap):
    # Thin values of up to 3, given the first 32 bits of their random words. The bits set in `bitmap` mark the values
    # that are above 3, and those whose result depends on the remaining bits of their random words. `words` is padded to
    # whole words of the bitmap.
    values_at, words_at = values.ctypes.data, words.ctypes.data
    n_whole = n // _WORD_BITS
    for i in range(n_whole):
        bitmap[np.uint64(i)] = thin_small(values_at, words_at, _WORD_BITS * i, values, steps)
    n_rest = n % _WORD_BITS
    if n_rest:
        rest = np.zeros(_WORD_BITS, values.dtype)
        rest[:n_rest] = values[n - n_rest : n]
        words_at += np.uint64(words.itemsize * _WORD_BITS * n_whole)
        found = thin_small(rest.ctypes.data, words_at, 0, rest, steps)
        bitmap[np.uint64(n_whole)] = found & ((_ONE << np.uint64(n_rest)) - _ONE)
        values[n - n_rest : n] = rest[:n_rest]


@kernel
def _small(drawn, count, steps):
    # Thin a value of up to 3. The result is exact if the 32 bits of `drawn` decide all comparisons.
    low, low_2, middle_2, low_3, middle_3, high_3 = steps
    if count == 3:
        return np.int32(drawn >= low_3) + np.int32(drawn >= middle_3) + np.int32(drawn >= high_3)
    if count == 2:
        return np.int32(drawn >= low_2) + np.int32(drawn >= middle_2)
    return np.int32(count == 1 and drawn >= low)


@kernel
def _keys_of(key, number, rows):
    keys = np.empty(len(rows), np.uint64)
    row_keys(stream(key, number), rows, keys)
    return keys


@kernel
def _dense_scratch(dense):
    # Return the number of dense rows that are changed at a time, and arrays for their nonzeros as CSR.
    n_at_once = max(1, _DENSE_AT_ONCE // max(1, dense.shape[1]))
    size = n_at_once * dense.shape[1]
    return n_at_once, np.empty(n_at_once + 1, np.int64), np.empty(size, np.int32), np.empty(size, dense.dtype)


@kernel
def _csr_scratch(source, dense):
    # Return scratch arrays for the CSR rows of `source` that are changed together.
    positions, lengths = source[0], source[1]
    size = _NONZEROS_AT_ONCE
    for i in range(len(positions)):
        size = max(size, lengths[positions[i]])
    return np.empty(len(positions) + 1, np.int64), np.empty(size, np.int32), np.empty(size, dense.dtype)


@kernel
def _copy_next(source, first, indptr, columns, values):
    # Copy rows of `source` from `first` on, as many as fit. Return the row after the last of them, or -1 if columns are
    # out of range or not ascending.
    positions, lengths, data_at, indices_at, n_vars, like_data, like_indices = source
    stop, n = first, np.int64(0)
    indptr[0] = 0
    while stop < len(positions) and n + lengths[positions[stop]] <= len(columns):
        n += lengths[positions[stop]]
        stop += 1
        indptr[stop - first] = n
    bad = copy_rows_csr(
        positions[first:stop],
        lengths,
        data_at,
        indices_at,
        n_vars,
        indptr,
        columns,
        values,
        like_data,
        like_indices,
        False,
    )
    return stop if bad == -1 else np.int64(-1)


@kernel
def _flat_position(first, n_vars, indptr, columns, bad):
    # Return the flat position in `dense` of the CSR value at position `bad`, for CSR rows that begin at dense row
    # `first`.
    row = 0
    while indptr[row + 1] <= bad:
        row += 1
    return (first + row) * n_vars + columns[bad]


@kernel
def downsample(key, number, rows, first_row, indptr, columns, values, p, table, heads):
    """Keep each molecule counted in CSR rows with probability `p`.

    `table` and `heads` are those of `steps_of`. Return the position in `values` of the first value that is not a whole
    number from 0 to 2**53 (2**24 for float32), or -1. If there is one, other values may have been changed already.
    """
    return _downsample(_keys_of(key, number, rows), first_row, indptr, columns, values, p, table, heads)


@kernel
def downsample_dense(key, number, rows, first_row, dense, p, table, heads):
    """Downsample dense rows as `downsample` does; return the flat position in `dense` of the first bad value, or -1."""
    keys = _keys_of(key, number, rows)
    n_at_once, indptr, columns, values = _dense_scratch(dense)
    for first in range(0, len(dense), n_at_once):
        some = dense[first : first + n_at_once]
        n = squeeze(some, indptr, columns, values)
        starts = indptr[: len(some) + 1]
        bad = _downsample(keys, first_row + first, starts, columns, values[:n], p, table, heads)
        if bad >= 0:
            return _flat_position(first, dense.shape[1], indptr, columns, bad)
        put(indptr, columns, values, some)
    return np.int64(-1)


@kernel
def downsample_scattered(key, number, rows, source, dense, p, table, heads):
    """Write the rows of `source` into `dense` and downsample them as `downsample` does.

    Return False if a value is not a count, or columns of `source` are out of range or not ascending.
    """
    keys = _keys_of(key, number, rows)
    indptr, columns, values = _csr_scratch(source, dense)
    first = np.int64(0)
    while first < len(dense):
        stop = _copy_next(source, first, indptr, columns, values)
        if stop < 0:
            return False
        starts = indptr[: stop - first + 1]
        if _downsample(keys, first, starts, columns, values[: starts[-1]], p, table, heads) >= 0:
            return False
        densify(starts, columns, values, dense[first:stop])
        first = stop
    return True


@kernel
def _downsample(keys, first_row, indptr, columns, values, p, table, heads):
    n = len(values)
    words, listed = np.empty(n + _WORD_BITS, np.uint32), np.empty(n + _WORD_BITS, np.int32)
    bitmap = np.empty((n + _WORD_BITS - 1) // _WORD_BITS, np.uint64)
    for i in range(len(indptr) - 1):
        _fill_words(keys[first_row + i], columns, np.int64(indptr[i]), np.int64(indptr[i + 1]), words, indptr[i])
    two, three = 2 * N_TABLE, 3 * N_TABLE
    steps = heads[N_TABLE], heads[two], heads[two + 1], heads[three], heads[three + 1], heads[three + 2]
    _thin_small(values, words, n, steps, bitmap)
    heads_at, largest = heads.ctypes.data, _largest_in(values)
    row = np.int64(0)
    for i in range(_list_bits(bitmap, listed)):
        at = np.uint64(listed[i])
        value = values[at]
        if not _is_count(value, largest):
            return np.int64(at)
        count = np.int64(value)
        if count <= N_TABLE:
            steps_at = np.uint64(count) * np.uint64(N_TABLE)
            found = n_below(heads_at, steps_at, heads, words[at])
            if found == count or heads[steps_at + np.uint64(found)] != words[at]:
                values[at] = found
                continue
        while np.uint64(indptr[row + 1]) <= at:
            row += 1
        row_key = keys[first_row + row]
        if count <= N_TABLE:
            values[at] = _stepped(table, count, word(row_key, columns[at]))
        else:
            values[at] = _large(row_key, columns[at], count, p, table)
    return np.int64(-1)


@kernel
def _sample_slowly(row_key, columns, values, n, target, kept):
    # Sample one row of any size. Return the position of the first invalid value, or -1.
    counts, largest = np.empty(n, np.int64), _largest_in(values)
    total = np.int64(0)
    for k in range(n):
        if not _is_count(values[k], largest):
            return k
        counts[k] = np.int64(values[k])
        total += counts[k]
        if total > _LARGEST:
            return k
    if target < total:
        _reach(row_key, columns, counts, n, target, kept)
    else:
        kept[:n] = counts
    return -1


@kernel
def _longest(indptr):
    longest = 1
    for i in range(len(indptr) - 1):
        longest = max(longest, indptr[i + 1] - indptr[i])
    return longest


@kernel
def sample(key, number, rows, first_row, indptr, columns, values, target):
    """Keep `target` molecules of each CSR row, or all if there are fewer.

    Return the position in `values` of the first value that is not a whole number from 0 to 2**53 (2**24 for float32),
    or that makes the sum of its row larger than 2**53; -1 if there is none. If there is one, the rows before it have
    been changed already.
    """
    return _sample(_keys_of(key, number, rows), first_row, indptr, columns, values, target)


@kernel
def sample_dense(key, number, rows, first_row, dense, target):
    """Sample dense rows as `sample` does; return the flat position in `dense` of the first bad value, or -1."""
    keys = _keys_of(key, number, rows)
    n_at_once, indptr, columns, values = _dense_scratch(dense)
    for first in range(0, len(dense), n_at_once):
        some = dense[first : first + n_at_once]
        squeeze(some, indptr, columns, values)
        bad = _sample(keys, first_row + first, indptr[: len(some) + 1], columns, values, target)
        if bad >= 0:
            return _flat_position(first, dense.shape[1], indptr, columns, bad)
        put(indptr, columns, values, some)
    return np.int64(-1)


@kernel
def sample_scattered(key, number, rows, source, dense, target):
    """Write the rows of `source` into `dense` and sample them as `sample` does; see `downsample_scattered`."""
    keys = _keys_of(key, number, rows)
    indptr, columns, values = _csr_scratch(source, dense)
    first = np.int64(0)
    while first < len(dense):
        stop = _copy_next(source, first, indptr, columns, values)
        if stop < 0:
            return False
        starts = indptr[: stop - first + 1]
        if _sample(keys, first, starts, columns, values[: starts[-1]], target) >= 0:
            return False
        densify(starts, columns, values, dense[first:stop])
        first = stop
    return True


@kernel
def _sample(keys, first_row, indptr, columns, values, target):
    longest = np.int64(_longest(indptr)) + _WORD_BITS
    counts, kept, pool = np.empty(longest, np.int32), np.empty(longest, np.int32), np.empty(longest, np.uint32)
    words, bitmap = np.zeros(longest, np.uint32), np.zeros(longest // _WORD_BITS, np.uint64)
    ends, listed = np.empty(longest // _BLOCK + _BLOCK, np.uint32), np.empty(longest, np.int32)
    taken = np.zeros(_MOST_IN_ROW // _WORD_BITS, np.uint64)
    for i in range(len(indptr) - 1):
        start = np.int64(indptr[i])
        first = np.uint64(start)  # an unsigned index avoids numba's check for negative values
        n = np.int64(indptr[i + 1]) - start
        row_key = keys[first_row + i]
        is_slow = False
        total = np.int64(0)
        for k in range(np.uint64(n)):
            value = values[first + k]
            count = np.int32(value)
            counts[k] = count
            kept[k] = count
            is_slow |= (value != values.dtype.type(count)) | (np.uint32(count) > _MOST)
            total += count
        if not is_slow and total <= target:
            continue
        if is_slow or total > _MOST_IN_ROW:
            row_values, kept_slowly = values[start : start + n], np.empty(n, np.int64)
            bad = _sample_slowly(row_key, columns[start : start + n], row_values, n, target, kept_slowly)
            if bad >= 0:
                return start + bad
            for k in range(n):
                row_values[k] = kept_slowly[k]
            continue
        _fill_words(row_key, columns, start, start + n, words, 0)
        # The row is padded with zeros to whole words of the bitmap (64 values each), so no loop has a remainder.
        n_padded = (n + _WORD_BITS - 1) // _WORD_BITS * _WORD_BITS
        for k in range(np.uint64(n), np.uint64(n_padded)):
            counts[k] = kept[k] = 0

        n_shares = min(max(np.int64(target * _N_SHARES / total + 0.5), 1), _N_SHARES - 1)
        others = _N_SHARES - n_shares
        # The third powers of `n_shares` and `others` have 30 bits, so nothing is rounded.
        steps = (
            np.uint32(others << 22),
            np.uint32(others**2 << 12),
            np.uint32((2**20 - n_shares**2) << 12),
            np.uint32(others**3 << 2),
            np.uint32((others**3 + 3 * others**2 * n_shares) << 2),
            np.uint32((2**30 - n_shares**3) << 2),
        )
        _thin_small(kept, words, n_padded, steps, bitmap)
        single, n_single, n_drawn = np.uint64(0), np.int32(0), 0
        bits_key = stream(row_key, _SINGLE_BITS)
        for i_listed in range(_list_bits(bitmap[: n_padded // _WORD_BITS], listed)):
            at = np.uint64(listed[i_listed])
            count = counts[at]
            if count > N_TABLES:
                kept[at] = binomial_kept(stream(row_key, columns[first + at]), count, n_shares / _N_SHARES)
                continue
            if count <= 3:
                kept[at] = _small(words[at], count, steps)
                continue
            if count > n_single:
                single, n_single = _single_bits(bits_key, n_drawn, n_shares), np.int32(_WORD_BITS)
                n_drawn += 1
            kept[at] = np.int32(_count_bits(single << np.uint64(_WORD_BITS - count)))
            single = (single >> np.uint64(count - 1)) >> _ONE
            n_single -= count
        n_kept = np.int32(0)
        for k in range(np.uint64(n_padded)):
            n_kept += kept[k]
        if n_kept != target:
            adds = n_kept < target
            for k in range(np.uint64(n_padded)):
                pool[k] = np.uint32(counts[k] - kept[k]) if adds else np.uint32(kept[k])
            _take(stream(row_key, _DIFFERENCE), pool, n, abs(n_kept - target), kept, 1 if adds else -1, ends, taken)
        for k in range(np.uint64(n)):
            values[first + k] = kept[k]
    return np.int64(-1)


@kernel
def mask(key, number, rows, first_row, indptr, columns, values, p):
    """Set each value of CSR rows to 0 with probability `p`."""
    _mask(_keys_of(key, number, rows), first_row, indptr, columns, values, p)


@kernel
def mask_dense(key, number, rows, first_row, dense, p):
    """Set each nonzero of dense rows to 0 with probability `p`, as `mask` does."""
    keys = _keys_of(key, number, rows)
    n_at_once, indptr, columns, values = _dense_scratch(dense)
    for first in range(0, len(dense), n_at_once):
        some = dense[first : first + n_at_once]
        squeeze(some, indptr, columns, values)
        _mask(keys, first_row + first, indptr[: len(some) + 1], columns, values, p)
        put(indptr, columns, values, some)


@kernel
def mask_scattered(key, number, rows, source, dense, p):
    """Write the rows of `source` into `dense` and mask them as `mask` does; see `downsample_scattered`."""
    keys = _keys_of(key, number, rows)
    indptr, columns, values = _csr_scratch(source, dense)
    first = np.int64(0)
    while first < len(dense):
        stop = _copy_next(source, first, indptr, columns, values)
        if stop < 0:
            return False
        starts = indptr[: stop - first + 1]
        _mask(keys, first, starts, columns, values, p)
        densify(starts, columns, values, dense[first:stop])
        first = stop
    return True


@kernel
def _mask(keys, first_row, indptr, columns, values, p):
    step = np.uint64(p * _ONE_AS_WORD)
    nothing = values.dtype.type(0)
    for i in range(len(indptr) - 1):
        row_key = keys[first_row + i]
        for k in range(np.uint64(indptr[i]), np.uint64(indptr[i + 1])):
            value = values[k]
            values[k] = nothing if (bits(row_key, columns[k]) >> _U11) < step else value
