"""Dealing rows, and groups of rows, to the parts of a split."""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.permute import below

__all__ = ["assign_units", "count_pairs", "deal_by_quota", "put_by_code"]


@kernel
def count_pairs(rows, columns, out):
    """Add to ``out[row, column]`` how often each pair comes; `rows`, `columns` shape (n,), `out` 2-D."""
    for i in range(rows.shape[0]):
        out[rows[i], columns[i]] += 1


@kernel
def put_by_code(rows, codes, places, out):
    """Write each of `rows` to `out` at the next place of its code, for which that place is counted up.

    Parameters
    ----------
    rows, codes
        Shape (n,); -1 is the last code.
    places
        Where the next row of each code goes, shape (n_codes,), int64.
    out
        Int64.
    """
    for i in range(rows.shape[0]):
        c = codes[i] if codes[i] >= 0 else places.shape[0] - 1
        out[places[c]] = rows[i]
        places[c] += 1


@kernel
def deal_by_quota(codes, quotas, key, out):
    """Write to `out` the part of each row, drawn so that every way of filling the quotas is as likely as another.

    One pass, without a permutation: a row goes to each part with the probability that the part's quota has among
    what is left of its class (selection sampling; Knuth, The Art of Computer Programming 2, 3.4.2, algorithm S).

    Parameters
    ----------
    codes
        The class of each row, shape (n,).
    quotas
        Rows of each class for each part, shape (n_classes, n_parts), int64; their sums are the sizes of the classes.
        Used up.
    key
        uint64.
    out
        Shape (n,).
    """
    left = quotas.sum(axis=1)
    for i in range(codes.shape[0]):
        c = codes[i]
        draw = below(key, i, left[c])
        part = 0
        while draw >= quotas[c, part]:
            draw -= quotas[c, part]
            part += 1
        quotas[c, part] -= 1
        left[c] -= 1
        out[i] = part


@kernel
def assign_units(counts, order, shares, out):
    """Write to `out` the part of each unit, one after the other; return how far the parts are from their shares.

    A unit goes to a part that has less than its share of the total. Of several to that where the squared distance
    from the shares of the classes, each over what is expected, grows least. Parts that are empty come first as soon as
    there are no more units than these.

    Parameters
    ----------
    counts
        What each unit has of each class, shape (n_units, n_classes), int64.
    order
        The units in the order in which they are assigned, shape (n,), int64.
    shares
        Of each part, shape (n_parts,), float64, summing to 1.
    out
        Shape (n_units,).

    Returns
    -------
    float
        The sum of squared distances over what is expected, over parts and classes (Pearson's chi-square).
    """
    n_classes, n_parts = counts.shape[1], shares.shape[0]
    expected = np.zeros((n_parts, n_classes))
    for u in order:
        for c in range(n_classes):
            for k in range(n_parts):
                expected[k, c] += shares[k] * counts[u, c]
    total = expected.sum()
    have = np.zeros((n_parts, n_classes))
    filled = np.zeros(n_parts)
    n_empty = n_parts
    for position in range(order.shape[0]):
        u = order[position]
        only_empty = order.shape[0] - position <= n_empty
        best, least, best_is_short = 0, np.inf, False
        for k in range(n_parts):
            if only_empty and filled[k] > 0:
                continue
            is_short = filled[k] < shares[k] * total
            grows = 0.0
            for c in range(n_classes):
                if counts[u, c] > 0:
                    grows += counts[u, c] * ((2 * have[k, c] + counts[u, c]) / expected[k, c] - 2)
            if (is_short and not best_is_short) or (is_short == best_is_short and grows < least):
                best, least, best_is_short = k, grows, is_short
        n_empty -= filled[best] == 0
        for c in range(n_classes):
            have[best, c] += counts[u, c]
            filled[best] += counts[u, c]
        out[u] = best
    distance = 0.0
    for k in range(n_parts):
        for c in range(n_classes):
            if expected[k, c] > 0:
                distance += (have[k, c] - expected[k, c]) ** 2 / expected[k, c]
    return distance
