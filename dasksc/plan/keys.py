"""Keys of random numbers.

Randomness is keyed: `epoch_keys` derives independent 64-bit keys from ``(seed, epoch, purpose)``. Every
random value is a pure function of a key and a position.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

__all__ = ["Purpose", "epoch_keys"]


class Purpose(enum.IntEnum):
    """Purpose of a key; keys of different purposes are independent."""

    BLOCKS = 0
    FETCHES = 1
    DEAL = 2
    DRAW = 3
    USER = 4
    TOKENS = 5
    SPLIT = 6
    SETS = 7
    DOWNSAMPLE = 8
    MASK_GENES = 9


def epoch_keys(seed: int, epoch: int, purpose: Purpose, *more: int, n: int = 1) -> NDArray[np.uint64]:
    """Derive `n` independent 64-bit keys for one purpose of one epoch."""
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch, int(purpose), *more))
    return sequence.generate_state(n, np.uint64).astype(np.uint64, copy=False)
