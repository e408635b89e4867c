"""What a fetch task does: fetch the same rows of several matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dasksc.storage import Fetched, Matrix

__all__ = ["FetchMatrices", "FetchedMatrices"]


@dataclass(frozen=True, slots=True)
class FetchedMatrices:
    """One fetch of every matrix, by name."""

    parts: Mapping[str, Fetched]

    @property
    def nbytes(self) -> int:
        """Anonymous memory held, in bytes."""
        return sum(part.nbytes for part in self.parts.values())

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.nbytes

    def compact(self) -> FetchedMatrices:
        """Return the same rows in blocks of their own, which hold nothing else and travel as they are."""
        return FetchedMatrices({name: part.compact() for name, part in self.parts.items()})


@dataclass(frozen=True, slots=True)
class FetchMatrices:
    """The task of a fetch: called with its rows, pure, and pickled once for a cluster."""

    matrices: Mapping[str, Matrix]

    def __call__(self, rows: NDArray[np.int64]) -> FetchedMatrices:
        """Fetch `rows`, ascending row numbers, of every matrix."""
        return FetchedMatrices({name: matrix.fetch(rows) for name, matrix in self.matrices.items()})
