"""Labels of a column as integer codes: the one code table that batches, splits, sampling and statistics share."""

from __future__ import annotations

from numbers import Real
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.errors import InputError

__all__ = ["check_categories", "label_codes"]


def label_codes(
    column: pd.Series[Any], *, order: Literal["occurrence", "value", "text"]
) -> tuple[NDArray[np.integer[Any]], pd.Index[Any]]:
    """Return the code of each row's label, -1 if it is missing, and the label of each code."""
    # Categories keep their codes, except in the order of text, which depends on neither categories nor rows.
    if isinstance(column.dtype, pd.CategoricalDtype):
        codes, labels = np.asarray(column.array.codes), column.array.categories
    else:
        codes, labels = pd.factorize(column, sort=order == "value")
        codes = codes.astype(np.min_scalar_type(-max(len(labels), 1)), copy=False)
    check_categories(labels, f"obs column {column.name!r}")
    if order == "text":
        by_text = np.argsort(labels.map(str).to_numpy(object), kind="stable")
        places = np.full(len(labels) + 1, -1, dtype=np.int32)  # code -1 of missing labels selects the last entry
        places[by_text] = np.arange(len(labels))
        codes, labels = places[codes], labels.take(by_text)
    return codes, labels


def check_categories(categories: Any, column: object) -> None:
    """Raise an error for categories of several types, such as 1 and "1", which would be different classes."""
    objects = np.dtype(object)
    if getattr(categories, "dtype", objects) != objects:
        return
    values = np.asarray(categories, dtype=object).tolist()
    types = {str if isinstance(one, str) else type(one): one for one in values}
    if len(types) > 1 and not all(issubclass(one, Real) and not issubclass(one, bool) for one in types):
        first, second = list(types.values())[:2]
        raise InputError(
            f"the categories of {column} mix types: {first!r} is a {type(first).__name__}, and {second!r} a "
            f"{type(second).__name__}. In all joined atlases, labels must have the same type; convert them to "
            "strings"
        )
