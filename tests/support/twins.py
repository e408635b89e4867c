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
