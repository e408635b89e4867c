"""What a fetch task does: fetch the same rows of several matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from dasksc.executor import metrics
from dasksc.memory.reading_mode import Reading
from dasksc.storage import Fetched, Matrix, mapping
from dasksc.storage.read_timing import Clock, Spent

__all__ = ["FetchMatrices", "FetchedMatrices"]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FetchedMatrices:
    """One fetch of every matrix, by name, and what the task that made it spent."""

    parts: Mapping[str, Fetched]
    spent: Spent | None = None

    @property
    def nbytes(self) -> int:
        """Anonymous memory held, in bytes."""
        return sum(part.nbytes for part in self.parts.values())

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.nbytes

    def compact(self) -> FetchedMatrices:
        """Return the same rows in blocks of their own, which hold nothing else and travel as they are."""
        return FetchedMatrices({name: part.compact() for name, part in self.parts.items()}, self.spent)


@dataclass(frozen=True, slots=True)
class FetchMatrices:
    """The task of a fetch: called with its rows, pure, and pickled once for a cluster.

    Parameters
    ----------
    matrices
        What to fetch, by name.
    reading
        Says of which of them files are not to be mapped; None: all are mapped that may be. Does not pickle.
    """

    matrices: Mapping[str, Matrix]
    reading: Reading | None = None

    def __call__(self, rows: NDArray[np.int64]) -> FetchedMatrices:
        """Fetch `rows`, ascending row numbers, of every matrix."""
        start = perf_counter()
        with Clock() as spent:
            parts = {name: self._fetch(name, matrix, rows) for name, matrix in self.matrices.items()}
        fetched = FetchedMatrices(parts, spent)
        metrics.count(n_rows=len(rows), n_bytes=fetched.nbytes, fetch_s=perf_counter() - start, spent=spent)
        return fetched

    def _fetch(self, name: str, matrix: Matrix, rows: NDArray[np.int64]) -> Fetched:
        with mapping(self.reading is None or name not in self.reading.unmapped):
            return matrix.fetch(rows)
