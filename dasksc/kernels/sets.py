"""Sets of cells: grouping of rows by code, and keyed draws from a group.

Every draw takes consecutive cells from a random order of a group's cells. A key determines this order. To form it, the
cells are rotated by a random offset and cut into full blocks and a short one. The full blocks are permuted, and the
short block is inserted at a random place. Since the offset is uniform, every cell is equally likely at any place of the
order, for any sizes. Cells that are neighbors in storage are read together.
"""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.permute import N_ROUNDS, below, permuted, shuffle, stream


@kernel
def combine_codes(codes, lookup, radix, out):
    """Append a column to mixed-radix codes: ``out = out * radix + codes``, or -1 if either code is negative."""
    n_lookup = lookup.shape[0]
    for i in range(out.shape[0]):
        code = np.int64(codes[lookup[i]] if n_lookup > 0 else codes[i])
        before = np.int64(out[i])
        out[i] = -1 if code < 0 or before < 0 else before * radix + code


@kernel
def count_groups(codes, counts, firsts):
    """Count the rows of each code; return the number of rows without code and the number of runs of equal codes."""
    # `firsts` receives the first row of the last run of each code.
    n_missing = 0
    n_runs = 0
    last = np.int64(-1)
    for i in range(codes.shape[0]):
        code = np.int64(codes[i])
        if code < 0:
            n_missing += 1
        else:
            counts[code] += 1
            if code != last:
                n_runs += 1
                firsts[code] = i
        last = code
    return n_missing, n_runs


@kernel
def list_members(codes, cursors, out):
    """List the rows of each code in ascending order, from its cursor on; the cursors advance past the last rows."""
    for i in range(codes.shape[0]):
        code = np.int64(codes[i])
        if code >= 0:
            out[cursors[code]] = i
            cursors[code] += 1


@kernel
def set_keys(key, numbers, out):
    """Write the key derived from `key` and each number into `out`."""
    for i in range(numbers.shape[0]):
        out[i] = stream(key, numbers[i])


@kernel
def fill_from_group(key, n, block_size, first, table, out):
    """Write entries ``[first, first + len(out))`` of a keyed order of ``range(n)``, which repeats periodically."""
    # Up to len(table) blocks are permuted by Fisher-Yates in `table`, more blocks by a Feistel network.
    size = out.shape[0]
    block = min(block_size, n)
    n_full = n // block
    short = n - n_full * block
    turn = below(key, 0, n)
    short_at = below(key, 1, n_full + 1) * block
    own = stream(key, 2)
    is_table = n_full <= table.shape[0]
    half_bits = 1
    round_keys = np.empty(N_ROUNDS, dtype=np.uint64)
    if is_table:
        for i in range(n_full):
            table[i] = i
        begin = first % n
        # Only the used part of the order is computed; all of it if the range wraps around the end.
        last = n if begin + size > n else begin + size
        for i in range(min(n_full, -(-last // block))):
            j = i + below(own, i, n_full - i)
            table[i], table[j] = table[j], table[i]
    else:
        while np.int64(1) << (2 * half_bits) < n_full:
            half_bits += 1
        for i in range(N_ROUNDS):
            round_keys[i] = stream(own, i)
    last_place = np.int64(-1)
    start = np.int64(0)
    for i in range(size):
        j = (first + i) % n
        if j >= short_at and j < short_at + short:
            member = n_full * block + j - short_at
        else:
            if j >= short_at:
                j -= short
            place = j // block
            if place != last_place:
                start = table[place] if is_table else permuted(place, n_full, half_bits, round_keys)
                start *= block
                last_place = place
            member = start + j - place * block
        out[i] = (member + turn) % n


@kernel
def fill_sets(groups, keys, firsts, starts, counts, block_size, set_size, table, out):
    """Write the members of each set, in random order, from the order of its group that its key gives."""
    drawn = np.empty(set_size, dtype=np.int64)
    order = np.empty(set_size, dtype=np.int64)
    for s in range(groups.shape[0]):
        group = groups[s]
        fill_from_group(keys[s], counts[group], block_size, firsts[s], table, drawn)
        shuffle(stream(stream(keys[s], 3), firsts[s]), order)
        for i in range(set_size):
            out[s * set_size + order[i]] = starts[group] + drawn[i]


@kernel
def fill_controls(keys, pools, starts, counts, block_size, n_controls, set_size, table, out):
    """Draw `n_controls` control cells for each row of each set from the pool of the row."""
    # Rows of a set that share a pool draw from the same order of the pool. A control is repeated in a set only if the
    # pool is smaller than the number of draws from it.
    drawn = np.empty(set_size * n_controls, dtype=np.int64)
    order = np.empty(set_size * n_controls, dtype=np.int64)
    is_done = np.empty(set_size, dtype=np.bool_)
    for s in range(keys.shape[0]):
        base = s * set_size
        is_done[:] = False
        for i in range(set_size):
            if is_done[i]:
                continue
            pool = pools[base + i]
            n_rows = 0
            for j in range(i, set_size):
                n_rows += pools[base + j] == pool
            n_drawn = n_rows * n_controls
            key = stream(keys[s], pool)
            fill_from_group(key, counts[pool], block_size, 0, table, drawn[:n_drawn])
            shuffle(stream(key, 3), order[:n_drawn])
            taken = 0
            for j in range(i, set_size):
                if pools[base + j] != pool:
                    continue
                is_done[j] = True
                for c in range(n_controls):
                    out[(base + j) * n_controls + c] = starts[pool] + drawn[order[taken]]
                    taken += 1
