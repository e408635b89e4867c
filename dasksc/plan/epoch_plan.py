"""Plan of an epoch: the rows that each rank reads, and their order.

A plan is a pure function of its fields. Any fetch can be computed without the preceding ones, in time and memory that
depend on the size of that fetch alone. `docs/concepts/ranks.md` shows how the blocks of an epoch, and the leftover
rows, are dealt to the ranks. If an epoch is read in several segments, with different numbers of ranks or batch sizes,
the rows that one segment leaves unread are dealt again in the next.

A plan deals units of the sampler: rows, sets of rows (`CellSets`) or batches (`ClassBalancedSampling` with
``per_batch=True``). Private positions and sizes are in units, public ones in rows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.checks import whole_number
from dasksc.displays import constructor
from dasksc.errors import InputError
from dasksc.kernels import permute
from dasksc.plan.deal import BlockOrder, ConsumedSegment, Deal, FetchPlan, RankSequence, ascending
from dasksc.plan.keys import Purpose, digest_of, epoch_keys
from dasksc.plan.labels import Diversity, diversity_of, encode_labels
from dasksc.plan.samplers import Draw, Sampler, StratifiedSampler
from dasksc.plan.sets import SetDraw

_Int64s = NDArray[np.int64]

# Maximum number of rows of an epoch; sums of two numbers of rows fit into int64.
_MAX_ROWS = 2**62
# Upper bound of the number of batches in one segment of an epoch.
_MAX_BATCHES = 2**48


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class EpochPlan:
    """Plan of one epoch for one rank.

    Parameters
    ----------
    sampler
        Strategy bound to a collection, which draws the rows.
    batch_size
        Number of rows in a batch, per rank.
    fetch_factor
        Number of batches in a fetch.
    drop_last
        If True, drop the last short batch of each rank and the rows that do not divide evenly among the
        ranks. If blocks are shuffled, every row is dropped equally often.
    equal_ranks
        If True, give every rank the same number of batches of the same sizes. Ranks that are one row
        short repeat a row; with `drop_last`, the surplus rows are dropped instead.
    seed, epoch
        Keys of all random draws, integers in [0, 2**64) and [0, 2**32).
    rank, world_size
        Rank of this plan, in [0, world_size), and number of ranks.
    consumed
        Segments of the epoch that were read before. The plan covers the remaining rows.

    Examples
    --------
    >>> dataset = dasksc.scDataset("atlas.h5ad", batch_size=64, seed=0, rank=1, world_size=3)
    >>> plan = dataset.plan(epoch=0)
    >>> plan.n_batches, plan.n_padded
    (11, 1)
    >>> plan.batch_rows(0)[:4]
    array([ 433,  939,  766, 1445])
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
    consumed: tuple[ConsumedSegment, ...] = ()

    def __post_init__(self) -> None:
        for name in ("batch_size", "fetch_factor", "world_size"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        for name, end in (("rank", self.world_size), ("seed", 2**64), ("epoch", 2**32)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 0, end))
        if isinstance(self.sampler, StratifiedSampler):
            object.__setattr__(self, "sampler", self.sampler.of_batches(self.batch_size))
        if self.sampler.n_rows > _MAX_ROWS:
            raise InputError(
                f"an epoch of {self.sampler.n_rows} rows is too long; draw at most 2**62 rows (n_sets=, total_size=)"
            )
        unit = self.sampler.unit
        if self.batch_size % unit:
            raise InputError(
                f"batch_size={self.batch_size} is not a multiple of {unit}, the number of rows in a set. A set is "
                f"never divided between batches; give a multiple, such as {-(-self.batch_size // unit) * unit}"
            )

    def __repr__(self) -> str:
        return constructor(self, sampler=f"{type(self.sampler).__name__} of {self.n_rows:,} rows")

    # Sizes are closed forms, computed without drawing rows unless a segment of the epoch was read before.

    @property
    def n_rows(self) -> int:
        """Number of rows in the epoch over all ranks, before padding and dropping. For sets, only target cells."""
        return self.sampler.n_rows

    @property
    def n_control_rows(self) -> int:
        """Number of control rows that are read in addition to `n_rows`."""
        return self.n_rows * self.sampler.n_controls

    @property
    def n_dealt(self) -> int:
        """Number of rows of the epoch that no consumed segment has read."""
        return self._deal.n_dealt * self.sampler.unit

    @property
    def fetch_rows(self) -> int:
        """Number of rows in a full fetch, without controls."""
        return self.batch_size * self.fetch_factor

    @property
    def block_size(self) -> int:
        """Number of rows in a block. A block is dealt to one rank as a whole."""
        return self._block * self.sampler.unit

    @property
    def _n_units(self) -> int:
        return self.sampler.n_rows // self.sampler.unit

    @property
    def _batch(self) -> int:
        """Number of units in a batch."""
        return self.batch_size // self.sampler.unit

    @property
    def _fetch_units(self) -> int:
        return self._batch * self.fetch_factor

    @property
    def _block(self) -> int:
        """Number of units in a block."""
        if self.sampler.block_size is not None:
            return self.sampler.block_size
        if self.consumed:
            return self.consumed[0].batch_size * self.consumed[0].fetch_factor
        return self._fetch_units

    @property
    def _n_rank_units(self) -> int:
        return self._deal.n_yielded(self.rank)

    @property
    def n_rank_rows(self) -> int:
        """Number of rows that this rank yields."""
        return self._n_rank_units * self.sampler.unit

    @property
    def n_batches(self) -> int:
        """Number of batches that this rank yields."""
        return -(-self._n_rank_units // self._batch)

    @property
    def n_fetches(self) -> int:
        """Number of fetches of this rank."""
        return -(-self._n_rank_units // self._fetch_units)

    @property
    def n_padded(self) -> int:
        """Number of rows, over all ranks, that are repeated so that ranks yield equal numbers of rows."""
        return self._deal.n_padded * self.sampler.unit

    @property
    def n_dropped(self) -> int:
        """Number of the `n_dealt` rows that no rank yields."""
        return self._deal.n_dropped * self.sampler.unit

    @property
    def n_rank_padded(self) -> int:
        """Number of repeated rows that this rank yields: at most one row, or the rows of one set or one batch."""
        return int(self._deal.is_padded(self.rank)) * self.sampler.unit

    @property
    def n_rank_dropped(self) -> int:
        """Number of rows dealt to this rank that it does not yield.

        To keep the ranks equal, some rows may be dealt to no rank; `n_dropped` also counts those.
        """
        return (self._deal.n_sequence(self.rank) - self._n_rank_units) * self.sampler.unit

    @cached_property
    def _draw(self) -> Draw:
        return self.sampler.draw(self.seed, self.epoch)

    @cached_property
    def _order(self) -> BlockOrder:
        n_full = self._n_units // self._block
        if not self.sampler.shuffle_blocks or self.sampler.is_shuffled:
            return BlockOrder.storage(n_full)
        return BlockOrder.shuffled(n_full, self.seed, self.epoch)

    @cached_property
    def _deal(self) -> Deal:
        first, n_full = 0, self._n_units // self._block
        rest = np.arange(n_full * self._block, self._n_units, dtype=np.int64)
        if self.consumed:
            *before, last = self.consumed
            plan = dataclasses.replace(
                self,
                consumed=tuple(before),
                rank=0,
                world_size=last.world_size,
                batch_size=last.batch_size,
                fetch_factor=last.fetch_factor,
            )
            first, n_full, rest = plan._after(last.n_batches)
        return Deal(
            first=first,
            n_full=n_full,
            rest=rest,
            block_size=self._block,
            batch_size=self._batch,
            world_size=self.world_size,
            drop_last=self.drop_last,
            equal_ranks=self.equal_ranks,
        )

    def _keys(self, purpose: Purpose, n: int) -> NDArray[np.uint64]:
        """Return keys that differ between the segments of an epoch."""
        number = (len(self.consumed),) if self.consumed else ()
        return epoch_keys(self.seed, self.epoch, purpose, *number, n=n)

    @cached_property
    def _sequence(self) -> RankSequence:
        deal, sampler = self._deal, self.sampler
        round_key, left_key = self._keys(Purpose.DEAL, 2)
        # If blocks are in storage order, the piece comes last. The leftover units are dealt from a random one on, so
        # that the surplus units vary.
        at_random = sampler.shuffle_blocks or sampler.shuffle_rows
        n_rounds = deal.n_rounds
        return RankSequence(
            rank=self.rank,
            deal=deal,
            order=self._order,
            piece_round=int(permute.below(round_key, 0, n_rounds + 1)) if sampler.shuffle_blocks else n_rounds,
            left_from=int(permute.below(left_key, 0, deal.n_left)) if at_random and deal.n_left else 0,
        )

    def _stored(self, positions: _Int64s) -> _Int64s:
        """Rotate positions so that every row is equally likely to be dropped, if rows may be dropped."""
        if not (self.drop_last and self.sampler.shuffle_blocks):
            return positions
        # The last rows of a block would be dropped more often than the first, so each block is rotated to begin at a
        # random row. The short block, which would always hold the last rows of the epoch, starts at a random position
        # and wraps around from the last row to the first.
        n_units, block_size = self._n_units, self._block
        short = n_units % block_size
        end = n_units - short
        keys = epoch_keys(self.seed, self.epoch, Purpose.DEAL, n=4)
        turn, offset = int(permute.uniform(keys[2], 0) * block_size), int(permute.uniform(keys[3], 0) * n_units)
        within = positions % block_size
        turned = positions - within + (within + turn) % block_size
        wrapped = max(0, offset + short - n_units)
        turned += wrapped or short * (turned >= offset)
        return np.where(positions < end, turned, (positions - end + offset) % max(1, n_units))

    def fetch(self, k: int) -> FetchPlan:
        """Return fetch `k` of this rank.

        Raises
        ------
        IndexError
            If `k` is not in [0, n_fetches).
        """
        if not 0 <= k < self.n_fetches:
            raise IndexError(f"fetch {k} is out of range; there are {self.n_fetches}, numbered from 0")
        positions, order = self._units(k)
        if isinstance(self._draw, SetDraw):
            groups, targets, controls = self._draw.sets(positions[order])
            n = len(targets)
            # Targets and controls are read in one pass.
            rows, order = ascending(targets if controls is None else np.concatenate([targets, controls]))
            beside = None if controls is None else order[n:].reshape(n, -1)
            return FetchPlan(k, rows, order[:n], self.batch_size, groups, beside)
        unit = self.sampler.unit
        stored = self._stored(positions)
        if unit > 1:
            stored = (stored[:, None] * unit + np.arange(unit)).ravel()
            order = (order[:, None] * unit + np.arange(unit)).ravel()
        rows = self._draw.rows(stored)
        if self.sampler.shuffle_rows and unit == 1:
            rows = np.sort(rows)  # they are permuted by `order`
        elif np.any(rows[1:] < rows[:-1]):
            # The rows are read in ascending order, and yielded in the order of the draw.
            rows, positions = ascending(rows)
            order = positions[order]
        return FetchPlan(k, rows, order, self.batch_size)

    def _units(self, k: int) -> tuple[_Int64s, _Int64s]:
        """Return the storage positions of the units of a fetch, and the order in which they are yielded."""
        start = k * self._fetch_units
        # The units to drop are still part of the last fetch here, so that a random subset is dropped after the
        # permutation.
        stop = min(start + self._fetch_units, self._deal.n_sequence(self.rank))
        positions = self._sequence.positions(start, stop)
        order = np.arange(len(positions), dtype=np.int64)
        if self.sampler.shuffle_rows:
            if not self.sampler.is_shuffled:
                # Blocks are ascending runs, which a stable sort merges without sorting them again.
                positions.sort(kind="stable" if self._block > 4 else None)
            key = self._keys(Purpose.FETCHES, 1)[0]
            permute.shuffle(np.uint64(permute.stream(key, k * self.world_size + self.rank)), order)
        return positions, order[: min(stop, self._n_rank_units) - start]

    def batch_number(self, i: int) -> int:
        """Return the number that identifies batch `i` of this rank in the whole epoch.

        The number does not depend on the process that makes the batch, and no two batches of an epoch share a number.
        """
        return len(self.consumed) * _MAX_BATCHES + i * self.world_size + self.rank

    def batch_rows(self, i: int) -> _Int64s:
        """Return the row numbers of batch `i` of this rank, in the order of yielding."""
        if not 0 <= i < self.n_batches:
            raise IndexError(f"batch {i} is out of range; there are {self.n_batches}, numbered from 0")
        fetch = self.fetch(i // self.fetch_factor)
        return fetch.rows[fetch.batch(i % self.fetch_factor)]

    def diversity(self, labels: Any, n_batches: int = 1000) -> Diversity:
        """Measure the label diversity of this rank's batches.

        Parameters
        ----------
        labels
            One label per row of the collection: an array, a pandas Series or Categorical. Missing labels
            are ignored.
        n_batches
            Approximate number of batches to measure, from fetches spread over the epoch.

        Returns
        -------
        Diversity
            Mean and standard deviation of the label entropy of the batches and of ideal random batches.
        """
        codes, names = encode_labels(labels)
        wanted = min(self.n_fetches, -(-n_batches // self.fetch_factor))
        ks = np.unique(np.linspace(0, max(self.n_fetches - 1, 0), wanted).astype(np.int64))
        batches = []
        for fetch in map(self.fetch, ks):
            batches += [codes[fetch.rows[fetch.batch(i)]] for i in range(fetch.n_batches)]
        return diversity_of(batches, len(names))

    def of_rank(self, rank: int) -> EpochPlan:
        """Return the plan of another rank for the same epoch, without drawing the rows again."""
        other = dataclasses.replace(self, rank=rank)
        for name in ("_draw", "_order", "_deal"):
            other.__dict__[name] = getattr(self, name)
        return other

    def _after(self, n_batches: int) -> tuple[int, int, _Int64s]:
        """Return the fields `first`, `n_full` and `rest` of the `Deal` after every rank has yielded `n_batches`."""
        plans = [self.of_rank(rank) for rank in range(self.world_size)]
        unread = [plan._unread(n_batches * self._batch) for plan in plans]
        rest = [loose for _, _, loose in unread]
        # Rounds that no rank has touched remain a range of the order.
        first = max(plan._sequence.n_begun(start) for plan, (start, _, _) in zip(plans, unread, strict=True))
        end = min(plan._sequence.n_ended(stop) for plan, (_, stop, _) in zip(plans, unread, strict=True))
        if first >= end or not self.sampler.shuffle_blocks:
            first = end = 0
        for plan, (start, stop, _) in zip(plans, unread, strict=True):
            sequence = plan._sequence
            outside = sequence.outside(start, stop, first, end)
            rest += [sequence.own(sequence.positions(low, high)) for low, high in outside]
        positions = np.concatenate(rest)
        if not self.sampler.shuffle_blocks:
            positions.sort()
        return self._deal.first + first * self.world_size, (end - first) * self.world_size, positions

    def _unread(self, n_done: int) -> tuple[int, int, _Int64s]:
        """Return the unread part of this rank's sequence after `n_done` units, and the unread units outside it."""
        k, n_within = divmod(min(n_done, self._n_rank_units), self._fetch_units)
        start, stop = k * self._fetch_units, self._n_rank_units
        loose = [np.empty(0, dtype=np.int64)]

        def loosen(fetch: int, skipped: int) -> None:
            positions, order = self._units(fetch)
            if self.sampler.shuffle_rows and self.sampler.unit == 1:
                # A fetch sorts its rows before it permutes them, so the positions are first sorted by row number.
                rows = self._draw.rows(self._stored(positions))
                positions = positions[np.argsort(rows, kind="stable")]
            loose.append(positions[order[skipped:]])

        if n_within:
            loosen(k, n_within)
            start += self._fetch_units
        if self._deal.n_sequence(self.rank) > stop and stop % self._fetch_units:
            last = self.n_fetches - 1
            if last * self._fetch_units >= start:
                loosen(last, 0)
            stop = last * self._fetch_units
        return start, max(start, stop), self._sequence.own(np.concatenate(loose))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EpochPlan) and (self.digest(), self.rank) == (other.digest(), other.rank)

    def __hash__(self) -> int:
        return hash((self.digest(), self.rank))

    def digest(self) -> str:
        """Return a hex digest of the epoch over all ranks; equal digests mean equal batches."""
        sizes = (self.batch_size, self.fetch_factor, self.drop_last, self.equal_ranks, self.consumed)
        return digest_of(self.seed, self.epoch, self.world_size, *sizes, self.sampler.digest(), self._draw)
