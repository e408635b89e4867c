"""Synthetic atlases of raw counts with cell types, donors and batches."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from dasksc.checks import check_flags, whole_number
from dasksc.errors import InputError
from dasksc.kernels import synthetic as kernels
from dasksc.output.work_folder import as_anndata_writes, atomic_path, discard

# Alias tables of `dasksc.kernels.synthetic`, two arrays of shape (n_profiles, n_vars).
_Tables = tuple[NDArray[np.uint32], NDArray[np.int32]]
_CELLS_PER_CHUNK = 2_048
_GENES_SEEN = 0.0725  # share of the genes that a cell of typical depth expresses: 1,450 of 20,000
_MARKER_FOLD = 6.0


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
    overwrite: bool = False,
) -> Path:
    """Write a synthetic atlas of raw counts to an h5ad file or a Zarr store.

    X is CSR and holds integer counts as float32. Cells are sorted by type, the hardest case for a loader. obs has the
    columns ``cell_type``, ``donor``, `batch_key` and ``n_counts`` (molecules of each cell).

    Parameters
    ----------
    path
        Path of the atlas, which appears when it is complete: a Zarr v3 store (``.zarr``), or else an h5ad file.
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
    overwrite
        If True, replace an existing atlas at `path`.

    Returns
    -------
    Path
        `path`.

    Raises
    ------
    InputError
        If an argument is out of range, or if `path` exists and `overwrite` is False.

    Notes
    -----
    The same arguments give the same atlas on any number of cores. For each cell, the number of genes that it expresses
    is drawn first, and then molecules from the log-normal profile of its type, donor and batch until that many genes
    occur. Memory is 8 bytes for each gene of each profile, and about 150 bytes for each cell. X is drawn into a
    temporary file in the folder of `path`, as large as X.

    Examples
    --------
    >>> path = dasksc.datasets.synthetic("synthetic.h5ad", n_obs=1_000, n_vars=200)
    >>> dasksc.open(path).shape
    (1000, 200)
    """
    path = Path(path)
    for name, number in {"n_obs": n_obs, "n_vars": n_vars, "n_types": n_types}.items():
        whole_number(name, number)
    for name, number in {"n_donors": n_donors, "n_batches": n_batches, "n_markers": n_markers}.items():
        whole_number(name, number, 0)
    whole_number("seed", seed, 0, 2**64)
    for name, effect in {"donor_effect": donor_effect, "batch_effect": batch_effect}.items():
        if not 0 <= effect < 10:
            raise InputError(f"{name} must be a number in [0, 10); got {effect}")
    if n_batches and batch_key in ("cell_type", "donor", "n_counts", "_index", ""):
        raise InputError(f'batch_key={batch_key!r} is the name of another column; give another name, such as "batch"')

    with partial_path(path, overwrite=overwrite) as partial:
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
        types = _types(n_obs, n_types)
        labels = {"cell_type": pd.Categorical.from_codes(types, names("type", n_types))}
        batches = rng.integers(max(1, n_batches), size=n_obs, dtype=np.min_scalar_type(-n_batches - 1))
        depths = _depths(rng, batches, n_obs, n_vars)
        profiles = _type_profiles(rng, n_types, n_vars, n_markers)

        # Separate random streams: an atlas without donors has the same cells as one whose donors have no effect.
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(2,)))
        donors = _donors(rng, types, n_types, n_donors) if n_donors else types
        groups, folds = types, np.ones((1, n_vars))
        for column, codes, n, effect in (
            ("donor", donors, n_donors, donor_effect),
            (batch_key, batches, n_batches, batch_effect),
        ):
            if n:
                labels[column] = pd.Categorical.from_codes(codes, names(column, n))
            if n and effect:
                folds = (folds[:, None] * np.exp(rng.normal(0, effect, (n, n_vars)))).reshape(-1, n_vars)
                groups = groups * n + codes
        tables = _alias_tables(profiles, folds)
        key = np.random.SeedSequence(seed, spawn_key=(1,)).generate_state(1, np.uint64)[0]

        with _drawn(path.parent, key, groups, depths, tables) as (x, n_counts):
            obs = pd.DataFrame({**labels, "n_counts": n_counts}, index=names("cell", n_obs))
            atlas = anndata.AnnData(x, obs, pd.DataFrame(index=names("gene", n_vars)))
            if path.suffix == ".zarr":
                with as_anndata_writes(), anndata.settings.override(zarr_write_format=3):
                    atlas.write_zarr(partial)
            else:
                atlas.write_h5ad(partial)
    return path


def names(prefix: str, n: int) -> list[str]:
    """Return ``prefix_0``, ..., ``prefix_{n - 1}``, with zero-padded numbers."""
    width = len(str(n - 1))
    return [f"{prefix}_{i:0{width}}" for i in range(n)]


@contextlib.contextmanager
def partial_path(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary path next to `path`, which is renamed to `path` when the block succeeds."""
    check_flags(overwrite=overwrite)
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists. Give another path, or overwrite=True (--overwrite).")
    with atomic_path(path) as partial:
        yield partial
        discard(path)  # no file can replace a store


