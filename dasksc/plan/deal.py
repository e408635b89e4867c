"""Order of the blocks of an epoch, their deal to the ranks (segments, sizes, sequence of each rank), and fetches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
        out = np.empty(len(positions), dtype=np.int64)
        permute.permuted_many(positions, self.n_blocks, self.table, self.half_bits, self.round_keys, out)
        return out


# Number of positions of a piece that are computed at once.
_COMPUTED_AT_ONCE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedSegment:
    """Part of an epoch that was already read: world size, batch size, fetch factor, and number of batches per rank."""

    world_size: int
    batch_size: int
    fetch_factor: int
    n_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """Units to distribute to the ranks, and the sizes of the shares of all ranks, in closed form."""

    # first, n_full: First position and number of the full blocks to distribute. They are a range of the block order.
    first: int
    n_full: int
    rest: _Int64s  # Positions, in storage order, of all other units to distribute, shape (n_rest,), int64
    # block_size, batch_size: In units.
    block_size: int
    batch_size: int
    world_size: int
    # drop_last, equal_ranks: As for `EpochPlan`.
    drop_last: bool
    equal_ranks: bool

    @property
    def n_dealt(self) -> int:
        return self.n_full * self.block_size + len(self.rest)

    @property
    def n_rounds(self) -> int:
        """Number of rounds, in each of which every rank receives a full block."""
        return self.n_full // self.world_size

    @property
    def n_left(self) -> int:
        """Number of leftover units, which do not fill a round."""
        return self.n_dealt - self.n_rounds * self.world_size * self.block_size

    @property
    def n_larger(self) -> int:
        """Number of ranks whose piece of the leftover units is one unit larger than those of the others."""
        return self.n_left % self.world_size

    def n_piece(self, rank: int) -> int:
        """Return the number of units in a rank's piece of the leftover units, including padding."""
        size = self.n_left // self.world_size
        if self.equal_ranks:
            return size + (self.n_larger > 0 and not self.drop_last)
        return size + (rank < self.n_larger)

    def n_sequence(self, rank: int) -> int:
        return self.n_rounds * self.block_size + self.n_piece(rank)

    def n_yielded(self, rank: int) -> int:
        n = self.n_sequence(rank)
        return n // self.batch_size * self.batch_size if self.drop_last else n

    @property
    def n_padded(self) -> int:
        """Number of repeated units over all ranks, which make the ranks equal."""
        return -self.n_left % self.world_size if self.equal_ranks and not self.drop_last else 0

    def is_padded(self, rank: int) -> bool:
        """Return True if a rank's piece ends in a unit that another rank also receives."""
        return self.n_padded > 0 and rank >= self.n_larger

    @property
    def n_dropped(self) -> int:
        """Number of the `n_dealt` units that no rank yields."""
        if not self.drop_last:
            return 0
        # The ranks below `n_larger` yield as much as rank 0, all others as much as the last rank.
        n_others = self.world_size - self.n_larger
        return self.n_dealt - self.n_larger * self.n_yielded(0) - n_others * self.n_yielded(self.world_size - 1)


