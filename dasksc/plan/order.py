"""Order of the blocks in an epoch, and the rotation that makes all rows equally likely to be dropped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dasksc.kernels import permute
from dasksc.plan.arrays import EMPTY_INTS
from dasksc.plan.keys import Purpose, epoch_keys

_Int64s = NDArray[np.int64]

# Up to this number of blocks, the order is a Fisher-Yates table (half a megabyte, 1 ms). A Feistel network
# is always an even permutation and mixes a small domain poorly.
_TABLE_BLOCKS = 65_536


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """Order of ``range(n_blocks)``: a keyed permutation, or storage order."""

    n_blocks: int
    table: _Int64s
    half_bits: int
    round_keys: NDArray[np.uint64]

    @classmethod
    def storage(cls, n_blocks: int) -> BlockOrder:
        """Return the storage order of `n_blocks` blocks."""
        return cls(n_blocks, EMPTY_INTS, 0, np.empty(0, dtype=np.uint64))

    @classmethod
    def shuffled(cls, n_blocks: int, seed: int, epoch: int) -> BlockOrder:
        """Return a random order of `n_blocks` blocks, in O(min(n_blocks, 65,536)) time and memory."""
        keys = epoch_keys(seed, epoch, Purpose.BLOCKS, n=permute.N_ROUNDS)
        if n_blocks <= _TABLE_BLOCKS:
            table = np.empty(n_blocks, dtype=np.int64)
            permute.shuffle(keys[0], table)
            return cls(n_blocks, table, 0, keys)
        return cls(n_blocks, EMPTY_INTS, -(-(n_blocks - 1).bit_length() // 2), keys)

    def at(self, positions: _Int64s) -> _Int64s:
        """Return the block numbers at `positions` in the order."""
        out = np.empty(len(positions), dtype=np.int64)
        permute.permuted_many(positions, self.n_blocks, self.table, self.half_bits, self.round_keys, out)
        return out


def rotated(positions: _Int64s, *, n_units: int, block_size: int, seed: int, epoch: int) -> _Int64s:
    """Rotate positions so that every row is equally likely to be dropped."""
    # The last rows of a block would be dropped more often than the first, so each block is rotated to begin at a random
    # row. The short block, which would always hold the last rows of the epoch, starts at a random position and wraps
    # around from the last row to the first.
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
