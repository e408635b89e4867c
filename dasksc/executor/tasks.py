"""Task of a fetch, which reads the same rows of several matrices, and division of large fetches into several tasks.

Smaller tasks let all cores work on one fetch and keep less memory in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dasksc.plan.epoch_plan import EpochPlan
from dasksc.storage import Matrix, RowBuffer, join, mapping, mapping_of
from dasksc.storage.arrays import ThreadTimes, clock

if TYPE_CHECKING:
    from dasksc.executor.window import Window


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
    """Task of a fetch: a pure function of its row numbers, which maps no files of the matrices labeled `unmapped`."""

    matrices: Mapping[str, Matrix]
    unmapped: frozenset[str] = frozenset()

    def __call__(self, rows: NDArray[np.int64]) -> FetchedMatrices:
        """Fetch `rows`, ascending row numbers, from every matrix."""
        parts = {}
        with clock() as spent, mapping(True, unmapped=self.unmapped):
            for name, matrix in self.matrices.items():
                with mapping_of(matrix.label):
                    parts[name] = matrix.fetch(rows)
        return FetchedMatrices(parts, spent)


def fetch_name(source: str, plan: EpochPlan) -> str:
    """Return the name of the fetch tasks of an epoch, such as ``"epoch 3: dasksc-fetch-pbmc-r1"``."""
    # The progress panel of Dask's dashboard shows a single bar per epoch for all ranks, since it cuts names at ``r1``.
    return f"epoch {plan.epoch}: dasksc-fetch-{source}-r{plan.rank}"


def part_of(rows: NDArray[np.int64], part: int, n_parts: int) -> NDArray[np.int64]:
    """Return the rows of one part. A part is contiguous in `rows`, so that parts share few chunks."""
    return rows[len(rows) * part // n_parts : len(rows) * (part + 1) // n_parts]


class AssembledFetches:
    """Fetches assembled from their `n_parts` parts each, which a window yields. Iterating yields ``(k, fetched)``."""

    def __init__(self, window: Window[FetchedMatrices], n_parts: int) -> None:
        self._window = window
        self._n_parts = n_parts
        self._held: list[FetchedMatrices] = []
        self._number = 0
        self._ended = False
        self._failure: Exception | None = None

    def is_ready(self) -> bool:
        """Take the finished parts; return True if the next fetch, its error or the end is available without waiting."""
        while len(self._held) < self._n_parts and not self._ended and self._window.next_is_done():
            self._take()
        return len(self._held) == self._n_parts or self._ended

    def __iter__(self) -> Iterator[tuple[int, FetchedMatrices]]:
        while True:
            while len(self._held) < self._n_parts and not self._ended:
                self._take()
            if self._ended:
                if self._failure is not None:
                    raise self._failure
                return
            held, self._held = self._held, []
            names = held[0].parts
            yield self._number, FetchedMatrices({name: join([one.parts[name] for one in held]) for name in names})
            del held

    def _take(self) -> None:
        try:
            i, result = next(self._window)
        except StopIteration:
            self._ended = True
        except Exception as error:
            self._ended, self._failure = True, error
        else:
            self._number = i // self._n_parts
            self._held.append(result)
