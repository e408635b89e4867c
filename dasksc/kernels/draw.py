"""Weighted and balanced draws, computed one segment of rows at a time.

Weights have one of three sources. If `values` is empty, every row has weight 1. If `table` is empty, `values` holds the
weights. Otherwise `values` holds integer codes from -1 (no label) upwards, and ``table[c + 1]`` is the weight of code
c. A candidate is a row that may be drawn; `values` has one entry per candidate. A heap is a binary tree of sums in one
array: the children of node i are nodes 2 i and 2 i + 1.
"""

from __future__ import annotations

import math

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.intrinsics import count_bits
from dasksc.kernels.permute import bits, stream, uniform

# Up to this number of trials, a binomial draw simulates each trial. This takes only integer operations and is fastest.
_COUNTED = 128

# Up to this number of draws at a node, the draws are not split between its children; each draw uses its own random
# number.
_GROUP = 24

# Number of weights processed at a time in passes over all weights.
_CHUNK = 1024

# Number of neighboring candidates in a run. In a segment, the weights of each run are summed first.
_RUN = 8

_U0 = np.uint64(0)
_U1 = np.uint64(1)
_U8 = np.uint64(8)
_U11 = np.uint64(11)
_U63 = np.uint64(63)


@kernel
def _copy_weights(start, size, values, table, out):
    # Copy the weights of candidates ``[start, start + size)``. Each source of weights has a plain loop of its
    # own, because a call or a branch for each weight takes longer than reading the weight.
    first = np.uint64(start)
    if values.shape[0] == 0:
        out[:size] = 1.0
    elif table.shape[0] > 0:
        for i in range(np.uint64(size)):
            out[i] = table[np.uint64(np.int64(values[first + i]) + 1)]
    else:
        for i in range(np.uint64(size)):
            out[i] = values[first + i]


@kernel
def segment_sums(n, segment, values, table, out):
    """Sum the weights of each segment into `out`; return the first candidate of an invalid weight, or -1."""
    # The weights in `table` are not negative.
    weights = np.empty(segment, dtype=np.float64)
    for s in range(out.shape[0]):
        start = s * segment
        size = min(segment, n - start)
        _copy_weights(start, size, values, table, weights)
        total = 0.0
        n_wrong = 0
        for i in range(size):
            n_wrong += not (weights[i] >= 0.0 and weights[i] < math.inf)
            total += weights[i]
        if n_wrong:
            for i in range(size):
                if not (weights[i] >= 0.0 and weights[i] < math.inf):
                    return start + i
        out[s] = total
    return -1


