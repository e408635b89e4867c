"""Strategies by name, and their binding to a collection: its number of rows, its obs columns and a filter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from dasksc.checks import is_whole
from dasksc.errors import InputError, WrongTypeError
from dasksc.multiindexable import take_rows
from dasksc.plan.arrays import Candidates, array_of, index_array
from dasksc.plan.epoch_plan import EpochPlan
from dasksc.plan.keys import Purpose, digest_of, epoch_keys
from dasksc.plan.samplers import ChosenRows, RowSampler, Sampler
from dasksc.plan.strategies import BlockShuffling, BuiltInStrategy, ClassBalancedSampling, SamplingStrategy, Streaming

# Names of strategies that need no arguments, except for the labels of "balance".
StrategyName = Literal["shuffle", "stream", "balance"]
SHORT_NAMES: dict[str, type[BuiltInStrategy]] = {
    "shuffle": BlockShuffling,
    "stream": Streaming,
    "balance": ClassBalancedSampling,
}


def is_balanced(strategy: Any) -> bool:
    """Return True for a name whose strategy needs the labels of ``label_key=``."""
    return isinstance(strategy, str) and SHORT_NAMES.get(strategy) is ClassBalancedSampling


def as_strategy(given: Any, *, label_key: str | None = None, block_size: int | None = None) -> SamplingStrategy:
    """Return the strategy for an argument of `scDataset`: an object, or a short name with its options."""
    if isinstance(given, str):
        if given not in SHORT_NAMES:
            raise InputError(
                f"strategy={given!r} is not the name of a strategy; expected {', '.join(map(repr, SHORT_NAMES))}, or "
                "an object such as dasksc.BlockShuffling(block_size=64)"
            )
        if is_balanced(given) and label_key is None:
            raise InputError(f"strategy={given!r} needs label_key=, the obs column whose classes it balances")
        if not is_balanced(given) and label_key is not None:
            raise InputError(
                f"label_key={label_key!r} applies only to strategy='balance', but strategy is {given!r}; give "
                "strategy='balance', or leave out label_key="
            )
        options: dict[str, Any] = {"label_key": label_key, "block_size": block_size}
        if given == "stream":
            del options["block_size"]
        return SHORT_NAMES[given](**{name: value for name, value in options.items() if value is not None})
    if not isinstance(given, SamplingStrategy):
        advice = ""
        if is_whole(given):
            advice = f". The second argument is the strategy; give the batch size by name: batch_size={given}"
        elif isinstance(given, type) and issubclass(given, SamplingStrategy):
            advice = f". Give an instance: {given.__name__}(...)"
        raise WrongTypeError(
            "strategy must be a SamplingStrategy such as dasksc.BlockShuffling(), or the name of one "
            f"({', '.join(map(repr, SHORT_NAMES))}); got {given!r}{advice}"
        )
    if label_key is not None:
        raise InputError(
            f"label_key={label_key!r} applies to strategy='balance'; a {type(given).__name__} has its own arguments. "
            f"Give dasksc.ClassBalancedSampling(label_key={label_key!r}), or leave out label_key="
        )
    return given


@dataclass(frozen=True)
class UserSampler(Sampler):
    """Sampler of a user-defined strategy, which returns all row indices of an epoch at once."""

    strategy: SamplingStrategy
    collection: Any
    n_obs: int
    n_drawn: int
    shuffle_rows: bool
    block_size = None
    shuffle_blocks = False

    @property
    def n_rows(self) -> int:
        return self.n_drawn

    def draw(self, seed: int, epoch: int) -> ChosenRows:
        # An int below 2**63, which `np.random.default_rng`, `random.Random` and `torch.Generator` accept as a seed.
        key = int(epoch_keys(seed, epoch, Purpose.USER)[0] >> np.uint64(1))
        name = type(self.strategy).__name__
        rows = array_of(f"the result of {name}.get_indices", self.strategy.get_indices(self.collection, seed=key))
        if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
            raise InputError(f"{name}.get_indices must return row numbers; got {rows.dtype} of shape {rows.shape}")
        if len(rows) != self.n_rows:
            raise InputError(
                f"{name}.get_len returned {self.n_rows}, but get_indices returned {len(rows)} rows; make both agree"
            )
        if len(rows) and (rows.min() < 0 or rows.max() >= self.n_obs):
            raise InputError(f"{name}.get_indices returned rows outside [0, {self.n_obs})")
        return ChosenRows(Candidates(n=self.n_obs), rows.astype(np.int64))  # a copy, as the array may be used again

    def digest(self) -> str:
        """Return a hex digest; the rows of one epoch stand for the parameters, which are not known."""
        return digest_of("user", type(self.strategy).__qualname__, self.n_rows, self.draw(0, 0).chosen)


def bind(strategy: SamplingStrategy, collection: Any, n_obs: int, labels_of: Callable[[str], Any]) -> Sampler:
    """Bind a strategy to a collection."""
    if isinstance(strategy, BuiltInStrategy):
        for name in ("get_indices", "get_len"):
            if getattr(type(strategy), name) is not getattr(BuiltInStrategy, name):
                raise InputError(
                    f"{type(strategy).__name__} has its own {name}, which is not called in a subclass of a built-in "
                    "strategy. Derive it from dasksc.SamplingStrategy"
                )
        return strategy.bind(n_obs, labels_of)
    if not isinstance(strategy, SamplingStrategy):
        raise WrongTypeError(
            f"strategy must be a SamplingStrategy such as dasksc.BlockShuffling(); got {type(strategy).__name__}"
        )
    n_rows: Any = strategy.get_len(collection)
    if not is_whole(n_rows) or n_rows < 0:
        raise InputError(f"{type(strategy).__name__}.get_len must return a number of rows; got {n_rows!r}")
    return UserSampler(strategy, collection, n_obs, int(n_rows), bool(strategy._shuffle_before_yield))


def is_random(sampler: Sampler) -> bool:
    """Return True if epochs depend on the seed."""
    return not isinstance(sampler, RowSampler) or sampler.shuffle_blocks or sampler.shuffle_rows


def n_rows_from_indices(strategy: SamplingStrategy) -> int | None:
    """Return the minimum number of rows of the collection, given a strategy's indices; None if they set no minimum."""
    indices = getattr(strategy, "indices", getattr(strategy, "_indices", None))
    if indices is None or isinstance(indices, slice):
        return None
    rows = index_array(indices)
    return len(rows) if rows.dtype == np.bool_ or not len(rows) else int(rows.max()) + 1


