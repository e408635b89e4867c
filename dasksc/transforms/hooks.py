"""Ready-made hooks: fetched rows of the usual collections as arrays and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from dasksc.errors import InputError, MissingKeyError
from dasksc.multiindexable import MultiIndexable

__all__ = ["adata_to_mindex", "bionemo_to_tensor", "fetch_transform_adata", "hf_tahoe_to_tensor"]


def adata_to_mindex(batch: Any, columns: Sequence[str] | None = None) -> MultiIndexable:
    """Turn fetched AnnData rows into a dense X and some obs columns.

    Parameters
    ----------
    batch
        An AnnData (in memory, backed, or with Dask arrays) or a view of an AnnCollection.
    columns
        Names of obs columns. `functools.partial` gives a hook with columns:
        ``partial(adata_to_mindex, columns=["cell_type"])``.

    Returns
    -------
    MultiIndexable
        ``"X"``, dense, shape (n_rows, n_vars), in the dtype of ``adata.X``; and each column by its name, as
        its pandas ``.values``: a NumPy array, or a Categorical for a categorical column.

    Raises
    ------
    MissingKeyError
        If obs has no such column.
    """
    members = {"X": _dense(batch.X)}
    for name in columns or ():
        members[name] = _obs_values(batch.obs, name)
    return MultiIndexable(members)


def fetch_transform_adata(batch: Any, columns: Sequence[str] | None = None) -> torch.Tensor | MultiIndexable:
    """Turn fetched AnnData rows into a tensor, or a tensor and some obs columns.

    Parameters
    ----------
    batch
        As for `adata_to_mindex`.
    columns
        As for `adata_to_mindex`.

    Returns
    -------
    torch.Tensor or MultiIndexable
        Without columns X alone, dense float32, shape (n_rows, n_vars). With columns what
        `adata_to_mindex` gives, with that tensor as ``"X"``.

    Raises
    ------
    MissingKeyError
        If obs has no such column.
    """
    X = _as_float32(_dense(batch.X))
    if not columns:
        return X
    return MultiIndexable({"X": X, **{name: _obs_values(batch.obs, name) for name in columns}})


def hf_tahoe_to_tensor(batch: Any, num_genes: int = 62713) -> torch.Tensor:
    """Turn cells kept as lists of genes and expressions, as Tahoe-100M's are, into a dense tensor.

    Parameters
    ----------
    batch
        A mapping with ``"genes"`` and ``"expressions"``, each a sequence with one array a cell (what a
        Hugging Face data set gives for several rows), or a sequence of such mappings, one a cell.
        A cell may be empty.
    num_genes
        Number of columns of the result; the default is that of Tahoe-100M.

    Returns
    -------
    torch.Tensor
        Shape (n_cells, num_genes), float32. Of a gene given twice in one cell the last value counts.

    Raises
    ------
    InputError
        If the batch has another form, a cell has more genes than expressions or fewer, or a gene lies
        outside [0, num_genes).
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
    """Fetch rows of a BioNeMo ``SingleCellMemMapDataset``; a ``fetch_callback``.

    Parameters
    ----------
    data_collection
        The data set.
    idx
        One position, a slice, or a sequence, array or tensor of positions.

    Returns
    -------
    torch.Tensor
        Dense, shape (n_rows, n_genes).

    Raises
    ------
    ImportError
        If bionemo-scdl is not installed.
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
    """Bring a matrix of any kind that AnnData holds into memory, dense."""
    for method in ("compute", "to_memory"):  # Dask arrays; AnnData's matrices on disk
        if hasattr(X, method):
            X = getattr(X, method)()
    return X.toarray() if sp.issparse(X) else np.asarray(X)


def _as_float32(X: NDArray[Any]) -> torch.Tensor:
    # A read-only array would make torch warn, and a copy of a view frees what it views.
    return torch.from_numpy(np.require(X, dtype=np.float32, requirements=["C", "W"]))


def _obs_values(obs: Any, name: str) -> Any:
    try:
        column = obs[name]
    except KeyError as error:
        raise MissingKeyError(f"obs has no column {name!r}; it has {list(obs.keys())}") from error
    return getattr(column, "values", column)


def _joined(cells: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    # An empty list would become float64 and take the whole array with it.
    return np.concatenate([np.empty(0, dtype), *(np.asarray(cell, dtype=dtype) for cell in cells)])
