"""Samplers, which are strategies bound to a collection, and their draws, which give the rows of one epoch.

The samplers of weighted and stratified draws, of sets and of user-defined strategies are in `dasksc.plan.weighted`,
`dasksc.plan.stratified`, `dasksc.plan.sets` and `dasksc.plan.binding`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dasksc.kernels import draw as draw_kernels
from dasksc.kernels import permute
from dasksc.plan.arrays import Candidates
from dasksc.plan.keys import Purpose, digest_of, epoch_keys

_Int64s = NDArray[np.int64]


class Draw(Protocol):
    """Rows of one epoch, in storage order."""

    def rows(self, positions: _Int64s) -> _Int64s:
        """Return the row numbers at `positions`, each in [0, n_rows)."""


class Sampler:
    """Strategy bound to a collection, as used by `EpochPlan`."""

    block_size: int | None  # Number of units that the plan moves as a whole; None for blocks of the size of a fetch
    shuffle_blocks: bool = True  # True if blocks are in random order, False if they are in storage order
    shuffle_rows: bool = True  # True if the rows of a fetch are permuted

    @property
    def n_rows(self) -> int:
        """Number of rows in an epoch, over all ranks; a multiple of `unit`."""
        raise NotImplementedError

    @property
    def unit(self) -> int:
        """Number of consecutive rows of an epoch that stay together in a batch; 1 if rows are independent."""
        return 1

    @property
    def n_controls(self) -> int:
        """Number of control rows for each row."""
        return 0

    @property
    def is_shuffled(self) -> bool:
        """True if the draws are already in random order, so that blocks need no permutation."""
        return False

    def draw(self, seed: int, epoch: int) -> Draw:
        raise NotImplementedError

    def digest(self) -> str:
        """Return a hex digest of all parameters of the draws, except seed and epoch."""
        return digest_of(self)


@dataclass(frozen=True, slots=True)
class AllRows:
    """Draw of every candidate once, except `n_skipped` candidates from `skip_from` on."""

    candidates: Candidates
    skip_from: int = 0
    n_skipped: int = 0

    def rows(self, positions: _Int64s) -> _Int64s:
        if self.n_skipped:
            positions = positions + self.n_skipped * (positions >= self.skip_from)
        return self.candidates.rows(positions)


@dataclass(frozen=True)
class RowSampler(Sampler):
    """Sampler that draws every candidate once per epoch, except for a short block that may be dropped."""

    candidates: Candidates
    block_size: int | None
    shuffle_blocks: bool
    shuffle_rows: bool
    drop_last: bool = False

    @property
    def _n_skipped(self) -> int:
        return self.candidates.n % self.block_size if self.drop_last and self.block_size else 0

    @property
    def n_rows(self) -> int:
        return self.candidates.n - self._n_skipped

    def draw(self, seed: int, epoch: int) -> AllRows:
        if not self._n_skipped:
            return AllRows(self.candidates)
        # The skipped rows begin at a random row and wrap around the end, so that all rows are skipped equally often.
        place = int(permute.uniform(epoch_keys(seed, epoch, Purpose.DRAW)[0], 0) * self.candidates.n)
        wrapped = place + self._n_skipped - self.candidates.n
        if wrapped > 0:
            return AllRows(self.candidates, skip_from=0, n_skipped=wrapped)
        return AllRows(self.candidates, skip_from=place, n_skipped=self._n_skipped)


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """Draw given by an array of candidate positions, shape (n_rows,), integers."""

    candidates: Candidates
    chosen: NDArray[Any]

    def rows(self, positions: _Int64s) -> _Int64s:
        return self.candidates.rows(self.chosen[positions].astype(np.int64, copy=False))


@dataclass(frozen=True)
class QuotaSampler(Sampler):
    """Sampler that draws a fixed number of rows of each class without replacement."""

    candidates: Candidates
    codes: NDArray[Any]
    lookup: _Int64s = field(compare=False)
    quotas: _Int64s
    counts: _Int64s
    block_size: int

    @cached_property
    def n_rows(self) -> int:
        return int(self.quotas.sum())

    def draw(self, seed: int, epoch: int) -> ChosenRows:
        out = np.empty(self.n_rows, dtype=np.int64)
        source = self.candidates.n, self.codes, self.lookup, self.quotas.copy(), self.counts.copy()
        draw_kernels.select_quotas(*source, epoch_keys(seed, epoch, Purpose.DRAW)[0], out)
        return ChosenRows(self.candidates, out)
