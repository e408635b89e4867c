"""Stratified draws: every batch has its share of each class."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.kernels import groups as kernels
from dasksc.kernels import permute
from dasksc.plan.arrays import Candidates
from dasksc.plan.keys import Purpose, digest_of, epoch_keys
from dasksc.plan.labels import check_quotas, largest_remainders, max_draws
from dasksc.plan.samplers import Sampler

_Int64s = NDArray[np.int64]

# Number of batches among which the draws of a class are distributed at random. Rows that are neighbors in storage are
# thus read together, but are spread over these batches.
_GROUP_UNITS = 16

_GOLDEN = (5**0.5 - 1) / 2

# The product of two numbers of batches fits into int64, and quotas computed from float64 shares sum to the number of
# rows.
_MAX_BATCHES, _MAX_ROWS = 2**31, 2**39


@dataclass(frozen=True, kw_only=True)
class StratifiedRows:
    """Rows of one epoch, batch after batch; any batch can be computed on request."""

    sampler: StratifiedSampler  # Sampler of the rows
    # Random keys of the draws, the groups, the batches and the systematic sampling (see `dasksc.kernels.groups`),
    # shape (4,), uint64.
    keys: NDArray[np.uint64]

    def rows(self, positions: _Int64s) -> _Int64s:
        sampler = self.sampler
        n_units = sampler.n_rows // sampler.unit
        circle = _stride(n_units), int(permute.below(self.keys[3], 0, n_units))
        units, within = np.divmod(positions, sampler.unit)
        groups, group_index = np.unique(units // _GROUP_UNITS, return_inverse=True)
        drawn = np.empty((len(groups), _GROUP_UNITS, sampler.unit), dtype=np.int64)
        source = sampler.quotas, sampler.starts, sampler.members, sampler.run_rows
        kernels.stratified_rows(groups, _GROUP_UNITS, n_units, *source, *circle, self.keys[:3], drawn)
        out = drawn[group_index, units % _GROUP_UNITS, within]
        return sampler.candidates.rows(out)


def _stride(n_units: int) -> int:
    """Return a number coprime to `n_units` whose multiples are evenly distributed modulo `n_units`."""
    stride = max(1, int(n_units * _GOLDEN))
    while gcd(stride, n_units) > 1:
        stride += 1
    return stride % n_units if n_units > 1 else 0


@dataclass(frozen=True, eq=False)
class StratifiedSampler(Sampler):
    """Sampler that gives every batch its share of each class; the shares of an epoch are exact."""

    candidates: Candidates  # Rows to draw from
    members: NDArray[Any]  # Positions of the candidates, sorted by class, integers
    starts: _Int64s  # Start of each class in `members`, shape (n_classes + 1,), int64
    share: NDArray[np.float64] = field(compare=False)  # Probability of each class, shape (n_classes,)
    names: list[Any] = field(compare=False)  # Labels of the classes, for error messages
    run_rows: int  # Number of neighboring rows of a class that are drawn together
    # Number of rows of an epoch; None: the number of candidates or, without replacement, the largest number for which
    # no class runs out of rows.
    total_size: int | None
    replace: bool  # If True, the rows of a class with fewer rows than its quota are drawn repeatedly
    batch_rows: int | None = None  # Number of rows in a batch; None: an epoch is one batch
    block_size = _GROUP_UNITS

    @classmethod
    def of(
        cls, candidates: Candidates, codes: NDArray[Any], lookup: _Int64s, counts: _Int64s, **options: Any
    ) -> StratifiedSampler:
        """Create a sampler; sorting the candidates by class takes four bytes per candidate."""
        starts = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        members = np.empty(starts[-1], dtype=np.int32 if candidates.n < 2**31 else np.int64)
        kernels.list_members(codes[lookup] if len(lookup) else codes, starts.copy(), members)
        return cls(candidates, members, starts, **options)

    def of_batches(self, batch_rows: int) -> StratifiedSampler:
        """Return a sampler for batches of a given size; return self if `batch_rows` is already set."""
        if self.batch_rows is not None:
            return self
        total = self.n_rows
        if self.total_size is None:
            total = total // batch_rows * batch_rows
            if not total and self.replace:
                total = batch_rows
            if not total:
                raise InputError(
                    f"per_batch=True draws {self.n_rows} rows without replacement, fewer than batch_size={batch_rows}; "
                    "lower batch_size, or draw with replace=True"
                )
        elif total % batch_rows:
            near = max(1, total // batch_rows) * batch_rows
            raise InputError(
                f"per_batch=True needs whole batches, but total_size={total} is not a multiple of "
                f"batch_size={batch_rows}; give {near} or {near + batch_rows}"
            )
        if total // batch_rows >= _MAX_BATCHES or total >= _MAX_ROWS:
            raise InputError(
                f"per_batch=True draws fewer than 2**31 batches and 2**39 rows in an epoch; got total_size={total} and "
                f"batch_size={batch_rows}. Give a smaller total_size"
            )
        sampler = replace(self, total_size=total, batch_rows=batch_rows)
        if not self.replace:
            check_quotas(sampler.quotas, np.diff(self.starts), self.names)
        return sampler

    @cached_property
    def n_rows(self) -> int:
        if self.total_size is not None:
            return self.total_size
        return self.candidates.n if self.replace else max_draws(np.diff(self.starts), self.share)

    @cached_property
    def quotas(self) -> _Int64s:
        """Number of rows of each class in an epoch, shape (n_classes,), int64."""
        return largest_remainders(self.share, self.n_rows)

    @property
    def unit(self) -> int:
        """Number of rows in a batch; the rows of a batch stay together."""
        return max(1, self.n_rows) if self.batch_rows is None else self.batch_rows

    def draw(self, seed: int, epoch: int) -> StratifiedRows:
        return StratifiedRows(sampler=self, keys=epoch_keys(seed, epoch, Purpose.DRAW, n=4))

    def digest(self) -> str:
        return digest_of(self, self.quotas)  # quotas, unlike shares, do not differ between math libraries
