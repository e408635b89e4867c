"""Samplers, which are strategies bound to a collection, and their draws, which give the rows of one epoch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.kernels import draw as draw_kernels
from dasksc.kernels import groups as kernels
from dasksc.kernels import permute
from dasksc.plan.arrays import EMPTY_FLOATS, Candidates, read_only
from dasksc.plan.keys import Purpose, digest_of, epoch_keys
from dasksc.plan.labels import check_quotas, largest_remainders, max_draws

_Int64s = NDArray[np.int64]


class Draw(Protocol):
    """Rows of one epoch, in storage order."""

    def rows(self, positions: _Int64s) -> _Int64s:
        """Return the row numbers at `positions`, each in [0, n_rows)."""


class Sampler:
    """Strategy bound to a collection, as used by `EpochPlan`."""

    block_size: int | None  # Number of units that the plan moves as a whole; None for blocks of the size of a fetch
    shuffle_blocks: bool = True  # True if blocks are in random order, False if they are in storage order
    shuffle_rows: bool = True  # True if the rows of a fetch are permuted

    @property
    def n_rows(self) -> int:
        """Number of rows in an epoch, over all ranks; a multiple of `unit`."""
        raise NotImplementedError

    @property
    def unit(self) -> int:
        """Number of consecutive rows of an epoch that stay together in a batch; 1 if rows are independent."""
        return 1

    @property
    def n_controls(self) -> int:
        """Number of control rows for each row."""
        return 0

    @property
    def is_shuffled(self) -> bool:
        """True if the draws are already in random order, so that blocks need no permutation."""
        return False

    def draw(self, seed: int, epoch: int) -> Draw:
        raise NotImplementedError

    def digest(self) -> str:
        """Return a hex digest of all parameters of the draws, except seed and epoch."""
        return digest_of(self)


@dataclass(frozen=True, slots=True)
class AllRows:
    """Draw of every candidate once, except `n_skipped` candidates from `skip_from` on."""

    candidates: Candidates
    skip_from: int = 0
    n_skipped: int = 0

    def rows(self, positions: _Int64s) -> _Int64s:
        if self.n_skipped:
            positions = positions + self.n_skipped * (positions >= self.skip_from)
        return self.candidates.rows(positions)


@dataclass(frozen=True)
class RowSampler(Sampler):
    """Sampler that draws every candidate once per epoch, except for a short block that may be dropped."""

    candidates: Candidates
    block_size: int | None
    shuffle_blocks: bool
    shuffle_rows: bool
    drop_last: bool = False

    @property
    def _n_skipped(self) -> int:
        return self.candidates.n % self.block_size if self.drop_last and self.block_size else 0

    @property
    def n_rows(self) -> int:
        return self.candidates.n - self._n_skipped

    def draw(self, seed: int, epoch: int) -> AllRows:
        if not self._n_skipped:
            return AllRows(self.candidates)
        # The skipped rows begin at a random row and wrap around the end, so that all rows are skipped equally often.
        place = int(permute.uniform(epoch_keys(seed, epoch, Purpose.DRAW)[0], 0) * self.candidates.n)
        wrapped = place + self._n_skipped - self.candidates.n
        if wrapped > 0:
            return AllRows(self.candidates, skip_from=0, n_skipped=wrapped)
        return AllRows(self.candidates, skip_from=place, n_skipped=self._n_skipped)


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """Draw given by an array of candidate positions, shape (n_rows,), integers."""

    candidates: Candidates
    chosen: NDArray[Any]

    def rows(self, positions: _Int64s) -> _Int64s:
        return self.candidates.rows(self.chosen[positions].astype(np.int64, copy=False))


@dataclass(frozen=True)
class QuotaSampler(Sampler):
    """Sampler that draws a fixed number of rows of each class without replacement."""

    candidates: Candidates
    codes: NDArray[Any]
    quotas: _Int64s
    counts: _Int64s
    block_size: int

    @cached_property
    def n_rows(self) -> int:
        return int(self.quotas.sum())

    def draw(self, seed: int, epoch: int) -> ChosenRows:
        quotas = np.stack([self.quotas, self.counts - self.quotas], axis=1)
        parts = np.ones(self.candidates.n, dtype=np.int8)
        kernels.deal_by_quota(read_only(self.codes), quotas, epoch_keys(seed, epoch, Purpose.DRAW)[0], parts)
        return ChosenRows(self.candidates, np.flatnonzero(parts == 0))


_SEGMENT_LEVELS = 6
# Number of candidates per segment. The sums of weights of all segments are kept: 1.6 million numbers for 10^8 rows.
_SEGMENT = 1 << _SEGMENT_LEVELS

# Down to this level of the heap, the number of draws in each node is computed once per epoch and kept: half a
# megabyte, 5 ms.
_SPLIT_LEVELS = 16

# Number of candidates whose Gumbel keys are computed to estimate the smallest key that is drawn.
_SAMPLED_KEYS = 65_536

# If weights sum to less than `_TINY`, they are multiplied by `_SCALE` for drawing.
_TINY, _SCALE = 2.0**-500, 2.0**500

# The number of a round is one word of its key.
_MAX_ROUNDS = 2**32


@dataclass(frozen=True, slots=True)
class Weights:
    """Source of the candidates' weights; see `dasksc.kernels.draw`."""

    values: NDArray[Any]
    table: NDArray[np.float64]

    @property
    def arrays(self) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """The arrays in the order of the arguments of kernels, which are compiled once: all arrays are read-only."""
        return read_only(self.values), read_only(self.table)


