"""Weighted draws, with or without replacement."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.kernels import draw as draw_kernels
from dasksc.plan.arrays import EMPTY_FLOATS, EMPTY_INTS, Candidates, read_only
from dasksc.plan.keys import Purpose, digest_of, epoch_keys
from dasksc.plan.samplers import ChosenRows, Draw, Sampler

_Int64s = NDArray[np.int64]

_SEGMENT_LEVELS = 6
# Number of candidates per segment. The sums of weights of all segments are kept: 1.6 million numbers for 10^8 rows.
_SEGMENT = 1 << _SEGMENT_LEVELS

# Down to this level of the heap, the number of draws in each node is computed once per epoch and kept: half a
# megabyte, 5 ms.
_SPLIT_LEVELS = 16

# Number of candidates whose Gumbel keys are computed to estimate the smallest key that is drawn.
_SAMPLED_KEYS = 65_536

# The number of a round is one word of its key.
_MAX_ROUNDS = 2**32


@dataclass(frozen=True, slots=True)
class Weights:
    """Source of the candidates' weights; see `dasksc.kernels.draw`."""

    values: NDArray[Any]
    table: NDArray[np.float64]
    lookup: _Int64s = field(compare=False)

    @property
    def arrays(self) -> tuple[NDArray[Any], NDArray[np.float64], _Int64s]:
        """The arrays in the order of the arguments of kernels, which are compiled once: all arrays are read-only."""
        return read_only(self.values), read_only(self.table), read_only(self.lookup)


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
            value = self.weights.values[self.weights.lookup[wrong] if len(self.weights.lookup) else wrong]
            raise InputError(f"weights must be finite and not negative; the weight of row {row} is {value}")
        draw_kernels.sum_up(tree)
        if not 0 < tree[1] < np.inf:
            raise InputError(f"weights must have a positive, finite sum; the sum is {tree[1]}")
        return tree

    @property
    def total_weight(self) -> float:
        return float(self._tree[1])

    def require_drawable(self) -> None:
        """Raise `InputError` if rows cannot be drawn with these weights."""
        self._tree  # noqa: B018, whose computation checks the weights
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
    weights = Weights(np.arange(4096, dtype=np.float64), EMPTY_FLOATS, EMPTY_INTS)
    sampler = WeightedSampler(Candidates(n=4096), weights, 8, 1_000_000, None)
    in_order: Any = sampler.draw(0, 0)
    singly = replace(in_order, in_order=False)
    some = np.arange(0, sampler.n_rows, 997)
    return digest_of(in_order.rows(some), singly.rows(some), sampler._choose(500, np.uint64(1)))
