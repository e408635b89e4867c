"""Samplers: strategies bound to a collection.

`Sampler` is what a plan draws with (`dasksc.planning.plan`). The sampler by weight is in
`dasksc.sampling.weighted`, that of a user's own strategy in `dasksc.sampling.binding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from dasksc.kernels import draw as draw_kernels
from dasksc.kernels import permute
from dasksc.sampling.candidates import Candidates
from dasksc.sampling.digests import digest_of
from dasksc.sampling.draws import AllRows, ChosenRows, Draw
from dasksc.sampling.random_keys import Purpose, epoch_keys

__all__ = ["QuotaSampler", "RowSampler", "Sampler"]

_Int64s = NDArray[np.int64]


class Sampler(Protocol):
    """A strategy bound to a collection: what `EpochPlan` plans with."""

    @property
    def unit(self) -> int:
        """Neighbouring rows of an epoch that stay together in a batch; 1 where any may be apart."""

    @property
    def n_controls(self) -> int:
        """Control rows that come with each row."""

    @property
    def n_rows(self) -> int:
        """Rows of an epoch, over all ranks; a multiple of `unit`."""

    @property
    def block_size(self) -> int | None:
        """Units the plan moves as one; None for runs as long as a fetch."""

    @property
    def shuffle_blocks(self) -> bool:
        """Whether blocks come in a random order rather than in storage order."""

    @property
    def shuffle_rows(self) -> bool:
        """Whether the rows of a fetch are permuted."""

    @property
    def is_shuffled(self) -> bool:
        """Whether draws are independent of their positions, so that blocks need no other order."""

    def draw(self, seed: int, epoch: int) -> Draw:
        """Draw an epoch."""

    def digest(self) -> str:
        """Return a hex digest of everything the draws depend on but the seed and the epoch."""


@dataclass(frozen=True)
class RowSampler:
    """Every candidate once an epoch, but for a short block that may be dropped."""

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
        # Those from a random row on, past the end from the first on, so that all are left out as often.
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
    """A fixed number of each class, without replacement."""

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