@kernel
def sum_up(tree):
    """Compute the sums at the inner nodes of a heap, shape (2 * n_leaves,), from its leaves in the second half."""
    for node in range(tree.shape[0] // 2 - 1, 0, -1):
        tree[node] = tree[2 * node] + tree[2 * node + 1]


@kernel
def count_codes(codes, out):
    """Add the number of candidates with code c to ``out[c + 1]``, int64, for each code c from -1 (no label) upwards."""
    # Sorted labels contain long runs of one code. Counting a run in a register does not wait for memory.
    run_code = np.int64(-1)
    run = 0
    for i in range(codes.shape[0]):
        code = np.int64(codes[i])
        if code != run_code:
            out[run_code + 1] += run
            run_code = code
            run = 0
        run += 1
    out[run_code + 1] += run


@kernel
def _tail(k):
    # Difference between log(k!) and Stirling's formula.
    if k < 10:
        return math.lgamma(k + 1.0) - ((k + 0.5) * math.log(k + 1.0) - (k + 1.0) + 0.9189385332046727)
    square = (k + 1.0) * (k + 1.0)
    return (1.0 / 12 - (1.0 / 360 - 1.0 / 1260 / square) / square) / (k + 1.0)


@kernel
def _heads(key, n, end):
    # Count how many of n random 53-bit numbers are below `end`. 64 numbers are compared at a time, from the
    # highest bit down. Each random word supplies one bit of every number, and few bits decide most comparisons.
    heads = np.int64(0)
    counter = 0
    for first in range(0, n, 64):
        undecided = ~_U0 >> np.uint64(64 - min(64, n - first))
        rest = end << _U11
        while undecided != _U0 and rest != _U0:
            word = bits(key, counter)
            counter += 1
            if rest >> _U63:
                heads += np.int64(count_bits(undecided & ~word))
                undecided &= word
            else:
                undecided &= ~word
            rest <<= _U1
    return heads


@kernel
def transformed_rejection(key, n, p, is_flipped):
    """Draw a binomial number for ``n * p >= 10`` and ``p <= 0.5``."""
    # Hoermann: The generation of binomial random variates, J. Stat. Comput. Simul. 46, 1993, algorithm BTRS. Every
    # second random number is subtracted from 1 if `is_flipped`.
    spread = math.sqrt(n * p * (1.0 - p))
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * p
    center = n * p + 0.5
    alpha = (2.83 + 5.1 / b) * spread
    squeezed = 0.92 - 4.2 / b
    mode = math.floor((n + 1) * p)
    odds = p / (1.0 - p)
    counter = 0
    while True:
        u = uniform(key, counter) - 0.5
        v = uniform(key, counter + 1)
        if is_flipped:
            v = 1.0 - v
        counter += 2
        near = 0.5 - abs(u)
        if near <= 0.0:
            continue
        k = np.floor((2.0 * a / near + b) * u + center)
        if k < 0 or k > n:
            continue
        if near >= 0.07 and v <= squeezed:
            return np.int64(k)
        bound = (
            (mode + 0.5) * math.log((mode + 1.0) / (odds * (n - mode + 1.0)))
            + (n + 1.0) * math.log((n - mode + 1.0) / (n - k + 1.0))
            + (k + 0.5) * math.log(odds * (n - k + 1.0) / (k + 1.0))
            + _tail(mode)
            + _tail(n - mode)
            - _tail(k)
            - _tail(n - k)
        )
        if math.log(v * alpha / (a / (near * near) + b)) <= bound:
            return np.int64(k)


@kernel
def binomial(key, n, p):
    """Draw a binomial number of successes in `n` trials with probability `p`, exact up to the rounding of `p`."""
    # Few trials are drawn one by one. For few expected successes, the gaps between them are drawn.
    if n <= 0 or p <= 0.0:
        return np.int64(0)
    if p >= 1.0:
        return np.int64(n)
    if n <= _COUNTED:
        return _heads(key, n, np.uint64(p * 9007199254740992.0))
    q = min(p, 1.0 - p)
    if n * q < 10.0:
        heads = np.int64(0)
        thrown = 0.0
        scale = math.log1p(-q)
        counter = 0
        while True:
            # np.floor returns a float. math.floor returns an integer, which is undefined for an infinite gap.
            gap = np.floor(math.log1p(-uniform(key, counter)) / scale) + 1.0
            thrown += gap
            if not thrown <= n:
                break
            heads += 1
            counter += 1
    else:
        heads = transformed_rejection(key, n, q, True)
    return heads if p <= 0.5 else n - heads


@kernel
def _sum_inside(number, segment, n, values, table, inside):
    # Compute the heap of one segment's weights, shape (2 * segment,). Its first entry is not a node and holds
    # the number of the segment, so that the same segment is not summed twice in succession.
    if inside[0] == number:
        return
    inside[0] = number
    start = number * segment
    size = min(segment, n - start)
    _copy_weights(start, size, values, table, inside[segment:])
    inside[segment + size :] = 0.0
    sum_up(inside)


@kernel
def split_draws(n_draws, tree, n_levels, key, out):
    """Write the first draw at each node, `n_levels` below the root of a heap, into `out`, followed by `n_draws`."""
    out[0] = n_draws
    for level in range(n_levels):
        width = 1 << level
        for i in range(width - 1, -1, -1):
            node = width + i
            count = out[i]
            n_left = _go_left(key, node, count, tree[2 * node], tree[2 * node + 1])
            out[2 * i] = n_left
            out[2 * i + 1] = count - n_left
    total = np.int64(0)
    for i in range(1 << n_levels):
        count = out[i]
        out[i] = total
        total += count
    out[1 << n_levels] = total


@kernel
def _go_left(key, node, count, left, right):
    if count == 0 or left == 0.0:
        return np.int64(0)
    return binomial(stream(key, node), count, left / (left + right))


@kernel
def _descend(heap, n_levels, n, nodes, rests):
    # Descend a heap from the first n of `nodes`, level by level for all of them, to overlap cache misses.
    # A draw is a point on the axis of cumulative weight. `rests` holds its distance from the start of its node, and is
    # updated at each level.
    for _ in range(n_levels):
        for i in range(n):
            child = nodes[i] << _U1
            left = heap[child]
            goes_right = rests[i] >= left
            nodes[i] = child + np.uint64(goes_right)
            rests[i] = rests[i] - left if goes_right else rests[i]
    for i in range(n):
        # Rounding can make an entry of `rests` as large as the node's weight; the draw must still not select a
        # candidate of weight 0.
        while heap[nodes[i]] == 0.0:
            nodes[i] -= _U1
            rests[i] = heap[nodes[i]]


@kernel
def _fall(key, node, n_draws, numbers, shares):
    # Write the positions of the few draws at a node as shares of its weight, in ascending order. Extra low bits make
    # the random numbers distinct, so that they can be ranked without branches.
    own = stream(key, node)
    for i in range(n_draws):
        numbers[i] = np.int64(((bits(own, i) >> _U11) << _U8) | np.uint64(i))
    for i in range(n_draws):
        number = numbers[i]
        rank = 0
        for k in range(n_draws):
            rank += numbers[k] < number
        shares[rank] = np.float64(number >> 8) * (1.0 / 9007199254740992.0)


@kernel
def drawn_in_order(wanted, starts_at, tree, n_levels, segment_levels, n, values, table, key, out):
    """Write the candidates of the `wanted` weighted draws with replacement into `out`; draws are in storage order."""
    # A heap over the candidates splits the draws: `tree` holds its sums down to segments of candidates, and `starts_at`
    # the result of `split_draws`. The number of draws that a node passes to its left child is binomial, with that
    # child's share of the node's weight as probability. Each node has its own random stream. Any single draw is found
    # by descending the heap, and the paths of neighboring draws share their beginnings. At nodes with few draws, each
    # draw uses a random number of its own.
    segment = 1 << segment_levels
    bottom = n_levels + segment_levels
    n_tops = starts_at.shape[0] - 1
    top = 0
    while 1 << top < n_tops:
        top += 1
    inside = np.full(2 * segment, -1.0)  # heap of one segment
    numbers = np.empty(_GROUP, dtype=np.int64)
    rests = np.empty(_GROUP, dtype=np.float64)
    fallen = np.empty(_GROUP, dtype=np.uint64)
    last_rest = np.empty(1, dtype=np.float64)
    last_node = np.empty(1, dtype=np.uint64)
    rows = np.empty(_GROUP, dtype=np.int64)
    nodes = np.zeros(bottom + 1, dtype=np.int64)
    starts = np.zeros(bottom + 1, dtype=np.int64)
    stops = np.zeros(bottom + 1, dtype=np.int64)
    level = top
    for w in range(wanted.shape[0]):
        draw = wanted[w]
        if not starts[level] <= draw < stops[level]:
            while level > top and not starts[level] <= draw < stops[level]:
                level -= 1
            if not starts[level] <= draw < stops[level]:
                number = np.searchsorted(starts_at, draw, side="right") - 1
                nodes[level] = n_tops + number
                starts[level] = starts_at[number]
                stops[level] = starts_at[number + 1]
            while level < bottom and stops[level] - starts[level] > _GROUP:
                node = nodes[level]
                if level < n_levels:
                    left, right = tree[2 * node], tree[2 * node + 1]
                else:
                    below_segment = level - n_levels
                    number = (node >> below_segment) - (1 << n_levels)
                    _sum_inside(number, segment, n, values, table, inside)
                    local = (1 << below_segment) + (node & ((1 << below_segment) - 1))
                    left, right = inside[2 * local], inside[2 * local + 1]
                middle = starts[level] + _go_left(key, node, stops[level] - starts[level], left, right)
                goes_right = draw >= middle
                level += 1
                nodes[level] = 2 * node + goes_right
                starts[level] = middle if goes_right else starts[level - 1]
                stops[level] = stops[level - 1] if goes_right else middle
            if level < bottom:
                node = nodes[level]
                n_fallen = stops[level] - starts[level]
                _fall(key, node, n_fallen, numbers, rests)
                if level < n_levels:
                    for i in range(n_fallen):
                        fallen[i] = node
                        rests[i] *= tree[node]
                    _descend(tree, n_levels - level, n_fallen, fallen, rests)
                    for i in range(n_fallen):
                        number = np.int64(fallen[i]) - (1 << n_levels)
                        _sum_inside(number, segment, n, values, table, inside)
                        last_node[0] = 1
                        last_rest[0] = rests[i] / tree[fallen[i]] * inside[1]
                        _descend(inside, segment_levels, 1, last_node, last_rest)
                        rows[i] = (number - 1) * segment + np.int64(last_node[0])
                else:
                    below_segment = level - n_levels
                    number = (node >> below_segment) - (1 << n_levels)
                    _sum_inside(number, segment, n, values, table, inside)
                    local = (1 << below_segment) + (node & ((1 << below_segment) - 1))
                    for i in range(n_fallen):
                        fallen[i] = local
                        rests[i] *= inside[local]
                    _descend(inside, bottom - level, n_fallen, fallen, rests)
                    for i in range(n_fallen):
                        rows[i] = (number - 1) * segment + np.int64(fallen[i])
        out[w] = rows[draw - starts[level]] if level < bottom else nodes[level] - (np.int64(1) << bottom)


@kernel
def uniforms(counters, key, out):
    """Write the uniform random number in [0, 1) of each counter into `out`, float64."""
    for i in range(counters.shape[0]):
        out[i] = uniform(key, counters[i])


@kernel
def drawn_singly(shares, tree, n_levels, segment_levels, n, values, table, out):
    """Write the candidates of independent draws, at `shares` of the total weight before each, into `out`."""
    n_wanted = shares.shape[0]
    nodes = np.ones(n_wanted, dtype=np.uint64)
    rests = np.empty(n_wanted, dtype=np.float64)
    for i in range(n_wanted):
        rests[i] = shares[i] * tree[1]
    _descend(tree, n_levels, n_wanted, nodes, rests)
    segment = 1 << segment_levels
    weights = np.empty(segment, dtype=np.float64)
    for i in range(n_wanted):
        start = (np.int64(nodes[i]) - (1 << n_levels)) * segment
        size = min(segment, n - start)
        _copy_weights(start, size, values, table, weights)
        weights[size:] = 0.0
        rest = rests[i]
        passed = 0  # candidates of the runs before the draw
        while True:
            total = 0.0
            for k in range(_RUN):
                total += weights[passed + k]
            if rest < total or passed + _RUN == segment:
                break
            rest -= total
            passed += _RUN
        total = 0.0
        n_passed = 0
        for k in range(_RUN):
            total += weights[passed + k]
            n_passed += total <= rest
        passed += min(n_passed, _RUN - 1)
        while weights[passed] == 0.0:  # as in `_descend`
            passed -= 1
        out[i] = start + passed


@kernel
def _gumbel(weight, u):
    # -log1p(-u) is exponentially distributed; u == 0 would make its logarithm infinite.
    return math.log(weight) - math.log(max(-math.log1p(-u), 1e-300))


@kernel
def gumbel_keys(candidates, values, table, key, out):
    """Write the random key of each candidate; those with the k largest keys are k draws without replacement."""
    # The keys are u ** (1 / w) (Efraimidis, Spirakis: Weighted random sampling with a reservoir, Inf. Process. Lett.
    # 97, 2006) under the map log(w) - log(-log(u)), which keeps precision for weights of any size.
    weight = np.empty(1, dtype=np.float64)
    for k in range(candidates.shape[0]):
        _copy_weights(candidates[k], 1, values, table, weight)
        out[k] = _gumbel(weight[0], uniform(key, candidates[k])) if weight[0] > 0.0 else -math.inf


@kernel
def count_positive(n, values, table):
    """Return the number of candidates with a weight above 0."""
    weights = np.empty(_CHUNK, dtype=np.float64)
    found = 0
    for start in range(0, n, _CHUNK):
        size = min(_CHUNK, n - start)
        _copy_weights(start, size, values, table, weights)
        for i in range(size):
            found += weights[i] > 0.0
    return found


@kernel
def select_above(n, values, table, key, low, high, out, near, near_keys):
    """Write the candidates whose key (see `gumbel_keys`) is at least `low`, in storage order; return their number."""
    # Also write the positions in `out` of those whose key is at most `high`, and their keys, and return their number.
    # Candidates that do not fit are only counted.
    weights = np.empty(_CHUNK, dtype=np.float64)
    # A key above `low` requires -log1p(-u) < weight * exp(-low). Since u <= -log1p(-u), most candidates are
    # rejected without a logarithm. For `low` outside (-700, 700), exp could underflow or overflow.
    scale = math.exp(-low) * (1.0 + 1e-9) if -700.0 < low < 700.0 else math.inf
    n_out = 0
    n_near = 0
    for start in range(0, n, _CHUNK):
        size = min(_CHUNK, n - start)
        _copy_weights(start, size, values, table, weights)
        for i in range(size):
            weight = weights[i]
            u = uniform(key, start + i)
            if weight <= 0.0 or u > weight * scale:
                continue
            found = _gumbel(weight, u)
            if found < low:
                continue
            if n_out < out.shape[0]:
                out[n_out] = start + i
            if found <= high:
                if n_near < near.shape[0]:
                    near[n_near] = n_out
                    near_keys[n_near] = found
                n_near += 1
            n_out += 1
    return n_out, n_near
