"""Keys of random numbers.

Randomness is keyed: `epoch_keys` turns ``(seed, epoch, purpose)`` into independent 64-bit keys, and
everything random is a pure function of a key and a position.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

__all__ = ["Purpose", "epoch_keys"]


class Purpose(enum.IntEnum):
    """What a key is for; keys of different purposes are independent."""

    BLOCKS = 0
    FETCHES = 1
    DEAL = 2
    DRAW = 3
    USER = 4
    TOKENS = 5
    SPLIT = 6
    DOWNSAMPLE = 7
    MASK_GENES = 8


def epoch_keys(seed: int, epoch: int, purpose: Purpose, *more: int, n: int = 1) -> NDArray[np.uint64]:
    """Derive `n` independent 64-bit keys for one purpose of one epoch.

    Parameters
    ----------
    seed
        In [0, 2**64).
    epoch
        In [0, 2**32); each value is a word of its own in the key, so no two ``(seed, epoch)`` collide.
    purpose
        What the keys are for.
    *more
        Further words below 2**32, such as the number of a round.
    n
        How many keys.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch, int(purpose), *more))
    return sequence.generate_state(n, np.uint64).astype(np.uint64, copy=False)
