"""Synthetic atlases of raw counts with cell types, donors and batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from dasksc.checks import check_flags
from dasksc.datasets.design import Sizes, design, names
from dasksc.datasets.writing import Chunk, partial_path, write_atlas
from dasksc.errors import InputError
from dasksc.kernels import synthetic as kernels

__all__ = ["synthetic"]

_CELLS_PER_CHUNK = 2_048


def synthetic(
    path: str | os.PathLike[str],
    n_obs: int = 20_000,
    n_vars: int = 2_000,
    *,
    n_types: int = 10,
    n_donors: int = 8,
    n_batches: int = 4,
    batch_key: str = "batch",
    n_markers: int = 15,
    donor_effect: float = 0.2,
    batch_effect: float = 0.1,
    seed: int = 0,
    dense: bool = False,
    compression: Literal["gzip", "lzf"] | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Path:
    """Write a synthetic atlas of raw counts to an h5ad file or a Zarr store.

    X holds integer counts as float32. Cells are sorted by type, which is the hardest case for a loader because
    neighbors on disk are alike. obs has the columns ``cell_type``, ``donor``, `batch_key` and ``n_counts`` (molecules
    of each cell).

    Parameters
    ----------
    path
        Path of the atlas. A name that ends in ``.zarr`` gives a Zarr v3 store, any other an h5ad file. The file or
        store appears when it is complete.
    n_obs, n_vars
        Number of cells and genes. A typical cell expresses 7% of the genes.
    n_types
        Number of cell types. Type k has a share proportional to 1 / (k + 1).
    n_donors
        Number of donors, which differ in their shares of the cell types. 0: no column ``donor``.
    n_batches
        Number of batches, which differ by about 10% in depth and are independent of types and donors. 0: no column.
    batch_key
        Name of the obs column of batches.
    n_markers
        Number of marker genes of each type, whose expression is six times as high in that type.
    donor_effect, batch_effect
        Standard deviation, over genes, of the natural logarithm of the fold change of a donor or a batch. 0: the same
        expression in all donors or batches.
    seed
        Random seed, an integer in [0, 2**64).
    dense
        If True, write X as a dense array rather than CSR.
    compression
        Compression of the arrays of an h5ad file. A Zarr store uses AnnData's default.
    overwrite
        If True, replace an existing atlas at `path`.
    progress
        Show a progress bar (requires tqdm).

    Returns
    -------
    Path
        `path`.

    Raises
    ------
    InputError
        If an argument is out of range; if `path` exists and `overwrite` is False; if `compression` is given for a Zarr
        store; or if the expression profiles of all combinations of type, donor and batch take more than 4 GiB.

    Notes
    -----
    The same arguments give the same atlas on any number of cores. For each cell, the number of genes that it expresses
    is drawn first. Molecules are then drawn from the profile of its type, donor and batch until that many genes occur.
    Profiles are log-normal over genes.

    Memory is 8 bytes for each gene of each profile, about 20 bytes for each cell, and a few chunks of 2,048
    cells. Two cores write about 150,000 cells of 2,000 genes per second.

    Examples
    --------
    >>> path = dasksc.datasets.synthetic("synthetic.h5ad", n_obs=1_000, n_vars=200)
    >>> dasksc.open(path).shape
    (1000, 200)
    """
    check_flags(dense=dense, progress=progress)
    path = Path(path)
    is_zarr = path.suffix == ".zarr"
    if compression is not None and (is_zarr or compression not in ("gzip", "lzf")):
        raise InputError(
            f'compression={compression!r} is not possible for {path.name}: "gzip" and "lzf" are for h5ad files; '
            "a Zarr store uses AnnData's default compression"
        )
    if n_batches and batch_key in ("cell_type", "donor", "n_counts", "_index", ""):
        raise InputError(f'batch_key={batch_key!r} is the name of another column; give another name, such as "batch"')
    sizes = Sizes(
        n_obs=n_obs,
        n_vars=n_vars,
        n_types=n_types,
        n_donors=n_donors,
        n_batches=n_batches,
        n_markers=n_markers,
        donor_effect=donor_effect,
        batch_effect=batch_effect,
        seed=seed,
    )
    with partial_path(path, overwrite=overwrite) as partial:
        cells = design(sizes)
        key = np.random.SeedSequence(seed, spawn_key=(1,)).generate_state(1, np.uint64)[0]

        def make(start: int) -> Chunk:
            rows = slice(start, min(start + _CELLS_PER_CHUNK, n_obs))
            depths = cells.depths[rows]
            nnz = int(depths.sum())
            indices, data = np.empty(nnz + 1, dtype=np.int32), np.empty(nnz + 1, dtype=np.float32)
            total = np.empty(len(depths), dtype=np.float32)
            kernels.draw_cells(key, start, cells.groups[rows], depths, *cells.tables, indices, data, total)
            return Chunk(rows=rows, indices=indices[:nnz], data=data[:nnz], total=total)

        labels = {"cell_type": pd.Categorical.from_codes(cells.types, names("type", n_types))}
        if cells.donors is not None:
            labels["donor"] = pd.Categorical.from_codes(cells.donors, names("donor", n_donors))
        if cells.batches is not None:
            labels[batch_key] = pd.Categorical.from_codes(cells.batches, names(batch_key, n_batches))
        write_atlas(
            partial,
            make,
            range(0, n_obs, _CELLS_PER_CHUNK),
            is_zarr=is_zarr,
            depths=cells.depths,
            n_vars=n_vars,
            labels=labels,
            dense=dense,
            filters={} if compression is None else {"compression": compression},
            progress=progress,
        )
    return path
