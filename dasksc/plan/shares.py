"""Shares of classes in an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError, WrongTypeError
from dasksc.plan.labels import CodedColumn

_Int64s = NDArray[np.int64]


def weight_of(argument: str, key: Any, weight: Any) -> float:
    """Return a weight as a float, or raise an error if it cannot be one."""
    if not isinstance(weight, Real) or not 0 <= float(weight) < np.inf:
        raise InputError(f"{argument}[{key!r}] must be finite and not negative; got {weight!r}")
    return float(weight)


def factors_of(class_weights: Any, column: CodedColumn) -> NDArray[np.float64]:
    """Return the factor of each class."""
    factors = np.ones(len(column.labels), dtype=np.float64)
    if class_weights is None:
        return factors
    if not isinstance(class_weights, Mapping):
        raise WrongTypeError(f"class_weights must be a dict of factors by label; got {class_weights!r}")
    for code, (label, factor) in zip(
        column.codes_of("class_weights", class_weights), class_weights.items(), strict=True
    ):
        factors[code] = weight_of("class_weights", label, factor)
    return factors


def shares_of(
    counts: _Int64s, factors: NDArray[np.float64], *, smoothing: float = 0.0, temperature: float | None = None
) -> NDArray[np.float64]:
    """Return the probability of each class, shape (n_classes,), summing to 1."""
    present = counts > 0
    share = np.zeros(len(counts), dtype=np.float64)
    if temperature is None:
        share[present] = (1 - smoothing) / present.sum()
        share += smoothing * counts / counts.sum()
    else:
        # Counts are relative to the most frequent class, because powers of small frequencies could underflow.
        share[present] = (counts[present] / counts.max()) ** (1 / temperature)
    share *= factors
    if not share.sum() > 0:
        raise InputError("class_weights are 0 for all classes in the data; give at least one a positive weight")
    share /= share.sum()
    return share


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
