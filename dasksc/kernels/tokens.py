"""Tokens from the nonzeros of CSR rows: ranked, binned, sampled and masked.

Common parameters
-----------------
indptr, columns, values
    Batch of CSR rows, shapes (n_rows + 1,), (nnz,) and (nnz,) float32.
ids
    Token of each column, shape (n_vars,), int64; -1 for a column without a token.
keys
    Key of all random draws of each row, shape (n_rows,), uint64.
first
    Column of the first token of a row in `out_ids` and `out_values`, which have shape (n_rows, length) and
    the types int64 and float32.
"""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.permute import mix, stream, uniform

_ALL = np.uint32(0xFFFFFFFF)
# Streams under the key of a row: for the choice of sampled genes, the choice of masked genes, the fate of a masked
# gene, the replacement of a masked gene, and the bin of a value at which several bin edges coincide.
_SAMPLED, _MASKED, _FATE, _REPLACEMENT, TIED = range(5)

HIDDEN, REPLACED, SHOWN = 1, 2, 3
"""Fates of a token to predict: hidden behind the mask, replaced by a random one, or shown unchanged."""


@kernel
def row_keys(key, rows, out):
    """Write a key for each row of a batch into `out`; it depends on all rows, their order, and its own position."""
    batch = np.uint64(key)
    for i in range(len(rows)):
        batch = mix(batch ^ mix(np.uint64(rows[i])))
    for i in range(len(rows)):
        out[i] = stream(batch, i)


@kernel
def count_tokens(indptr, columns, values, ids, counts):
    """Count the tokens of each row into `counts`, int64; return the first row with a value not in [0, inf), or -1."""
    for i in range(len(counts)):
        count = 0
        for k in range(indptr[i], indptr[i + 1]):
            if not 0 <= values[k] < np.inf:
                return i
            count += (values[k] != 0) & (ids[columns[k]] >= 0)
        counts[i] = count
    return -1


@kernel
def _take_row(start, stop, columns, values, ids, row_ids, row_values):
    # Write the tokens of one row in the order of their columns; return their number.
    n = 0
    for k in range(start, stop):
        token = ids[columns[k]]
        if values[k] != 0 and token >= 0:
            row_ids[n] = token
            row_values[n] = values[k]
            n += 1
    return n


@kernel
def _sort_descending(order, spare, sort_keys, n):
    # Stable radix sort, beginning with the least significant byte. A byte that is equal in all keys needs no pass;
    # small counts, stored as float32, share their lowest two or three bytes.
    for i in range(n):
        order[i] = i
        sort_keys[i] ^= _ALL  # values are positive, so their bits are in their order
    counts = np.empty(256, np.int64)
    for byte in range(4):
        shift = np.uint32(8 * byte)
        counts[:] = 0
        for i in range(n):
            counts[(sort_keys[i] >> shift) & np.uint32(255)] += 1
        if n == 0 or counts[(sort_keys[0] >> shift) & np.uint32(255)] == n:
            continue
        total = 0
        for digit in range(256):
            count = counts[digit]
            counts[digit] = total
            total += count
        for i in range(n):
            digit = (sort_keys[order[i]] >> shift) & np.uint32(255)
            spare[counts[digit]] = order[i]
            counts[digit] += 1
        for i in range(n):
            order[i] = spare[i]


@kernel
def rank_tokens(indptr, columns, values, ids, counts, first, out_ids, out_values):
    """Write the tokens of each row in descending order of value, ties in the order of columns, as many as fit."""
    longest = max(1, counts.max()) if len(counts) else 1
    row_ids = np.empty(longest, np.int64)
    row_values = np.empty(longest, np.float32)
    sort_keys = np.empty(longest, np.uint32)
    order = np.empty(longest, np.int64)
    spare = np.empty(longest, np.int64)
    for i in range(len(counts)):
        n = _take_row(indptr[i], indptr[i + 1], columns, values, ids, row_ids, row_values)
        words = row_values.view(np.uint32)
        for k in range(n):
            sort_keys[k] = words[k]
        _sort_descending(order, spare, sort_keys, n)
        for k in range(min(n, out_ids.shape[1] - first)):
            out_ids[i, first + k] = row_ids[order[k]]
            out_values[i, first + k] = row_values[order[k]]


