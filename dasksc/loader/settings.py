"""Settings of a data set as short text, for errors that list differences from a state or between ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from dasksc.displays import brief
from dasksc.loader.source import IndexedSource, MatrixSource
from dasksc.plan.strategies import SamplingStrategy

__all__ = ["differences", "settings_of", "settings_of_batches"]

# Text for strategy arguments that share their name with an argument of `scDataset`.
_OF_STRATEGY = {"drop_last": "drop_last of the strategy"}

_SAME_TEXT = (
    "{strategy} draws different rows than before, although its arguments look the same: array values, labels in obs, "
    "or the version of dasksc differ"
)


def settings_of(strategy: SamplingStrategy, filter: str | None) -> dict[str, str]:
    """Return the class and the arguments of a strategy as text, with only the shape and the data type of arrays.

    Parameters
    ----------
    strategy
        Strategy of a data set. If its class is not a dataclass, the arguments are omitted.
    filter
        Text of the expression over obs that rows must satisfy.
    """
    given: Any = strategy  # strategy classes defined by users need not be dataclasses
    names = [field.name for field in dataclasses.fields(given)] if dataclasses.is_dataclass(given) else []
    arguments = {_OF_STRATEGY.get(name, name): brief(getattr(given, name)) for name in names}
    return {"strategy": type(strategy).__name__, **arguments} | ({} if filter is None else {"filter": filter})


def settings_of_batches(source: MatrixSource | IndexedSource) -> dict[str, str]:
    """Return the number of rows, the matrices, and the content of batches as text."""
    settings = {"n_obs": str(source.n_obs)}
    if isinstance(source, MatrixSource):
        settings |= {name: _matrix(shape) for name, shape in source.identity.items()}
        settings |= {"layout": source.maker.layout, "dtype": str(source.maker.dtype)}
        settings |= {f"genes of {name}": str(len(one)) for name, one in source.maker.columns.items()}
    return settings


def differences(
    identity: Mapping[str, Any], was: Mapping[str, Any], settings: Mapping[str, str], settings_then: Mapping[str, str]
) -> Iterator[str]:
    """Yield a clause for each difference from a state, such as "block_size is 16 and was 8".

    Parameters
    ----------
    identity, was
        Properties of the data set and of the state, which are compared.
    settings, settings_then
        Settings of the strategy now and in the state, which explain a difference. States of earlier versions of dasksc
        have none.
    """
    for name, value in identity.items():
        before = was.get(name)
        if value == before:
            continue
        if name == "strategy":
            has_same_rows = identity.get("n_obs") == was.get("n_obs")
            yield from _of_strategy(str(before), settings, settings_then, has_same_rows=has_same_rows)
        elif name == "matrices" and isinstance(before, Mapping):
            for matrix in {**value, **before}:
                if value.get(matrix) != before.get(matrix):
                    yield f"{matrix} is {_matrix(value.get(matrix))} and was {_matrix(before.get(matrix))}"
        else:
            yield f"{name} is {value!r} and was {before!r}"


def _of_strategy(
    before: str, settings: Mapping[str, str], settings_then: Mapping[str, str], *, has_same_rows: bool
) -> Iterator[str]:
    strategy, strategy_then = settings["strategy"], before.partition(" ")[0]
    if strategy != strategy_then:
        yield f"strategy is {strategy} and was {strategy_then}"
        return
    if not settings_then:
        yield (
            f"the arguments of {strategy} differ; an earlier version of dasksc wrote the state, without their values"
        )
        return
    names = [name for name in {**settings, **settings_then} if settings.get(name) != settings_then.get(name)]
    if not names and has_same_rows:  # a changed number of rows would explain the difference
        yield _SAME_TEXT.format(strategy=strategy)
    for name in names:
        yield f"{name} is {settings.get(name, 'not set')} and was {settings_then.get(name, 'not set')}"


def _matrix(shape: Any) -> str:
    if not isinstance(shape, list | tuple) or len(shape) != 3:
        return "not requested" if shape is None else repr(shape)
    return f"{shape[0]} x {shape[1]} {shape[2]}"
