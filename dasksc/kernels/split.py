"""Assignment of rows, and of groups of rows, to the parts of a split."""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.permute import below


@kernel
def count_pairs(rows, columns, out):
    """Add the count of each pair to ``out[row, column]``; `rows` and `columns` have shape (n,), `out` is 2-D."""
    for i in range(rows.shape[0]):
        out[rows[i], columns[i]] += 1


@kernel
def put_by_code(rows, codes, places, out):
    """Write each row to the next free place of its code in `out`; code -1 stands for the last one."""
    for i in range(rows.shape[0]):
        c = codes[i] if codes[i] >= 0 else places.shape[0] - 1
        out[places[c]] = rows[i]
        places[c] += 1


@kernel
def deal_by_quota(codes, quotas, key, out):
    """Draw the part of each row; every assignment that fills `quotas`, (n_classes, n_parts), is equally likely."""
    # The probability of a part is its remaining quota divided by the number of remaining rows of the class (selection
    # sampling; Knuth, The Art of Computer Programming 2, 3.4.2, algorithm S).
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
    """Assign units (rows that stay together) to parts one by one; return Pearson's chi-square of the parts."""
    # A unit goes to a part that has less than its share of the total. Among several such parts, it goes to the one
    # whose contribution to the chi-square grows least. Once the number of remaining units is at most the number of
    # empty parts, units go to empty parts only. `counts` has shape (n_units, n_classes).
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
