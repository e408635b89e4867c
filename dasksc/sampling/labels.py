"""Labels as integer codes."""

from __future__ import annotations

from numbers import Real
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.sampling.arrays import EMPTY_INTS, array_of

__all__ = ["encode_labels"]

_Int64s = NDArray[np.int64]

_MOST_FRACTIONS = 100
# More different labels with a fraction are a measurement, not classes.


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
    return np.concatenate([table[codes] for codes in encoded] or [EMPTY_INTS]), classes


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
