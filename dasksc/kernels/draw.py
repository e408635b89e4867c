"""Weighted and balanced draws, a segment of rows at a time.

A weight comes from one of three places, told apart by what is empty: `values` empty, every row
weighs 1; `table` empty, `values` are the weights; otherwise `values` are integer codes and `table`
holds the weight of code c, from -1 (no label) on, at ``table[c + 1]``. `lookup` says where in `values` each
candidate's entry is; empty, candidate i's is entry i.
"""

from __future__ import annotations

import math

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.permute import below, bits, stream, uniform

__all__ = [
    "binomial",
    "count_codes",
    "drawn_in_order",
    "drawn_singly",
    "gumbel_keys",
    "segment_sums",
    "select_quotas",
    "sum_up",
]

_COUNTED = 64
# Up to here a binomial is a count of coins: integers only, and cheaper than any other way.

_ABREAST = 64
# Draws that walk down a heap side by side.

_U1 = np.uint64(1)
_U11 = np.uint64(11)


@kernel
def _weight_at(i, values, table, lookup):
    if values.shape[0] == 0:
        return 1.0
    # Unsigned, since a signed index is checked for being negative.
    entry = np.uint64(lookup[np.uint64(i)]) if lookup.shape[0] > 0 else np.uint64(i)
    if table.shape[0] == 0:
        return np.float64(values[entry])
    return table[np.uint64(np.int64(values[entry]) + 1)]


@kernel
def _copy_weights(start, size, values, table, lookup, out):
    # The weights of candidates ``start ... start + size``. One plain loop for each kind: what is called
    # or decided for every weight costs more than the weight.
    first = np.uint64(start)
    if values.shape[0] == 0:
        out[:size] = 1.0
    elif lookup.shape[0] > 0:
        for i in range(size):
            out[i] = _weight_at(start + i, values, table, lookup)
    elif table.shape[0] > 0:
        for i in range(np.uint64(size)):
            out[i] = table[np.uint64(np.int64(values[first + i]) + 1)]
    else:
        for i in range(np.uint64(size)):
            out[i] = values[first + i]


@kernel
def segment_sums(n, segment, values, table, lookup, out):
    """Sum the weights of each run of `segment` candidates into `out`, float64.

    Returns the first candidate whose weight is negative or not finite, or -1; `table` is not checked.
    """
    for s in range(out.shape[0]):
        start = s * segment
        stop = min(start + segment, n)
        total = 0.0
        if values.shape[0] == 0:
            total = np.float64(stop - start)
        elif table.shape[0] > 0:
            if lookup.shape[0] > 0:
                for i in range(start, stop):
                    total += table[np.uint64(np.int64(values[lookup[i]]) + 1)]
            else:
                for i in range(start, stop):
                    total += table[np.uint64(np.int64(values[i]) + 1)]
        else:
            n_wrong = 0
            for i in range(start, stop):
                weight = np.float64(values[lookup[i] if lookup.shape[0] > 0 else i])
                n_wrong += not (weight >= 0.0 and weight < math.inf)
                total += weight
            if n_wrong:
                for i in range(start, stop):
                    weight = np.float64(values[lookup[i] if lookup.shape[0] > 0 else i])
                    if not (weight >= 0.0 and weight < math.inf):
                        return i
        out[s] = total
    return -1


