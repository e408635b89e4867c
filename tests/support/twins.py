"""Plain Python twins of the random kernels: arbitrary integers, one value at a time, no numba."""

from __future__ import annotations

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
    """Lemire's method over 32-bit halves, then over words of a stream of their own."""
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
    """How many of n 53-bit numbers lie below `end`: bit i of a word is one bit of number i, highest first."""
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
    """Draw `number` of a class: passes through its rows from a random one on, runs of neighbours in a random order."""
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
    """How many rows of each class each batch has, and which draws of each class each group has, one batch at a time."""
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
