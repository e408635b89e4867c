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

An epoch may be read in stretches, by other numbers of ranks or in batches of another size. What one
stretch leaves unread is dealt again to the next: the full blocks that nobody has touched are a range
of the order, as at first, and everything else joins what is left over.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.config import whole_number
from dasksc.errors import InputError
from dasksc.kernels import permute
from dasksc.planning.consumed_segments import Deal, Rounds, Stretch
from dasksc.planning.fetches import FetchPlan
from dasksc.planning.label_entropy import Diversity, diversity_of
from dasksc.sampling.block_order import BlockOrder
from dasksc.sampling.draws import Draw
from dasksc.sampling.labels import encode_labels
from dasksc.sampling.random_keys import Purpose, epoch_keys
from dasksc.sampling.samplers import Sampler

__all__ = ["EpochPlan"]

_Int64s = NDArray[np.int64]

# Positions of a piece that are computed together.
_COMPUTED_AT_ONCE = 2**20
# Of one stretch of an epoch.
_BATCHES_AT_MOST = 2**48


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
        Leave out each rank's last short batch and the rows that do not divide by the ranks: where blocks are
        shuffled, every row as often as any other.
    equal_ranks
        Give every rank the same number of batches of the same sizes: by repeating a row on the ranks
        that are one short, or with `drop_last` by leaving out the row too many.
    seed, epoch
        What everything random is keyed by.
    rank, world_size
        Whose part this is.
    consumed
        Stretches of the epoch that were read before; this plan is of the rest.
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
    consumed: tuple[Stretch, ...] = ()

    def __post_init__(self) -> None:
        for name in ("batch_size", "fetch_factor", "world_size"):
            value = getattr(self, name)
            object.__setattr__(self, name, whole_number(name, value))
        for name, end in (("rank", self.world_size), ("seed", 2**64), ("epoch", 2**32)):
            value = getattr(self, name)
            if not _is_whole(value) or not 0 <= value < end:
                raise InputError(f"{name} must be a whole number in [0, {end}); got {value!r}")
            object.__setattr__(self, name, int(value))

    # --- Sizes: closed forms, nothing is drawn for them unless a part of the epoch was read before ---

    @property
    def n_rows(self) -> int:
        """Rows of the epoch over all ranks, before any are repeated or left out."""
        return self.sampler.n_rows

    @property
    def n_dealt(self) -> int:
        """Rows of the epoch that had not been read before."""
        return self._deal.n_full * self.block_size + len(self._deal.rest)

    @property
    def fetch_rows(self) -> int:
        """Rows of a full fetch."""
        return self.batch_size * self.fetch_factor

    @property
    def block_size(self) -> int:
        """Rows dealt to a rank as one."""
        if self.sampler.block_size is not None:
            return self.sampler.block_size
        if self.consumed:
            return self.consumed[0].batch_size * self.consumed[0].fetch_factor
        return self.fetch_rows

    @property
    def _n_rounds(self) -> int:
        return self._deal.n_full // self.world_size

    @property
    def _n_left(self) -> int:
        """Rows that do not make a full round."""
        return self.n_dealt - self._n_rounds * self.world_size * self.block_size

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
        """Rows dealt that no rank yields."""
        if not self.drop_last:
            return 0
        n_larger = self._n_left % self.world_size
        if self.equal_ranks or not n_larger:
            yielded = self.world_size * self._n_yielded(0)
        else:
            yielded = n_larger * self._n_yielded(0) + (self.world_size - n_larger) * self._n_yielded(n_larger)
        return self.n_dealt - yielded

    @property
    def n_rank_padded(self) -> int:
        """Rows that this rank yields and another does too; 0 or 1."""
        return int(self._is_padded)

    @property
    def n_rank_dropped(self) -> int:
        """Rows dealt to this rank that it does not yield.

        `n_dropped` counts beside them those that are dealt to no rank, so that ranks are equal.
        """
        return self._n_sequence(self.rank) - self.n_rank_rows

    # --- What is drawn, in which order, and the piece of this rank ---

    @cached_property
    def _draw(self) -> Draw:
        return self.sampler.draw(self.seed, self.epoch)

    @cached_property
    def _order(self) -> BlockOrder:
        n_full = self.n_rows // self.block_size
        if not self.sampler.shuffle_blocks or self.sampler.is_shuffled:
            return BlockOrder.storage(n_full)
        return BlockOrder.shuffled(n_full, self.seed, self.epoch)

    @cached_property
    def _deal(self) -> Deal:
        if not self.consumed:
            n_full = self.n_rows // self.block_size
            return Deal(first=0, n_full=n_full, rest=np.arange(n_full * self.block_size, self.n_rows, dtype=np.int64))
        *before, last = self.consumed
        plan = dataclasses.replace(
            self,
            consumed=tuple(before),
            rank=0,
            world_size=last.world_size,
            batch_size=last.batch_size,
            fetch_factor=last.fetch_factor,
        )
        return plan._after(last.n_batches)

    def _keys(self, purpose: Purpose, n: int) -> NDArray[np.uint64]:
        """Return keys that differ from one stretch of an epoch to the next."""
        stretch = (len(self.consumed),) if self.consumed else ()
        return epoch_keys(self.seed, self.epoch, purpose, *stretch, n=n)

    @cached_property
    def _deal_keys(self) -> NDArray[np.uint64]:
        return self._keys(Purpose.DEAL, 2)

    @property
    def _piece_round(self) -> int:
        """Round before which every rank inserts its piece; in storage order that is after all."""
        if not self.sampler.shuffle_blocks:
            return self._n_rounds
        return int(permute.below(self._deal_keys[0], 0, self._n_rounds + 1))

    @property
    def _rounds(self) -> Rounds:
        return Rounds(block_size=self.block_size, piece_round=self._piece_round, n_piece=len(self._piece))

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
        piece = np.empty(self._n_piece(self.rank), dtype=np.int64)
        for done in range(0, len(piece), _COMPUTED_AT_ONCE):
            out = piece[done : done + _COMPUTED_AT_ONCE]
            left = np.arange(start + done, start + done + len(out), dtype=np.int64)
            out[:] = self._left_at(left % self._n_left)
        return piece

    def _left_at(self, left: _Int64s) -> _Int64s:
        """Return positions, in storage order, of rows that do not make a full round, by their numbers among these."""
        deal = self._deal
        n_full = deal.n_full - self._n_rounds * self.world_size
        block, within = np.divmod(left, self.block_size)
        is_full = block < n_full
        found = np.empty_like(left)
        blocks = self._order.at(deal.first + deal.n_full - n_full + block[is_full])
        found[is_full] = blocks * self.block_size + within[is_full]
        found[~is_full] = deal.rest[left[~is_full] - n_full * self.block_size]
        return found

    def _positions(self, start: int, stop: int) -> _Int64s:
        """Return positions, in storage order, of ``start ... stop`` of this rank's sequence."""
        out = np.empty(stop - start, dtype=np.int64)
        order = self._order
        permute.deal(
            start,
            self.block_size,
            self.rank,
            self.world_size,
            self._deal.first,
            self._piece_round,
            self._piece,
            order.n_blocks,
            order.table,
            order.half_bits,
            order.round_keys,
            out,
        )
        return out

    def _stored(self, positions: _Int64s) -> _Int64s:
        """Turn positions so that every row is as likely to be dropped as any other.

        Only where rows are dropped: otherwise blocks keep to multiples of their size. The last rows of a block
        are dropped more often than its first, so each block begins at a random one of its rows. The short block
        has chances of its own, so it lies anywhere, past the end with the rest of it at the beginning.
        """
        if not (self.drop_last and self.sampler.shuffle_blocks):
            return positions
        short = self.n_rows % self.block_size
        end = self.n_rows - short
        turn, place = (
            int(permute.uniform(key, 0) * n)
            for key, n in zip(
                epoch_keys(self.seed, self.epoch, Purpose.DEAL, n=4)[2:], (self.block_size, self.n_rows), strict=True
            )
        )
        within = positions % self.block_size
        turned = positions - within + (within + turn) % self.block_size
        wrapped = max(0, place + short - self.n_rows)
        turned += wrapped or short * (turned >= place)
        return np.where(positions < end, turned, (positions - end + place) % max(1, self.n_rows))

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
        _, rows, order = self._fetch(k, with_positions=False)
        return FetchPlan(number=k, rows=rows, order=order, batch_size=self.batch_size)

    def _fetch(self, k: int, *, with_positions: bool) -> tuple[_Int64s, _Int64s, _Int64s]:
        """Return a fetch's positions in storage order, its ascending rows, and the order of yielding.

        Without `with_positions` the first may be in another order than the rows, which is cheaper.
        """
        start = k * self.fetch_rows
        # The last fetch holds its dropped rows too: which of them are dropped is then random.
        stop = min(start + self.fetch_rows, self._n_sequence(self.rank))
        n_yielded = min(stop, self.n_rank_rows) - start
        positions = self._positions(start, stop)
        if self.sampler.shuffle_rows and not self.sampler.is_shuffled:
            # Blocks come as ascending runs, which a merging sort leaves whole.
            positions.sort(kind="stable" if self.block_size > 4 else None)
        ascending = self.sampler.shuffle_rows and not with_positions
        rows = self._draw.rows(self._stored(positions), ascending=ascending)
        order = np.arange(len(rows), dtype=np.int64)
        if np.any(rows[1:] < rows[:-1]):
            # A user's own order: read sorted, yielded as given.
            by_row = np.argsort(rows, kind="stable")
            positions, rows = positions[by_row], rows[by_row]
            order[by_row] = np.arange(len(rows), dtype=np.int64)
        if self.sampler.shuffle_rows:
            key = self._keys(Purpose.FETCHES, 1)[0]
            permute.shuffle(np.uint64(permute.stream(key, k * self.world_size + self.rank)), order)
        return positions, rows, order[:n_yielded]

    def batch_number(self, i: int) -> int:
        """Return the number of the rank's batch `i` among all batches of the epoch, of any rank and stretch.

        The same batch has it whoever makes it, and no two batches of an epoch share one.
        """
        return len(self.consumed) * _BATCHES_AT_MOST + i * self.world_size + self.rank

    def batch_rows(self, i: int) -> _Int64s:
        """Return the row numbers of the rank's batch `i`, in the order they are yielded."""
        if not 0 <= i < self.n_batches:
            raise IndexError(f"batch {i} of {self.n_batches}")
        fetch = self.fetch(i // self.fetch_factor)
        return fetch.rows[fetch.batch(i % self.fetch_factor)]

    def diversity(self, labels: Any, n_batches: int = 1000) -> Diversity:
        """Measure how well this rank's batches mix labels; see `Diversity`.

        Parameters
        ----------
        labels
            One per row of the collection: an array, a pandas Series or Categorical. Missing ones are
            left out.
        n_batches
            About how many batches to look at, from fetches spread over the epoch.

        Returns
        -------
        Diversity
            Mean and spread of the label entropy of batches, beside those of ideal random batches.
        """
        codes, names = encode_labels(labels)
        wanted = min(self.n_fetches, -(-n_batches // self.fetch_factor))
        ks = np.unique(np.linspace(0, max(self.n_fetches - 1, 0), wanted).astype(np.int64))
        batches = []
        for fetch in map(self.fetch, ks):
            batches += [codes[fetch.rows[fetch.batch(i)]] for i in range(fetch.n_batches)]
        return diversity_of(batches, len(names))

    def of_rank(self, rank: int) -> EpochPlan:
        """Return the plan of another rank of the same epoch, sharing what both have derived."""
        other = dataclasses.replace(self, rank=rank)
        for name in ("_draw", "_order", "_deal", "_deal_keys"):
            other.__dict__[name] = getattr(self, name)
        return other

    # --- What remains of an epoch that was left in the middle ---

    def _after(self, n_batches: int) -> Deal:
        """Return what is left to deal when every rank has yielded `n_batches`."""
        plans = [self.of_rank(rank) for rank in range(self.world_size)]
        unread = [plan._unread(n_batches * self.batch_size) for plan in plans]
        rest = [loose for _, _, loose in unread]
        # Rounds that no rank has touched stay a range of the order.
        first = max(plan._rounds.begun(start) for plan, (start, _, _) in zip(plans, unread, strict=True))
        end = min(plan._rounds.ended(stop) for plan, (_, stop, _) in zip(plans, unread, strict=True))
        if first >= end or not self.sampler.shuffle_blocks:
            first = end = 0
        for plan, (start, stop, _) in zip(plans, unread, strict=True):
            for low, high in plan._rounds.outside(start, stop, first, end):
                rest.append(plan._positions(low, high))
                if plan._is_padded and low <= plan._padding < high:
                    rest[-1] = np.delete(rest[-1], plan._padding - low)
        positions = np.concatenate(rest)
        if not self.sampler.shuffle_blocks:
            positions.sort()
        return Deal(
            first=self._deal.first + first * self.world_size,
            n_full=(end - first) * self.world_size,
            rest=positions,
        )

    def _unread(self, n_done: int) -> tuple[int, int, _Int64s]:
        """Return the range of the rank's sequence in fetches not begun, and what is unread in others.

        The latter are positions in storage order: of the fetch that was left in the middle, and of a
        last fetch some of whose rows are dropped, wherever they lie in it.
        """
        k, n_within = divmod(min(n_done, self.n_rank_rows), self.fetch_rows)
        start, stop = k * self.fetch_rows, self.n_rank_rows
        loose = [np.empty(0, dtype=np.int64)]

        def loosen(fetch: int, skipped: int) -> None:
            positions, _, order = self._fetch(fetch, with_positions=True)
            loose.append(positions[order[skipped:]])

        if n_within:
            loosen(k, n_within)
            start += self.fetch_rows
        if self._n_sequence(self.rank) > stop and stop % self.fetch_rows:
            last = self.n_fetches - 1
            if last * self.fetch_rows >= start:
                loosen(last, 0)
            stop = last * self.fetch_rows
        found = np.concatenate(loose)
        if self._is_padded:
            found = found[found != self._piece[-1]]
        return start, max(start, stop), found

    @property
    def _is_padded(self) -> bool:
        """Whether this rank's piece ends in a row that is another rank's too."""
        return self.n_padded > 0 and self.rank >= self._n_left % self.world_size

    @property
    def _padding(self) -> int:
        """Where in the rank's sequence that row stands."""
        return self._piece_round * self.block_size + len(self._piece) - 1

    def digest(self) -> str:
        """Return a hex digest of the epoch over all ranks: equal digests, equal batches."""
        state = hashlib.blake2b(digest_size=16)
        sizes = (self.n_rows, self.batch_size, self.fetch_factor, self.drop_last, self.equal_ranks, self.consumed)
        state.update(repr((self.seed, self.epoch, self.world_size, *sizes)).encode())
        state.update(self.sampler.digest().encode())
        state.update(self._draw.digest())
        return state.hexdigest()


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
