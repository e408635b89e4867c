"""Rotation of positions, which makes all rows equally likely to be dropped."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dasksc.kernels import permute
from dasksc.plan.keys import Purpose, epoch_keys

__all__ = ["rotated"]


def rotated(positions: NDArray[np.int64], *, n_units: int, block_size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Rotate positions so that every row is equally likely to be dropped."""
    # The last rows of a block would be dropped more often than the first, so each block is rotated to begin at a random
    # row. If the short block always held the last rows of the epoch, these would be dropped with a different
    # probability. The short block therefore starts at a random position and wraps around from the last row to the
    # first.
    short = n_units % block_size
    end = n_units - short
    turn, offset = (
        int(permute.uniform(key, 0) * n)
        for key, n in zip(epoch_keys(seed, epoch, Purpose.DEAL, n=4)[2:], (block_size, n_units), strict=True)
    )
    within = positions % block_size
    turned = positions - within + (within + turn) % block_size
    wrapped = max(0, offset + short - n_units)
    turned += wrapped or short * (turned >= offset)
    return np.where(positions < end, turned, (positions - end + offset) % max(1, n_units))
