"""Pure-Python counterparts of the random kernels, with arbitrary-precision integers, one value at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def bits(key: int, counter: int) -> int:
    return mix((key + (counter + 1) * GOLDEN) % WORD)


def uniform(key: int, counter: int) -> float:
    return (bits(key, counter) >> 11) / 2**53


def stream(key: int, number: int) -> int:
    return mix(key ^ mix(number))


def below(key: int, counter: int, n: int) -> int:
    """Draw an integer below `n` with Lemire's method.

    If both 32-bit halves of one word are rejected, the upper halves of words of a separate stream follow.
    """
    too_few = 2**32 % n
    word = bits(key, counter)
    for half in (word >> 32, word % 2**32):
        if half * n % 2**32 >= too_few:
            return half * n >> 32
    attempt = 0
    while True:
        half = bits(mix(word ^ key), attempt) >> 32
        if half * n % 2**32 >= too_few:
            return half * n >> 32
        attempt += 1


def shuffled(key: int, n: int) -> list[int]:
    out = list(range(n))
    for i in reversed(range(1, n)):
        j = below(key, i, i + 1)
        out[i], out[j] = out[j], out[i]
    return out


def permuted(position: int, n: int, half_bits: int, round_keys: Sequence[int]) -> int:
    x = position
    while True:
        left, right = divmod(x, 2**half_bits)
        for key in round_keys:
            left, right = right, left ^ mix((right + int(key)) % WORD) % 2**half_bits
        x = left * 2**half_bits + right
        if x < n:
            return x


def heads(key: int, n: int, end: int) -> int:
    """Return how many of n random 53-bit numbers lie below `end`.

    64 numbers are compared at a time, from the highest bit down. Bit i of each word belongs to number i.
    """
    total = counter = 0
    for first in range(0, n, 64):
        undecided = 2 ** min(64, n - first) - 1
        for place in reversed(range(53)):
            if not undecided or not end % 2 ** (place + 1):
                break
            word = bits(key, counter)
            counter += 1
            if end >> place & 1:
                total += (undecided & ~word).bit_count()
                undecided &= word
            else:
                undecided &= ~word
    return total


def class_draw(number: int, n_rows: int, run_rows: int, key: int, n_table: int, n_rounds: int) -> int:
    """Return the position, among the rows of a class, of the draw with index `number`.

    Each pass over the rows divides them into runs, from a random row on, and takes the runs in random order.
    """
    pass_key = stream(key, number // n_rows)
    place, n_runs = number % n_rows, n_rows // run_rows
    if place // run_rows < n_runs:
        if n_runs <= n_table:
            run = shuffled(stream(pass_key, 1), n_runs)[place // run_rows]
        else:
            half_bits = next(bits_of_half for bits_of_half in range(1, 40) if 4**bits_of_half >= n_runs)
            run = permuted(place // run_rows, n_runs, half_bits, [bits(pass_key, k + 1) for k in range(n_rounds)])
        place = run * run_rows + place % run_rows
    return (place + below(pass_key, 0, n_rows)) % n_rows


def stratified(
    quotas: Sequence[int], n_units: int, stride: int, shift: int, group_units: int
) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Return the number of rows of each class in each batch, and the draws of each class in each group of batches.

    A group has `group_units` batches. Both results are computed batch by batch.
    """
    counts, taken, groups = [], [0] * len(quotas), []
    for u in range(n_units):
        place, ahead = (stride * u + shift) % n_units, 0
        counts.append([])
        if u % group_units == 0:
            groups.append([[] for _ in quotas])
        for c, quota in enumerate(quotas):
            covered = {one % n_units for one in range(ahead, ahead + quota % n_units)}
            ahead += quota % n_units
            counts[-1].append(quota // n_units + (place in covered))
            groups[-1][c] += range(taken[c], taken[c] + counts[-1][c])
            taken[c] += counts[-1][c]
    return counts, groups


def row_keys(key: int, rows: Sequence[int]) -> list[int]:
    for row in rows:
        key = mix(key ^ mix(row))
    return [stream(key, i) for i in range(len(rows))]


@functools.cache
def steps_of(n: int, p: float) -> list[int]:
    """Return the distribution function of a binomial in 53 bits, by recursion over the counts."""
    shares = [1.0]
    for _ in range(n):
        shares = [
            (shares[k] * (1 - p) if k < len(shares) else 0.0 * (1 - p)) + (shares[k - 1] * p if k else 0.0)
            for k in range(len(shares) + 1)
        ]
    total, steps = 0.0, []
    for share in shares[:-1]:
        total += share
        steps.append(int(min(total, 1.0) * 2**53))
    return steps


def binomial(key: int, n: int, p: float) -> int:
    if p > 0.5:
        return n - binomial(key, n, 1.0 - p) if p < 1 else n
    if n == 0 or p <= 0:
        return 0
    if n * p < 10:
        draw, share, k = uniform(key, 0), math.exp(n * math.log1p(-p)), 0
        while draw >= share and k < n:
            draw -= share
            k += 1
            share *= (n - k + 1) * p / (k * (1 - p))
        return k
    spread = math.sqrt(n * p * (1 - p))
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * p
    odds, alpha, mode = p / (1 - p), (2.83 + 5.1 / b) * spread, int((n + 1) * p)
    counter = 0
    while True:
        u, v = uniform(key, counter) - 0.5, uniform(key, counter + 1)
        counter += 2
        near = 0.5 - abs(u)
        if near == 0:
            continue
        k = math.floor((2 * a / near + b) * u + (n * p + 0.5))
        if not 0 <= k <= n:
            continue
        if near >= 0.07 and v <= 0.92 - 4.2 / b:
            return k
        bound = (
            (mode + 0.5) * math.log((mode + 1) / (odds * (n - mode + 1)))
            + (n + 1) * math.log((n - mode + 1) / (n - k + 1))
            + (k + 0.5) * math.log(odds * (n - k + 1) / (k + 1))
            + stirling(mode)
            + stirling(n - mode)
            - stirling(k)
            - stirling(n - k)
        )
        if math.log(v * alpha / (a / (near * near) + b)) <= bound:
            return k


def stirling(k: int) -> float:
    """Return the amount by which Stirling's formula underestimates the logarithm of k!."""
    if k < 10:
        return math.lgamma(k + 1) - ((k + 0.5) * math.log(k + 1) - (k + 1) + 0.5 * math.log(2 * math.pi))
    square = (k + 1.0) * (k + 1.0)
    return (1 / 12 - (1 / 360 - 1 / 1260 / square) / square) / (k + 1.0)


def word(key: int, column: int) -> int:
    """Return 53 bits: the hash triple32 of an affine function of the column, and the top 21 bits of a random word."""
    x = (column * (key % 2**32 | 1) + (key >> 32)) % 2**32
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x = (x ^ x >> shift) * factor % 2**32
    return (x ^ x >> 14) << 21 | bits(key, column) >> 43


def stepped(drawn: int, n: int, p: float) -> int:
    return sum(drawn >= step for step in steps_of(n, p))


def thinned(key: int, columns: Sequence[int], counts: Sequence[int], p: float) -> list[int]:
    kept = []
    for column, count in zip(columns, counts, strict=True):
        own, (n_parts, rest) = stream(key, column), divmod(count, 16)
        if count <= 16:
            kept.append(stepped(word(key, column), count, p))
        elif count <= 64:
            parts = [stepped(bits(own, i) >> 11, 16, p) for i in range(n_parts)]
            kept.append(sum(parts) + stepped(bits(own, n_parts) >> 11, rest, p))
        else:
            kept.append(binomial(own, count, p))
    return kept


def single_bits(key: int, number: int, n_shares: int) -> list[bool]:
    """Return 64 bits, each set if a random number of ten bits is below n_shares (probability n_shares / 1024)."""
    digits = [bits(key, number * 10 + i) for i in range(10)]
    numbers = [sum((1 - (digit >> place & 1)) << i for i, digit in enumerate(digits)) for place in range(64)]
    return [number < n_shares for number in numbers]


def sampled(key: int, columns: Sequence[int], counts: Sequence[int], target: int) -> list[int]:
    """Draw `target` of all counts without replacement: thin them, then add or remove the difference."""
    total = sum(counts)
    if total <= target:
        return list(counts)
    if total > 2**17:
        return reached(key, columns, counts, target)
    n_shares = min(max(int(target * 1024 / total + 0.5), 1), 1023)
    p = n_shares / 1024
    kept, single, n_words = [], [], 0
    for column, count in zip(columns, counts, strict=True):
        if count <= 3:
            kept.append(stepped(word(key, column), count, p))
        elif count > 64:
            kept.append(binomial(stream(key, column), count, p))
        else:
            if count > len(single):
                single = single_bits(stream(key, WORD - 2), n_words, n_shares)
                n_words += 1
            kept.append(sum(single[:count]))
            single = single[count:]
    change = 1 if sum(kept) < target else -1
    pool = [c - k for c, k in zip(counts, kept, strict=True)] if change > 0 else list(kept)
    units = [gene for gene, n in enumerate(pool) for _ in range(n)]
    drawn: set[int] = set()
    counter = 0
    while len(drawn) < abs(sum(kept) - target):
        drawn.add(int(uniform(stream(key, WORD - 1), counter) * len(units)))
        counter += 1
    for unit in drawn:
        kept[units[unit]] += change
    return kept


def reached(key: int, columns: Sequence[int], counts: Sequence[int], target: int) -> list[int]:
    """Compute `sampled` for large totals: thin in rounds, then draw the last few counts one by one."""
    kept, number = [0] * len(counts), 2**63
    while (difference := target - sum(kept)) != 0:
        change = 1 if difference > 0 else -1
        pool = [c - k for c, k in zip(counts, kept, strict=True)] if change > 0 else list(kept)
        if abs(difference) <= 8:
            place, gene = int(uniform(key, number) * sum(pool)), 0
            while place >= pool[gene]:
                place, gene = place - pool[gene], gene + 1
            kept[gene] += change
        else:
            drawn = thinned(stream(key, number), columns, pool, abs(difference) / sum(pool))
            kept = [k + change * d for k, d in zip(kept, drawn, strict=True)]
        number += 1
    return kept
