"""What an epoch draws: the sampling strategies.

A strategy is a frozen spec. *Binding* it to a collection checks it against the number of rows and
gives a `Sampler`, whose `Sampler.draw` says which rows an epoch holds, in storage order. In which
order they are read, and by whom, is the plan's business (`dasksc.planning.plan`).

Randomness is keyed: `epoch_keys` turns ``(seed, epoch, purpose)`` into independent 64-bit keys, and
everything random is a pure function of a key and a position.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import Any, ClassVar, Protocol, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dasksc.config import whole_number
from dasksc.errors import InputError, MissingKeyError, WrongTypeError
from dasksc.kernels import draw as draw_kernels
from dasksc.kernels import permute
from dasksc.multiindexable import count_rows, take_rows

__all__ = [
    "BlockOrder",
    "BlockShuffling",
    "BlockWeightedSampling",
    "ClassBalancedSampling",
    "Draw",
    "Purpose",
    "Sampler",
    "SamplingStrategy",
    "Streaming",
    "array_of",
    "bind",
    "encode_labels",
    "epoch_keys",
    "is_random",
    "n_rows_named",
    "restricted",
]

logger = logging.getLogger("dasksc.sampling")

_Int64s = NDArray[np.int64]

_TABLE_BLOCKS = 65_536
# Up to here the order of the blocks is a Fisher-Yates table (half a megabyte, 1 ms): a Feistel network
# is always an even permutation and mixes a small domain poorly.

_SEGMENT_LEVELS = 6
_SEGMENT = 1 << _SEGMENT_LEVELS
# Candidates whose weights are summed once and kept as one number: 10^8 rows have 1.6 million of them.

_SPLIT_LEVELS = 16
# Down to this level of the heap the draws of an epoch are split once, and kept: half a megabyte, 5 ms.

_TINY, _SCALE = 2.0**-500, 2.0**500
# Weights that sum to less than the first are drawn by multiplied with the second.

_MOST_FRACTIONS = 100
# More different labels with a fraction are a measurement, not classes.

_SAMPLED_KEYS = 65_536
# Keys that are looked at to guess which are the largest.

_EMPTY_INTS: _Int64s = np.empty(0, dtype=np.int64)
_EMPTY_FLOATS: NDArray[np.float64] = np.empty(0, dtype=np.float64)


class Purpose(enum.IntEnum):
    """What a key is for; keys of different purposes are independent."""

    BLOCKS = 0
    FETCHES = 1
    DEAL = 2
    DRAW = 3
    USER = 4
    TOKENS = 5
    SPLIT = 6


def epoch_keys(seed: int, epoch: int, purpose: Purpose, *more: int, n: int = 1) -> NDArray[np.uint64]:
    """Derive `n` independent 64-bit keys for one purpose of one epoch.

    Parameters
    ----------
    seed
        In [0, 2**64).
    epoch
        In [0, 2**32); each value is a word of its own in the key, so no two ``(seed, epoch)`` collide.
    purpose
        What the keys are for.
    *more
        Further words below 2**32, such as the number of a round.
    n
        How many keys.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch, int(purpose), *more))
    return sequence.generate_state(n, np.uint64).astype(np.uint64, copy=False)


class Draw(Protocol):
    """The rows of one epoch, in storage order."""

    def rows(self, positions: _Int64s, *, ascending: bool = False) -> _Int64s:
        """Return the row numbers at `positions`, each in [0, n_rows); or these rows in ascending order."""

    def digest(self) -> bytes:
        """Return what tells this draw from another."""


class Sampler(Protocol):
    """A strategy bound to a collection: what `EpochPlan` plans with."""

    @property
    def n_rows(self) -> int:
        """Rows of an epoch, over all ranks."""

    @property
    def block_size(self) -> int | None:
        """Rows the plan moves as one; None for runs as long as a fetch."""

    @property
    def shuffle_blocks(self) -> bool:
        """Whether blocks come in a random order rather than in storage order."""

    @property
    def shuffle_rows(self) -> bool:
        """Whether the rows of a fetch are permuted."""

    @property
    def is_shuffled(self) -> bool:
        """Whether draws are independent of their positions, so that blocks need no other order."""

    def draw(self, seed: int, epoch: int) -> Draw:
        """Draw an epoch."""

    def digest(self) -> str:
        """Return a hex digest of everything the draws depend on but the seed and the epoch."""


# --- What users give --------------------------------------------------------------------------------

_TAKEN_AS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float16): np.dtype(np.float32),
    np.dtype(np.longdouble): np.dtype(np.float64),
}
# Types that kernels do not take, and those that they are converted to.


