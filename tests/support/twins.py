"""Pure-Python counterparts of the random kernels, one value at a time, and a test of drawn integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

# Probability that a perfect generator fails a statistical test; seeds and keys are fixed, so the outcome is, too.
ERROR = 1e-4
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
    """Draw an integer below `n` with Lemire's method."""
    # If both 32-bit halves of one word are rejected, the upper halves of words of a separate stream follow.
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


def follows(found: NDArray[Any], distribution: Any) -> bool:
    """Return True if integers follow a distribution: chi-square test with at least 20 expected values in a bin."""
    values = np.unique(found)
    ends = [int(values[0])]
    for value in values:
        if distribution.cdf(value) - distribution.cdf(ends[-1]) > 20 / len(found):
            ends.append(int(value))
    if distribution.sf(ends[-1]) * len(found) < 20:
        ends.pop()
    if ends and distribution.cdf(ends[0]) * len(found) < 20:
        ends = ends[1:]
    observed = np.bincount(np.searchsorted(ends, found), minlength=len(ends) + 1)
    expected = np.diff(np.concatenate([[0], distribution.cdf(ends), [1]])) * len(found)
    return len(ends) == 0 or bool(stats.chisquare(observed, expected).pvalue > ERROR)
