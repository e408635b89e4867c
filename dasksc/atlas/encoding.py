"""Encoding of obs columns as numbers, which batches hold as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.plan.labels import CodedColumn


def encode_column(series: pd.Series[Any]) -> tuple[NDArray[Any], list[Any] | None]:
    """Return an obs column as numbers, and the labels of its codes; None if the numbers are the values themselves."""
    dtype = series.dtype
    kind = ""
    if pd.api.types.is_object_dtype(dtype) or isinstance(dtype, pd.StringDtype):
        kind = pd.api.types.infer_dtype(series, skipna=True)
        if kind in ("integer", "floating", "mixed-integer-float"):
            series = pd.to_numeric(series)
        elif kind == "boolean":
            series = series.astype("boolean")
    elif isinstance(dtype, pd.DatetimeTZDtype):
        series = series.dt.tz_convert("UTC").dt.tz_localize(None)
    dtype = series.dtype
    if isinstance(dtype, pd.CategoricalDtype) or kind in ("string", "empty"):
        coded = CodedColumn.in_order(series, "value")
        return coded.codes, list(coded.labels)
    if pd.api.types.is_bool_dtype(dtype):
        if series.hasnans:
            return series.astype("Int8").fillna(-1).to_numpy(dtype=np.int8), [False, True]
        return series.to_numpy(dtype=bool), None
    if pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_complex_dtype(dtype):
        return _numbers(series), None
    if dtype.kind in "mM":
        return _seconds(series), None
    raise InputError(
        f"obs column {series.name!r} has dtype {dtype}{f' ({kind})' if kind else ''}, which cannot be converted to a "
        f"tensor. Convert it to numbers, strings or categories first: adata.obs[{series.name!r}].astype(str)"
    )


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
    return np.where(np.isnat(values), np.nan, whole.astype(np.int64) + rest)
