"""CSR rows from triples of row, column and value."""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel


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
