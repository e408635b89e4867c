"""The rows of a fetch, and their batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["FetchPlan"]

_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """The rows of one fetch and the order in which they are yielded.

    Parameters
    ----------
    number
        Which of the rank's fetches.
    rows
        Row numbers in ascending order, repeats included, shape (n,), int64.
    order
        Positions in `rows` in the order they are yielded, shape (m,), int64; m < n where the epoch
        ends in a short batch that is dropped.
    batch_size
        Rows of a batch.
    """

    number: int
    rows: _Int64s
    order: _Int64s
    batch_size: int

    @property
    def n_batches(self) -> int:
        """Batches of the fetch."""
        return -(-len(self.order) // self.batch_size)

    def batch(self, i: int) -> _Int64s:
        """Return the positions in `rows` that make up batch `i` of the fetch."""
        return self.order[i * self.batch_size : (i + 1) * self.batch_size]
