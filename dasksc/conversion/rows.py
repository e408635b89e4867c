"""Order of the rows of the output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.kernels.draw import count_codes
from dasksc.kernels.split import put_by_code
from dasksc.sampling.block_order import BlockOrder
from dasksc.sampling.groups import CodedColumn, combined_codes

__all__ = ["row_order"]

_PART = 2**20


def row_order(obs: pd.DataFrame, *, order: str, group_by: Sequence[str], seed: int, out: NDArray[np.int64]) -> None:
    """Compute the input row of each output row; arguments as for `dasksc.convert`.

    Groups are sorted by the first column, then by the next. Categorical columns keep the order of their categories; the
    values of other columns are sorted. Rows with a missing category come last.
    """
    n_obs = len(obs)
    keyed = BlockOrder.storage(n_obs) if order == "keep" or n_obs == 0 else BlockOrder.shuffled(n_obs, seed, 0)
    if group_by:
        grouped = {name: pd.Categorical(obs[name]) for name in group_by}
        columns = [CodedColumn(name, np.asarray(one.codes), list(one.categories)) for name, one in grouped.items()]
        codes, n_codes = combined_codes(columns, slice(None), n_obs)
        counts = np.zeros(n_codes + 1, dtype=np.int64)
        count_codes(n_obs, codes, np.empty(0, dtype=np.int64), counts)
        # Missing categories have the code -1; their rows come last.
        places = np.concatenate([[0], np.cumsum(counts[1:])])
    for start in range(0, n_obs, _PART):
        stop = min(start + _PART, n_obs)
        rows = keyed.at(np.arange(start, stop, dtype=np.int64))
        if not group_by:
            out[start:stop] = rows
        else:
            put_by_code(rows, codes[rows].astype(np.int32), places, out)
