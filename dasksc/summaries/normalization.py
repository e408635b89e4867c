"""Lazy normalization of cells to the same total."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
from anndata import AnnData

from dasksc.atlas.opening import open as open_atlas
from dasksc.checks import check_flags
from dasksc.errors import InputError
from dasksc.kernels import statistics as kernels
from dasksc.pushdown import row_local
from dasksc.pushdown.dask_arrays import CellsArray
from dasksc.readers.options import Openable
from dasksc.summaries.reading import Pass


def normalize(
    adata: Openable | Sequence[Openable] | Mapping[str, Openable],
    *,
    target_sum: float | None = None,
    log1p: bool = True,
    layer: str | None = None,
    progress: bool = False,
) -> AnnData:
    """Scale each cell to the same total and take the logarithm, lazily.

    Parameters
    ----------
    adata
        Any argument or result of `dasksc.open`.
    target_sum
        Total of each cell after scaling. None: the median of the positive totals, computed in one pass over the matrix
        with up to 33 bytes of memory per cell.
    log1p
        If True, take ``log(1 + x)`` of the scaled values.
    layer
        Name of the layer to normalize instead of X.
    progress
        Show a progress bar for the pass (requires tqdm).

    Returns
    -------
    AnnData
        AnnData as from `dasksc.open`, with a normalized X or layer of floating-point values. These are computed from
        the stored values whenever rows are read, both for Dask chunks and for batches. ``uns["log1p"]`` records the
        logarithm. `adata` does not change.

    Raises
    ------
    InputError
        If `target_sum` is not a positive number; or if it is None, and no cell has a positive total, or the totals and
        the rows being read need more memory than ``dasksc.memory-limit``.

    Notes
    -----
    The result equals that of `scanpy.pp.normalize_total` and `scanpy.pp.log1p`, with one exception: for CSR matrices
    in memory, scanpy includes cells with a total of 0 in the median. Cells with a total of 0 do not change. Totals are
    summed in float64.

    Examples
    --------
    >>> adata = dasksc.normalize("atlas.h5ad", target_sum=1e4)
    >>> batch = next(iter(dasksc.scDataset(adata, batch_size=3, seed=0)))
    >>> batch.expm1().sum(dim=1)
    tensor([10000., 10000., 10000.])
    """
    check_flags(log1p=log1p)
    atlas = open_atlas(adata)
    source = Pass(atlas, layer=layer, progress=progress)
    target: Any = _median_total(source) if target_sum is None else target_sum
    if isinstance(target, bool) or not isinstance(target, int | float | np.number) or not 0 < target < np.inf:
        raise InputError(f"target_sum must be a positive number; got {target!r}")
    array = source.array
    dtype = np.result_type(array.dtype, np.float32) if array.dtype.kind == "f" else np.dtype(np.float32)
    scaled = row_local(partial(_scaled, target=float(target), log1p=log1p, dtype=dtype))
    meta = sp.csr_matrix((0, 0), dtype=dtype) if sp.issparse(array._meta) else np.empty((0, 0), dtype=dtype)
    normalized = CellsArray.of(array.map_blocks(scaled, dtype=dtype, meta=meta))
    if layer is None:
        atlas.X = normalized
    else:
        atlas.layers[layer] = normalized
    if log1p:
        atlas.uns["log1p"] = {"base": None}
    return atlas


def _median_total(source: Pass) -> float:
    # Totals, numbers of genes, a mask, and two copies for the median.
    source.reserve(f"totals of {source.n_rows:,} cells", 33 * source.n_rows, "Give target_sum=")
    totals, counts = np.empty((source.n_rows, 1)), np.empty(source.n_rows, dtype=np.int64)
    masks = np.zeros((0, source.adata.n_vars), dtype=bool)
    for places, *rows in source:
        kernels.add_rows(*rows, masks, totals[places], counts[places])
    positive = totals[totals > 0]
    if not len(positive):
        raise InputError(f"no cell has a total of {source.label} above 0, so there is no median; give target_sum=")
    return float(np.median(positive))


def _scaled(block: Any, *, target: float, log1p: bool, dtype: np.dtype[Any]) -> Any:
    """Scale rows to the total `target`; the result is CSR or dense, as `block` is."""
    is_sparse = sp.issparse(block)
    result: Any = sp.csr_matrix(block, dtype=dtype, copy=True) if is_sparse else np.array(block, dtype=dtype)
    totals = np.asarray(result.sum(axis=1, dtype=np.float64)).reshape(-1)
    factors = np.divide(target, totals, out=np.ones_like(totals), where=totals != 0).astype(dtype)
    values = result.data if is_sparse else result
    values *= np.repeat(factors, np.diff(result.indptr)) if is_sparse else factors[:, None]
    if log1p:
        np.log1p(values, out=values)
    return result
