"""Encoding of labels as integer codes."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.obs_codes import check_categories
from dasksc.plan.arrays import EMPTY_INTS, array_of

__all__ = ["check_categories", "encode_labels", "listed", "pandas_label"]

_Int64s = NDArray[np.int64]

# Maximum number of distinct fractional labels; more of them suggest a measurement rather than classes.
_MAX_FRACTIONAL_LABELS = 100


def encode_labels(labels: Any, *, by_value: bool = False) -> tuple[NDArray[Any], list[Any]]:
    """Encode labels as integer codes and return the codes with the label of each code."""
    # Equal labels have equal codes, whatever the data type of the labels. Whole numbers below the number of rows, or
    # below 65,536, are used as codes unchanged. Categories keep their codes. All other labels are numbered in the order
    # of their first occurrence, or of their values.
    values = getattr(labels, "cat", None) or labels
    if hasattr(values, "codes") and hasattr(values, "categories"):
        check_categories(values.categories, "labels")
        return np.asarray(values.codes), list(values.categories)
    is_lazy = hasattr(labels, "blocks") and hasattr(labels, "compute") and labels.ndim == 1
    if not is_lazy:
        labels = _label_array(labels)
        if labels.ndim != 1:
            raise InputError(f"labels must contain one value per row; got shape {labels.shape}")
        if isinstance(labels, np.ndarray) and labels.dtype.kind in "iu" and len(labels):
            low, high = int(labels.min()), int(labels.max())
            if low >= (0 if by_value else -1) and high < _table_end(len(labels)):
                return labels, list(range(high + 1))
    import pandas as pd

    position: dict[Any, int] = {}
    encoded: list[NDArray[Any]] = []
    # One chunk of a Dask array is in memory at a time. Codes of a Dask array take the smallest integer type.
    blocks = (labels.blocks[i].compute() for i in range(labels.numblocks[0])) if is_lazy else [labels]
    for chunk in map(_label_array, blocks):
        try:
            codes, names = pd.factorize(cast(Any, chunk), sort=False)
        except (TypeError, ValueError) as error:
            raise InputError(f"labels of type {chunk.dtype} cannot be compared: {error}") from error
        if names.dtype.kind in "mM":
            names = pd.Index(names)  # its items are those of categories of dates, and equal those of datetime
        places = [position.setdefault(name, len(position)) for name in names]
        seen = np.array([*places, -1], dtype=np.int64)[codes]  # the code -1 of a missing label selects the last entry
        encoded.append(seen.astype(np.min_scalar_type(-max(len(position), 1))) if is_lazy else seen)
    check_categories(list(position), "labels")  # chunks of a Dask array may have labels of different types
    n_labels = sum(map(len, encoded))
    table, classes = _classes(list(position), n_labels, negative_is_missing=not by_value)
    if by_value:
        order, classes = _ascending(classes)
        table = order[table]
    table = table.astype(np.min_scalar_type(-max(len(classes), 1))) if is_lazy else table
    return np.concatenate([table[codes] for codes in encoded] or [EMPTY_INTS]), classes


def listed(labels: Any) -> list[Any]:
    """Return one label or several as a list; see `pandas_label`."""
    import pandas as pd

    labels = np.atleast_1d(labels) if isinstance(labels, np.ndarray) else labels
    is_several = pd.api.types.is_list_like(labels) and not isinstance(labels, Mapping)
    return [pandas_label(one) for one in (labels if is_several else [labels])]


def pandas_label(label: Any) -> Any:
    """Return a date or duration of NumPy as that of pandas, as `encode_labels` does; return other labels unchanged."""
    import pandas as pd

    if isinstance(label, np.datetime64):
        return pd.Timestamp(label)
    return pd.Timedelta(label) if isinstance(label, np.timedelta64) else label


def _label_array(labels: Any) -> Any:
    """Convert labels to a NumPy array, or to a pandas array if only that can mark missing labels."""
    if isinstance(labels, np.ma.MaskedArray) and np.ma.is_masked(labels):
        objects = np.array(labels.data, dtype=object)
        objects[np.ma.getmaskarray(labels)] = None
        return objects
    if hasattr(getattr(labels, "dtype", None), "construct_array_type"):
        return getattr(labels, "array", labels)
    return array_of("labels", labels)


def _table_end(n_labels: int) -> int:
    """Return the exclusive upper bound of the whole numbers that are used as codes unchanged."""
    # Beyond this bound, the table of classes would be larger than the data.
    return max(n_labels, 65_536)


def _ascending(names: list[Any]) -> tuple[_Int64s, list[Any]]:
    """Return the rank of each name, with -1 appended, and the sorted names."""
    try:
        order = sorted(range(len(names)), key=names.__getitem__)
    except TypeError:  # labels of several types, such as numbers and strings
        order = sorted(range(len(names)), key=lambda i: (type(names[i]).__name__, str(names[i])))
    places = np.full(len(names) + 1, -1, dtype=np.int64)
    places[order] = np.arange(len(names))
    return places, [names[i] for i in order]


def _classes(names: list[Any], n_labels: int, *, negative_is_missing: bool) -> tuple[_Int64s, list[Any]]:
    """Return the class code of each name, followed by -1, and the names of the classes."""
    numbers = np.arange(len(names) + 1)
    numbers[-1] = -1
    if not names or not all(isinstance(name, Real) and not isinstance(name, bool) for name in names):
        return numbers, names
    values = np.array(names, dtype=np.float64)
    if not np.all(np.isfinite(values) & (values == np.floor(values))):
        if len(names) > min(_MAX_FRACTIONAL_LABELS, max(8, n_labels // 2)):
            some = ", ".join(f"{name:g}" for name in names[:3])
            raise InputError(
                f"{n_labels} labels have {len(names)} different fractional values ({some}, ...), as in a continuous "
                "column, which has no classes. Divide it into bins (pandas.cut), or make each value a class "
                "(pandas.Categorical)"
            )
        return numbers, names
    is_class = values >= 0
    if not negative_is_missing and not is_class.all():
        return numbers, names
    if values.max() < _table_end(n_labels):
        numbers[:-1] = np.where(is_class, values, -1)
        return numbers, list(range(int(values.max()) + 1))
    numbers[:-1] = np.where(is_class, np.cumsum(is_class) - 1, -1)
    return numbers, [name for name, is_one in zip(names, is_class, strict=True) if is_one]