def array_of(name: str, values: Any) -> NDArray[Any]:
    """Return an argument as an array that kernels take: aligned and of native byte order.

    Parameters
    ----------
    name
        What errors call it.
    values
        Anything that NumPy makes an array of, or a tensor. Copied only where kernels need another type.

    Raises
    ------
    InputError
        If NumPy makes no array of its type or values, or entries are masked.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu()  # NumPy takes no tensor that requires gradients or is on a GPU
    try:
        array = np.asanyarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name} cannot be made an array: {error}") from error
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        n_masked = int(np.ma.getmaskarray(array).sum())
        raise InputError(f"{name} has {n_masked} masked entries, which have no value; leave them out")
    array = np.asarray(array)
    native = array.dtype.newbyteorder("=")
    taken: NDArray[Any] = np.require(array, cast(Any, _TAKEN_AS.get(native, native)), "A")
    return taken


# --- The rows a strategy draws from ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidates:
    """The rows a strategy may draw: a range, or a sorted array.

    Parameters
    ----------
    n
        How many.
    start
        The first row of a range.
    array
        The rows in ascending order, shape (n,), int64; None for a range.
    given
        Which of the entries the user gave each candidate was, shape (n,), int64; None if they were
        given in ascending order.
    """

    n: int
    start: int = 0
    array: _Int64s | None = None
    given: _Int64s | None = None

    @classmethod
    def of(cls, indices: Any, n_obs: int) -> Candidates:
        """Normalise None, a slice, a boolean mask or row numbers in any order."""
        if indices is None:
            return cls(n=n_obs)
        if isinstance(indices, range):
            indices = np.arange(indices.start, indices.stop, indices.step)
        if isinstance(indices, slice):
            try:
                span = range(*indices.indices(n_obs))
            except (TypeError, ValueError) as error:
                raise InputError(f"indices={indices!r} is no slice of rows: {error}") from error
            if span.step == 1:
                return cls(n=len(span), start=span.start)
            indices = np.arange(span.start, span.stop, span.step)
        array = asked = _index_array(indices)
        if array.dtype == np.bool_:
            if len(array) != n_obs:
                raise InputError(
                    f"a boolean mask of {len(array)} entries was given as indices of {n_obs} rows; "
                    "give one entry per row"
                )
            array = np.flatnonzero(array)
        given = None
        if np.any(array[1:] < array[:-1]):
            given = np.argsort(array, kind="stable")
            array = array[given]
        if len(array) and (array[0] < 0 or array[-1] >= n_obs):
            wrong = array[0] if array[0] < 0 else array[-1]
            raise InputError(f"indices hold {wrong}, but the collection has rows 0 to {n_obs - 1}")
        if len(array) and int(array[-1]) - int(array[0]) == len(array) - 1 and np.all(array[1:] > array[:-1]):
            return cls(n=len(array), start=int(array[0]), given=given)
        # Copied if it could change later: not what was made here, nor what nobody can write to.
        may_change = array is asked and (array.flags.writeable or not array.flags.owndata)
        rows = array.astype(np.int64, copy=may_change)
        rows.flags.writeable = False
        return cls(n=len(rows), array=rows, given=given)

    def entries(self, name: str, values: NDArray[Any], n_obs: int) -> tuple[NDArray[Any], _Int64s]:
        """Return `values`, one per row of the collection or per entry given, as the kernels want them.

        Returns
        -------
        values, lookup
            Candidate i's value is ``values[lookup[i]]``, or ``values[i]`` where `lookup` is empty. Copies
            only values given in another order than the rows'.
        """
        if len(values) == n_obs:
            if self.array is None:
                return values[self.start : self.start + self.n], _EMPTY_INTS
            return values, self.array
        if len(values) == self.n:
            return (values if self.given is None else values[self.given]), _EMPTY_INTS
        expected = f"{n_obs} (one per row)"
        if self.n != n_obs:
            expected += f" or {self.n} (one per entry of indices)"
        raise InputError(f"{name} has {len(values)} entries; expected {expected}")

    def rows(self, positions: _Int64s) -> _Int64s:
        """Return the row number of each candidate position; `positions` itself where both are the same."""
        if self.array is not None:
            return self.array[positions]
        return positions + self.start if self.start else positions

    def digest(self) -> str:
        """Return a hex digest."""
        return _digest(self.n, self.start, self.array)


def _index_array(indices: Any) -> NDArray[Any]:
    """Return indices as an array of row numbers, or as the mask that they are."""
    array = array_of("indices", indices)
    if array.ndim != 1:
        raise InputError(f"indices must be one-dimensional; got shape {array.shape}")
    if len(array) == 0:
        return _EMPTY_INTS
    if array.dtype.kind not in "iub":
        raise InputError(f"indices must be row numbers, a slice or a boolean mask; got dtype {array.dtype}")
    return array


def _digest(*parts: Any) -> str:
    """Hash arrays by content and everything else by repr."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, np.ndarray):
            state.update(f"{part.dtype.str}{part.shape}".encode())
            state.update(np.ascontiguousarray(part).data)
        else:
            state.update(repr(part).encode())
        state.update(b"|")
    return state.hexdigest()


# --- Draws ----------------------------------------------------------------------------------------


def _ascending(rows: _Int64s) -> _Int64s:
    return np.sort(rows) if np.any(rows[1:] < rows[:-1]) else rows


@dataclass(frozen=True, slots=True)
class AllRows:
    """Every candidate once; `n_skipped` of them, from `skip_from` on, left out."""

    candidates: Candidates
    skip_from: int = 0
    n_skipped: int = 0

    def rows(self, positions: _Int64s, *, ascending: bool = False) -> _Int64s:
        """See `Draw.rows`."""
        if self.n_skipped:
            positions = positions + self.n_skipped * (positions >= self.skip_from)
        rows = self.candidates.rows(positions)
        return _ascending(rows) if ascending else rows

    def digest(self) -> bytes:
        """See `Draw.digest`."""
        return f"{self.skip_from},{self.n_skipped}".encode()


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """Candidates held one by one: shape (n_rows,), integers."""

    candidates: Candidates
    chosen: NDArray[Any]

    def rows(self, positions: _Int64s, *, ascending: bool = False) -> _Int64s:
        """See `Draw.rows`."""
        rows = self.candidates.rows(self.chosen[positions].astype(np.int64, copy=False))
        return _ascending(rows) if ascending else rows

    def digest(self) -> bytes:
        """See `Draw.digest`."""
        return _digest(self.chosen).encode()


@dataclass(frozen=True, slots=True)
class Weights:
    """Where the weight of a candidate comes from; see `dasksc.kernels.draw`."""

    values: NDArray[Any]
    table: NDArray[np.float64]
    lookup: _Int64s


