"""Pure-Python counterparts of the random kernels, with arbitrary-precision integers, one value at a time."""

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


def row_keys(key: int, rows: Sequence[int]) -> list[int]:
    for row in rows:
        key = mix(key ^ mix(row))
    return [stream(key, i) for i in range(len(rows))]
