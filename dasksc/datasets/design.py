"""Design of a synthetic atlas: labels and depth of each cell, and the expression profile of each group of cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.kernels import synthetic as kernels

__all__ = ["Design", "Sizes", "design", "names"]

GENES_SEEN = 0.0725
"""Share of the genes that a cell of typical depth expresses: 1,450 of 20,000."""

MARKER_FOLD = 6.0
"""Fold change of a marker gene in its cell type."""

_MAX_TABLE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Shape of an atlas, number of its groups, and strength of their effects."""

    n_obs: int
    n_vars: int
    n_types: int
    n_donors: int
    n_batches: int
    n_markers: int
    donor_effect: float
    batch_effect: float
    seed: int

    def __post_init__(self) -> None:
        for name, lowest in (("n_obs", 1), ("n_vars", 1), ("n_types", 1), ("n_donors", 0), ("n_batches", 0)):
            value = getattr(self, name)
            if value < lowest:
                raise InputError(f"{name} must be at least {lowest}; got {value}")
        if self.n_markers < 0:
            raise InputError(f"n_markers must be at least 0; got {self.n_markers}")
        for name in ("donor_effect", "batch_effect"):
            value = getattr(self, name)
            if not 0 <= value < 10:
                raise InputError(f"{name} must be a number in [0, 10); got {value}")
        if not 0 <= self.seed < 2**64:
            raise InputError(f"seed must be an integer in [0, 2**64); got {self.seed}")
        n_bytes = self.n_groups * self.n_vars * 8
        if n_bytes > _MAX_TABLE_BYTES:
            raise InputError(
                f"{self.n_groups:,} expression profiles of {self.n_vars:,} genes need {n_bytes / 1e9:.1f} GB of "
                "memory. Lower n_types, n_donors, n_batches or n_vars, or set donor_effect=0 and batch_effect=0"
            )

    @property
    def has_donor_profiles(self) -> bool:
        """True if expression depends on the donor."""
        return self.n_donors > 0 and self.donor_effect > 0

    @property
    def has_batch_profiles(self) -> bool:
        """True if expression depends on the batch."""
        return self.n_batches > 0 and self.batch_effect > 0

    @property
    def n_groups(self) -> int:
        """Number of distinct expression profiles."""
        n_donors = self.n_donors if self.has_donor_profiles else 1
        return self.n_types * n_donors * (self.n_batches if self.has_batch_profiles else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Labels of all cells, and the alias tables (Walker's method) for drawing the genes of each group.

    Attributes
    ----------
    types, donors, batches
        Codes, shape (n_obs,). `donors` is None if the atlas has no donors, and `batches` is None if it has no batches.
    groups
        Row of the alias tables for each cell, shape (n_obs,).
    depths
        Number of genes (not of molecules) expressed in each cell, shape (n_obs,), int32.
    tables
        Alias tables of `dasksc.kernels.synthetic`, two arrays of shape (n_groups, n_vars).
    """

    types: NDArray[Any]
    donors: NDArray[Any] | None
    batches: NDArray[Any] | None
    groups: NDArray[Any]
    depths: NDArray[np.int32]
    tables: tuple[NDArray[np.uint32], NDArray[np.int32]]


def design(sizes: Sizes) -> Design:
    """Draw the design of an atlas; O(n_obs + n_groups * n_vars) time and memory."""
    rng = np.random.default_rng(np.random.SeedSequence(sizes.seed, spawn_key=(0,)))
    types = _zipf_codes(sizes.n_obs, sizes.n_types)
    batches = None
    if sizes.n_batches:
        batches = rng.integers(sizes.n_batches, size=sizes.n_obs, dtype=_dtype_of(sizes.n_batches))
    depths = _depths(rng, batches, sizes.n_obs, sizes.n_vars)
    profiles = _type_profiles(rng, sizes)

    # Separate random streams: an atlas without donors has the same cells as one whose donors have no effect.
    rng = np.random.default_rng(np.random.SeedSequence(sizes.seed, spawn_key=(2,)))
    donors = _donors(rng, types, sizes.n_types, sizes.n_donors) if sizes.n_donors else None
    folds = np.ones((1, sizes.n_vars))
    groups = types.astype(np.int32)
    if donors is not None and sizes.has_donor_profiles:
        folds = np.exp(rng.normal(0, sizes.donor_effect, (sizes.n_donors, sizes.n_vars)))
        groups = groups * sizes.n_donors + donors
    if batches is not None and sizes.has_batch_profiles:
        of_batch = np.exp(rng.normal(0, sizes.batch_effect, (sizes.n_batches, sizes.n_vars)))
        folds = (folds[:, None] * of_batch).reshape(-1, sizes.n_vars)
        groups = groups * sizes.n_batches + batches
    tables = _alias_tables(profiles, folds)
    return Design(types=types, donors=donors, batches=batches, groups=groups, depths=depths, tables=tables)


def names(prefix: str, n: int, start: int = 0, stop: int | None = None) -> list[str]:
    """Return the slice ``[start:stop]`` of the list ``prefix_0``, ..., ``prefix_{n - 1}``, with zero-padded numbers."""
    width = len(str(n - 1))
    return [f"{prefix}_{i:0{width}}" for i in range(start, n if stop is None else stop)]


def _dtype_of(n: int) -> Any:
    return np.int8 if n < 128 else np.int16 if n < 1 << 15 else np.int32


def _zipf_codes(n_obs: int, n_types: int) -> NDArray[Any]:
    """Return the type of each cell, sorted: type k has a share proportional to 1 / (k + 1)."""
    share = 1 / np.arange(1, n_types + 1)
    ends = np.rint(np.cumsum(share / share.sum()) * n_obs).astype(np.int64)
    sizes = np.diff(ends, prepend=0)
    return np.repeat(np.arange(n_types, dtype=_dtype_of(n_types)), sizes)


def _donors(rng: np.random.Generator, types: NDArray[Any], n_types: int, n_donors: int) -> NDArray[Any]:
    """Return the donor of each cell; donors differ in their shares of the cell types."""
    donors = np.empty(len(types), dtype=_dtype_of(n_donors))
    ends = np.searchsorted(types, np.arange(n_types), side="right")
    for start, stop in zip(np.concatenate([[0], ends[:-1]]), ends, strict=True):
        shares = rng.dirichlet(np.full(n_donors, 8.0))
        donors[start:stop] = rng.choice(n_donors, size=stop - start, p=shares)
    return donors


def _depths(rng: np.random.Generator, batches: NDArray[Any] | None, n_obs: int, n_vars: int) -> NDArray[np.int32]:
    """Return the number of genes expressed in each cell; its mean differs slightly between batches."""
    codes = np.zeros(n_obs, dtype=np.int8) if batches is None else batches
    of_batch = rng.normal(0, 0.1, codes.max() + 1)
    of_batch -= of_batch.mean()
    depths = np.empty(n_obs, dtype=np.int32)
    for start in range(0, n_obs, 1 << 20):
        part = slice(start, start + (1 << 20))
        log = rng.normal(-0.035, 0.25, len(depths[part])) + of_batch[codes[part]]
        depths[part] = np.clip(np.exp(log) * GENES_SEEN * n_vars, 1, max(1, 0.3 * n_vars))
    return depths


def _type_profiles(rng: np.random.Generator, sizes: Sizes) -> NDArray[np.float64]:
    """Return the expected share of each gene in each type, shape (n_types, n_vars)."""
    base = np.exp(rng.normal(0, 2, sizes.n_vars))
    profiles = np.tile(base, (sizes.n_types, 1))
    candidates = np.flatnonzero(base >= np.median(base))
    n_markers = min(len(candidates), sizes.n_markers)
    for profile in profiles:
        profile[rng.choice(candidates, n_markers, replace=False)] *= MARKER_FOLD
    shares: NDArray[np.float64] = profiles / profiles.sum(axis=1, keepdims=True)
    return shares


def _alias_tables(
    profiles: NDArray[np.float64], folds: NDArray[np.float64]
) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
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
