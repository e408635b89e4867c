"""Draw fewer counts of each row, and leave out values: what augments a batch.

Everything random in a row is keyed by the row and the number of a column, so that rows are the same dense and CSR.

Counts are drawn by binomial thinning. Few of them take a comparison with each step of a distribution function, or
several such comparisons; more, the transformed rejection of Hörmann [1]_ or, where few are expected, a sequential
search. A number of counts that is fixed is reached from there: given its size, a thinned sample is a uniform one
without replacement, and the difference is drawn without replacement, too, from what was or was not taken. The result
is multivariate hypergeometric.

.. [1] Hörmann: The generation of binomial random variates, Journal of Statistical Computation and Simulation 46
   (1993), algorithm BTRS.

Parameters that recur
---------------------
key, number
    What everything random is keyed by, uint64, and which batch it is.
rows
    Row numbers of the batch, shape (n_rows,), int64.
indptr, columns, values
    A batch of CSR rows: shapes (n_rows + 1,), (nnz,) and (nnz,). Or dense ones, one after the other in `values`, with
    two arrays without elements. Values are changed in place: of CSR rows zeros stay stored, so that nothing else is.
n_vars
    Number of columns.
"""

from __future__ import annotations

import math

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.csr import _BITS_AT_ONCE, _list_bits
from dasksc.kernels.permute import bits, stream, uniform
from dasksc.kernels.tokens import row_keys

__all__ = ["N_TABLE", "N_TABLES", "binomial", "binomial_table", "downsample", "mask"]

N_TABLE = 8
"""Counts that are drawn by one comparison with a table, at most."""

N_TABLES = 64
"""Counts that are drawn by the table in parts, at most."""

