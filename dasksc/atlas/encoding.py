"""Encoding of obs columns as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.plan.labels import check_categories

__all__ = ["encode_column"]


def encode_column(series: pd.Series[Any], *, narrow: bool = False) -> tuple[NDArray[Any], list[Any] | None]:
    """Encode an obs column as numbers."""
    values, labels = _encoded(series)
    return (values if labels is None or narrow else values.astype(np.int64, copy=False)), labels


def _encoded(series: pd.Series[Any]) -> tuple[NDArray[Any], list[Any] | None]:
    dtype = series.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        check_categories(series.cat.categories, f"obs column {series.name!r}")
        return _codes(series.array)
    if pd.api.types.is_bool_dtype(dtype):
        if not series.hasnans:
            return series.to_numpy(dtype=bool), None
        codes = series.astype("Int8").fillna(-1).to_numpy(dtype=np.int8)
        return codes, [False, True]
    if pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_complex_dtype(dtype):
        return _numbers(series), None
    if isinstance(dtype, pd.DatetimeTZDtype):
        return _encoded(series.dt.tz_convert("UTC").dt.tz_localize(None))
    if dtype.kind in "mM":
        return _seconds(series), None
    if pd.api.types.is_string_dtype(dtype) or pd.api.types.is_object_dtype(dtype):
        return _encode_objects(series)
    raise InputError(
        f"obs column {series.name!r} has dtype {dtype}, which cannot be converted to a tensor. Convert it to numbers, "
        "strings or categories first."
    )


def _codes(values: pd.Categorical) -> tuple[NDArray[np.integer[Any]], list[Any]]:
    return np.asarray(values.codes), values.categories.tolist()


def _numbers(series: pd.Series[Any]) -> NDArray[Any]:
    if isinstance(series.dtype, pd.api.extensions.ExtensionDtype) and series.hasnans:
        return np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))
    values = np.asarray(series.to_numpy(dtype=getattr(series.dtype, "numpy_dtype", None)))
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _seconds(series: pd.Series[Any]) -> NDArray[np.float64]:
    values = series.to_numpy()
    whole = values.astype(f"{values.dtype.kind}8[s]")
    # Added separately, since float64 cannot represent nanoseconds since 1970 exactly.
    rest = (values - whole) / np.timedelta64(1, "s")
    seconds = whole.astype(np.int64) + rest
    return np.where(np.isnat(values), np.nan, seconds)


def _encode_objects(series: pd.Series[Any]) -> tuple[NDArray[Any], list[Any] | None]:
    """Encode a column of strings, or of Python objects of a single kind."""
    kind = pd.api.types.infer_dtype(series, skipna=True)
    if kind in ("string", "empty"):
        return _codes(pd.Categorical(series))
    if kind == "boolean":
        return _encoded(series.astype("boolean"))
    if kind in ("integer", "floating", "mixed-integer-float"):
        return _numbers(pd.to_numeric(series)), None
    raise InputError(
        f"obs column {series.name!r} mixes types (pandas finds {kind!r}). Convert it to strings, e.g. "
        f"adata.obs[{series.name!r}] = adata.obs[{series.name!r}].astype(str)."
    )
