"""A rank's epoch as one lazy Dask array."""

from __future__ import annotations

import uuid
from typing import Any

import dask.array as da
import numpy as np
import scipy.sparse as sp
from dask.highlevelgraph import HighLevelGraph
from numpy.typing import NDArray

from dasksc.plan import EpochPlan
from dasksc.storage import Columns, Layout, Matrix

__all__ = ["epoch_array"]


def epoch_array(
    matrix: Matrix,
    plan: EpochPlan,
    *,
    name: str,
    layout: Layout,
    dtype: np.dtype[Any] | None,
    columns: Columns | None,
) -> da.Array:
    """Return the rows of a rank's epoch in the order in which they are yielded.

    Parameters
    ----------
    matrix
        Whose rows.
    plan
        Which rows; it travels with the graph, and each task works out its own fetch.
    name
        Of the array, before what makes it unique.
    layout, dtype, columns
        What the chunks hold: `csr_matrix` or ndarray, of this type (None: as stored), these columns.

    Returns
    -------
    dask.array.Array
        Shape (plan.n_rank_rows, n_vars); one chunk and one task a fetch.
    """
    dtype = matrix.dtype if dtype is None else dtype
    n_vars = matrix.shape[1] if columns is None else len(columns)
    # Unique, for equal keys are computed once, and a matrix in memory has nothing that tells it from another.
    name = f"{name}-{uuid.uuid4().hex}"
    source = f"{name}-source"
    graph: dict[Any, Any] = {source: _Epoch(matrix, plan, layout, dtype, columns)}
    graph |= {(name, k, 0): (_chunk, source, k) for k in range(plan.n_fetches)}
    full, rest = divmod(plan.n_rank_rows, plan.fetch_rows)
    rows = (plan.fetch_rows,) * full + ((rest,) if rest else ())
    meta = sp.csr_matrix((0, 0), dtype=dtype) if layout == "csr" else np.empty((0, 0), dtype=dtype)
    return da.Array(
        HighLevelGraph.from_collections(name, graph), name, chunks=(rows or (0,), (n_vars,)), dtype=dtype, meta=meta
    )


class _Epoch:
    """What every chunk needs."""

    def __init__(
        self, matrix: Matrix, plan: EpochPlan, layout: Layout, dtype: np.dtype[Any], columns: Columns | None
    ) -> None:
        self.matrix = matrix
        self.plan = plan
        self.layout = layout
        self.dtype = dtype
        self.columns = columns


def _chunk(epoch: _Epoch, k: int) -> NDArray[Any] | sp.csr_matrix:
    fetch = epoch.plan.fetch(k)
    fetched = epoch.matrix.fetch(fetch.rows)
    n_vars = fetched.shape[1] if epoch.columns is None else len(epoch.columns)
    shape = (len(fetch.order), n_vars)
    if epoch.layout == "csr":
        indptr, indices, data = fetched.gather_csr(fetch.order, dtype=epoch.dtype, columns=epoch.columns)
        return sp.csr_matrix((data, indices, indptr), shape=shape, copy=False)
    out = np.empty(shape, dtype=epoch.dtype)
    fetched.gather(fetch.order, out=out, columns=epoch.columns)
    return out
