"""Sequence of the units that one rank reads in an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dasksc.kernels import permute
from dasksc.plan.deal import Deal, Rounds
from dasksc.plan.order import BlockOrder
from dasksc.plan.rank_sizes import RankSizes

__all__ = ["RankSequence"]

_Int64s = NDArray[np.int64]

# Number of positions of a piece that are computed at once.
_COMPUTED_AT_ONCE = 2**20


@dataclass(frozen=True, kw_only=True)
class RankSequence:
    """Units of a rank in order: rounds of full blocks, and a piece of leftover units before one of the rounds."""

    rank: int  # Rank that reads the sequence
    sizes: RankSizes  # Sizes of the shares of all ranks
    order: BlockOrder  # Order of the full blocks
    deal: Deal  # Units to distribute to the ranks
    piece_round: int  # Round before which every rank inserts its piece
    left_from: int  # Offset at which dealing of the leftover units begins

    @property
    def rounds(self) -> Rounds:
        """Layout of the sequence."""
        return Rounds(block_size=self.sizes.block_size, piece_round=self.piece_round, n_piece=len(self.piece))

    @property
    def end_of_piece(self) -> int:
        """Position in the sequence of the last unit of the piece; if the rank is padded, this is the repeated unit."""
        return self.piece_round * self.sizes.block_size + len(self.piece) - 1

    @cached_property
    def piece(self) -> _Int64s:
        """Storage positions of this rank's piece of the leftover units."""
        n_left = self.sizes.n_left
        size, n_larger = divmod(n_left, self.sizes.world_size)
        start = self.left_from + self.rank * size + min(self.rank, n_larger)
        piece = np.empty(self.sizes.n_piece(self.rank), dtype=np.int64)
        for done in range(0, len(piece), _COMPUTED_AT_ONCE):
            out = piece[done : done + _COMPUTED_AT_ONCE]
            leftover = np.arange(start + done, start + done + len(out), dtype=np.int64)
            out[:] = self._left_at(leftover % n_left)
        return piece

    def _left_at(self, leftover: _Int64s) -> _Int64s:
        """Return the storage positions of the leftover units with the numbers `leftover`."""
        deal, block_size = self.deal, self.sizes.block_size
        n_full = deal.n_full - self.sizes.n_rounds * self.sizes.world_size
        block, within = np.divmod(leftover, block_size)
        is_full = block < n_full
        found = np.empty_like(leftover)
        blocks = self.order.at(deal.first + deal.n_full - n_full + block[is_full])
        found[is_full] = blocks * block_size + within[is_full]
        found[~is_full] = deal.rest[leftover[~is_full] - n_full * block_size]
        return found

    def positions(self, start: int, stop: int) -> _Int64s:
        """Return the storage positions of the range ``[start, stop)`` of the sequence, in the order of the sequence."""
        out = np.empty(stop - start, dtype=np.int64)
        permute.deal(
            start,
            self.sizes.block_size,
            self.rank,
            self.sizes.world_size,
            self.deal.first,
            self.piece_round,
            self.piece,
            self.order.n_blocks,
            self.order.table,
            self.order.half_bits,
            self.order.round_keys,
            out,
        )
        return out