@kernel
def sum_up(tree):
    """Fill the inner nodes of a heap, shape (2 * n_leaves,), whose leaves are its second half."""
    for node in range(tree.shape[0] // 2 - 1, 0, -1):
        tree[node] = tree[2 * node] + tree[2 * node + 1]


@kernel
def count_codes(n, codes, lookup, out):
    """Count the candidates of each code into `out`, int64: code c, from -1 on, at ``out[c + 1]``."""
    if lookup.shape[0] > 0:
        for i in range(n):
            out[np.int64(codes[lookup[i]]) + 1] += 1
        return
    # Sorted labels repeat one code for long: counting a run in a register does not wait for memory.
    run_code = np.int64(-1)
    run = 0
    for i in range(n):
        code = np.int64(codes[i])
        if code != run_code:
            out[run_code + 1] += run
            run_code = code
            run = 0
        run += 1
    out[run_code + 1] += run


@kernel
def _tail(k):
    # log(k!) less Stirling's formula for it.
    if k < 10:
        return math.lgamma(k + 1.0) - ((k + 0.5) * math.log(k + 1.0) - (k + 1.0) + 0.9189385332046727)
    square = (k + 1.0) * (k + 1.0)
    return (1.0 / 12 - (1.0 / 360 - 1.0 / 1260 / square) / square) / (k + 1.0)


@kernel
def binomial(key, n, p):
    """Return how many of `n` coins fall heads, each with probability `p`; exact to rounding of `p`.

    Few coins are thrown one by one. Of many, where few are to fall heads, the gaps between heads are
    drawn; else the count is, by transformed rejection (Hoermann: The generation of binomial random
    variates, J. Stat. Comput. Simul. 46, 1993, algorithm BTRS).
    """
    if n <= 0 or p <= 0.0:
        return np.int64(0)
    if p >= 1.0:
        return np.int64(n)
    if n <= _COUNTED:
        end = np.uint64(p * 9007199254740992.0)
        heads = np.int64(0)
        for i in range(n):
            heads += (bits(key, i) >> _U11) < end
        return heads
    q = min(p, 1.0 - p)
    if n * q < 10.0:
        heads = np.int64(0)
        thrown = 0.0
        scale = math.log1p(-q)
        counter = 0
        while True:
            gap = math.floor(math.log1p(-uniform(key, counter)) / scale) + 1.0
            thrown += gap
            if not thrown <= n:
                break
            heads += 1
            counter += 1
        return heads if p <= 0.5 else n - heads
    spread = math.sqrt(n * q * (1.0 - q))
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * q
    centre = n * q + 0.5
    alpha = (2.83 + 5.1 / b) * spread
    accepted = 0.92 - 4.2 / b
    mode = math.floor((n + 1) * q)
    odds = q / (1.0 - q)
    counter = 0
    while True:
        u = uniform(key, counter) - 0.5
        v = 1.0 - uniform(key, counter + 1)
        counter += 2
        inner = 0.5 - abs(u)
        if inner <= 0.0:
            continue
        k = math.floor((2.0 * a / inner + b) * u + centre)
        if k < 0 or k > n:
            continue
        if not (inner >= 0.07 and v <= accepted):
            height = math.log(v * alpha / (a / (inner * inner) + b))
            bound = (
                (mode + 0.5) * math.log((mode + 1.0) / (odds * (n - mode + 1.0)))
                + (n + 1.0) * math.log((n - mode + 1.0) / (n - k + 1.0))
                + (k + 0.5) * math.log(odds * (n - k + 1.0) / (k + 1.0))
                + _tail(mode)
                + _tail(n - mode)
                - _tail(k)
                - _tail(n - k)
            )
            if height > bound:
                continue
        heads = np.int64(k)
        return heads if p <= 0.5 else n - heads


@kernel
def _sum_inside(number, segment, n, values, table, lookup, inside):
    # The heap of one segment's weights, shape (2 * segment,).
    start = number * segment
    size = min(segment, n - start)
    _copy_weights(start, size, values, table, lookup, inside[segment:])
    inside[segment + size :] = 0.0
    for i in range(segment - 1, 0, -1):
        inside[i] = inside[2 * i] + inside[2 * i + 1]


@kernel
def drawn_in_order(wanted, n_draws, tree, n_levels, segment_levels, n, values, table, lookup, key, out):
    """Return which candidate each wanted draw fell on, draws standing in storage order.

    A heap over the candidates splits the draws: of those at a node, a binomial number fall on its left
    child, by the weights of the two, from a key of the node's own. So any draw is found by walking
    down, and the walks of neighbours share their beginnings.

    Parameters
    ----------
    wanted
        Numbers of the draws, shape (k,), int64; ascending ones are cheap.
    n_draws
        Draws in all.
    tree
        Weights of the heap's nodes down to segments of candidates, shape (2 << n_levels,), float64.
    n_levels, segment_levels
        Levels of the heap from its root to the segments, and from a segment to its candidates.
    n
        Candidates.
    values, table, lookup
        Their weights, see the module.
    key
        The epoch's uint64 key.
    out
        Candidates, shape (k,), int64.
    """
    segment = 1 << segment_levels
    bottom = n_levels + segment_levels
    inside = np.zeros(2 * segment, dtype=np.float64)  # the heap of one segment
    summed = np.int64(-1)
    nodes = np.empty(bottom + 1, dtype=np.int64)
    starts = np.empty(bottom + 1, dtype=np.int64)
    stops = np.empty(bottom + 1, dtype=np.int64)
    nodes[0], starts[0], stops[0] = 1, 0, n_draws
    level = 0
    for w in range(wanted.shape[0]):
        draw = wanted[w]
        while not starts[level] <= draw < stops[level]:
            level -= 1
        while level < bottom and stops[level] - starts[level] > 1:
            node = nodes[level]
            if level < n_levels:
                left, right = tree[2 * node], tree[2 * node + 1]
            else:
                below_segment = level - n_levels
                number = (node >> below_segment) - (1 << n_levels)
                if number != summed:
                    _sum_inside(number, segment, n, values, table, lookup, inside)
                    summed = number
                local = (1 << below_segment) + (node & ((1 << below_segment) - 1))
                left, right = inside[2 * local], inside[2 * local + 1]
            middle = starts[level] + binomial(stream(key, node), stops[level] - starts[level], left / (left + right))
            goes_right = draw >= middle
            level += 1
            nodes[level] = 2 * node + goes_right
            starts[level] = middle if goes_right else starts[level - 1]
            stops[level] = stops[level - 1] if goes_right else middle
        node = nodes[level]
        if level < bottom:
            # A single draw needs no counts: one number leads it all the way down.
            share = uniform(stream(key, node), 0)
            if level < n_levels:
                rest = share * tree[node]
                for _ in range(level, n_levels):
                    node *= 2
                    goes_right = (rest >= tree[node]) & (tree[node + 1] > 0.0)
                    rest -= tree[node] * goes_right
                    node += goes_right
                share = min(rest / tree[node], 1.0)
            below_segment = max(level - n_levels, 0)
            number = (node >> below_segment) - (1 << n_levels)
            if number != summed:
                _sum_inside(number, segment, n, values, table, lookup, inside)
                summed = number
            local = np.uint64((1 << below_segment) + (node & ((1 << below_segment) - 1)))
            rest = share * inside[local]
            for _ in range(max(level, n_levels), bottom):
                local <<= _U1
                goes_right = (rest >= inside[local]) & (inside[local + _U1] > 0.0)
                rest -= inside[local] * goes_right
                local += np.uint64(goes_right)
            out[w] = number * segment + np.int64(local) - segment
        else:
            out[w] = node - (np.int64(1) << bottom)


@kernel
def drawn_singly(wanted, tree, n_levels, segment_levels, n, values, table, lookup, key, out):
    """Return which candidate each wanted draw fell on, each draw made by itself.

    For draws that are read one by one, in no order. Parameters are those of `drawn_in_order`.
    """
    n_wanted = wanted.shape[0]
    nodes = np.empty(_ABREAST, dtype=np.uint64)
    rests = np.empty(_ABREAST, dtype=np.float64)
    segment = 1 << segment_levels
    weights = np.empty(segment, dtype=np.float64)
    for first in range(0, n_wanted, _ABREAST):
        size = min(_ABREAST, n_wanted - first)
        for i in range(size):
            nodes[i] = 1
            rests[i] = uniform(key, wanted[first + i]) * tree[1]
        # Several walk down side by side, so that they wait for memory together.
        for _ in range(n_levels):
            for i in range(size):
                child = nodes[i] << _U1
                left = tree[child]
                # Rounding can leave a rest as large as all there is; it must not fall on nothing.
                goes_right = (rests[i] >= left) & (tree[child + _U1] > 0.0)
                nodes[i] = child + np.uint64(goes_right)
                rests[i] -= left * goes_right
        for i in range(size):
            start = (np.int64(nodes[i]) - (1 << n_levels)) * segment
            n_rows = min(segment, n - start)
            _copy_weights(start, n_rows, values, table, lookup, weights)
            total = 0.0
            n_passed = 0
            for k in range(n_rows):
                total += weights[k]
                n_passed += total <= rests[i]
            if n_passed == n_rows:
                n_passed -= 1
                while n_passed > 0 and weights[n_passed] == 0.0:
                    n_passed -= 1
            out[first + i] = start + n_passed


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
