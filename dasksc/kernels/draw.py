"""Weighted and balanced draws, a segment of rows at a time.

A weight comes from one of three places, told apart by what is empty: `values` empty, every row
weighs 1; `table` empty, `values` are the weights; otherwise `values` are integer codes and `table`
holds a weight per code, a negative code weighing nothing. `lookup` says where in `values` each
candidate's entry is; empty, candidate i's is entry i.
"""

from __future__ import annotations

import math

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.permute import below, stream, uniform

__all__ = ["count_codes", "gumbel_keys", "segment_sums", "select_quotas", "weighted_positions"]


@kernel
def _weight_at(i, values, table, lookup):
    if values.shape[0] == 0:
        return 1.0
    entry = lookup[i] if lookup.shape[0] > 0 else i
    if table.shape[0] == 0:
        return np.float64(values[entry])
    code = np.int64(values[entry])
    return table[code] if code >= 0 else 0.0


@kernel
def segment_sums(n, segment, values, table, lookup, out):
    """Sum the weights of each run of `segment` candidates into `out`, float64.

    Returns the first candidate whose weight is negative or not finite, or -1.
    """
    for s in range(out.shape[0]):
        total = 0.0
        for i in range(s * segment, min((s + 1) * segment, n)):
            weight = _weight_at(i, values, table, lookup)
            if not (weight >= 0.0 and weight < math.inf):
                return i
            total += weight
        out[s] = total
    return -1


@kernel
def count_codes(n, codes, lookup, out):
    """Count the candidates of each code into `out`, int64; returns how many have none (negative)."""
    missing = 0
    for i in range(n):
        code = np.int64(codes[lookup[i] if lookup.shape[0] > 0 else i])
        if code < 0:
            missing += 1
        else:
            out[code] += 1
    return missing


@kernel
def weighted_positions(wanted, ends, segment, n, values, table, lookup, key, heavy, heavy_counts, out):
    """Return which candidate each wanted draw fell on.

    The draws of an epoch stand in storage order; draw j belongs to the segment whose span of `ends`
    holds j. A segment's draws are made when asked for, from a key of its own: each falls on one of
    its candidates by weight, and counting them puts them in storage order.

    Parameters
    ----------
    wanted
        Numbers of the draws, shape (k,), int64; runs of neighbours are cheap.
    ends
        Draws up to the end of each segment, shape (n_segments,), int64, ascending.
    segment, n
        Candidates in a segment, and in all.
    values, table, lookup
        The weights, see the module.
    key
        The epoch's uint64 key.
    heavy, heavy_counts
        Segments with far more draws than candidates, ascending, and the draws on each of their
        candidates, shape (n_heavy, segment), int64.
    out
        Candidates, shape (k,), int64.
    """
    cumulative = np.empty(segment, dtype=np.float64)
    counts = np.empty(segment, dtype=np.int64)
    current = np.int64(-1)
    start = np.int64(0)
    stop = np.int64(0)
    row = 0
    row_stop = np.int64(0)
    for w in range(wanted.shape[0]):
        draw = wanted[w]
        if not (current >= 0 and start <= draw < stop):
            current = np.searchsorted(ends, draw, side="right")
            start = ends[current - 1] if current > 0 else np.int64(0)
            stop = ends[current]
            low = current * segment
            size = min(segment, n - low)
            h = np.searchsorted(heavy, current)
            if h < heavy.shape[0] and heavy[h] == current:
                counts[:size] = heavy_counts[h, :size]
            else:
                total = 0.0
                last = 0
                for i in range(size):
                    weight = _weight_at(low + i, values, table, lookup)
                    total += weight
                    cumulative[i] = total
                    counts[i] = 0
                    if weight > 0.0:
                        last = i
                segment_key = stream(key, current)
                for d in range(stop - start):
                    target = uniform(segment_key, d) * total
                    # Never past the last candidate with weight: rounding can make target == total.
                    counts[min(np.searchsorted(cumulative[:size], target, side="right"), last)] += 1
            row = 0
            row_stop = start + counts[0]
        elif draw < row_stop - counts[row]:
            row = 0
            row_stop = start + counts[0]
        while draw >= row_stop:
            row += 1
            row_stop += counts[row]
        out[w] = current * segment + row


@kernel
def gumbel_keys(n, values, table, lookup, key, out):
    """Write a random key per candidate whose k largest are k draws without replacement by weight.

    The Efraimidis-Spirakis keys ``u ** (1 / w)`` under a monotone map, ``log(w) - log(-log(u))``, in
    which weights of any size keep their precision; a candidate without weight gets -inf. (Efraimidis,
    Spirakis: Weighted random sampling with a reservoir, Inf. Process. Lett. 97, 2006.)
    """
    for i in range(n):
        weight = _weight_at(i, values, table, lookup)
        if weight > 0.0:
            # (1 - u) lies in (0, 1]; u == 0 would make the inner logarithm zero.
            exponential = -math.log1p(-uniform(key, i))
            out[i] = math.log(weight) - math.log(max(exponential, 1e-300))
        else:
            out[i] = -math.inf


@kernel
def select_quotas(n, codes, lookup, quotas, counts, key, out):
    """Choose ``quotas[c]`` of the ``counts[c]`` candidates of each class, uniformly, in storage order.

    Selection sampling (Knuth, TAOCP 2, Algorithm 3.4.2 S), all classes in one pass: a candidate is
    taken with probability (still wanted of its class) / (still to come of its class). `codes` empty:
    all candidates are of class 0. `quotas` and `counts` are used up. Returns the number chosen.
    """
    chosen = 0
    for i in range(n):
        code = np.int64(0)
        if codes.shape[0] > 0:
            code = np.int64(codes[lookup[i] if lookup.shape[0] > 0 else i])
            if code < 0:
                continue
        if quotas[code] > 0 and below(key, i, counts[code]) < quotas[code]:
            out[chosen] = i
            chosen += 1
            quotas[code] -= 1
        counts[code] -= 1
    return chosen