@dataclass(frozen=True)
class WeightedRows:
    """Draws with replacement, each found when asked for.

    Parameters
    ----------
    candidates, weights
        What is drawn from.
    tree
        Weights of the nodes of a heap over segments of candidates, see `dasksc.kernels.draw`.
    n_draws
        Draws in all.
    key
        What they are keyed by.
    in_order
        Whether draws stand in storage order; else each is made by itself, which is cheaper for single
        rows and the same for draws that are read one by one.
    """

    candidates: Candidates
    weights: Weights
    tree: NDArray[np.float64]
    n_draws: int
    key: np.uint64
    in_order: bool

    @cached_property
    def _starts(self) -> _Int64s:
        """Where the draws of each node of an upper level of the tree begin."""
        levels = min(_SPLIT_LEVELS, len(self.tree).bit_length() - 2)
        starts = np.empty((1 << levels) + 1, dtype=np.int64)
        draw_kernels.split_draws(self.n_draws, self.tree, levels, self.key, starts)
        return starts

    def rows(self, positions: _Int64s, *, ascending: bool = False) -> _Int64s:
        """See `Draw.rows`."""
        out = np.empty(len(positions), dtype=np.int64)
        weights = self.weights
        levels = (len(self.tree).bit_length() - 2, _SEGMENT_LEVELS)
        source = (self.candidates.n, weights.values, weights.table, weights.lookup)
        if self.in_order:
            positions = _ascending(positions) if ascending else positions
            draw_kernels.drawn_in_order(positions, self._starts, self.tree, *levels, *source, self.key, out)
        else:
            shares = np.empty(len(positions), dtype=np.float64)
            draw_kernels.uniforms(positions, self.key, shares)
            if ascending:
                shares.sort()
            draw_kernels.drawn_singly(shares, self.tree, *levels, *source, out)
        return self.candidates.rows(out)

    def digest(self) -> bytes:
        """See `Draw.digest`. Libraries may differ in their logarithms, so it looks at some of the draws."""
        probes = np.linspace(0, self.n_draws - 1, min(self.n_draws, 256)).astype(np.int64)
        return _digest(self.key, self.rows(probes)).encode()


# --- Samplers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowSampler:
    """Every candidate once an epoch, but for a short block that may be dropped."""

    candidates: Candidates
    block_size: int | None
    shuffle_blocks: bool
    shuffle_rows: bool
    drop_last: bool = False
    is_shuffled: ClassVar[bool] = False

    @property
    def _n_skipped(self) -> int:
        return self.candidates.n % self.block_size if self.drop_last and self.block_size else 0

    @property
    def n_rows(self) -> int:
        """See `Sampler.n_rows`."""
        return self.candidates.n - self._n_skipped

    def draw(self, seed: int, epoch: int) -> AllRows:
        """See `Sampler.draw`."""
        if not self._n_skipped:
            return AllRows(self.candidates)
        # Those from a random row on, past the end from the first on, so that all are left out as often.
        place = int(permute.uniform(epoch_keys(seed, epoch, Purpose.DRAW)[0], 0) * self.candidates.n)
        wrapped = place + self._n_skipped - self.candidates.n
        if wrapped > 0:
            return AllRows(self.candidates, skip_from=0, n_skipped=wrapped)
        return AllRows(self.candidates, skip_from=place, n_skipped=self._n_skipped)

    def digest(self) -> str:
        """See `Sampler.digest`."""
        return _digest(
            "rows", self.candidates.digest(), self.block_size, self.shuffle_blocks, self.shuffle_rows, self.drop_last
        )


