"""Rows of stratified batches: each batch has its share of every class.

An epoch has `n_units` batches of equal size, with ``quotas[c]`` rows of class c in total. A batch has ``quotas[c] //
n_units`` rows of class c, and ``quotas[c] % n_units`` of the batches have one more. Systematic sampling [1]_, computed
in integer arithmetic, determines these batches. On a circle of `n_units` places, class c occupies an arc of ``quotas[c]
% n_units`` places, which begins where the arc of the preceding class ends. Batch u has one more row of each class whose
arc covers the place ``(stride * u + shift) % n_units``. Since `stride` and `n_units` are coprime, every batch has a
different place. All batches are therefore of equal size, and every class has exactly its quota.

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
