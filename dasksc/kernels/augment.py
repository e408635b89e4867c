"""Augmentation of a batch: thinned and sampled counts, and masked values.

Random numbers are keyed by the row and the column, or by the row and the index of a molecule in the row. Dense and CSR
rows therefore get the same values.

Counts are drawn by binomial thinning. For a small count, a random word of 53 bits is compared with each step of the
distribution function. A table holds the results that the first 10 bits of the word decide, so the comparisons are
rarely made. A larger count is divided into several small ones. The largest counts use the transformed rejection of
Hörmann [1]_ or, if the expected number is small, a sequential search.

A fixed number of molecules is drawn without replacement in two steps. First, all counts are thinned with the same
probability, which leaves about the target number. Whatever this probability is, all samples of the same size are
equally likely. Then the difference is drawn without replacement, from the kept molecules if there are too many,
otherwise from the removed ones. The result is multivariate hypergeometric.

.. [1] Hörmann: The generation of binomial random variates, Journal of Statistical Computation and Simulation 46
   (1993), algorithm BTRS.

Common parameters
-----------------
key, number
    Key of all random numbers, uint64, and number of the batch.
rows
    Row numbers of the batch, shape (n_rows,), int64.
indptr, columns, values
    CSR rows of the batch: shapes (n_rows + 1,), (nnz,) and (nnz,). Values are changed in place, and zeros stay stored.
dense
    C-contiguous dense rows of the batch, shape (n_rows, n_vars). Their nonzeros are changed in place.
"""

from __future__ import annotations

import math

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.csr import list_nonzeros, room_for_nonzeros
from dasksc.kernels.draw import transformed_rejection
from dasksc.kernels.permute import bits, stream, uniform
from dasksc.kernels.tokens import row_keys

# Largest count that is drawn by one word, and largest count that is drawn in such parts or by single bits.
_N_TABLE, _N_PARTS = 16, 64
_ONE_AS_WORD = 9007199254740992.0  # 2**53
# Number of first bits of a word by which the lookup table is indexed, as are the shifts; and the entry for words that
# these bits do not decide.
_LOOKUP_BITS, _LOOKUP_SHIFT, _HEAD_SHIFT = 10, np.uint32(10), np.uint32(22)
_UNDECIDED = np.uint8(255)
# Largest count in the lookup table, and the place of all other values.
_SMALL, _OTHERS = np.uint32(_N_TABLE), np.uint32((_N_TABLE + 1) << 10)
# Largest counts: those that float64 and float32 represent along with all smaller ones.
_LARGEST, _LARGEST_FLOAT32 = 2**53, 2**24
_U11, _U21, _U43 = np.uint64(11), np.uint64(21), np.uint64(43)
_ONE, _ONE_32, _U32 = np.uint64(1), np.uint32(1), np.uint64(32)
# Shifts and factors of the hash triple32 of https://github.com/skeeto/hash-prospector.
_SHIFT_1, _SHIFT_2, _SHIFT_3, _SHIFT_4 = np.uint32(17), np.uint32(11), np.uint32(15), np.uint32(14)
_FACTOR_1, _FACTOR_2, _FACTOR_3 = np.uint32(0xED5AD4BB), np.uint32(0xAC4C1B51), np.uint32(0x31848BAB)
# The number of a column's random stream is the column number. These are the numbers of the other streams of a row.
_DIFFERENCE, _SINGLE_BITS, _ROUNDS = np.uint64(2**64 - 1), np.uint64(2**64 - 2), np.uint64(2**63)
# Largest count that a vectorized loop of `sample` checks, and largest total of a row for which `sample` rounds the
# probability of thinning to `_SHARE_BITS` bits.
_MOST, _MOST_IN_ROW = np.uint32(2**20), 2**17
_SHARE_BITS = 10
_N_SHARES = 2**_SHARE_BITS
_ALL_KEPT = -2
# Largest difference for which `_sample_many` draws molecules one by one.
_FEW = 8


@kernel
def _keys_of(key, number, rows):
    keys = np.empty(len(rows), np.uint64)
    row_keys(stream(key, number), rows, keys)
    return keys


@kernel
def _head(row_key, column):
    # Return the first 32 bits of a word: a hash that processors compute for many columns at a time.
    x = np.uint32(np.uint32(column) * (np.uint32(row_key) | _ONE_32) + np.uint32(row_key >> _U32))
    x = np.uint32((x ^ (x >> _SHIFT_1)) * _FACTOR_1)
    x = np.uint32((x ^ (x >> _SHIFT_2)) * _FACTOR_2)
    x = np.uint32((x ^ (x >> _SHIFT_3)) * _FACTOR_3)
    return np.uint32(x ^ (x >> _SHIFT_4))


