"""Shares of classes in an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError, MissingKeyError, WrongTypeError
from dasksc.plan.labels import pandas_label

__all__ = ["largest_remainders", "max_draws", "check_quotas", "shares_of"]

_Int64s = NDArray[np.int64]


def shares_of(
    counts: _Int64s,
    names: list[Any],
    *,
    smoothing: float = 0.0,
    temperature: float | None = None,
    class_weights: Mapping[Any, float] | None = None,
) -> NDArray[np.float64]:
    """Return the probability of each class, shape (n_classes,), summing to 1."""
    present = counts > 0
    share = np.zeros(len(names), dtype=np.float64)
    if temperature is None:
        share[present] = (1 - smoothing) / present.sum()
        share += smoothing * counts / counts.sum()
    else:
        # Counts are relative to the most frequent class, because powers of small frequencies could underflow.
        share[present] = (counts[present] / counts.max()) ** (1 / temperature)
    share *= _factors(class_weights, names)
    if not share.sum() > 0:
        raise InputError("class_weights are 0 for all classes in the data; give at least one a positive weight")
    share /= share.sum()
    return share


def _factors(class_weights: Any, names: list[Any]) -> NDArray[np.float64]:
    weights: Any = {} if class_weights is None else class_weights
    if not isinstance(weights, Mapping):
        raise WrongTypeError(f"class_weights must be a dict of factors by label; got {weights!r}")
    factors = np.ones(len(names), dtype=np.float64)
    position = {name: i for i, name in enumerate(names)}
    for given, factor in weights.items():
        name = pandas_label(given)
        if name not in position:
            labels = [label.item() if isinstance(label, np.generic) else label for label in names[:20]]
            raise MissingKeyError(f"class_weights contains {name!r}, which is not a label; labels are {labels}")
        if not isinstance(factor, Real) or not 0 <= float(factor) < np.inf:
            raise InputError(f"class_weights[{name!r}] must be finite and not negative; got {factor!r}")
        factors[position[name]] = float(factor)
    return factors


def largest_remainders(share: NDArray[np.float64], total: int) -> _Int64s:
    """Divide `total` rows among classes by the largest remainder method."""
    exact = share * total
    quotas = np.floor(exact * (1 + 1e-12)).astype(np.int64)
    short = total - int(quotas.sum())
    quotas[np.argsort(-(exact - quotas), kind="stable")[:short]] += 1
    return quotas


def max_draws(counts: _Int64s, share: NDArray[np.float64]) -> int:
    """Return the number of rows that can be drawn with these shares before a class runs out of rows."""
    wanted = share > 0
    # The factor corrects rounding errors: a class of 5 rows with a share of 5/29 allows 29 draws in total, not 28.
    return int(np.floor(np.min(counts[wanted] / share[wanted]) * (1 + 1e-12)))


def check_quotas(quotas: _Int64s, counts: _Int64s, names: list[Any]) -> None:
    """Raise an error if more rows of a class are to be drawn than the class has."""
    over = np.flatnonzero(quotas > counts)
    if len(over):
        c = int(over[0])
        raise InputError(
            f"total_size={quotas.sum()} needs {quotas[c]} rows of class {names[c]!r}, which has {counts[c]}; lower "
            "total_size, or draw with replace=True"
        )
