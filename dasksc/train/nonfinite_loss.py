"""Explanation of a NaN or infinite loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

__all__ = ["explain_nonfinite_loss"]

_N_INSPECTED = 1024
_LOWER_RATE = "lower training.optimizer.lr, or set a training.gradient_clip"


def explain_nonfinite_loss(dataset: Any) -> str:
    """Return the likely reason for a NaN or infinite loss, found in the first rows of X.

    Parameters
    ----------
    dataset
        Training set.
    """
    x = getattr(dataset.collection, "X", None)
    if x is None:
        return f"Look for NaN in the data, {_LOWER_RATE}"
    rows = x[:_N_INSPECTED]
    rows = rows.compute() if hasattr(rows, "compute") else rows
    values = np.asarray(rows.data if sp.issparse(rows) else rows).ravel()
    if not np.isfinite(values).all():
        return "X holds NaN or infinite values: repair the atlas, or leave these cells out with data.filter"
    least = values.min(initial=0)
    if least < 0:
        return (
            f"X holds negative values, down to {least:.3g}, as scaled or centered data does; the built-in models "
            "expect counts. Give an atlas of counts, or set data.open.raw=true if the atlas keeps them in raw"
        )
    if (values % 1 != 0).any():
        return (
            f"X holds fractional values, as normalized or scaled data does (maximum {values.max():.3g}); the built-in "
            "models expect counts. Give an atlas of counts, or set data.open.raw=true if the atlas keeps them in raw. "
            f"If your model expects such values, {_LOWER_RATE}"
        )
    return (
        f"The first {rows.shape[0]:,} rows of X hold no NaN and no negative values, so the learning rate is probably "
        f"too high: {_LOWER_RATE}"
    )
