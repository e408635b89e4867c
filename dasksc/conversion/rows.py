"""In which order the rows of the input become rows of the output."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.sampling import BlockOrder

__all__ = ["Order", "row_order"]

Order = Literal["shuffle", "keep"]

_PART = 2**22


def row_order(obs: pd.DataFrame, *, order: Order, group_by: str | None, seed: int, out: NDArray[np.int64]) -> None:
    """Write which row of the input each row of the output is.

    Parameters
    ----------
    obs
        The table of the cells.
    order
        ``"shuffle"``: a keyed permutation of all rows; ``"keep"``: as they are.
    group_by
        A column of `obs`: rows of a category are put together, in `order`. Categories come in their order, what
        is no categorical sorted; missing values last.
    seed
        Of the permutation.
    out
        Where to, shape (n_obs,), int64.
    """
    n_obs = len(obs)
    keyed = BlockOrder.storage(n_obs) if order == "keep" or n_obs == 0 else BlockOrder.shuffled(n_obs, seed, 0)
    for start in range(0, n_obs, _PART):
        stop = min(start + _PART, n_obs)
        out[start:stop] = keyed.at(np.arange(start, stop, dtype=np.int64))
    if group_by is not None:
        codes = _codes(obs[group_by])
        out[:] = out[np.argsort(codes[out], kind="stable")]


def _codes(column: pd.Series[Any]) -> NDArray[Any]:
    codes = pd.Categorical(column).codes
    # Missing is -1, and goes last.
    return np.where(codes < 0, np.iinfo(codes.dtype).max, codes)