@kernel
def _word(row_key, column):
    # Return 53 random bits for a column of a row.
    return (np.uint64(_head(row_key, column)) << _U21) | (bits(row_key, column) >> _U43)


@kernel
def _write_steps(p, steps):
    # If each of n molecules is kept with probability `p`, at most k are kept when a word is below ``steps[n, k]``. From
    # k = n on, the entry is larger than any word.
    steps[:] = np.uint64(_ONE_AS_WORD)
    shares = np.zeros(_N_TABLE + 1)
    shares[0] = 1.0
    for n in range(1, _N_TABLE + 1):
        for k in range(n, 0, -1):
            shares[k] = shares[k] * (1.0 - p) + shares[k - 1] * p
        shares[0] *= 1.0 - p
        total = 0.0
        for k in range(n):
            total += shares[k]
            steps[n, k] = np.uint64(min(total, 1.0) * _ONE_AS_WORD)


@kernel
def _stepped(steps, count, word):
    # Unsigned indices avoid numba's check for negative values, so the loop is vectorized.
    found, own = np.int64(0), steps[np.uint64(count)]
    for k in range(np.uint64(_N_TABLE)):
        found += word >= own[k]
    return found


@kernel
def tables_of(p):
    """Return the tables by which `downsample` thins counts of up to 16 with probability `p`.

    The first table holds the steps of the distribution functions. The second, uint8, holds the number of molecules to
    keep for each count and each value of the first bits of a word. The entries of all other values follow.
    """
    steps = np.empty((_N_TABLE + 1, _N_TABLE), np.uint64)
    _write_steps(p, steps)
    lookup = np.full((_N_TABLE + 2) << _LOOKUP_BITS, _UNDECIDED, np.uint8)
    for count in range(_N_TABLE + 1):
        for j in range(1 << _LOOKUP_BITS):
            least = np.uint64(j) << _U43
            kept = _stepped(steps, count, least)
            if kept == _stepped(steps, count, least + (_ONE << _U43) - _ONE):
                lookup[(count << _LOOKUP_BITS) + j] = kept
    return steps, lookup


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
def _binomial(key, n, p):
    # Draw how many of `n` molecules are kept with probability `p` each.
    rarer = 1.0 - p if p > 0.5 else p
    if rarer <= 0.0:
        found = np.int64(0)
    else:
        found = np.int64(_few_of(key, n, rarer)) if n * rarer < 10 else transformed_rejection(key, n, rarer, False)
    return n - found if p > 0.5 else found


@kernel
def _is_count(value):
    # The largest counts are those that float64 and float32 represent along with all smaller ones.
    count = np.int64(value)
    largest = _LARGEST if type(value)(_LARGEST_FLOAT32 + 1) == _LARGEST_FLOAT32 + 1 else _LARGEST_FLOAT32
    return (value == count) & (count >= 0) & (count <= largest)


