"""Who reads which rows, and when: the plan of an epoch.

A plan is a pure function of its fields. It reads nothing and keeps nothing but what it has derived;
any fetch can be computed without those before it, in time and memory that grow with the fetch alone.

An epoch's rows, in storage order, are cut into blocks. The full blocks, in the epoch's order, are
dealt to the ranks in rounds, one each: rank r of W gets order positions r, r + W, r + 2W, ... What is
left, fewer than W full blocks and the short one, is cut into W equal pieces, and every rank inserts
its piece before the same round. So ranks differ by at most one row, whatever the sizes:

.. code-block:: text

    order      B7 B2 B9 B0 B4 B1 B8 B5 | B3 B6 b10          W = 4, two rounds, left: B3 B6 b10
    rank 0     B7 [piece 0] B4
    rank 1     B2 [piece 1] B1
    rank 2     B9 [piece 2] B8
    rank 3     B0 [piece 3] B5

A rank's sequence is then cut into fetches, each of which is read sorted and permuted in memory, and
fetches into batches.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.kernels import permute
from dasksc.sampling import BlockOrder, Draw, Purpose, Sampler, epoch_keys

__all__ = ["EpochPlan", "FetchPlan"]

_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """The rows of one fetch and the order in which they are yielded.

    Parameters
    ----------
    number
        Which of the rank's fetches.
    rows
        Row numbers in ascending order, repeats included, shape (n,), int64.
    order
        Positions in `rows` in the order they are yielded, shape (m,), int64; m < n where the epoch
        ends in a short batch that is dropped.
    batch_size
        Rows of a batch.
    """

    number: int
    rows: _Int64s
    order: _Int64s
    batch_size: int

    @property
    def n_batches(self) -> int:
        """Batches of the fetch."""
        return -(-len(self.order) // self.batch_size)

    def batch(self, i: int) -> _Int64s:
        """Return the positions in `rows` that make up batch `i` of the fetch."""
        return self.order[i * self.batch_size : (i + 1) * self.batch_size]


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """One rank's plan of one epoch.

    Parameters
    ----------
    sampler
        What is drawn: a strategy bound to a collection.
    batch_size
        Rows of a batch, per rank.
    fetch_factor
        Batches of a fetch.
    drop_last
        Leave out each rank's last short batch and the rows that do not divide by the ranks.
    equal_ranks
        Give every rank the same number of batches of the same sizes: by repeating a row on the ranks
        that are one short, or with `drop_last` by leaving out the row too many.
    seed, epoch
        What everything random is keyed by.
    rank, world_size
        Whose part this is.
    """

    sampler: Sampler
    batch_size: int
    fetch_factor: int = 16
    drop_last: bool = False
    equal_ranks: bool = True
    seed: int = 0
    epoch: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_size", "fetch_factor", "world_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise InputError(f"{name} must be a whole number of at least 1; got {value!r}")
        if not 0 <= self.rank < self.world_size:
            raise InputError(f"rank must lie in [0, world_size={self.world_size}); got {self.rank}")
        if not 0 <= self.seed < 2**64:
            raise InputError(f"seed must lie in [0, 2**64); got {self.seed}")
        if not 0 <= self.epoch < 2**32:
            raise InputError(f"epoch must lie in [0, 2**32); got {self.epoch}")

    # --- Sizes: closed forms, nothing is drawn for them ---

    @property
    def n_rows(self) -> int:
        """Rows of the epoch over all ranks, before any are repeated or left out."""
        return self.sampler.n_rows

    @property
    def fetch_rows(self) -> int:
        """Rows of a full fetch."""
        return self.batch_size * self.fetch_factor

    @property
    def block_size(self) -> int:
        """Rows dealt to a rank as one."""
        return self.sampler.block_size or self.fetch_rows

    @property
    def _n_rounds(self) -> int:
        return self.n_rows // self.block_size // self.world_size

    @property
    def _n_left(self) -> int:
        """Rows that do not make a full round."""
        return self.n_rows - self._n_rounds * self.world_size * self.block_size

    def _n_piece(self, rank: int) -> int:
        """Rows of a rank's piece of what is left, padding included."""
        size, n_larger = divmod(self._n_left, self.world_size)
        if not n_larger:
            return size
        if self.equal_ranks:
            return size if self.drop_last else size + 1
        return size + (rank < n_larger)

    def _n_sequence(self, rank: int) -> int:
        return self._n_rounds * self.block_size + self._n_piece(rank)

    def _n_yielded(self, rank: int) -> int:
        n = self._n_sequence(rank)
        return n // self.batch_size * self.batch_size if self.drop_last else n

    @property
    def n_rank_rows(self) -> int:
        """Rows this rank yields."""
        return self._n_yielded(self.rank)

    @property
    def n_batches(self) -> int:
        """Batches this rank yields."""
        return -(-self.n_rank_rows // self.batch_size)

    @property
    def n_fetches(self) -> int:
        """Fetches this rank makes."""
        return -(-self.n_rank_rows // self.fetch_rows)

    @property
    def n_padded(self) -> int:
        """Rows that are yielded once more, over all ranks, so that ranks are equal."""
        n_larger = self._n_left % self.world_size
        return self.world_size - n_larger if n_larger and self.equal_ranks and not self.drop_last else 0

    @property
    def n_dropped(self) -> int:
        """Rows of the epoch that no rank yields."""
        if not self.drop_last:
            return 0
        n_larger = self._n_left % self.world_size
        if self.equal_ranks or not n_larger:
            yielded = self.world_size * self._n_yielded(0)
        else:
            yielded = n_larger * self._n_yielded(0) + (self.world_size - n_larger) * self._n_yielded(n_larger)
        return self.n_rows - yielded

    # --- What is drawn, in which order, and the piece of this rank ---

    @cached_property
    def _draw(self) -> Draw:
        return self.sampler.draw(self.seed, self.epoch)

    @cached_property
    def _order(self) -> BlockOrder:
        n_full = self.n_rows // self.block_size
        if not self.sampler.shuffle_blocks:
            return BlockOrder.storage(n_full)
        return BlockOrder.shuffled(n_full, self.seed, self.epoch)

    @cached_property
    def _deal_keys(self) -> NDArray[np.uint64]:
        return epoch_keys(self.seed, self.epoch, Purpose.DEAL, n=2)

    @property
    def _piece_round(self) -> int:
        """Round before which every rank inserts its piece; in storage order that is after all."""
        if not self.sampler.shuffle_blocks:
            return self._n_rounds
        return int(permute.below(self._deal_keys[0], 0, self._n_rounds + 1))

    @property
    def _left_from(self) -> int:
        """Where the dealing of what is left begins, so that the row too many is not always the same."""
        if not (self.sampler.shuffle_blocks or self.sampler.shuffle_rows) or not self._n_left:
            return 0
        return int(permute.below(self._deal_keys[1], 0, self._n_left))

    @cached_property
    def _piece(self) -> _Int64s:
        """Positions, in storage order, of this rank's piece of what is left."""
        size, n_larger = divmod(self._n_left, self.world_size)
        start = self._left_from + self.rank * size + min(self.rank, n_larger)
        left = np.arange(start, start + self._n_piece(self.rank), dtype=np.int64)
        if not len(left):
            return left
        left %= self._n_left
        first = self._n_rounds * self.world_size
        n_full = self.n_rows // self.block_size
        block, within = np.divmod(left, self.block_size)
        is_full = first + block < n_full
        piece = first * self.block_size + left  # right for the short block, which is last in storage too
        piece[is_full] = self._order.at(first + block[is_full]) * self.block_size + within[is_full]
        return piece

    def _positions(self, start: int, stop: int) -> _Int64s:
        """Return positions, in storage order, of ``start ... stop`` of this rank's sequence."""
        out = np.empty(stop - start, dtype=np.int64)
        order = self._order
        permute.deal(
            start,
            self.block_size,
            self.rank,
            self.world_size,
            0,
            self._piece_round,
            self._piece,
            order.n_blocks,
            order.table,
            order.half_bits,
            order.round_keys,
            out,
        )
        return out

    # --- What it is all for ---

    def fetch(self, k: int) -> FetchPlan:
        """Return the rank's fetch `k`.

        Raises
        ------
        IndexError
            If `k` is not in [0, n_fetches).
        """
        if not 0 <= k < self.n_fetches:
            raise IndexError(f"fetch {k} of {self.n_fetches}")
        start = k * self.fetch_rows
        # The last fetch holds its dropped rows too: which of them are dropped is then random.
        stop = min(start + self.fetch_rows, self._n_sequence(self.rank))
        n_yielded = min(stop, self.n_rank_rows) - start
        rows = self._draw.rows(self._positions(start, stop))
        n = len(rows)
        if self.sampler.shuffle_rows:
            order = np.empty(n, dtype=np.int64)
            key = epoch_keys(self.seed, self.epoch, Purpose.FETCHES)[0]
            permute.shuffle(np.uint64(permute.stream(key, k * self.world_size + self.rank)), order)
            rows = np.sort(rows)
        elif np.all(rows[:-1] <= rows[1:]):
            order = np.arange(n, dtype=np.int64)
        else:
            # A user's own order: read sorted, yielded as given.
            by_row = np.argsort(rows, kind="stable")
            rows = rows[by_row]
            order = np.empty(n, dtype=np.int64)
            order[by_row] = np.arange(n, dtype=np.int64)
        return FetchPlan(number=k, rows=rows, order=order[:n_yielded], batch_size=self.batch_size)

    def batch_rows(self, i: int) -> _Int64s:
        """Return the row numbers of the rank's batch `i`, in the order they are yielded."""
        if not 0 <= i < self.n_batches:
            raise IndexError(f"batch {i} of {self.n_batches}")
        fetch = self.fetch(i // self.fetch_factor)
        return fetch.rows[fetch.batch(i % self.fetch_factor)]

    def of_rank(self, rank: int) -> EpochPlan:
        """Return the plan of another rank of the same epoch, sharing what both have derived."""
        other = dataclasses.replace(self, rank=rank)
        for name in ("_draw", "_order", "_deal_keys"):
            other.__dict__[name] = getattr(self, name)
        return other

    def digest(self) -> str:
        """Return a hex digest of the epoch over all ranks: equal digests, equal batches."""
        state = hashlib.blake2b(digest_size=16)
        sizes = (self.n_rows, self.batch_size, self.fetch_factor, self.drop_last, self.equal_ranks)
        state.update(repr((self.seed, self.epoch, self.world_size, *sizes)).encode())
        state.update(self.sampler.digest().encode())
        state.update(self._draw.digest())
        return state.hexdigest()
