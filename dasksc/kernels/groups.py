"""Rows by group: sets of cells, stratified batches, and the parts of a split.

Sets of cells are keyed draws from a group. Every draw takes consecutive cells from a random order of the group's cells.
A key determines this order. To form it, the cells are rotated by a random offset and cut into full blocks and a short
one. The full blocks are permuted, and the short block is inserted at a random place. Since the offset is uniform, every
cell is equally likely at any place of the order, for any sizes. Cells that are neighbors in storage are read together.

Stratified batches each have their share of every class. An epoch has `n_units` batches of equal size, with
``quotas[c]`` rows of class c in total. A batch has ``quotas[c] // n_units`` rows of class c, and ``quotas[c] %
n_units`` of the batches have one more. Systematic sampling [1]_, computed in integer arithmetic, determines these
batches. On a circle of `n_units` places, class c occupies an arc of ``quotas[c] % n_units`` places, which begins where
the arc of the preceding class ends. Batch u has one more row of each class whose arc covers the place ``(stride * u +
shift) % n_units``. Since `stride` and `n_units` are coprime, every batch has a different place. All batches are
therefore of equal size, and every class has exactly its quota.

The rows of a class are drawn in passes. A pass draws each row of the class once: it begins at a random row and is cut
into runs of neighbors, which are in random order.

.. [1] Madow: On the theory of systematic sampling, II, Annals of Mathematical Statistics 20 (1949).
"""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.permute import N_ROUNDS, below, bits, permuted, shuffle, stream

# Up to this number of runs, the order of a pass is a table, because a Feistel network mixes a small domain poorly.
_TABLE_RUNS = 256


@kernel
def combine_codes(codes, radix, out):
    """Append a column to mixed-radix codes: ``out = out * radix + codes``, or -1 if either code is negative."""
    for i in range(out.shape[0]):
        code = np.int64(codes[i])
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


@kernel
def floor_sum(n, m, a, b):
    """Return the sum of ``(a * i + b) // m`` over i in [0, n), for ``0 <= a < m`` and any `b`, in O(log m)."""
    total = n * (b // m)
    b = b % m
    while True:
        if a >= m:
            total += (n - 1) * n // 2 * (a // m)
            a = a % m
        if b >= m:
            total += n * (b // m)
            b = b % m
        end = a * n + b
        if end < m:
            return total
        n = end // m
        b = end % m
        m, a = a, m


@kernel
def more_before(unit, n_units, first, length, stride, shift):
    """Return the number of batches before `unit` whose place lies in the arc of `length` places from `first` on."""
    if length == 0:
        return np.int64(0)
    start = shift - first
    return floor_sum(unit, n_units, stride, start) - floor_sum(unit, n_units, stride, start - length)


@kernel
def drawn_of_class(first, n_rows, run_rows, key, out):
    """Write draws ``[first, first + len(out))`` from a class of `n_rows` rows, as row indices in [0, n_rows)."""
    table = np.empty(_TABLE_RUNS, dtype=np.int64)
    round_keys = np.empty(N_ROUNDS, dtype=np.uint64)
    n_runs = n_rows // run_rows
    half_bits = 1
    while 1 << (2 * half_bits) < n_runs:
        half_bits += 1
    known = np.int64(-1)
    turn = np.int64(0)
    for i in range(out.shape[0]):
        number = (first + i) // n_rows
        place = (first + i) % n_rows
        if number != known:
            known = number
            own = stream(key, number)
            turn = below(own, 0, n_rows)
            if n_runs <= _TABLE_RUNS:
                shuffle(stream(own, 1), table[:n_runs])
            else:
                for k in range(N_ROUNDS):
                    round_keys[k] = bits(own, k + 1)
        run = place // run_rows
        if run < n_runs:
            run_at = table[run] if n_runs <= _TABLE_RUNS else permuted(run, n_runs, half_bits, round_keys)
            place = run_at * run_rows + place % run_rows
        out[i] = (place + turn) % n_rows


@kernel
def stratified_rows(groups, group_units, n_units, quotas, starts, members, run_rows, stride, shift, keys, out):
    """Write the rows of all batches of some groups of `group_units` neighboring batches."""
    # The draws of each class are distributed at random among the batches of a group. `out` has shape (n_groups,
    # group_units, batch_rows); entries of batches beyond the last are not written.
    batch_rows = out.shape[2]
    order = np.empty(batch_rows, dtype=np.int64)
    filled = np.empty(group_units, dtype=np.int64)
    for g in range(groups.shape[0]):
        begin = groups[g] * group_units
        n_here = min(group_units, n_units - begin)
        group_key = stream(keys[1], groups[g])
        filled[:] = 0
        ahead = np.int64(0)  # total length of the arcs of the preceding classes
        for c in range(quotas.shape[0]):
            every = quotas[c] // n_units
            length = quotas[c] % n_units
            first_place = ahead % n_units
            ahead += length
            if quotas[c] == 0:
                continue
            start = begin * every + more_before(begin, n_units, first_place, length, stride, shift)
            stop = begin + n_here
            end = stop * every + more_before(stop, n_units, first_place, length, stride, shift)
            if start == end:
                continue
            drawn = np.empty(end - start, dtype=np.int64)
            drawn_of_class(start, starts[c + 1] - starts[c], run_rows, stream(keys[0], c), drawn)
            dealt = np.empty(end - start, dtype=np.int64)
            shuffle(stream(group_key, c), dealt)
            taken = 0
            for u in range(n_here):
                place = (stride * (begin + u) + shift) % n_units
                n_of_class = every + ((place - first_place) % n_units < length)
                for _ in range(n_of_class):
                    out[g, u, filled[u]] = members[starts[c] + drawn[dealt[taken]]]
                    filled[u] += 1
                    taken += 1
        for u in range(n_here):
            shuffle(stream(keys[2], begin + u), order)
            batch = out[g, u].copy()
            for i in range(batch_rows):
                out[g, u, i] = batch[order[i]]


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
        c = np.int64(codes[i])
        if c < 0:  # the row has no class and keeps its entry in `out`
            continue
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