@kernel
def _in_parts(key, count, steps):
    # A sum of independent binomial numbers with equal `p` is binomial.
    found = np.int64(0)
    for i in range(count // _N_TABLE):
        found += _stepped(steps, _N_TABLE, bits(key, i) >> _U11)
    return found + _stepped(steps, count % _N_TABLE, bits(key, count // _N_TABLE) >> _U11)


@kernel
def _thinned(row_key, column, count, p, steps):
    # Keep each of `count` molecules with probability `p`.
    if count <= _N_TABLE:
        return _stepped(steps, count, _word(row_key, column))
    key = stream(row_key, column)
    return _in_parts(key, count, steps) if count <= _N_PARTS else _binomial(key, count, p)


@kernel
def downsample(key, number, rows, indptr, columns, values, p, steps, lookup):
    """Keep each molecule counted in CSR rows with probability `p`.

    `steps` and `lookup` are those of `tables_of`. Return the position in `values` of the first value that is not a
    whole number from 0 to 2**53 (2**24 for float32), or -1. If there is one, other values may have been changed.
    """
    keys, places = _keys_of(key, number, rows), np.empty(len(values), np.uint32)
    for i in range(len(keys)):
        row_key, start, stop = keys[i], np.uint64(indptr[i]), np.uint64(indptr[i + 1])
        _look_up(row_key, columns, values, start, stop, places)
        for k in range(start, stop):
            kept = lookup[np.uint64(places[k])]
            if kept != _UNDECIDED:
                values[k] = kept
            elif _is_count(values[k]):
                values[k] = _thinned(row_key, columns[k], np.int64(values[k]), p, steps)
            else:
                return np.int64(k)
    return np.int64(-1)


@kernel
def downsample_dense(key, number, rows, dense, p, steps, lookup):
    """Downsample dense rows as `downsample` does; return the flat position in `dense` of the first bad value, or -1."""
    keys, n_vars = _keys_of(key, number, rows), dense.shape[1]
    nonzero, columns = room_for_nonzeros(n_vars)
    values, places = np.empty(n_vars, dense.dtype), np.empty(n_vars, np.uint32)
    for i in range(len(keys)):
        row_key, row = keys[i], dense[i]
        n = list_nonzeros(row, nonzero, columns)
        for k in range(n):
            values[k] = row[np.uint64(columns[k])]
        _look_up(row_key, columns, values, np.uint64(0), n, places)
        for k in range(n):
            column, kept = np.uint64(columns[k]), lookup[np.uint64(places[k])]
            if kept != _UNDECIDED:
                row[column] = kept
            elif _is_count(values[k]):
                row[column] = _thinned(row_key, columns[k], np.int64(values[k]), p, steps)
            else:
                return np.int64(i) * n_vars + columns[k]
    return np.int64(-1)


@kernel
def _look_up(row_key, columns, values, start, stop, places):
    # Write the places of values in the lookup table. The loop has no branches, so it is vectorized.
    for k in range(start, stop):
        count = np.int32(values[k])
        is_small = (values.dtype.type(count) == values[k]) & (np.uint32(count) <= _SMALL)
        place = np.uint32((np.uint32(count) << _LOOKUP_SHIFT) | (_head(row_key, columns[k]) >> _HEAD_SHIFT))
        places[k] = place if is_small else _OTHERS


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
def _take(key, counts, kept, n, n_more):
    # Draw `n_more` molecules without replacement from those that are not kept; or, if it is negative, discard as many
    # of those that are.
    ends, size = np.empty(n, np.int64), np.int64(0)
    for k in range(np.uint64(n)):
        size += counts[k] - kept[k] if n_more > 0 else kept[k]
        ends[k] = size
    taken, counter = np.zeros(size, np.bool_), 0
    n_left, step = abs(n_more), 1 if n_more > 0 else -1
    while n_left:
        place = min(np.int64(uniform(key, counter) * size), size - 1)
        counter += 1
        if not taken[np.uint64(place)]:
            taken[np.uint64(place)] = True
            kept[np.searchsorted(ends, place, side="right")] += step
            n_left -= 1


@kernel
def _sample_few(row_key, columns, counts, kept, total, target):
    # Keep `target` of the `total` molecules of a row.
    n_shares = min(max(np.int64(target * _N_SHARES / total + 0.5), 1), _N_SHARES - 1)
    others = _N_SHARES - n_shares
    # Steps of the counts 1, 2 and 3 for the first 32 bits of a word. The third powers of `n_shares` and `others` have
    # 30 bits, so nothing is rounded.
    low_1, low_2, low_3 = np.uint64(others << 22), np.uint64(others**2 << 12), np.uint64(others**3 << 2)
    middle_2, middle_3 = np.uint64((2**20 - n_shares**2) << 12), np.uint64((others**3 + 3 * others**2 * n_shares) << 2)
    high_3, never = np.uint64((2**30 - n_shares**3) << 2), _ONE << _U32
    # A loop without branches is vectorized. Its results for counts above 3 are replaced afterwards.
    for k in range(np.uint64(len(columns))):
        head, count = np.uint64(_head(row_key, columns[k])), counts[k]
        low = low_3 if count == 3 else low_2 if count == 2 else low_1 if count == 1 else never
        middle = middle_3 if count == 3 else middle_2 if count == 2 else never
        high = high_3 if count == 3 else never
        kept[k] = np.int64(head >= low) + np.int64(head >= middle) + np.int64(head >= high)
    single, n_single, n_drawn, n_kept = np.uint64(0), 0, 0, np.int64(0)
    for k in range(np.uint64(len(columns))):
        count = counts[k]
        if count <= 3:
            n_kept += kept[k]
            continue
        if count > _N_PARTS:
            kept[k] = _binomial(stream(row_key, columns[k]), count, n_shares / _N_SHARES)
        else:
            if count > n_single:
                single, n_single = _single_bits(stream(row_key, _SINGLE_BITS), n_drawn, n_shares), 64
                n_drawn += 1
            kept[k] = 0
            for _ in range(count):
                kept[k] += np.int64(single & _ONE)
                single >>= _ONE
            n_single -= count
        n_kept += kept[k]
    _take(stream(row_key, _DIFFERENCE), counts, kept, len(columns), target - n_kept)


@kernel
def _sample_many(row_key, columns, counts, kept, target):
    # Keep `target` molecules of a row of any size. Each round draws approximately the remaining difference by
    # thinning, and the next round corrects the error.
    n = len(columns)
    pool = np.empty(n, np.int64)
    steps = np.empty((_N_TABLE + 1, _N_TABLE), np.uint64)
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
            _write_steps(share, steps)
            key = stream(row_key, number)
            for k in range(n):
                drawn = step * _thinned(key, columns[k], pool[k], share, steps)
                kept[k] += drawn
                difference -= drawn
        number += _ONE


@kernel
def sample(key, number, rows, indptr, columns, values, target):
    """Keep `target` molecules of each CSR row, or all if there are fewer.

    Return the position in `values` of the first value that `downsample` refuses, or that makes the sum of its row
    larger than 2**53; -1 if there is none. If there is one, the rows before it have been changed already.
    """
    keys, longest = _keys_of(key, number, rows), 0
    for i in range(len(keys)):
        longest = max(longest, indptr[i + 1] - indptr[i])
    counts, kept = np.empty(longest, np.int64), np.empty(longest, np.int64)
    for i in range(len(keys)):
        start, stop = np.uint64(indptr[i]), np.uint64(indptr[i + 1])
        bad = _sample(keys[i], columns, values, start, stop, counts, kept, target)
        if bad >= 0:
            return bad
        if bad != _ALL_KEPT:
            for k in range(start, stop):
                values[k] = kept[k - start]
    return np.int64(-1)


@kernel
def sample_dense(key, number, rows, dense, target):
    """Sample dense rows as `sample` does; return the flat position in `dense` of the first bad value, or -1."""
    keys, n_vars = _keys_of(key, number, rows), dense.shape[1]
    nonzero, columns = room_for_nonzeros(n_vars)
    values, counts, kept = np.empty(n_vars, dense.dtype), np.empty(n_vars, np.int64), np.empty(n_vars, np.int64)
    for i in range(len(keys)):
        row = dense[i]
        n = list_nonzeros(row, nonzero, columns)
        for k in range(n):
            values[k] = row[np.uint64(columns[k])]
        bad = _sample(keys[i], columns, values, np.uint64(0), n, counts, kept, target)
        if bad >= 0:
            return np.int64(i) * n_vars + columns[bad]
        if bad != _ALL_KEPT:
            for k in range(n):
                row[np.uint64(columns[k])] = kept[k]
    return np.int64(-1)


@kernel
def _sample(row_key, columns, values, start, stop, counts, kept, target):
    # Write how many molecules of a row to keep, and return -1; or the position of the first bad value, or `_ALL_KEPT`.
    total, is_small = np.int64(0), True
    # A loop without branches is vectorized.
    for k in range(start, stop):
        count = np.int32(values[k])
        is_small &= (values.dtype.type(count) == values[k]) & (np.uint32(count) <= _MOST)
        counts[k - start] = count
        total += count
    if not is_small:
        total = np.int64(0)
        for k in range(start, stop):
            counts[k - start] = np.int64(values[k])
            total += counts[k - start]
            if not _is_count(values[k]) or total > _LARGEST:
                return np.int64(k)
    if total <= target:
        return np.int64(_ALL_KEPT)
    if total <= _MOST_IN_ROW:
        _sample_few(row_key, columns[start:stop], counts, kept, total, target)
    else:
        _sample_many(row_key, columns[start:stop], counts, kept, target)
    return np.int64(-1)


@kernel
def mask(key, number, rows, indptr, columns, values, p):
    """Set each value of CSR rows to 0 with probability `p`."""
    keys, step, nothing = _keys_of(key, number, rows), np.uint64(p * _ONE_AS_WORD), values.dtype.type(0)
    for i in range(len(keys)):
        row_key = keys[i]
        for k in range(np.uint64(indptr[i]), np.uint64(indptr[i + 1])):
            value = values[k]
            values[k] = nothing if (bits(row_key, columns[k]) >> _U11) < step else value


@kernel
def mask_dense(key, number, rows, dense, p):
    """Set each nonzero of dense rows to 0 with probability `p`, as `mask` does."""
    keys, step, nothing = _keys_of(key, number, rows), np.uint64(p * _ONE_AS_WORD), dense.dtype.type(0)
    nonzero, columns = room_for_nonzeros(dense.shape[1])
    values = np.empty(dense.shape[1], dense.dtype)
    for i in range(len(keys)):
        row_key, row = keys[i], dense[i]
        n = list_nonzeros(row, nonzero, columns)
        # The loop in the middle is vectorized.
        for k in range(n):
            values[k] = row[np.uint64(columns[k])]
        for k in range(n):
            value = values[k]
            values[k] = nothing if (bits(row_key, columns[k]) >> _U11) < step else value
        for k in range(n):
            row[np.uint64(columns[k])] = values[k]