@dataclass(frozen=True, kw_only=True)
class RankSequence:
    """Units of a rank in order: rounds of full blocks, and a piece of leftover units before one of the rounds."""

    rank: int  # Rank that reads the sequence
    deal: Deal  # Units to distribute to the ranks
    order: BlockOrder  # Order of the full blocks
    piece_round: int  # Round before which every rank inserts its piece
    left_from: int  # Offset at which dealing of the leftover units begins

    @cached_property
    def piece(self) -> _Int64s:
        """Storage positions of this rank's piece of the leftover units."""
        n_left = self.deal.n_left
        size, n_larger = divmod(n_left, self.deal.world_size)
        start = self.left_from + self.rank * size + min(self.rank, n_larger)
        piece = np.empty(self.deal.n_piece(self.rank), dtype=np.int64)
        for done in range(0, len(piece), _COMPUTED_AT_ONCE):
            out = piece[done : done + _COMPUTED_AT_ONCE]
            leftover = np.arange(start + done, start + done + len(out), dtype=np.int64)
            out[:] = self._left_at(leftover % n_left)
        return piece

    def _left_at(self, leftover: _Int64s) -> _Int64s:
        """Return the storage positions of the leftover units with the numbers `leftover`."""
        deal, block_size = self.deal, self.deal.block_size
        n_full = deal.n_full - deal.n_rounds * deal.world_size
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
        deal, order = self.deal, self.order
        dealt = start, deal.block_size, self.rank, deal.world_size, deal.first, self.piece_round, self.piece
        permute.deal(*dealt, order.n_blocks, order.table, order.half_bits, order.round_keys, out)
        return out

    def own(self, positions: _Int64s) -> _Int64s:
        """Return the positions without the repeated unit that pads this rank, which another rank also receives."""
        return positions[positions != self.piece[-1]] if self.deal.is_padded(self.rank) else positions

    def n_begun(self, position: int) -> int:
        """Return the number of rounds that begin before a position in the sequence."""
        before = self.piece_round * self.deal.block_size
        if position <= before:
            return -(-position // self.deal.block_size)
        return max(self.piece_round, -(-(position - len(self.piece)) // self.deal.block_size))

    def n_ended(self, position: int) -> int:
        """Return the number of rounds that end at or before a position in the sequence."""
        ended = (position - len(self.piece)) // self.deal.block_size
        return ended if ended > self.piece_round else min(self.piece_round, position // self.deal.block_size)

    def outside(self, start: int, stop: int, first: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of a range of the sequence that lie outside rounds ``[first, end)``."""
        if first == end:
            return [(start, stop)]
        where, n_piece = self.piece_round, len(self.piece)
        begin = first * self.deal.block_size + (n_piece if first >= where else 0)
        finish = end * self.deal.block_size + (n_piece if end > where else 0)
        spans = [(start, begin), (finish, stop)]
        if first < where < end:
            spans.append((where * self.deal.block_size, where * self.deal.block_size + n_piece))
        return spans


def ascending(rows: _Int64s) -> tuple[_Int64s, _Int64s]:
    """Sort `rows`; return them and the sorted position of each input row, both of shape (n,), int64."""
    # Equal rows keep their order.
    # Sorting integers that combine row and index is nine times as fast as a stable argsort. They have at most 63 bits,
    # because a collection has fewer than 2**40 rows and a fetch fewer than 2**23.
    n_bits = max(len(rows) - 1, 0).bit_length()
    indices = np.arange(len(rows), dtype=np.int64)
    keys = (rows.astype(np.int64, copy=False) << n_bits) | indices
    keys.sort()
    positions = np.empty_like(indices)
    positions[keys & ((1 << n_bits) - 1)] = indices
    return keys >> n_bits, positions


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Rows of one fetch and the order in which they are yielded."""

    number: int  # Number of the fetch on this rank
    rows: _Int64s  # Row numbers in ascending order, repeats included, shape (n,), int64
    # Positions in `rows` in the order of yielding, shape (m,), int64. m < n if the epoch ends in a short batch that is
    # dropped, or if there are controls.
    order: _Int64s
    batch_size: int  # Number of rows in a batch
    # Group of each set in the order of yielding, shape (n_sets,), int64; None without sets.
    groups: _Int64s | None = None
    # Positions in `rows` of the controls of each yielded row, shape (m, n_controls), int64; None without controls.
    controls: _Int64s | None = None

    @property
    def n_batches(self) -> int:
        return -(-len(self.order) // self.batch_size)

    def batch(self, i: int) -> _Int64s:
        """Return the positions in `rows` of batch `i` of the fetch."""
        return self.order[i * self.batch_size : (i + 1) * self.batch_size]

    def batch_controls(self, i: int) -> _Int64s | None:
        """Return the positions in `rows` of the controls of batch `i`, row by row; None without controls."""
        if self.controls is None:
            return None
        return self.controls[i * self.batch_size : (i + 1) * self.batch_size].ravel()

    def batch_groups(self, i: int) -> _Int64s | None:
        """Return the group of each set of batch `i`; None without sets."""
        if self.groups is None:
            return None
        set_size = len(self.order) // max(1, len(self.groups))
        return self.groups[i * self.batch_size // set_size : (i + 1) * self.batch_size // set_size]
