"""Built-in hooks that convert fetched rows of common collections to arrays and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from dasksc.checks import known
from dasksc.errors import InputError
from dasksc.multiindexable import MultiIndexable

__all__ = ["adata_to_mindex", "bionemo_to_tensor", "fetch_transform_adata", "hf_tahoe_to_tensor"]


def adata_to_mindex(batch: Any, columns: Sequence[str] | None = None) -> MultiIndexable:
    """Convert fetched AnnData rows to a dense X and selected obs columns.

    Parameters
    ----------
    batch
        AnnData (in memory, backed, or with Dask arrays) or a view of an AnnCollection.
    columns
        Names of obs columns.

    Returns
    -------
    MultiIndexable
        ``"X"``, dense, shape (n_rows, n_vars), with the data type of ``adata.X``; and each column by its name, as
        its pandas ``.values``: a NumPy array, or a Categorical for a categorical column.

    Examples
    --------
    >>> from functools import partial
    >>> hook = partial(dasksc.adata_to_mindex, columns=["cell_type"])
    >>> batch = next(iter(dasksc.scDataset("atlas.h5ad", batch_size=64, fetch_transform=hook, seed=0)))
    >>> batch["X"].shape, len(batch["cell_type"])
    ((64, 300), 64)
    """
    return MultiIndexable({"X": _dense(batch.X), **{name: _obs_values(batch.obs, name) for name in columns or ()}})


def fetch_transform_adata(batch: Any, columns: Sequence[str] | None = None) -> torch.Tensor | MultiIndexable:
    """Convert fetched AnnData rows to a tensor, or to a tensor and selected obs columns.

    Parameters
    ----------
    batch, columns
        As for `adata_to_mindex`.

    Returns
    -------
    torch.Tensor or MultiIndexable
        Without columns, X as a dense float32 tensor, shape (n_rows, n_vars). With columns, the result of
        `adata_to_mindex` with that tensor as ``"X"``.

    Examples
    --------
    >>> hook = dasksc.fetch_transform_adata
    >>> next(iter(dasksc.scDataset("atlas.h5ad", batch_size=64, fetch_transform=hook, seed=0))).shape
    torch.Size([64, 300])
    """
    # The array must be writable, since torch warns about read-only ones; copying a view also frees its base.
    X = torch.from_numpy(np.require(_dense(batch.X), dtype=np.float32, requirements=["C", "W"]))
    if not columns:
        return X
    return MultiIndexable({"X": X, **{name: _obs_values(batch.obs, name) for name in columns}})


def hf_tahoe_to_tensor(batch: Any, num_genes: int = 62713) -> torch.Tensor:
    """Convert cells stored as lists of genes and expressions, such as those of Tahoe-100M, to a dense tensor.

    Parameters
    ----------
    batch
        Mapping with ``"genes"`` and ``"expressions"``, each a sequence with one array per cell (the result of
        indexing several rows of a Hugging Face data set), or a sequence of such mappings, one per cell.
        A cell may be empty.
    num_genes
        Number of columns of the result; the default is that of Tahoe-100M.

    Returns
    -------
    torch.Tensor
        Shape (n_cells, num_genes), float32. If a gene occurs twice in a cell, its last value is used.

    Examples
    --------
    >>> cells = [{"genes": [1, 3], "expressions": [2.0, 5.0]}, {"genes": [], "expressions": []}]
    >>> dasksc.hf_tahoe_to_tensor(cells, num_genes=5)
    tensor([[0., 2., 0., 5., 0.],
            [0., 0., 0., 0., 0.]])
    """
    if isinstance(batch, Mapping):
        genes, expressions = batch["genes"], batch["expressions"]
    elif isinstance(batch, Sequence) and all(isinstance(cell, Mapping) for cell in batch):
        genes = [cell["genes"] for cell in batch]
        expressions = [cell["expressions"] for cell in batch]
    else:
        raise InputError(
            'hf_tahoe_to_tensor takes a dict with "genes" and "expressions", or a list of such dicts; '
            f"got {type(batch).__name__}"
        )

    n_genes = np.fromiter((len(cell) for cell in genes), dtype=np.int64)
    n_values = np.fromiter((len(cell) for cell in expressions), dtype=np.int64)
    if not np.array_equal(n_genes, n_values):
        raise InputError(
            f"every cell needs as many expressions as genes; got {n_values.tolist()} expressions "
            f"for {n_genes.tolist()} genes"
        )
    columns = _joined(genes, np.dtype(np.int64))
    if len(columns) and not (columns.min() >= 0 and columns.max() < num_genes):
        raise InputError(
            f"genes must lie in [0, num_genes={num_genes}); got {columns.min()} to {columns.max()}. "
            "Pass the number of genes of your vocabulary as num_genes."
        )
    dense = np.zeros((len(n_genes), num_genes), dtype=np.float32)
    dense[np.repeat(np.arange(len(n_genes)), n_genes), columns] = _joined(expressions, np.dtype(np.float32))
    return torch.from_numpy(dense)


def bionemo_to_tensor(data_collection: Any, idx: Any) -> torch.Tensor:
    """Return rows of a BioNeMo ``SingleCellMemMapDataset``; for use as ``fetch_callback``.

    Parameters
    ----------
    data_collection
        Data set to index.
    idx
        One position, a slice, or a sequence, array or tensor of positions.

    Returns
    -------
    torch.Tensor
        Dense, shape (n_rows, n_genes).

    Examples
    --------
    >>> from bionemo.scdl.io.single_cell_memmap_dataset import SingleCellMemMapDataset  # doctest: +SKIP
    >>> data = SingleCellMemMapDataset("folder", h5ad_path="atlas.h5ad")  # doctest: +SKIP
    >>> dataset = dasksc.scDataset(data, batch_size=64, fetch_callback=dasksc.bionemo_to_tensor)  # doctest: +SKIP
    """
    try:
        from bionemo.scdl.util.torch_dataloader_utils import collate_sparse_matrix_batch
    except ImportError as error:
        raise ImportError("bionemo_to_tensor needs bionemo-scdl: pip install bionemo-scdl") from error
    positions = range(*idx.indices(len(data_collection))) if isinstance(idx, slice) else np.atleast_1d(idx)
    cells = [data_collection[int(i)] for i in positions]
    dense: torch.Tensor = collate_sparse_matrix_batch(cells).to_dense()
    return dense


def _dense(X: Any) -> NDArray[Any]:
    """Return a matrix, of any type that AnnData supports, as a dense array in memory."""
    for method in ("compute", "to_memory"):  # Dask arrays; backed matrices of AnnData
        if hasattr(X, method):
            X = getattr(X, method)()
    return X.toarray() if sp.issparse(X) else np.asarray(X)


def _obs_values(obs: Any, name: str) -> Any:
    column = obs[known("obs", name, list(obs.keys()))]
    return getattr(column, "values", column)


def _joined(cells: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    # Without a data type an empty list would become float64, and so would the whole array.
    return np.concatenate([np.empty(0, dtype), *(np.asarray(cell, dtype=dtype) for cell in cells)])
