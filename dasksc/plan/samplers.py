"""Samplers: strategies bound to a collection.

`Sampler` is the protocol that plans use (`dasksc.plan.epoch_plan`). The weighted sampler is in
`dasksc.plan.weighted`, and the sampler of a user-defined strategy in `dasksc.plan.binding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from dasksc.kernels import draw as draw_kernels
from dasksc.kernels import permute
from dasksc.plan.candidates import Candidates
from dasksc.plan.digests import digest_of
from dasksc.plan.draws import AllRows, ChosenRows, Draw
from dasksc.plan.keys import Purpose, epoch_keys

__all__ = ["QuotaSampler", "RowSampler", "Sampler"]

_Int64s = NDArray[np.int64]


class Sampler(Protocol):
    """Strategy bound to a collection, as used by `EpochPlan`."""

    @property
    def unit(self) -> int:
        """Number of consecutive rows of an epoch that always stay together in a batch; 1 if rows are independent."""

    @property
    def n_controls(self) -> int:
        """Number of control rows for each row."""

    @property
    def n_rows(self) -> int:
        """Number of rows in an epoch, over all ranks; a multiple of `unit`."""

    @property
    def block_size(self) -> int | None:
        """Number of units in a block, which the plan moves as a whole; None for blocks of the size of a fetch."""

    @property
    def shuffle_blocks(self) -> bool:
        """True if blocks are in random order, False if they are in storage order."""

    @property
    def shuffle_rows(self) -> bool:
        """True if the rows of a fetch are permuted."""

    @property
    def is_shuffled(self) -> bool:
        """True if the draws are already in random order, so that blocks need no permutation."""

    def draw(self, seed: int, epoch: int) -> Draw:
        """Return the draw of an epoch."""

    def digest(self) -> str:
        """Return a hex digest of all parameters of the draws, except seed and epoch."""


@dataclass(frozen=True)
class RowSampler:
    """Sampler that draws every candidate once per epoch, except for a short block that may be dropped."""

    candidates: Candidates
    block_size: int | None
    shuffle_blocks: bool
    shuffle_rows: bool
    drop_last: bool = False
    is_shuffled: ClassVar[bool] = False
    unit: ClassVar[int] = 1
    n_controls: ClassVar[int] = 0

    @property
    def _n_skipped(self) -> int:
        return self.candidates.n % self.block_size if self.drop_last and self.block_size else 0

    @property
    def n_rows(self) -> int:
        """See `Sampler.n_rows`."""
        return self.candidates.n - self._n_skipped

    def draw(self, seed: int, epoch: int) -> AllRows:
        """See `Sampler.draw`."""
        if not self._n_skipped:
            return AllRows(self.candidates)
        # The skipped rows begin at a random row and wrap around the end, so that all rows are skipped equally often.
        place = int(permute.uniform(epoch_keys(seed, epoch, Purpose.DRAW)[0], 0) * self.candidates.n)
        wrapped = place + self._n_skipped - self.candidates.n
        if wrapped > 0:
            return AllRows(self.candidates, skip_from=0, n_skipped=wrapped)
        return AllRows(self.candidates, skip_from=place, n_skipped=self._n_skipped)

    def digest(self) -> str:
        """See `Sampler.digest`."""
        return digest_of(
            "rows", self.candidates.digest(), self.block_size, self.shuffle_blocks, self.shuffle_rows, self.drop_last
        )


@dataclass(frozen=True)
class QuotaSampler:
    """Sampler that draws a fixed number of rows of each class without replacement."""

    candidates: Candidates
    codes: NDArray[Any]
    lookup: _Int64s
    quotas: _Int64s
    counts: _Int64s
    block_size: int
    shuffle_blocks: ClassVar[bool] = True
    shuffle_rows: ClassVar[bool] = True
    is_shuffled: ClassVar[bool] = False
    unit: ClassVar[int] = 1
    n_controls: ClassVar[int] = 0

    @property
    def n_rows(self) -> int:
        """See `Sampler.n_rows`."""
        return int(self.quotas.sum())

    def draw(self, seed: int, epoch: int) -> ChosenRows:
        """See `Sampler.draw`."""
        out = np.empty(self.n_rows, dtype=np.int64)
        draw_kernels.select_quotas(
            self.candidates.n,
            self.codes,
            self.lookup,
            self.quotas.copy(),
            self.counts.copy(),
            epoch_keys(seed, epoch, Purpose.DRAW)[0],
            out,
        )
        return ChosenRows(self.candidates, out)

    def digest(self) -> str:
        """See `Sampler.digest`."""
        return digest_of("quotas", self.candidates.digest(), self.codes, self.quotas, self.counts, self.block_size)