@kernel
def choose(key, n, n_chosen, out):
    """Write a random subset of ``range(n)`` of size `n_chosen`, ascending; every subset is equally likely."""
    # Selection sampling (Knuth, The Art of Computer Programming 2, algorithm 3.4.2 S).
    taken = 0
    for i in range(n):
        if uniform(key, i) * (n - i) < n_chosen - taken:
            out[taken] = i
            taken += 1
            if taken == n_chosen:
                return


@kernel
def bin_tokens(indptr, columns, values, ids, counts, keys, n_bins, first, out_ids, out_values):
    """Write the tokens of each row in the order of their columns, with the bins of their values."""
    # The edges of a row are n_bins - 1 quantiles of its values, equal to numpy.quantile bit for bit. Bin 0 is not used
    # for tokens. The other bins and the edges are numbered from 1, and bin i begins at edge i, so the last bin holds
    # only the largest value. If several edges are equal, a value on them goes at random to one of the bins that begin
    # there. If there are more tokens than fit, a random sample is written.
    longest = max(1, counts.max()) if len(counts) else 1
    row_ids = np.empty(longest, np.int64)
    row_values = np.empty(longest, np.float32)
    chosen = np.empty(longest, np.int64)
    edges = np.empty(n_bins - 1, np.float64)
    step = 1.0 / max(1, n_bins - 2)
    for i in range(len(counts)):
        n = _take_row(indptr[i], indptr[i + 1], columns, values, ids, row_ids, row_values)
        if n == 0:
            continue
        ascending = np.sort(row_values[:n])
        for j in range(len(edges)):
            place = (1.0 if 0 < j == n_bins - 2 else j * step) * (n - 1)
            below = int(place)
            above = min(below + 1, n - 1)
            low, high = np.float64(ascending[below]), np.float64(ascending[above])
            span = np.float64(ascending[above] - ascending[below])
            share = place - below
            edges[j] = high - span * (1.0 - share) if share >= 0.5 else low + span * share
        tied = stream(keys[i], TIED)
        n_kept = min(n, out_ids.shape[1] - first)
        choose(stream(keys[i], _SAMPLED), n, n_kept, chosen)
        for k in range(n_kept):
            out_ids[i, first + k] = row_ids[chosen[k]]
            value = np.float64(row_values[chosen[k]])
            highest = np.searchsorted(edges, value, side="right")
            n_equal = highest - np.searchsorted(edges, value, side="left")
            out_values[i, first + k] = highest - int(uniform(tied, chosen[k]) * n_equal)


@kernel
def sample_tokens(counts, keys, out):
    """Write which tokens of each row `bin_tokens` keeps."""
    for i in range(len(counts)):
        choose(stream(keys[i], _SAMPLED), counts[i], min(counts[i], out.shape[1]), out[i])


@kernel
def mask_tokens(lengths, keys, ratio, replaced, kept, first, out, draws):
    """Choose a fraction `ratio` of the tokens of each row, but at least one, and draw the fate of each chosen token."""
    # `out` holds zeros on entry. A replaced token gets a random number in [0, 1) in `draws`.
    chosen = np.empty(out.shape[1], np.int64)
    for i in range(len(lengths)):
        n = lengths[i]
        n_masked = min(n, max(1, int(ratio * n + 0.5)))
        choose(stream(keys[i], _MASKED), n, n_masked, chosen)
        for k in range(n_masked):
            place = chosen[k]
            fate = uniform(stream(keys[i], _FATE), place)
            if fate < replaced:
                out[i, first + place] = REPLACED
                draws[i, first + place] = uniform(stream(keys[i], _REPLACEMENT), place)
            else:
                out[i, first + place] = SHOWN if fate < replaced + kept else HIDDEN