@dataclass(frozen=True)
class WeightedRows:
    """Weighted draws with replacement, each computed on request."""

    candidates: Candidates
    weights: Weights
    tree: NDArray[np.float64]  # Weights of the nodes of a heap over segments of candidates, see `dasksc.kernels.draw`
    n_draws: int  # Total number of draws
    key: np.uint64  # Key of the draws, uint64
    # If True, the draws are in storage order. If False, they are in random order, and each is computed independently.
    # This is cheaper, and suffices if rows are read one by one, since their order then does not matter.
    in_order: bool

    @cached_property
    def _starts(self) -> _Int64s:
        """First draw of each node in an upper level of the tree, shape (n_nodes + 1,), int64."""
        levels = min(_SPLIT_LEVELS, len(self.tree).bit_length() - 2)
        starts = np.empty((1 << levels) + 1, dtype=np.int64)
        draw_kernels.split_draws(self.n_draws, self.tree, levels, self.key, starts)
        return starts

    def rows(self, positions: _Int64s) -> _Int64s:
        out = np.empty(len(positions), dtype=np.int64)
        levels = (len(self.tree).bit_length() - 2, _SEGMENT_LEVELS)
        source = (self.candidates.n, *self.weights.arrays)
        if self.in_order:
            draw_kernels.drawn_in_order(positions, self._starts, self.tree, *levels, *source, self.key, out)
        else:
            shares = np.empty(len(positions), dtype=np.float64)
            draw_kernels.uniforms(positions, self.key, shares)
            draw_kernels.drawn_singly(shares, self.tree, *levels, *source, out)
        return self.candidates.rows(out)