@dataclass(frozen=True)
class WeightedSampler:
    """`n_rows` draws by weight, with replacement, or without it in rounds of `round_size`."""

    candidates: Candidates
    weights: Weights
    block_size: int
    n_rows: int
    round_size: int | None
    shuffle_blocks: ClassVar[bool] = True
    shuffle_rows: ClassVar[bool] = True

    @property
    def is_shuffled(self) -> bool:
        """See `Sampler.is_shuffled`."""
        return self.round_size is None and self.block_size == 1

    @cached_property
    def _tree(self) -> NDArray[np.float64]:
        """Weights of a heap over segments of candidates."""
        n_segments = -(-self.candidates.n // _SEGMENT)
        n_leaves = 1 << (n_segments - 1).bit_length()
        tree = np.zeros(2 * n_leaves, dtype=np.float64)
        weights = self.weights
        wrong = draw_kernels.segment_sums(
            self.candidates.n,
            _SEGMENT,
            weights.values,
            weights.table,
            weights.lookup,
            tree[n_leaves : n_leaves + n_segments],
        )
        if wrong >= 0:
            row = int(self.candidates.rows(np.array([wrong]))[0])
            raise InputError(f"weights must be finite and not negative; that of row {row} is not")
        draw_kernels.sum_up(tree)
        if not 0 < tree[1] < np.inf:
            raise InputError(f"weights must have a positive, finite sum; it is {tree[1]}")
        return tree

    @property
    def total_weight(self) -> float:
        """Sum of the weights."""
        return float(self._tree[1])

    def check(self) -> None:
        """Refuse weights that cannot be drawn by."""
        tree = self._tree
        if self.round_size is not None:
            positive = self._n_positive
            if self.round_size > positive:
                raise InputError(
                    f"{self.round_size} rows without replacement were asked for, but only {positive} have a "
                    "positive weight; lower total_size or sampling_size, or draw with replace=True"
                )
        tree.flags.writeable = False

    @property
    def _source(self) -> tuple[NDArray[Any], NDArray[np.float64], _Int64s]:
        return self.weights.values, self.weights.table, self.weights.lookup

    @cached_property
    def _n_positive(self) -> int:
        return int(draw_kernels.count_positive(self.candidates.n, *self._source))

    def draw(self, seed: int, epoch: int) -> Draw:
        """See `Sampler.draw`."""
        return self._draw_all(seed, epoch) if self.round_size is None else self._draw_rounds(seed, epoch)

    def _draw_all(self, seed: int, epoch: int) -> WeightedRows:
        return WeightedRows(
            candidates=self.candidates,
            weights=self.weights,
            tree=self._tree,
            n_draws=self.n_rows,
            key=epoch_keys(seed, epoch, Purpose.DRAW)[0],
            in_order=not self.is_shuffled,
        )

    def _draw_rounds(self, seed: int, epoch: int) -> ChosenRows:
        assert self.round_size is not None
        n_rounds = -(-self.n_rows // self.round_size)
        sizes = [self.round_size] * (n_rounds - 1) + [self.n_rows - self.round_size * (n_rounds - 1)]
        keys = (epoch_keys(seed, epoch, Purpose.DRAW, i)[0] for i in range(n_rounds))
        rounds = [self._choose(size, key) for size, key in zip(sizes, keys, strict=True)]
        if n_rounds == 1:
            return ChosenRows(self.candidates, rounds[0])
        chosen = np.concatenate(rounds)
        chosen.sort()
        return ChosenRows(self.candidates, chosen)

    def _choose(self, size: int, key: np.uint64) -> NDArray[Any]:
        """Draw `size` candidates without replacement; in storage order, in the fewest bytes.

        They are those with the largest keys. A sample of the keys says between which two the smallest of
        them lies; one pass takes all above the lower, and only those between the two are sorted.
        """
        n = self.candidates.n
        sampled = np.linspace(0, n - 1, min(n, _SAMPLED_KEYS)).astype(np.int64)
        keys = np.empty(len(sampled), dtype=np.float64)
        draw_kernels.gumbel_keys(sampled, *self._source, key, keys)
        keys[::-1].sort()
        rank = size / n * len(keys)
        reach = 6 * np.sqrt(rank) + 6  # standard deviations, unless weights repeat with the sample's step
        n_out, n_near = int((rank + reach) / len(keys) * n) + 1, int(2 * reach / len(keys) * n) + 1
        while True:
            first, last = int(rank - reach), int(rank + reach)
            low = keys[last] if last < len(keys) else -np.inf
            high = keys[first] if first >= 0 else np.inf
            out = np.empty(min(n_out, self._n_positive), dtype=np.int32 if n < 2**31 else np.int64)
            near = np.empty(min(n_near, self._n_positive), dtype=np.int64)
            near_keys = np.empty(len(near), dtype=np.float64)
            n_out, n_near = draw_kernels.select_above(n, *self._source, key, low, high, out, near, near_keys)
            if not n_out - n_near <= size <= n_out:
                reach *= 4
            elif n_out <= len(out) and n_near <= len(near):
                break
        surplus = n_out - size
        lowest = np.argpartition(near_keys[:n_near], surplus)[:surplus] if surplus else _EMPTY_INTS
        draw_kernels.leave_out(out, n_out, np.sort(near[lowest]))
        return out[:size]

    def digest(self) -> str:
        """See `Sampler.digest`."""
        weights = self.weights
        return _digest(
            "weighted",
            self.candidates.digest(),
            weights.values,
            weights.table,
            self.block_size,
            self.n_rows,
            self.round_size,
            _way_of_drawing(),
        )


@functools.cache
def _way_of_drawing() -> str:
    """Return a digest of some draws: those of another version, or with other logarithms, have another."""
    weights = Weights(np.arange(4096, dtype=np.float64), _EMPTY_FLOATS, _EMPTY_INTS)
    sampler = WeightedSampler(Candidates(n=4096), weights, 8, 1_000_000, None)
    in_order = sampler._draw_all(0, 0)
    singly = replace(in_order, in_order=False)
    some = np.arange(0, sampler.n_rows, 997)
    return _digest(in_order.rows(some), singly.rows(some), sampler._choose(500, np.uint64(1)))


@dataclass(frozen=True)
class QuotaSampler:
    """A fixed number of each class, without replacement."""

    candidates: Candidates
    codes: NDArray[Any]
    lookup: _Int64s
    quotas: _Int64s
    counts: _Int64s
    block_size: int
    shuffle_blocks: ClassVar[bool] = True
    shuffle_rows: ClassVar[bool] = True
    is_shuffled: ClassVar[bool] = False

    @property
    def n_rows(self) -> int:
        """See `Sampler.n_rows`."""
        return int(self.quotas.sum())

    def draw(self, seed: int, epoch: int) -> ChosenRows:
        """See `Sampler.draw`."""
        out = np.empty(self.n_rows, dtype=np.int64)
        draw_kernels.select_quotas(
            self.candidates.n,
            self.codes,
            self.lookup,
            self.quotas.copy(),
            self.counts.copy(),
            epoch_keys(seed, epoch, Purpose.DRAW)[0],
            out,
        )
        return ChosenRows(self.candidates, out)

    def digest(self) -> str:
        """See `Sampler.digest`."""
        return _digest("quotas", self.candidates.digest(), self.codes, self.quotas, self.counts, self.block_size)


@dataclass(frozen=True)
class UserSampler:
    """A user's own strategy, asked for all its indices once an epoch."""

    strategy: SamplingStrategy
    collection: Any
    n_obs: int
    n_rows: int
    block_size: ClassVar[None] = None
    shuffle_blocks: ClassVar[bool] = False
    is_shuffled: ClassVar[bool] = False

    @property
    def shuffle_rows(self) -> bool:
        """See `Sampler.shuffle_rows`."""
        return bool(self.strategy._shuffle_before_yield)

    def draw(self, seed: int, epoch: int) -> ChosenRows:
        """See `Sampler.draw`."""
        # Below 2**63, and int: what a user hands to any generator's constructor.
        key = int(epoch_keys(seed, epoch, Purpose.USER)[0] >> np.uint64(1))
        name = type(self.strategy).__name__
        rows = array_of(f"what {name}.get_indices returns", self.strategy.get_indices(self.collection, seed=key))
        if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
            raise InputError(f"{name}.get_indices must return row numbers; got {rows.dtype} of shape {rows.shape}")
        if len(rows) != self.n_rows:
            raise InputError(f"{name}.get_len promised {self.n_rows} rows, get_indices returned {len(rows)}")
        if len(rows) and (rows.min() < 0 or rows.max() >= self.n_obs):
            raise InputError(f"{name}.get_indices returned rows outside [0, {self.n_obs})")
        return ChosenRows(Candidates(n=self.n_obs), rows.astype(np.int64, copy=False))

    def digest(self) -> str:
        """See `Sampler.digest`."""
        return _digest("user", type(self.strategy).__qualname__, self.n_rows, self.draw(0, 0).chosen)


# --- The order of blocks --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """A keyed order of ``range(n_blocks)``, or storage order."""

    n_blocks: int
    table: _Int64s
    half_bits: int
    round_keys: NDArray[np.uint64]

    @classmethod
    def storage(cls, n_blocks: int) -> BlockOrder:
        """Keep blocks where they are."""
        return cls(n_blocks, _EMPTY_INTS, 0, np.empty(0, dtype=np.uint64))

    @classmethod
    def shuffled(cls, n_blocks: int, seed: int, epoch: int) -> BlockOrder:
        """Put blocks in a random order; O(min(n_blocks, 65,536)) time and memory."""
        keys = epoch_keys(seed, epoch, Purpose.BLOCKS, n=permute.N_ROUNDS)
        if n_blocks <= _TABLE_BLOCKS:
            table = np.empty(n_blocks, dtype=np.int64)
            permute.shuffle(keys[0], table)
            return cls(n_blocks, table, 0, keys)
        return cls(n_blocks, _EMPTY_INTS, -(-(n_blocks - 1).bit_length() // 2), keys)

    def at(self, positions: _Int64s) -> _Int64s:
        """Return the block at each of `positions` of the order."""
        out = np.empty(len(positions), dtype=np.int64)
        permute.permuted_many(positions, self.n_blocks, self.table, self.half_bits, self.round_keys, out)
        return out


# --- The strategies -------------------------------------------------------------------------------


class SamplingStrategy:
    """What to draw from a collection. Derive from it to write your own.

    A subclass needs `get_len` and `get_indices` only. It then works under ranks, DataLoader workers
    and resuming: `get_indices` is called once an epoch on every rank with the same seed, and its
    result, which must depend on nothing else, is dealt out in runs as long as a fetch.

    Parameters
    ----------
    indices
        Row numbers, kept sorted in ``_indices`` for the subclass to use.
    """

    _shuffle_before_yield: ClassVar[bool | None] = None
    """Whether the rows of a fetch are permuted before they are cut into batches."""
    _indices: _Int64s | None = None

    def __init__(self, indices: ArrayLike | None = None) -> None:
        if indices is not None:
            array = _index_array(indices)
            self._indices = np.sort(np.flatnonzero(array) if array.dtype == np.bool_ else array)

    def get_len(self, data_collection: Any) -> int:
        """Return the number of rows of an epoch."""
        raise NotImplementedError(f"{type(self).__name__} must define get_len(collection)")

    def get_indices(
        self,
        data_collection: Any,
        seed: int | None = None,
        rng: np.random.Generator | None = None,
    ) -> _Int64s:
        """Return the rows of an epoch in the order they are to be read.

        Parameters
        ----------
        data_collection
            What the strategy draws from: anything with ``len()``.
        seed
            Equal seeds give equal rows; None draws one.
        rng
            Used instead of `seed` when given.

        Returns
        -------
        ndarray
            Row numbers, shape (get_len(data_collection),), int64.
        """
        raise NotImplementedError(f"{type(self).__name__} must define get_indices(collection, seed, rng)")


class _BuiltIn(SamplingStrategy):
    """What the four strategies share: they are bound to a number of rows, and listed for a look."""

    def bind(self, n_obs: int, labels_of: Callable[[str], Any]) -> Sampler:
        """Check the strategy against `n_obs` rows and return what the plan draws with."""
        raise NotImplementedError

    def get_len(self, data_collection: Any) -> int:
        """Return the number of rows of an epoch."""
        return _bind_collection(self, data_collection).n_rows

    def get_indices(
        self,
        data_collection: Any,
        seed: int | None = None,
        rng: np.random.Generator | None = None,
    ) -> _Int64s:
        """Return the rows of an epoch, blocks in order; see `SamplingStrategy.get_indices`."""
        if rng is not None:
            seed = int(rng.integers(2**63))
        elif seed is None:
            seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
        sampler = _bind_collection(self, data_collection)
        n = sampler.n_rows
        positions = np.arange(n, dtype=np.int64)
        if sampler.shuffle_blocks and sampler.block_size:
            n_full, short = divmod(n, sampler.block_size)
            order = BlockOrder.shuffled(n_full, seed, 0)
            blocks = order.at(np.arange(n_full, dtype=np.int64))
            positions = (blocks[:, None] * sampler.block_size + np.arange(sampler.block_size)).ravel()
            if short:
                where = int(permute.below(epoch_keys(seed, 0, Purpose.DEAL)[0], 0, n_full + 1))
                tail = np.arange(n - short, n)
                positions = np.insert(positions, where * sampler.block_size, tail)
        return sampler.draw(seed, 0).rows(positions)


def _bind_collection(strategy: _BuiltIn, collection: Any) -> Sampler:
    return strategy.bind(len(collection), lambda key: _obs_column(collection, key))


def _obs_column(collection: Any, key: str) -> Any:
    obs = getattr(collection, "obs", None)
    if obs is None:
        raise InputError(
            f"label_key={key!r} names an obs column, but a {type(collection).__name__} has no obs; pass labels="
        )
    if key not in obs:
        raise MissingKeyError(f"label_key={key!r} is not a column of obs; it has {list(obs)}")
    return obs[key]


def bind(strategy: SamplingStrategy, collection: Any, n_obs: int, labels_of: Callable[[str], Any]) -> Sampler:
    """Bind any strategy to a collection.

    Parameters
    ----------
    strategy
        One of ours, or a user's subclass of `SamplingStrategy`.
    collection
        Handed to a user's strategy.
    n_obs
        Rows of the collection.
    labels_of
        Returns an obs column by its name.

    Raises
    ------
    InputError
        If the strategy does not fit the collection.
    """
    if isinstance(strategy, _BuiltIn):
        return strategy.bind(n_obs, labels_of)
    if not isinstance(strategy, SamplingStrategy):
        raise WrongTypeError(
            f"strategy must be a SamplingStrategy such as dasksc.BlockShuffling(); got {type(strategy).__name__}"
        )
    n_rows: Any = strategy.get_len(collection)
    if isinstance(n_rows, bool) or not isinstance(n_rows, (int, np.integer)) or n_rows < 0:
        raise InputError(f"{type(strategy).__name__}.get_len must return a number of rows; got {n_rows!r}")
    return UserSampler(strategy, collection, n_obs, int(n_rows))


def is_random(sampler: Sampler) -> bool:
    """Return whether epochs depend on the seed."""
    return not isinstance(sampler, RowSampler) or sampler.shuffle_blocks or sampler.shuffle_rows


def n_rows_named(strategy: SamplingStrategy) -> int | None:
    """Return how many rows a collection has at least by the indices of a strategy; None if these do not say."""
    indices = getattr(strategy, "indices", getattr(strategy, "_indices", None))
    if indices is None or isinstance(indices, slice):
        return None
    array = _index_array(indices)
    return len(array) if array.dtype == np.bool_ or not len(array) else int(array.max()) + 1


def restricted(strategy: SamplingStrategy, keep: NDArray[np.bool_], by: str) -> SamplingStrategy:
    """Return a strategy that draws only those of its rows that are to be kept.

    Parameters
    ----------
    strategy
        One of those of this module.
    keep
        Whether each row of the collection is kept, shape (n_obs,).
    by
        What says so, for errors.

    Raises
    ------
    InputError
        If nothing is left to draw, or the strategy is a user's own.
    """
    if not isinstance(strategy, _BuiltIn):
        raise InputError(
            f"the filter {by} cannot be applied to a {type(strategy).__name__}, which says itself what it draws; give "
            "it the rows of dasksc.rows_where(...)"
        )
    n_obs = len(keep)
    candidates = Candidates.of(getattr(strategy, "indices", None), n_obs)
    if candidates.array is None:
        kept = np.flatnonzero(keep[candidates.start : candidates.start + candidates.n])
    else:
        kept = np.flatnonzero(keep[candidates.array])
    if not len(kept):
        raise InputError(f"the filter {by} holds for none of the {candidates.n} rows to draw from")
    rows = candidates.rows(kept)
    # So that binding the strategy keeps them rather than a copy.
    rows.flags.writeable = False
    changed: dict[str, Any] = {"indices": rows}
    for name in ("weights", "labels"):
        values = getattr(strategy, name, None)
        if values is not None and len(values) == candidates.n != n_obs:
            if len(kept) == n_obs:
                raise InputError(f"{name} per entry of indices cannot be told from {name} per row; give one per row")
            changed[name] = take_rows(values, kept if candidates.given is None else candidates.given[kept])
    return cast(SamplingStrategy, replace(cast(Any, strategy), **changed))


def _check_sizes(strategy: BlockShuffling | BlockWeightedSampling | ClassBalancedSampling) -> None:
    """Refuse sizes that are none, and keep the others as Python's integers, which never overflow."""
    for name in ("block_size", "total_size", "sampling_size"):
        value = getattr(strategy, name, None)
        if value is not None or name == "block_size":
            object.__setattr__(strategy, name, whole_number(name, value))


def _check_entries(name: str, values: Any, indices: Any) -> None:
    """Refuse values that fit neither `indices` nor the rows of any collection that has them all."""
    try:
        n = count_rows(values)
    except TypeError as error:
        raise WrongTypeError(f"{name} must be one per row; got {values!r}") from error
    except ValueError as error:
        raise InputError(f"{name} have chunks of unknown sizes; call compute_chunk_sizes() on them first") from error
    if n == 0:
        raise InputError(f"{name} are empty; give one per row")
    if indices is None or isinstance(indices, slice):
        return
    array = _index_array(indices)
    is_mask = array.dtype == np.bool_
    n_given = int(np.count_nonzero(array)) if is_mask else len(array)
    n_rows = len(array) if is_mask or not len(array) else int(array.max()) + 1
    if n != n_given and (n < n_rows or (is_mask and n > n_rows)):
        raise InputError(
            f"{name} has {n} entries, and indices {'are a mask of' if is_mask else 'need at least'} {n_rows} rows, "
            f"{n_given} of them given; give one per row of the collection, or one per entry of indices"
        )


@dataclass(frozen=True, eq=False)
class Streaming(_BuiltIn):
    """Every row once, in storage order.

    Since that order is kept, the rows that ``drop_last`` leaves out of an epoch are always those at the
    end, with `shuffle` too.

    Parameters
    ----------
    indices
        Rows to stream through: row numbers in any order, a boolean mask or a slice. None: all.
    shuffle
        Whether to permute the rows of each fetch.
    """

    indices: Any = None
    shuffle: bool = False

    @property
    def _shuffle_before_yield(self) -> bool:  # type: ignore[override]
        return self.shuffle

    def bind(self, n_obs: int, labels_of: Callable[[str], Any]) -> Sampler:
        """See `bind`."""
        return RowSampler(Candidates.of(self.indices, n_obs), None, shuffle_blocks=False, shuffle_rows=self.shuffle)


@dataclass(frozen=True, eq=False)
class BlockShuffling(_BuiltIn):
    """Every row once: blocks of neighbouring rows in a random order, rows permuted inside each fetch.

    Parameters
    ----------
    block_size
        Rows of a block. Larger blocks read faster and mix less; one of all rows is taken as two.
    indices
        Rows to draw from: row numbers in any order, a boolean mask or a slice. None: all.
    drop_last
        Leave out as many rows as the last block is short, at a place that changes with the epoch: every row
        as often as any other.
    """

    block_size: int = 8
    indices: Any = None
    drop_last: bool = False
    _shuffle_before_yield: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_sizes(self)

    def bind(self, n_obs: int, labels_of: Callable[[str], Any]) -> Sampler:
        """See `bind`."""
        candidates = Candidates.of(self.indices, n_obs)
        block_size = self.block_size
        if block_size >= candidates.n > 1 and not self.drop_last:
            # One block has one order only, and where a fetch is shorter, the same rows would come last in every
            # epoch: with drop_last they would never be seen.
            block_size = -(-candidates.n // 2)
        return RowSampler(candidates, block_size, shuffle_blocks=True, shuffle_rows=True, drop_last=self.drop_last)


def _check_rounds(strategy: BlockWeightedSampling | ClassBalancedSampling) -> None:
    _check_sizes(strategy)
    if strategy.sampling_size is not None and strategy.replace:
        logger.warning("sampling_size=%s means nothing with replace=True; ignored", strategy.sampling_size)


@dataclass(frozen=True, eq=False)
class BlockWeightedSampling(_BuiltIn):
    """Draw rows by weight; in storage order cut into blocks, blocks in a random order.

    Parameters
    ----------
    block_size
        Draws of a block.
    indices
        Rows to draw from: row numbers in any order, a boolean mask or a slice. None: all.
    weights
        One weight per row of the collection, or per entry of `indices`, in their order; any scale. None:
        equal.
    total_size
        Draws of an epoch, over all ranks. Default: as many as there are rows to draw from.
    replace
        Whether a row can be drawn twice.
    sampling_size
        With ``replace=False``: draw in rounds of this many, without replacement inside a round. Without
        it, `total_size` rows are drawn without replacement.

    Raises
    ------
    InputError
        If weights are negative, not finite, all zero or of the wrong length, or if more rows are to be
        drawn without replacement than have a positive weight.
    """

    block_size: int = 8
    indices: Any = None
    weights: Any = None
    total_size: int | None = None
    replace: bool = True
    sampling_size: int | None = None
    _shuffle_before_yield: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_rounds(self)
        if self.weights is not None:
            weights = array_of("weights", self.weights)
            if weights.ndim != 1 or weights.dtype.kind not in "biufc":
                raise InputError(f"weights must be one number per row; got {weights.dtype} of shape {weights.shape}")
            if weights.dtype.kind == "c":
                raise InputError("weights must be real numbers; got complex ones")
            if len(weights):
                _check_entries("weights", weights, self.indices)
            object.__setattr__(self, "weights", weights)

    def bind(self, n_obs: int, labels_of: Callable[[str], Any]) -> Sampler:
        """See `bind`."""
        candidates = Candidates.of(self.indices, n_obs)
        if candidates.n == 0:
            raise InputError("there are no rows to draw from: indices are empty")
        if self.weights is None:
            weights = Weights(_EMPTY_FLOATS, _EMPTY_FLOATS, _EMPTY_INTS)
        else:
            values, lookup = candidates.entries("weights", self.weights, n_obs)
            weights = Weights(values, _EMPTY_FLOATS, lookup)
        return _weighted(self, candidates, weights)


def _weighted(
    strategy: BlockWeightedSampling | ClassBalancedSampling, candidates: Candidates, weights: Weights
) -> Sampler:
    total = candidates.n if strategy.total_size is None else int(strategy.total_size)
    round_size = None
    if not strategy.replace:
        round_size = total if strategy.sampling_size is None else int(strategy.sampling_size)
    sampler = WeightedSampler(candidates, weights, int(strategy.block_size), total, round_size)
    if 0 < sampler.total_weight < _TINY:
        # Shares of denormal numbers would be rounded to whole multiples of the smallest.
        scaled = replace(weights, values=weights.values.astype(np.float64) * _SCALE)
        sampler = replace(sampler, weights=scaled)
    sampler.check()
    return sampler


@dataclass(frozen=True, eq=False)
class ClassBalancedSampling(_BuiltIn):
    """Draw classes evenly: each of the K classes with probability ``1 / K`` unless smoothed.

    Class c, with frequency ``f_c`` among the rows to draw from, is drawn with probability
    ``(1 - smoothing) / K + smoothing * f_c``, scaled by its entry in `class_weights`; inside a class
    every row is as likely as another. Rows without a label (NaN, None, masked, -1) are never drawn.

    Parameters
    ----------
    labels
        A label per row of the collection, or per entry of `indices`, in their order: an array, a pandas
        Series or Categorical, a 1-D Dask array. Whole numbers below 0 are no label, in whatever type;
        categories are labels whatever they are.
    block_size
        Draws of a block.
    indices
        Rows to draw from: row numbers in any order, a boolean mask or a slice. None: all.
    total_size
        Draws of an epoch, over all ranks. Default: as many as there are rows to draw from; with
        ``replace=False`` as many as the rarest class allows.
    replace
        Whether a row can be drawn twice.
    sampling_size
        With ``replace=False``: draw in rounds of this many, without replacement inside a round.
        Without it each class gets its exact share of `total_size`.
    label_key
        The obs column to take the labels from, instead of `labels`.
    smoothing
        0 balances fully, 1 keeps the natural distribution.
    class_weights
        Factors by label; classes not named keep 1.

    Raises
    ------
    InputError
        If neither or both of `labels` and `label_key` are given, no row has a label, labels are
        continuous (numbers with fractions, more than 100 different ones or one for every other row),
        `smoothing` is outside [0, 1], or a class has fewer rows than are to be drawn from it without
        replacement.
    """

    labels: Any = None
    block_size: int = 8
    indices: Any = None
    total_size: int | None = None
    replace: bool = True
    sampling_size: int | None = None
    _: KW_ONLY
    label_key: str | None = None
    smoothing: float = 0.0
    class_weights: Mapping[Any, float] | None = field(default=None)
    _shuffle_before_yield: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_rounds(self)
        if (self.labels is None) == (self.label_key is None):
            raise InputError("give either labels=, one per row, or label_key=, the name of an obs column")
        if self.labels is not None:
            _check_entries("labels", self.labels, self.indices)
        smoothing: Any = self.smoothing
        if not isinstance(smoothing, Real) or not 0 <= float(smoothing) <= 1:
            raise InputError(f"smoothing must lie in [0, 1]; got {self.smoothing!r}")

    def bind(self, n_obs: int, labels_of: Callable[[str], Any]) -> Sampler:
        """See `bind`."""
        candidates = Candidates.of(self.indices, n_obs)
        codes, names = encode_labels(self.labels if self.label_key is None else labels_of(self.label_key))
        codes, lookup = candidates.entries("labels", codes, n_obs)
        counted = np.zeros(len(names) + 1, dtype=np.int64)
        draw_kernels.count_codes(candidates.n, codes, lookup, counted)
        missing, counts = int(counted[0]), counted[1:]
        if missing:
            logger.warning("%d of %d rows have no label and are never drawn", missing, candidates.n)
        present = counts > 0
        if not present.any():
            raise InputError("no row to draw from has a label")
        share = np.zeros(len(names), dtype=np.float64)
        share[present] = (1 - self.smoothing) / present.sum()
        share += self.smoothing * counts / counts.sum()
        share *= self._factors(names)
        if not share.sum() > 0:
            raise InputError("class_weights leave nothing to draw: every class present has weight 0")
        share /= share.sum()
        if not self.replace and self.sampling_size is None:
            return self._quotas(candidates, codes, lookup, counts, share, names)
        table = np.zeros(len(names) + 1)
        np.divide(share, counts, out=table[1:], where=present)
        return _weighted(self, candidates, Weights(codes, table, lookup))

    def _factors(self, names: list[Any]) -> NDArray[np.float64]:
        weights: Any = self.class_weights or {}
        if not isinstance(weights, Mapping):
            raise WrongTypeError(f"class_weights must be a dict of factors by label; got {weights!r}")
        factors = np.ones(len(names), dtype=np.float64)
        position = {name: i for i, name in enumerate(names)}
        for name, factor in weights.items():
            if name not in position:
                raise MissingKeyError(f"class_weights names {name!r}, which is not a label; labels are {names[:20]}")
            if not isinstance(factor, Real) or not 0 <= float(factor) < np.inf:
                raise InputError(f"class_weights[{name!r}] must be finite and not negative; got {factor!r}")
            factors[position[name]] = float(factor)
        return factors

    def _quotas(
        self,
        candidates: Candidates,
        codes: NDArray[Any],
        lookup: _Int64s,
        counts: _Int64s,
        share: NDArray[np.float64],
        names: list[Any],
    ) -> QuotaSampler:
        wanted = share > 0
        if self.total_size is None:
            # A hair above the quotient, so that 3 rows at share 3/9 allow 9 and not 8.
            total = int(np.floor(np.min(counts[wanted] / share[wanted]) * (1 + 1e-12)))
        else:
            total = int(self.total_size)
        exact = share * total
        quotas = np.floor(exact * (1 + 1e-12)).astype(np.int64)
        # What rounding leaves goes to the largest remainders.
        short = total - int(quotas.sum())
        quotas[np.argsort(-(exact - quotas), kind="stable")[:short]] += 1
        if self.total_size is None:
            quotas = np.minimum(quotas, counts)
        over = np.flatnonzero(quotas > counts)
        if len(over):
            c = int(over[0])
            raise InputError(
                f"total_size={total} takes {quotas[c]} rows of class {names[c]!r}, which has {counts[c]}; lower "
                "total_size or draw with replace=True"
            )
        return QuotaSampler(candidates, codes, lookup, quotas, counts, int(self.block_size))


def encode_labels(labels: Any) -> tuple[NDArray[Any], list[Any]]:
    """Return integer codes, -1 for a missing label, and the label of each code.

    Equal labels have equal codes in any type: whole numbers that are not far beyond the number of rows
    are their own codes, everything else is numbered as it comes.

    Parameters
    ----------
    labels
        An array, a pandas Series or Categorical, or a Dask array, which is encoded chunk by chunk.

    Returns
    -------
    codes, names
        Integer codes are taken as they are, not copied.

    Raises
    ------
    InputError
        If there is not one label per row, or labels are continuous.
    """
    values = getattr(labels, "cat", None) or labels
    if hasattr(values, "codes") and hasattr(values, "categories"):
        return np.asarray(values.codes), list(values.categories)
    is_lazy = hasattr(labels, "blocks") and hasattr(labels, "compute") and labels.ndim == 1
    if not is_lazy:
        labels = _label_array(labels)
        if labels.ndim != 1:
            raise InputError(f"labels must be one per row; got shape {labels.shape}")
        if isinstance(labels, np.ndarray) and labels.dtype.kind in "iu" and len(labels):
            low, high = int(labels.min()), int(labels.max())
            if low >= -1 and high < _table_end(len(labels)):
                return labels, list(range(high + 1))
    import pandas as pd

    position: dict[Any, int] = {}
    encoded: list[NDArray[Any]] = []
    # No more than a chunk of a Dask array is held, and its codes in the fewest bytes.
    blocks = (labels.blocks[i].compute() for i in range(labels.numblocks[0])) if is_lazy else [labels]
    for chunk in map(_label_array, blocks):
        try:
            codes, names = pd.factorize(cast(Any, chunk), sort=False)
        except (TypeError, ValueError) as error:
            raise InputError(f"labels of type {chunk.dtype} cannot be told apart: {error}") from error
        known = [position.setdefault(name, len(position)) for name in names]
        seen = np.array([*known, -1], dtype=np.int64)[codes]  # a missing label's -1 finds the last entry
        encoded.append(seen.astype(np.min_scalar_type(-max(len(position), 1))) if is_lazy else seen)
    n_labels = sum(map(len, encoded))
    table, classes = _classes(list(position), n_labels)
    table = table.astype(np.min_scalar_type(-max(len(classes), 1))) if is_lazy else table
    return np.concatenate([table[codes] for codes in encoded] or [_EMPTY_INTS]), classes


def _label_array(labels: Any) -> Any:
    """Return labels as an array of NumPy's, or as pandas' own where that alone says what is missing."""
    if isinstance(labels, np.ma.MaskedArray) and np.ma.is_masked(labels):
        objects = np.array(labels.data, dtype=object)
        objects[np.ma.getmaskarray(labels)] = None
        return objects
    if hasattr(getattr(labels, "dtype", None), "construct_array_type"):
        return getattr(labels, "array", labels)
    return array_of("labels", labels)


def _table_end(n_labels: int) -> int:
    """Where numbers end that are their own codes: others make the table of classes larger than the data."""
    return max(n_labels, 65_536)


def _classes(names: list[Any], n_labels: int) -> tuple[_Int64s, list[Any]]:
    """Return the code of the class that each name stands for, then -1, and the names of the classes.

    Whole numbers below 0 stand for none.
    """
    numbers = np.arange(len(names) + 1)
    numbers[-1] = -1
    if not names or not all(isinstance(name, Real) and not isinstance(name, bool) for name in names):
        return numbers, names
    values = np.array(names, dtype=np.float64)
    if not np.all(np.isfinite(values) & (values == np.floor(values))):
        if len(names) > min(_MOST_FRACTIONS, max(8, n_labels // 2)):
            some = ", ".join(f"{name:g}" for name in names[:3])
            raise InputError(
                f"{n_labels} labels hold {len(names)} different numbers with fractions ({some}, ...): a continuous "
                "column has no classes. Cut it into bins (pandas.cut), or make each value a class: "
                "labels=pandas.Categorical(values)"
            )
        return numbers, names
    is_class = values >= 0
    if values.max() < _table_end(n_labels):
        numbers[:-1] = np.where(is_class, values, -1)
        return numbers, list(range(int(values.max()) + 1))
    numbers[:-1] = np.where(is_class, np.cumsum(is_class) - 1, -1)
    return numbers, [name for name, is_one in zip(names, is_class, strict=True) if is_one]