def restricted(strategy: SamplingStrategy, keep: NDArray[np.bool_], by: str) -> SamplingStrategy:
    """Restrict a strategy to the rows that a filter keeps."""
    if not isinstance(strategy, BuiltInStrategy):
        raise InputError(
            f"the filter {by} cannot be applied to the strategy {type(strategy).__name__}, which chooses its own rows; "
            "give it the rows of dasksc.rows_where(...)"
        )
    n_obs = len(keep)
    candidates = Candidates.of(getattr(strategy, "indices", None), n_obs)
    kept = np.flatnonzero(keep[candidates.selector])
    if not len(kept):
        raise InputError(f"the filter {by} matches none of the {candidates.n} rows to draw from")
    changed: dict[str, Any] = {"indices": candidates.rows(kept)}
    control_indices = getattr(strategy, "control_indices", None)
    if control_indices is not None:
        controls = Candidates.of(control_indices, n_obs, name="control_indices")
        changed["control_indices"] = controls.rows(np.flatnonzero(keep[controls.selector]))
        if not len(changed["control_indices"]):
            raise InputError(f"the filter {by} matches none of the {controls.n} rows of control_indices=")
    for rows in changed.values():
        # Binding the strategy copies writeable indices, but not read-only ones.
        rows.flags.writeable = False
    for name in ("weights", "labels"):
        values = getattr(strategy, name, None)
        if values is None or isinstance(values, str):  # the weights of CellSets are a name
            continue
        if len(values) == candidates.n != n_obs:
            if len(kept) == n_obs:  # `bind` would match the remaining values to rows instead of entries
                raise InputError(
                    f"{name} has {len(values)} values, one per entry of indices=. With this filter, give one value per "
                    "row of the collection"
                )
            changed[name] = take_rows(values, kept if candidates.given is None else candidates.given[kept])
    return cast(SamplingStrategy, replace(cast(Any, strategy), **changed))


def reason_for_no_batches(plan: EpochPlan) -> str:
    """Return why no rank yields a batch, with a remedy, for messages."""
    if plan.n_rows:
        return (
            f"{plan.n_rows:,} rows over all ranks (world size {plan.world_size}) leave each rank less than a batch of "
            f"{plan.batch_size}, and drop_last=True. Lower batch_size, or use drop_last=False"
        )
    if isinstance(plan.sampler, RowSampler) and plan.sampler.candidates.n:
        return (
            f"the strategy has drop_last=True, and its rows do not fill a block of {plan.block_size:,}. Lower "
            "block_size, or give the strategy drop_last=False"
        )
    return "the strategy draws no rows: the collection is empty, or the strategy (indices=) selects none of its rows"
