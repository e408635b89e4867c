"""Sampling strategies by name, as in `scDataset`, on the command line and in training configurations."""

from __future__ import annotations

from typing import Any, Literal

from dasksc.checks import is_whole
from dasksc.errors import InputError, WrongTypeError
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


def strategy_named(name: str, *, label_key: str | None = None, block_size: int | None = None) -> BuiltInStrategy:
    """Return the strategy that a short name stands for."""
    if name not in SHORT_NAMES:
        raise InputError(
            f"strategy={name!r} is not the name of a strategy; expected {', '.join(map(repr, SHORT_NAMES))}, or an "
            "object such as dasksc.BlockShuffling(block_size=64)"
        )
    if is_balanced(name) and label_key is None:
        raise InputError(f"strategy={name!r} needs label_key=, the name of the obs column whose classes it balances")
    if not is_balanced(name) and label_key is not None:
        raise InputError(
            f"label_key={label_key!r} applies only to strategy='balance', but strategy is {name!r}; give "
            "strategy='balance', or leave out label_key="
        )
    options: dict[str, Any] = {"label_key": label_key, "block_size": block_size}
    if SHORT_NAMES[name] is Streaming:
        del options["block_size"]
    return SHORT_NAMES[name](**{option: value for option, value in options.items() if value is not None})


def as_strategy(given: Any, *, label_key: str | None = None) -> SamplingStrategy:
    """Return the strategy for an argument of `scDataset`: an object, or a short name with its `label_key`."""
    if isinstance(given, str):
        return strategy_named(given, label_key=label_key)
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
