"""Sampling strategies, which determine the rows of an epoch.

*Binding* a strategy to a collection returns a `Sampler`, whose method `draw` returns the `Draw` of an epoch. The plan
deals the positions in a draw to the ranks (`dasksc.plan.epoch_plan`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dasksc.checks import check_flags, name_or_none, whole_number
from dasksc.displays import brief, constructor
from dasksc.errors import InputError, MissingKeyError
from dasksc.kernels import draw as draw_kernels
from dasksc.kernels import permute
from dasksc.plan.arrays import EMPTY_FLOATS, Candidates, array_of, index_array
from dasksc.plan.deal import BlockOrder
from dasksc.plan.keys import Purpose, epoch_keys
from dasksc.plan.labels import (
    CodedColumn,
    check_quotas,
    encode_labels,
    factors_of,
    largest_remainders,
    max_draws,
    shares_of,
)
from dasksc.plan.samplers import QuotaSampler, RowSampler, Sampler, StratifiedSampler, WeightedSampler, Weights

logger = logging.getLogger("dasksc.plan")

_Int64s = NDArray[np.int64]


class SamplingStrategy:
    """Base class of sampling strategies. Derive from it to write your own.

    A subclass only needs to define `get_len` and `get_indices`. It then supports ranks, DataLoader workers and
    resuming. In each epoch, every rank and every DataLoader worker calls `get_indices` with the same seed, which
    changes from epoch to epoch. The result must depend only on the collection and the seed. It is cut into fetches,
    which are dealt to the ranks in turn. A class attribute ``obs_columns``, a tuple of names, lists the columns of obs
    that a subclass reads from ``data_collection.obs``; of an atlas given as a path, others may be missing.

    Parameters
    ----------
    indices
        Row numbers, stored in ``_indices`` in ascending order for use by the subclass.

    Examples
    --------
    >>> import numpy as np
    >>> class EverySecond(dasksc.SamplingStrategy):
    ...     def get_len(self, data_collection):
    ...         return len(data_collection) // 2
    ...
    ...     def get_indices(self, data_collection, seed=None, rng=None):
    ...         return np.arange(0, 2 * self.get_len(data_collection), 2)
    >>> dataset = dasksc.scDataset("atlas.h5ad", EverySecond(), batch_size=100, seed=0)
    >>> len(dataset)
    10
    """

    _shuffle_before_yield: ClassVar[bool | None] = None
    """True if the rows of a fetch are permuted before they are divided into batches."""
    _indices: _Int64s | None = None

    def __init__(self, indices: ArrayLike | None = None) -> None:
        if indices is not None:
            array = index_array(indices)
            self._indices = np.sort(np.flatnonzero(array) if array.dtype == np.bool_ else array)

    def __repr__(self) -> str:
        # In user-defined subclasses that are dataclasses, `_indices` is usually None, and the fields are shown instead.
        return constructor(self, **({} if self._indices is None else {"indices": brief(self._indices)}))

    def get_len(self, data_collection: Any) -> int:
        """Return the number of rows of an epoch."""
        raise NotImplementedError(f"{type(self).__name__} must define get_len(collection)")

    def get_indices(
        self,
        data_collection: Any,
        seed: int | None = None,
        rng: np.random.Generator | None = None,
    ) -> _Int64s:
        """Return the rows of an epoch in the order in which they are dealt to ranks, fetches and batches.

        On one rank, batches hold the rows in this order.

        Parameters
        ----------
        data_collection
            Collection to draw from, with ``len()``.
        seed
            Seed of the draw; equal seeds give equal rows. If None, a random seed is drawn.
        rng
            Random number generator, used instead of `seed` if given.

        Returns
        -------
        ndarray
            Row numbers, shape (get_len(data_collection),), int64.
        """
        raise NotImplementedError(f"{type(self).__name__} must define get_indices(collection, seed, rng)")


class BuiltInStrategy(SamplingStrategy):
    """Base class of the built-in strategies, whose binding requires only columns of obs and the number of rows."""

    @property
    def obs_columns(self) -> tuple[str, ...]:
        """Columns of obs that binding reads."""
        key = getattr(self, "label_key", None)
        return () if key is None else (key,)

    def bind(self, n_obs: int, labels_of: Callable[[str], Any]) -> Sampler:
        """Check the strategy against `n_obs` rows, and return the sampler for the plan."""
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
        """Return the rows of an epoch, block by block; see `SamplingStrategy.get_indices`."""
        if rng is not None:
            seed = int(rng.integers(2**63))
        elif seed is None:
            seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
        sampler = _bind_collection(self, data_collection)
        n = sampler.n_rows // sampler.unit
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
        rows = (positions[:, None] * sampler.unit + np.arange(sampler.unit)).ravel()
        return sampler.draw(seed, 0).rows(rows)


def _bind_collection(strategy: BuiltInStrategy, collection: Any) -> Sampler:
    def labels_of(key: str) -> Any:
        obs = getattr(collection, "obs", None)
        if obs is None or key not in obs:
            held = "no obs" if obs is None else f"the columns {list(obs)}"
            raise MissingKeyError(f"{key!r} names a column of obs, but the {type(collection).__name__} has {held}")
        return obs[key]

    return strategy.bind(len(collection), labels_of)


@dataclass(frozen=True, eq=False, repr=False)
class Streaming(BuiltInStrategy):
    """Strategy that yields every row once, in storage order.

    The rows that ``scDataset(drop_last=True)`` omits always come from the end of storage order: the last rows or, with
    `shuffle`, random rows of the last fetches.

    Parameters
    ----------
    indices
        Rows to stream: row numbers in any order, a boolean mask or a slice. None: all.
    shuffle
        If True, permute the rows of each fetch.

    Examples
    --------
    >>> dataset = dasksc.scDataset("atlas.h5ad", dasksc.Streaming(), batch_size=6, return_index=True)
    >>> next(iter(dataset)).index
    tensor([0, 1, 2, 3, 4, 5])
    """

    indices: Any = None
    shuffle: bool = False

    def __post_init__(self) -> None:
        check_flags(shuffle=self.shuffle)

    def bind(self, n_obs: int, labels_of: Callable[[str], Any]) -> Sampler:
        """See `BuiltInStrategy.bind`."""
        return RowSampler(Candidates.of(self.indices, n_obs), None, shuffle_blocks=False, shuffle_rows=self.shuffle)


@dataclass(frozen=True, eq=False, repr=False)
class BlockShuffling(BuiltInStrategy):
    """Strategy that yields every row once, in shuffled blocks of consecutive rows, with rows permuted in each fetch.

    Parameters
    ----------
    block_size
        Number of rows in a block. Larger blocks are read faster and mix less. If a single block would contain all rows,
        it is divided into two, unless `drop_last` is True.
    indices
        Rows to draw from: row numbers in any order, a boolean mask or a slice. None: all.
    drop_last
        If True, omit the rows of an incomplete block. The position of this block changes with the epoch, so every row
        is omitted equally often.

    Examples
    --------
    >>> blocks = dasksc.BlockShuffling(block_size=4)
    >>> dataset = dasksc.scDataset("atlas.h5ad", blocks, batch_size=8, fetch_factor=1, seed=0, return_index=True)
    >>> next(iter(dataset)).index
    tensor([1643,  594,  595, 1641, 1640,  593,  592, 1642])
    """

    block_size: int = 8
    indices: Any = None
    drop_last: bool = False

    def __post_init__(self) -> None:
        _check_sizes(self)

    def bind(self, n_obs: int, labels_of: Callable[[str], Any]) -> Sampler:
        """See `BuiltInStrategy.bind`."""
        candidates = Candidates.of(self.indices, n_obs)
        block_size = self.block_size
        if block_size >= candidates.n > 1 and not self.drop_last:
            # A single block has only one order, so with fetches shorter than the block, the same rows would come last
            # in every epoch.
            block_size = -(-candidates.n // 2)
        return RowSampler(candidates, block_size, shuffle_blocks=True, shuffle_rows=True, drop_last=self.drop_last)


def _check_sizes(strategy: BlockShuffling | BlockWeightedSampling | ClassBalancedSampling) -> None:
    """Raise an error for invalid sizes and flags, and convert sizes to Python integers, which never overflow."""
    for name in ("block_size", "total_size", "sampling_size"):
        value = getattr(strategy, name, None)
        if value is not None or name == "block_size":
            object.__setattr__(strategy, name, whole_number(name, value))
    check_flags(
        **{name: getattr(strategy, name) for name in ("drop_last", "replace", "per_batch") if hasattr(strategy, name)}
    )
    size = getattr(strategy, "sampling_size", None)
    if size is not None and getattr(strategy, "replace", False):
        logger.warning("sampling_size=%s is ignored, because it has no effect with replace=True", size)


@dataclass(frozen=True, eq=False, repr=False)
class BlockWeightedSampling(BuiltInStrategy):
    """Strategy that draws rows by weight, sorts the draws by storage position and shuffles blocks of them.

    Parameters
    ----------
    block_size
        Number of draws in a block.
    indices
        Rows to draw from: row numbers in any order, a boolean mask or a slice. None: all.
    weights
        Weights on any scale, one per row of the collection, or per entry of `indices` in their order. None:
        equal weights.
    total_size
        Number of draws in an epoch, over all ranks. Default: the number of rows to draw from.
    replace
        If True, a row can be drawn repeatedly.
    sampling_size
        With ``replace=False``, number of draws in a round; draws are without replacement within a round. By
        default, an epoch is a single round of `total_size` draws.

    Raises
    ------
    InputError
        If weights are negative, not finite, all zero or of the wrong length, or if the draws without replacement
        exceed the number of rows with a positive weight.

    Examples
    --------
    >>> adata = dasksc.open("atlas.h5ad")
    >>> weighted = dasksc.BlockWeightedSampling(weights=adata.obs["n_counts"].to_numpy(), total_size=1_000)
    >>> dataset = dasksc.scDataset(adata, weighted, batch_size=50, seed=0)
    >>> len(dataset)
    20
    """

    block_size: int = 8
    indices: Any = None
    weights: Any = None
    total_size: int | None = None
    replace: bool = True
    sampling_size: int | None = None

    def __post_init__(self) -> None:
        _check_sizes(self)
        if isinstance(self.weights, str):
            raise InputError(
                f"weights={self.weights!r} is a string; give one number per row, such as "
                f"adata.obs[{self.weights!r}].to_numpy()"
            )
        if self.weights is not None:
            weights = array_of("weights", self.weights)
            if weights.ndim != 1 or weights.dtype.kind not in "biuf":
                raise InputError(
                    f"weights must be one real number per row; got {weights.dtype} of shape {weights.shape}"
                )
            object.__setattr__(self, "weights", weights)

    def bind(self, n_obs: int, labels_of: Callable[[str], Any]) -> Sampler:
        """See `BuiltInStrategy.bind`."""
        candidates = Candidates.of(self.indices, n_obs)
        if candidates.n == 0:
            raise InputError("there are no rows to draw from: indices= is empty. Give at least one row")
        if self.weights is None:
            values = EMPTY_FLOATS
        else:
            values = candidates.entries("weights", self.weights, n_obs)
        return _weighted(self, candidates, Weights(values, EMPTY_FLOATS))


@dataclass(frozen=True, eq=False, repr=False)
class ClassBalancedSampling(BuiltInStrategy):
    """Strategy that draws classes evenly: each of K classes with probability ``1 / K`` by default.

    Class c, with frequency ``f_c`` among the rows to draw from, is drawn with probability
    ``(1 - smoothing) / K + smoothing * f_c``, multiplied by its entry in `class_weights` and normalized. Within a
    class, all rows are equally likely. Rows without a label (NaN, None, masked, -1) are never drawn.

    Parameters
    ----------
    labels
        Labels, one per row of the collection, or per entry of `indices` in their order: an array, a pandas Series or
        Categorical, or a 1-D Dask array. Integers below 0, of any type, mean no label, unless they are categories of a
        Categorical.
    block_size
        Number of draws in a block.
    indices
        Rows to draw from: row numbers in any order, a boolean mask or a slice. None: all.
    total_size
        Number of draws in an epoch, over all ranks. Default: the number of rows to draw from; with ``replace=False``
        and no `sampling_size`, the largest number for which no class runs out of rows.
    replace
        If True, a row can be drawn repeatedly.
    sampling_size
        With ``replace=False``, number of draws in a round; draws are without replacement within a round.
        If it is not given, ``replace=False`` draws an exact share of `total_size` from each class.
    label_key
        Name of the obs column with the labels, instead of `labels`.
    smoothing
        0 balances fully, 1 keeps the natural distribution.
    class_weights
        Factors by label; the default factor is 1.
    temperature
        Draw class c with probability proportional to ``f_c ** (1 / temperature)``, as in the training of multilingual
        models: 1 keeps the natural distribution, and larger values make it more even. Not allowed with `smoothing`.
    per_batch
        If True, give every batch its share of each class. Shares are rounded down or up such that the epoch as a whole
        has exact shares (largest remainders). An epoch consists of whole batches, which do not depend on the number of
        ranks, on resuming or on ``drop_last``. Resuming requires the same ``batch_size``. Rows of a class are
        drawn again only after all rows of the class have been drawn, so the numbers of draws of any two rows of a class
        differ by at most one. With ``replace=False``, each row is drawn at most once.

    Raises
    ------
    InputError
        If neither or both of `labels` and `label_key` are given; if no row has a label; if labels are continuous
        (fractional numbers with more than 100 distinct values, or with more distinct values than half the number of
        rows); if `smoothing` is outside [0, 1] or `temperature` is not positive; or if a class has fewer rows than are
        to be drawn without replacement.

    Examples
    --------
    >>> balanced = dasksc.ClassBalancedSampling(label_key="cell_type", per_batch=True)
    >>> dataset = dasksc.scDataset("atlas.h5ad", balanced, batch_size=60, obs=["cell_type"], seed=0)
    >>> next(iter(dataset)).obs["cell_type"].bincount()
    tensor([10, 10, 10, 10, 10, 10])
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

    def __post_init__(self) -> None:
        _check_sizes(self)
        name_or_none("label_key", self.label_key)
        if (self.labels is None) == (self.label_key is None):
            raise InputError("give either labels=, one per row, or label_key=, the name of an obs column")
        if isinstance(self.labels, str):
            raise InputError(
                f"labels={self.labels!r} is a string; give one label per row, or the name of an obs column: "
                f"label_key={self.labels!r}"
            )
        if self.per_batch and self.sampling_size is not None:
            raise InputError(
                "per_batch=True draws every row of a class once before it draws any of them again, so sampling_size= "
                "would have no effect; omit it"
            )
        smoothing: Any = self.smoothing
        if isinstance(smoothing, bool) or not isinstance(smoothing, Real) or not 0 <= float(smoothing) <= 1:
            raise InputError(f"smoothing must lie in [0, 1]; got {self.smoothing!r}")
        temperature: Any = self.temperature
        if temperature is None:
            return
        if smoothing:
            raise InputError(
                f"smoothing={smoothing!r} and temperature={temperature!r} both set the strength of balancing; give "
                "only one"
            )
        if isinstance(temperature, bool) or not isinstance(temperature, Real) or not float(temperature) > 0:
            raise InputError(
                "temperature must be a positive number: 1 keeps the natural distribution, float('inf') balances "
                f"fully; got {temperature!r}"
            )

    def bind(self, n_obs: int, labels_of: Callable[[str], Any]) -> Sampler:
        """See `BuiltInStrategy.bind`."""
        candidates = Candidates.of(self.indices, n_obs)
        codes, names = encode_labels(self.labels if self.label_key is None else labels_of(self.label_key))
        column = CodedColumn(self.label_key or "labels", codes, names)
        codes = candidates.entries("labels", codes, n_obs)
        counted = np.zeros(len(names) + 1, dtype=np.int64)
        draw_kernels.count_codes(codes, counted)
        missing, counts = int(counted[0]), counted[1:]
        if missing:
            logger.warning("%d of %d rows have no label and are never drawn", missing, candidates.n)
        if not counts.any():
            raise InputError("none of the rows to draw from has a label; check the column, or the indices")
        factors = factors_of(self.class_weights, column)
        share = shares_of(counts, factors, smoothing=self.smoothing, temperature=self.temperature)
        if self.per_batch:
            return StratifiedSampler.of(
                *(candidates, codes, counts),
                share=share,
                names=names,
                run_rows=self.block_size,
                total_size=self.total_size,
                replace=self.replace,
            )
        if self.replace or self.sampling_size is not None:
            table = np.zeros(len(names) + 1)
            np.divide(share, counts, out=table[1:], where=counts > 0)
            return _weighted(self, candidates, Weights(codes, table))
        if self.total_size is None:
            quotas = np.minimum(largest_remainders(share, max_draws(counts, share)), counts)
        else:
            quotas = largest_remainders(share, self.total_size)
        check_quotas(quotas, counts, names)
        return QuotaSampler(candidates, codes, quotas, counts, self.block_size)


def _weighted(
    strategy: BlockWeightedSampling | ClassBalancedSampling, candidates: Candidates, weights: Weights
) -> Sampler:
    total = candidates.n if strategy.total_size is None else strategy.total_size
    round_size = None
    if not strategy.replace:
        round_size = total if strategy.sampling_size is None else strategy.sampling_size
    return WeightedSampler(candidates, weights, strategy.block_size, total, round_size).checked()