@contextlib.contextmanager
def _drawn(
    folder: Path, key: np.uint64, groups: NDArray[np.int32], depths: NDArray[np.int32], tables: _Tables
) -> Iterator[tuple[sp.csr_matrix, NDArray[np.float32]]]:
    """Draw X on all cores; yield it, mapped from temporary files, and the number of molecules of each cell."""
    n_counts = np.empty(len(depths), dtype=np.float32)
    indptr = np.zeros(len(depths) + 1, dtype=np.int64)
    np.cumsum(depths, out=indptr[1:])
    writing = threading.Lock()

    def draw(start: int) -> None:
        rows = slice(start, start + _CELLS_PER_CHUNK)
        nnz = int(depths[rows].sum())
        drawn = np.empty(nnz + 1, dtype=np.int32), np.empty(nnz + 1, dtype=np.float32)
        kernels.draw_cells(key, start, groups[rows], depths[rows], *tables, *drawn, n_counts[rows])
        with writing:
            for file, values in zip((indices, data), drawn, strict=True):
                file.seek(values.itemsize * int(indptr[start]))
                file.write(values[:nnz].data)

    # Files rather than arrays, so that memory does not grow with X; mapped, because AnnData writes arrays only.
    with tempfile.TemporaryFile(dir=folder) as indices, tempfile.TemporaryFile(dir=folder) as data:
        with ThreadPoolExecutor() as pool:
            list(pool.map(draw, range(0, len(depths), _CELLS_PER_CHUNK)))
        indices.flush()
        data.flush()
        x = sp.csr_matrix((len(depths), tables[0].shape[1]), dtype=np.float32)
        # The constructor would copy the indices to the dtype of indptr.
        x.data = np.asarray(np.memmap(data, np.float32, "r"))
        x.indices = np.asarray(np.memmap(indices, np.int32, "r"))
        x.indptr = indptr if indptr[-1] > np.iinfo(np.int32).max else indptr.astype(np.int32)
        yield x, n_counts


def _types(n_obs: int, n_types: int) -> NDArray[np.int32]:
    """Return the type of each cell, sorted: type k has a share proportional to 1 / (k + 1)."""
    share = 1 / np.arange(1, n_types + 1)
    ends = np.rint(np.cumsum(share / share.sum()) * n_obs).astype(np.int64)
    return np.repeat(np.arange(n_types, dtype=np.int32), np.diff(ends, prepend=0))


def _donors(rng: np.random.Generator, types: NDArray[Any], n_types: int, n_donors: int) -> NDArray[np.int32]:
    """Return the donor of each cell; donors differ in their shares of the cell types."""
    donors = np.empty(len(types), dtype=np.int32)
    ends = np.searchsorted(types, np.arange(n_types), side="right")
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        shares = rng.dirichlet(np.full(n_donors, 8.0))
        donors[start:stop] = rng.choice(n_donors, size=stop - start, p=shares)
    return donors


def _depths(rng: np.random.Generator, batches: NDArray[Any], n_obs: int, n_vars: int) -> NDArray[np.int32]:
    """Return the number of genes expressed in each cell; its mean differs slightly between batches."""
    of_batch = rng.normal(0, 0.1, batches.max() + 1)
    of_batch -= of_batch.mean()
    log = rng.normal(-0.035, 0.25, n_obs) + of_batch[batches]
    depths: NDArray[np.float64] = np.clip(np.exp(log) * _GENES_SEEN * n_vars, 1, max(1, 0.3 * n_vars))
    return depths.astype(np.int32)


def _type_profiles(rng: np.random.Generator, n_types: int, n_vars: int, n_markers: int) -> NDArray[np.float64]:
    """Return the expected share of each gene in each type, shape (n_types, n_vars)."""
    base = np.exp(rng.normal(0, 2, n_vars))
    profiles = np.tile(base, (n_types, 1))
    candidates = np.flatnonzero(base >= np.median(base))
    for profile in profiles:
        profile[rng.choice(candidates, min(len(candidates), n_markers), replace=False)] *= _MARKER_FOLD
    shares: NDArray[np.float64] = profiles / profiles.sum(axis=1, keepdims=True)
    return shares


def _alias_tables(profiles: NDArray[np.float64], folds: NDArray[np.float64]) -> _Tables:
    """Multiply each profile by each row of fold changes, and return the alias tables of the products."""
    shape = (len(profiles) * len(folds), profiles.shape[1])
    keep, other = np.empty(shape, dtype=np.uint32), np.empty(shape, dtype=np.int32)
    for i in range(shape[0]):
        profile = profiles[i // len(folds)]
        if len(folds) > 1:
            profile = profile * folds[i % len(folds)]
            profile /= profile.sum()
        kernels.fill_alias_table(profile * shape[1], keep[i], other[i])
    return keep, other
