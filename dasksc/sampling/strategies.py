"""The sampling strategies: what an epoch draws.

A strategy is a frozen spec. *Binding* it to a collection checks it against the number of rows and
gives a `Sampler`, whose `Sampler.draw` says which rows an epoch holds, in storage order. In which
order they are read, and by whom, is the plan's business (`dasksc.planning.plan`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dasksc.config import whole_number
from dasksc.errors import InputError, MissingKeyError
from dasksc.kernels import draw as draw_kernels
from dasksc.kernels import permute
from dasksc.sampling.arrays import EMPTY_FLOATS, EMPTY_INTS, array_of
from dasksc.sampling.block_order import BlockOrder
from dasksc.sampling.candidates import Candidates, check_entries, index_array
from dasksc.sampling.class_shares import largest_remainders, most_drawn, refuse_beyond, shares_of
from dasksc.sampling.labels import encode_labels
from dasksc.sampling.random_keys import Purpose, epoch_keys
from dasksc.sampling.samplers import QuotaSampler, RowSampler, Sampler
from dasksc.sampling.stratified import StratifiedSampler
from dasksc.sampling.weighted import WeightedSampler, Weights

__all__ = [
    "BlockShuffling",
    "BlockWeightedSampling",
    "BuiltInStrategy",
    "ClassBalancedSampling",
    "SamplingStrategy",
    "Streaming",
]

logger = logging.getLogger("dasksc.sampling")

_Int64s = NDArray[np.int64]

_TINY, _SCALE = 2.0**-500, 2.0**500
# Weights that sum to less than the first are drawn by multiplied with the second.


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
            array = index_array(indices)
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


class BuiltInStrategy(SamplingStrategy):
    """A strategy that is bound to a number of rows; a user's own is asked for its rows instead."""

    @property
    def obs_columns(self) -> tuple[str, ...]:
        """The obs columns that binding reads."""
        key = getattr(self, "label_key", None)
        return () if key is None else (key,)

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


def _bind_collection(strategy: BuiltInStrategy, collection: Any) -> Sampler:
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


@dataclass(frozen=True, eq=False)
class Streaming(BuiltInStrategy):
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
class BlockShuffling(BuiltInStrategy):
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


def _check_sizes(strategy: BlockShuffling | BlockWeightedSampling | ClassBalancedSampling) -> None:
    """Refuse sizes that are none, and keep the others as Python's integers, which never overflow."""
    for name in ("block_size", "total_size", "sampling_size"):
        value = getattr(strategy, name, None)
        if value is not None or name == "block_size":
            object.__setattr__(strategy, name, whole_number(name, value))


@dataclass(frozen=True, eq=False)
class BlockWeightedSampling(BuiltInStrategy):
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
                check_entries("weights", weights, self.indices)
            object.__setattr__(self, "weights", weights)

    def bind(self, n_obs: int, labels_of: Callable[[str], Any]) -> Sampler:
        """See `bind`."""
        candidates = Candidates.of(self.indices, n_obs)
        if candidates.n == 0:
            raise InputError("there are no rows to draw from: indices are empty")
        if self.weights is None:
            weights = Weights(EMPTY_FLOATS, EMPTY_FLOATS, EMPTY_INTS)
        else:
            values, lookup = candidates.entries("weights", self.weights, n_obs)
            weights = Weights(values, EMPTY_FLOATS, lookup)
        return _weighted(self, candidates, weights)


@dataclass(frozen=True, eq=False)
class ClassBalancedSampling(BuiltInStrategy):
    """Draw classes evenly: each of the K classes with probability ``1 / K`` unless smoothed or tempered.

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
    temperature
        Draw class c with probability proportional to ``f_c ** (1 / temperature)``, as multilingual models mix
        languages: 1 keeps the natural distribution, and the larger it is, the evener. Refused beside `smoothing`.
    per_batch
        Give every batch its share of each class, rounded down or up so that an epoch has it exactly (largest
        remainders). An epoch is whole batches; ranks, resumes and ``drop_last`` take and leave whole ones, and a resume
        needs the same ``batch_size``. Rows of a class are drawn in passes through all of them, each as often as any
        other or once more; with ``replace=False`` there is one pass.

    Raises
    ------
    InputError
        If neither or both of `labels` and `label_key` are given, no row has a label, labels are
        continuous (numbers with fractions, more than 100 different ones or one for every other row),
        `smoothing` is outside [0, 1] or `temperature` not positive, or a class has fewer rows than are to be drawn
        from it without replacement.
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
    temperature: float | None = None
    per_batch: bool = False
    _shuffle_before_yield: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_rounds(self)
        if (self.labels is None) == (self.label_key is None):
            raise InputError("give either labels=, one per row, or label_key=, the name of an obs column")
        if self.labels is not None:
            check_entries("labels", self.labels, self.indices)
        if self.per_batch and self.sampling_size is not None:
            raise InputError("per_batch=True draws in passes through each class; leave out sampling_size=")
        smoothing: Any = self.smoothing
        if not isinstance(smoothing, Real) or not 0 <= float(smoothing) <= 1:
            raise InputError(f"smoothing must lie in [0, 1]; got {self.smoothing!r}")
        temperature: Any = self.temperature
        if temperature is None:
            return
        if smoothing:
            raise InputError(
                f"smoothing={smoothing!r} and temperature={temperature!r} both say how far to balance; give one"
            )
        if isinstance(temperature, bool) or not isinstance(temperature, Real) or not float(temperature) > 0:
            raise InputError(
                "temperature must be a positive number: 1 keeps the natural distribution, float('inf') balances "
                f"fully; got {temperature!r}"
            )

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
        share = shares_of(
            counts,
            names,
            smoothing=self.smoothing,
            temperature=self.temperature,
            class_weights=self.class_weights,
        )
        if self.per_batch:
            return StratifiedSampler.of(
                *(candidates, codes, lookup, counts),
                share=share,
                names=names,
                run_rows=self.block_size,
                total_size=self.total_size,
                replace=self.replace,
            )
        if not self.replace and self.sampling_size is None:
            return self._quotas(candidates, codes, lookup, counts, share, names)
        table = np.zeros(len(names) + 1)
        np.divide(share, counts, out=table[1:], where=present)
        return _weighted(self, candidates, Weights(codes, table, lookup))

    def _quotas(
        self,
        candidates: Candidates,
        codes: NDArray[Any],
        lookup: _Int64s,
        counts: _Int64s,
        share: NDArray[np.float64],
        names: list[Any],
    ) -> QuotaSampler:
        total = most_drawn(counts, share) if self.total_size is None else int(self.total_size)
        quotas = largest_remainders(share, total)
        if self.total_size is None:
            quotas = np.minimum(quotas, counts)
        refuse_beyond(quotas, counts, names)
        return QuotaSampler(candidates, codes, lookup, quotas, counts, int(self.block_size))


def _check_rounds(strategy: BlockWeightedSampling | ClassBalancedSampling) -> None:
    _check_sizes(strategy)
    if strategy.sampling_size is not None and strategy.replace:
        logger.warning("sampling_size=%s means nothing with replace=True; ignored", strategy.sampling_size)


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