_N_STEPS = np.uint64(N_TABLE)
_U11 = np.uint64(11)
_ONE_AS_WORD = 9007199254740992.0  # 2**53
_LARGEST = 2**53
_NEVER = np.uint64(2**53)
# Streams under the key of a row; other numbers are those of columns.
_DIFFERENCE = np.uint64(2**64 - 1)
# Of each whole number below 10, by how much Stirling's formula for its factorial is too low; see `_stirling`.
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
def binomial_table(p, table):
    """Write distribution functions of binomials into `table`, shape ((N_TABLE + 1) * N_TABLE,), uint64.

    Of n counts, each of which is kept with probability `p`, at most k are kept if 53 random bits are below
    ``table[n * N_TABLE + k]``; for k = n and more it is above all of them.
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
def binomial(key, n, p):
    """Return how many of `n` are kept if each is with probability `p`, drawn by a uint64 `key`."""
    if p > 0.5:
        return n - binomial_below(key, n, 1.0 - p)
    return binomial_below(key, n, p)


@kernel
def binomial_below(key, n, p):
    """Return what `binomial` does, for `p` of at most 0.5."""
    if n == 0 or p <= 0.0:
        return np.int64(0)
    if n * p < 10:
        return np.int64(_few_of(key, n, p))
    return _many_of(key, n, p)


@kernel
def _is_count(value):
    count = np.int64(value)
    return (value == count) & (count >= 0) & (count <= _LARGEST)


@kernel
def _list_nonzeros(values, first, n, bitmap, listed):
    # Write which of `n` values, from `first` on, are not zero into `listed`; return how many there are.
    n_whole = n // 64
    for i in range(n_whole):
        at = first + np.uint64(64 * i)
        word = np.uint64(0)
        for k in range(64):
            word |= np.uint64(values[at + np.uint64(k)] != 0) << np.uint64(k)
        bitmap[i] = word
    if n % 64:
        word = np.uint64(0)
        for k in range(n_whole * 64, n):
            word |= np.uint64(values[first + np.uint64(k)] != 0) << np.uint64(k % 64)
        bitmap[n_whole] = word
    return _list_bits(bitmap, listed)


@kernel
def _sample(key, n, n_drawn, drawn):
    # Write `n_drawn` different numbers below `n` into `drawn`, ascending; every subset is as likely as any other.
    counter = 0
    n_found = 0
    while n_found < n_drawn:
        for i in range(n_found, n_drawn):
            drawn[i] = min(np.int64(uniform(key, counter) * n), n - 1)
            counter += 1
        drawn[:n_drawn] = np.sort(drawn[:n_drawn])
        n_found = 1
        for i in range(1, n_drawn):
            if drawn[i] != drawn[n_found - 1]:
                drawn[n_found] = drawn[i]
                n_found += 1


@kernel
def _reach(key, counts, kept, n, total, target):
    # Take a sample from what is kept, or from what is not, so that `target` of all counts, `total`, are kept.
    n_kept = np.int64(0)
    for k in range(n):
        n_kept += kept[k]
    n_drawn = abs(n_kept - target)
    if n_drawn == 0:
        return
    adds = n_kept < target
    drawn = np.empty(n_drawn, np.int64)
    _sample(stream(key, _DIFFERENCE), total - n_kept if adds else n_kept, n_drawn, drawn)
    passed = np.int64(0)
    i = 0
    for k in range(n):
        passed += counts[k] - kept[k] if adds else kept[k]
        while i < n_drawn and drawn[i] < passed:
            kept[k] += 1 if adds else -1
            # What was passed is by the numbers before.
            i += 1
        if i == n_drawn:
            return


@kernel
def _stepped(table, count, word):
    # Without a branch in it, all steps are compared at once.
    steps = np.uint64(count) * np.uint64(N_TABLE)
    found = np.int64(0)
    for j in range(N_TABLE):
        found += word >= table[steps + np.uint64(j)]
    return found


@kernel
def _by_parts(key, count, table):
    # A binomial is the sum of those of its parts.
    found = np.int64(0)
    for i in range(count // N_TABLE):
        found += _stepped(table, N_TABLE, bits(key, i) >> _U11)
    return found + _stepped(table, count % N_TABLE, bits(key, count // N_TABLE) >> _U11)


@kernel
def _longest(indptr):
    longest = 1
    for i in range(len(indptr) - 1):
        longest = max(longest, indptr[i + 1] - indptr[i])
    return longest


@kernel
def downsample(key, number, rows, indptr, columns, values, n_vars, p, target):
    """Keep each count of rows with probability `p`, or, if `p` is 0, `target` of the counts of each row.

    Return where in `values` the first is that is no whole number from 0 to 2**53, or -1. Then rows before it are done.
    """
    # Passes over one row, most without a branch, which are done on several values at a time. All are here since a call
    # costs as much as such a pass.
    is_dense = len(indptr) == 0
    keys = np.empty(len(rows), np.uint64)
    row_keys(stream(key, number), rows, keys)
    table = np.empty((N_TABLE + 1) * N_TABLE, np.uint64)
    if p > 0:
        binomial_table(p, table)
    longest = np.int64(n_vars if is_dense else _longest(indptr))
    row_columns = np.empty(longest + _BITS_AT_ONCE, np.int32)
    row_values = np.empty(longest, values.dtype)
    counts, more, kept = np.empty(longest, np.int64), np.empty(longest, np.int64), np.empty(longest, np.int64)
    words, bitmap = np.empty(longest, np.uint64), np.zeros((longest + 63) // 64, np.uint64)
    listed = np.empty(longest + _BITS_AT_ONCE, np.int32)
    for i in range(len(rows)):
        start = np.int64(i * n_vars if is_dense else indptr[i])
        first = np.uint64(start)  # signed, it might count from the end
        if is_dense:
            n = np.int64(_list_nonzeros(values, first, n_vars, bitmap, row_columns))
            for k in range(n):
                row_values[k] = values[first + np.uint64(row_columns[k])]
        else:
            n = np.int64(indptr[i + 1]) - start
            for k in range(n):
                row_columns[k] = columns[first + np.uint64(k)]
                row_values[k] = values[first + np.uint64(k)]

        fine = True
        total = np.int64(0)
        for k in range(n):
            value = row_values[k]
            count = np.int64(value)
            counts[k] = count
            fine &= (value == count) & (count >= 0) & (count <= _LARGEST)
            total += count
        if not fine:
            for k in range(n):
                if not _is_count(row_values[k]):
                    return start + row_columns[k] if is_dense else start + k

        share = p
        if p == 0:
            share = min(target / max(total, 1), 1.0)
            if share < 1:
                binomial_table(share, table)
        if share == 1:
            continue
        row_key = keys[i]
        for k in range(n):
            words[k] = bits(row_key, row_columns[k]) >> _U11
        one, two, two_more = table[N_TABLE], table[2 * N_TABLE], table[2 * N_TABLE + 1]
        three, three_more, three_most = table[3 * N_TABLE], table[3 * N_TABLE + 1], table[3 * N_TABLE + 2]
        for k in range(n):
            count, word = counts[k], words[k]
            low = three if count == 3 else two if count == 2 else one if count == 1 else _NEVER
            middle = three_more if count == 3 else two_more if count == 2 else _NEVER
            high = three_most if count == 3 else _NEVER
            kept[k] = np.int64(word >= low) + np.int64(word >= middle) + np.int64(word >= high)
            more[k] = count >> 2
        for i_listed in range(_list_nonzeros(more, np.uint64(0), n, bitmap, listed)):
            at = np.uint64(listed[i_listed])
            count = counts[at]
            if count <= N_TABLE:
                kept[at] = _stepped(table, count, words[at])
            elif count <= N_TABLES:
                kept[at] = _by_parts(stream(row_key, row_columns[at]), count, table)
            else:
                kept[at] = binomial(stream(row_key, row_columns[at]), count, share)
        if p == 0:
            _reach(row_key, counts, kept, n, total, target)

        if is_dense:
            for k in range(n):
                values[first + np.uint64(row_columns[k])] = kept[k]
        else:
            for k in range(n):
                values[first + np.uint64(k)] = kept[k]
    return -1


@kernel
def mask(key, number, rows, indptr, columns, values, n_vars, p):
    """Write 0 in place of values of rows, each with probability `p`."""
    keys = np.empty(len(rows), np.uint64)
    row_keys(stream(key, number), rows, keys)
    step = np.uint64(p * _ONE_AS_WORD)
    nothing = values.dtype.type(0)
    for i in range(len(rows)):
        row_key = keys[i]
        if len(indptr) == 0:
            first = np.uint64(i * n_vars)
            for k in range(n_vars):
                value = values[first + np.uint64(k)]
                values[first + np.uint64(k)] = nothing if (bits(row_key, k) >> _U11) < step else value
        else:
            for k in range(np.uint64(indptr[i]), np.uint64(indptr[i + 1])):
                value = values[k]
                values[k] = nothing if (bits(row_key, columns[k]) >> _U11) < step else value
