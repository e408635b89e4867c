"""Number of units that each rank receives and yields: closed forms, computed without drawing rows."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RankSizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSizes:
    """Sizes of the shares of all ranks in an epoch, in units of the sampler."""

    n_dealt: int  # Number of units to deal
    # n_full, block_size: Number of full blocks among them, and units per block.
    n_full: int
    block_size: int
    batch_size: int  # Number of units in a batch
    world_size: int  # Number of ranks
    # drop_last, equal_ranks: As for `EpochPlan`.
    drop_last: bool
    equal_ranks: bool

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
        if not self.n_larger:
            return size
        if self.equal_ranks:
            return size if self.drop_last else size + 1
        return size + (rank < self.n_larger)

    def n_sequence(self, rank: int) -> int:
        """Return the number of units that a rank receives."""
        return self.n_rounds * self.block_size + self.n_piece(rank)

    def n_yielded(self, rank: int) -> int:
        """Return the number of units that a rank yields."""
        n = self.n_sequence(rank)
        return n // self.batch_size * self.batch_size if self.drop_last else n

    @property
    def n_padded(self) -> int:
        """Number of repeated units over all ranks, which make the ranks equal."""
        if not self.n_larger or not self.equal_ranks or self.drop_last:
            return 0
        return self.world_size - self.n_larger

    def is_padded(self, rank: int) -> bool:
        """Return True if a rank's piece ends in a unit that another rank also receives."""
        return self.n_padded > 0 and rank >= self.n_larger

    @property
    def n_dropped(self) -> int:
        """Number of the `n_dealt` units that no rank yields."""
        if not self.drop_last:
            return 0
        if self.equal_ranks or not self.n_larger:
            yielded = self.world_size * self.n_yielded(0)
        else:
            yielded = self.n_larger * self.n_yielded(0) + (self.world_size - self.n_larger) * self.n_yielded(
                self.n_larger
            )
        return self.n_dealt - yielded