@dataclass(frozen=True)
class WeightedSampler(Sampler):
    """Sampler of `n_draws` weighted draws: with replacement, or without it in rounds of `round_size`."""

    candidates: Candidates
    weights: Weights
    block_size: int
    n_draws: int
    round_size: int | None

    @property
    def n_rows(self) -> int:
        return self.n_draws

    @property
    def is_shuffled(self) -> bool:
        return self.round_size is None and self.block_size == 1

    @cached_property
    def _tree(self) -> NDArray[np.float64]:
        """Weights of the nodes of a heap over segments of candidates, float64."""
        n_segments = -(-self.candidates.n // _SEGMENT)
        n_leaves = 1 << (n_segments - 1).bit_length()
        tree = np.zeros(2 * n_leaves, dtype=np.float64)
        leaves = tree[n_leaves : n_leaves + n_segments]
        wrong = draw_kernels.segment_sums(self.candidates.n, _SEGMENT, *self.weights.arrays, leaves)
        if wrong >= 0:
            row = int(self.candidates.rows(np.array([wrong]))[0])
            value = self.weights.values[wrong]
            raise InputError(f"weights must be finite and not negative; the weight of row {row} is {value}")
        draw_kernels.sum_up(tree)
        if not 0 < tree[1] < np.inf:
            raise InputError(f"weights must have a positive, finite sum; the sum is {tree[1]}")
        return tree

    def checked(self) -> WeightedSampler:
        """Return the sampler; raise an error if rows cannot be drawn with these weights."""
        if self._tree[1] < _TINY:  # the computation of `_tree` checks the weights
            # Without scaling, shares could be subnormal numbers, which are rounded to multiples of the smallest one.
            scaled = replace(self.weights, values=self.weights.values.astype(np.float64) * _SCALE)
            return replace(self, weights=scaled).checked()
        if self.round_size is not None:
            if self.n_draws > self.round_size * _MAX_ROUNDS:
                raise InputError(
                    f"total_size={self.n_draws} takes more than 2**32 rounds of sampling_size={self.round_size}; lower "
                    "total_size"
                )
            positive = self._n_positive
            if self.round_size > positive:
                raise InputError(
                    f"{self.round_size} rows are to be drawn without replacement, but only {positive} have a positive "
                    "weight; lower total_size or sampling_size, or draw with replace=True"
                )
        return self

    @cached_property
    def _n_positive(self) -> int:
        return int(draw_kernels.count_positive(self.candidates.n, *self.weights.arrays))

    def draw(self, seed: int, epoch: int) -> Draw:
        if self.round_size is None:
            key = epoch_keys(seed, epoch, Purpose.DRAW)[0]
            return WeightedRows(
                self.candidates, self.weights, self._tree, self.n_draws, key, in_order=not self.is_shuffled
            )
        n_rounds = -(-self.n_draws // self.round_size)
        sizes = [self.round_size] * (n_rounds - 1) + [self.n_draws - self.round_size * (n_rounds - 1)]
        keys = (epoch_keys(seed, epoch, Purpose.DRAW, i)[0] for i in range(n_rounds))
        rounds = [self._choose(size, key) for size, key in zip(sizes, keys, strict=True)]
        if n_rounds == 1:
            return ChosenRows(self.candidates, rounds[0])
        chosen = np.concatenate(rounds)
        chosen.sort()
        return ChosenRows(self.candidates, chosen)

    def _choose(self, size: int, key: np.uint64) -> NDArray[Any]:
        """Draw `size` candidates without replacement, in storage order and in the smallest integer type."""
        # Each candidate has a random key (Gumbel noise plus log weight), and those with the largest keys are drawn. A
        # sample of the keys gives two bounds around the smallest drawn key. One pass selects all candidates above the
        # lower bound, and only keys between the bounds are partially sorted.
        n = self.candidates.n
        sampled = np.linspace(0, n - 1, min(n, _SAMPLED_KEYS)).astype(np.int64)
        keys = np.empty(len(sampled), dtype=np.float64)
        draw_kernels.gumbel_keys(sampled, *self.weights.arrays, key, keys)
        keys[::-1].sort()
        rank = size / n * len(keys)
        # `rank` is the estimated position of the smallest drawn key in the sorted sample, and `reach` is about 6
        # standard deviations of this position. The estimate can be further off if the weights are periodic and the
        # interval between sampled candidates is a multiple of the period.
        reach = 6 * np.sqrt(rank) + 6
        n_out, n_near = int((rank + reach) / len(keys) * n) + 1, int(2 * reach / len(keys) * n) + 1
        while True:
            first, last = int(rank - reach), int(rank + reach)
            low = keys[last] if last < len(keys) else -np.inf
            high = keys[first] if first >= 0 else np.inf
            out = np.empty(min(n_out, self._n_positive), dtype=np.int32 if n < 2**31 else np.int64)
            near = np.empty(min(n_near, self._n_positive), dtype=np.int64)
            near_keys = np.empty(len(near), dtype=np.float64)
            n_out, n_near = draw_kernels.select_above(n, *self.weights.arrays, key, low, high, out, near, near_keys)
            if not n_out - n_near <= size <= n_out:
                reach *= 4
            elif n_out <= len(out) and n_near <= len(near):
                break
        surplus = n_out - size
        if not surplus:
            return out[:size]
        return np.delete(out[:n_out], near[np.argpartition(near_keys[:n_near], surplus)[:surplus]])

    def digest(self) -> str:
        return digest_of(self, _fingerprint_of_draws())


@functools.cache
def _fingerprint_of_draws() -> str:
    """Return a digest of some draws, which changes with the version of the kernels and the math library."""
    weights = Weights(np.arange(4096, dtype=np.float64), EMPTY_FLOATS)
    sampler = WeightedSampler(Candidates(n=4096), weights, 8, 1_000_000, None)
    in_order: Any = sampler.draw(0, 0)
    singly = replace(in_order, in_order=False)
    some = np.arange(0, sampler.n_rows, 997)
    return digest_of(in_order.rows(some), singly.rows(some), sampler._choose(500, np.uint64(1)))


# Number of batches among which the draws of a class are distributed at random. Rows that are neighbors in storage are
# thus read together, but are spread over these batches.
_GROUP_UNITS = 16

_GOLDEN = (5**0.5 - 1) / 2

# The product of two numbers of batches fits into int64, and quotas computed from float64 shares sum to the number of
# rows.
_MAX_BATCHES, _MAX_ROWS = 2**31, 2**39


@dataclass(frozen=True, kw_only=True)
class StratifiedRows:
    """Rows of one epoch, batch after batch; any batch can be computed on request."""

    sampler: StratifiedSampler  # Sampler of the rows
    # Random keys of the draws, the groups, the batches and the systematic sampling (see `dasksc.kernels.groups`),
    # shape (4,), uint64.
    keys: NDArray[np.uint64]

    def rows(self, positions: _Int64s) -> _Int64s:
        sampler = self.sampler
        n_units = sampler.n_rows // sampler.unit
        circle = _stride(n_units), int(permute.below(self.keys[3], 0, n_units))
        units, within = np.divmod(positions, sampler.unit)
        groups, group_index = np.unique(units // _GROUP_UNITS, return_inverse=True)
        drawn = np.empty((len(groups), _GROUP_UNITS, sampler.unit), dtype=np.int64)
        source = sampler.quotas, sampler.starts, sampler.members, sampler.run_rows
        kernels.stratified_rows(groups, _GROUP_UNITS, n_units, *source, *circle, self.keys[:3], drawn)
        out = drawn[group_index, units % _GROUP_UNITS, within]
        return sampler.candidates.rows(out)


def _stride(n_units: int) -> int:
    """Return a number coprime to `n_units` whose multiples are evenly distributed modulo `n_units`."""
    stride = max(1, int(n_units * _GOLDEN))
    while gcd(stride, n_units) > 1:
        stride += 1
    return stride % n_units if n_units > 1 else 0


@dataclass(frozen=True, eq=False)
class StratifiedSampler(Sampler):
    """Sampler that gives every batch its share of each class; the shares of an epoch are exact."""

    candidates: Candidates  # Rows to draw from
    members: NDArray[Any]  # Positions of the candidates, sorted by class, integers
    starts: _Int64s  # Start of each class in `members`, shape (n_classes + 1,), int64
    share: NDArray[np.float64] = field(compare=False)  # Probability of each class, shape (n_classes,)
    names: list[Any] = field(compare=False)  # Labels of the classes, for error messages
    run_rows: int  # Number of neighboring rows of a class that are drawn together
    # Number of rows of an epoch; None: the number of candidates or, without replacement, the largest number for which
    # no class runs out of rows.
    total_size: int | None
    replace: bool  # If True, the rows of a class with fewer rows than its quota are drawn repeatedly
    batch_rows: int | None = None  # Number of rows in a batch; None: an epoch is one batch
    block_size = _GROUP_UNITS

    @classmethod
    def of(cls, candidates: Candidates, codes: NDArray[Any], counts: _Int64s, **options: Any) -> StratifiedSampler:
        """Create a sampler; sorting the candidates by class takes four bytes per candidate."""
        starts = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        members = np.empty(starts[-1], dtype=np.int32 if candidates.n < 2**31 else np.int64)
        kernels.list_members(codes, starts.copy(), members)
        return cls(candidates, members, starts, **options)

    def of_batches(self, batch_rows: int) -> StratifiedSampler:
        """Return a sampler for batches of a given size; return self if `batch_rows` is already set."""
        if self.batch_rows is not None:
            return self
        total = self.n_rows
        if self.total_size is None:
            total = total // batch_rows * batch_rows
            if not total and self.replace:
                total = batch_rows
            if not total:
                raise InputError(
                    f"per_batch=True draws {self.n_rows} rows without replacement, fewer than batch_size={batch_rows}; "
                    "lower batch_size, or draw with replace=True"
                )
        elif total % batch_rows:
            near = max(1, total // batch_rows) * batch_rows
            raise InputError(
                f"per_batch=True needs whole batches, but total_size={total} is not a multiple of "
                f"batch_size={batch_rows}; give {near} or {near + batch_rows}"
            )
        if total // batch_rows >= _MAX_BATCHES or total >= _MAX_ROWS:
            raise InputError(
                f"per_batch=True draws fewer than 2**31 batches and 2**39 rows in an epoch; got total_size={total} and "
                f"batch_size={batch_rows}. Give a smaller total_size"
            )
        sampler = replace(self, total_size=total, batch_rows=batch_rows)
        if not self.replace:
            check_quotas(sampler.quotas, np.diff(self.starts), self.names)
        return sampler

    @cached_property
    def n_rows(self) -> int:
        if self.total_size is not None:
            return self.total_size
        return self.candidates.n if self.replace else max_draws(np.diff(self.starts), self.share)

    @cached_property
    def quotas(self) -> _Int64s:
        """Number of rows of each class in an epoch, shape (n_classes,), int64."""
        return largest_remainders(self.share, self.n_rows)

    @property
    def unit(self) -> int:
        """Number of rows in a batch; the rows of a batch stay together."""
        return max(1, self.n_rows) if self.batch_rows is None else self.batch_rows

    def draw(self, seed: int, epoch: int) -> StratifiedRows:
        return StratifiedRows(sampler=self, keys=epoch_keys(seed, epoch, Purpose.DRAW, n=4))

    def digest(self) -> str:
        return digest_of(self, self.quotas)  # quotas, unlike shares, do not differ between math libraries
