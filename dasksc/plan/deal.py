"""Consumed segments of an epoch, and the distribution of the remaining rows to ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Deal", "Rounds", "ConsumedSegment"]

_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedSegment:
    """Part of an epoch that was already read: world size, batch size, fetch factor, and number of batches per rank."""

    world_size: int
    batch_size: int
    fetch_factor: int
    n_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """Rows to distribute to the ranks."""

    # first, n_full: First position and number of the full blocks to distribute. They are a range of the block order.
    first: int
    n_full: int
    rest: _Int64s  # Positions, in storage order, of all other rows to distribute, shape (n_rest,), int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Layout of a rank's sequence: rounds of full blocks, and a piece of leftover rows before one of the rounds."""

    block_size: int  # Number of rows in a round, per rank
    piece_round: int  # Round before which the piece is inserted
    n_piece: int  # Number of rows in the piece

    def begun(self, position: int) -> int:
        """Return the number of rounds that begin before a position in the rank's sequence."""
        before = self.piece_round * self.block_size
        if position <= before:
            return -(-position // self.block_size)
        return max(self.piece_round, -(-(position - self.n_piece) // self.block_size))

    def ended(self, position: int) -> int:
        """Return the number of rounds that end at or before a position in the rank's sequence."""
        ended = (position - self.n_piece) // self.block_size
        return ended if ended > self.piece_round else min(self.piece_round, position // self.block_size)

    def outside(self, start: int, stop: int, first: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of a range of the rank's sequence that lie outside rounds ``[first, end)``."""
        if first == end:
            return [(start, stop)]
        where, n_piece = self.piece_round, self.n_piece
        begin = first * self.block_size + (n_piece if first >= where else 0)
        finish = end * self.block_size + (n_piece if end > where else 0)
        spans = [(start, begin), (finish, stop)]
        if first < where < end:
            spans.append((where * self.block_size, where * self.block_size + n_piece))
        return spans
