"""Task of a fetch, which reads the same rows of several matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dasksc.memory.reading_mode import AdaptiveReadingMode
from dasksc.planning.plan import EpochPlan
from dasksc.storage import Matrix, RowBuffer, mapping, mapping_of
from dasksc.storage.read_timing import Clock, ThreadTimes

__all__ = ["FetchMatrices", "FetchedMatrices", "fetch_name"]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FetchedMatrices:
    """Fetched rows of every matrix, by name, and the time that the task spent reading and decoding."""

    parts: Mapping[str, RowBuffer]
    spent: ThreadTimes | None = None

    @property
    def nbytes(self) -> int:
        """Anonymous memory held, in bytes."""
        return sum(part.nbytes for part in self.parts.values())

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.nbytes

    def compact(self) -> FetchedMatrices:
        """Return the same rows in arrays that hold nothing else and can be sent without conversion."""
        return FetchedMatrices({name: part.compact() for name, part in self.parts.items()}, self.spent)


@dataclass(frozen=True, slots=True)
class FetchMatrices:
    """Task of a fetch: a pure function of its row numbers.

    For a cluster, the task is pickled once per window, not with each fetch.

    Parameters
    ----------
    matrices
        Matrices to fetch from, by name.
    reading
        Reading mode, which lists the matrices whose files are not memory-mapped; None maps every file that can be
        mapped. A reading mode cannot be pickled, so tasks for other processes must have None.
    """

    matrices: Mapping[str, Matrix]
    reading: AdaptiveReadingMode | None = None

    def __call__(self, rows: NDArray[np.int64]) -> FetchedMatrices:
        """Fetch `rows`, ascending row numbers, from every matrix."""
        unmapped = () if self.reading is None else self.reading.unmapped
        parts = {}
        with Clock() as spent, mapping(True, unmapped=unmapped):
            for name, matrix in self.matrices.items():
                with mapping_of(matrix.label):
                    parts[name] = matrix.fetch(rows)
        return FetchedMatrices(parts, spent)


def fetch_name(source: str, plan: EpochPlan) -> str:
    """Return the name of the fetch tasks of an epoch, such as ``"epoch 3: dasksc-fetch-pbmc-r1"``.

    The progress panel of Dask's dashboard splits a name at its hyphens. It always keeps the first part. It also keeps
    the parts that follow, up to but not including one that contains a non-letter, here the rank ``r1``. It therefore
    shows a single bar per epoch for all ranks: ``"epoch 3: dasksc-fetch-pbmc"``.
    """
    return f"epoch {plan.epoch}: dasksc-fetch-{source}-r{plan.rank}"
