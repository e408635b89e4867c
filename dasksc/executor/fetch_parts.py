"""Division of large fetches into several tasks.

Smaller tasks let all cores work on one fetch and keep less memory in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray

from dasksc.executor.tasks import FetchedMatrices
from dasksc.storage import join

__all__ = ["AssembledFetches", "PartNumbers", "part_of"]


class PartNumbers(Sequence[int]):
    """Numbers of the parts of fetches: part j of fetch k is ``k * n_parts + j``.

    Parameters
    ----------
    ks
        Fetch numbers, in order.
    n_parts
        Number of parts of each fetch.
    """

    def __init__(self, ks: range, n_parts: int) -> None:
        self._ks = ks
        self._n_parts = n_parts

    def __len__(self) -> int:
        return len(self._ks) * self._n_parts

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        """Return one number, or the list of numbers of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i, part = divmod(range(len(self))[index], self._n_parts)
        return self._ks[i] * self._n_parts + part


def part_of(rows: NDArray[np.int64], part: int, n_parts: int) -> NDArray[np.int64]:
    """Return the rows of one part. A part is contiguous in `rows`, so that parts share few chunks."""
    return rows[len(rows) * part // n_parts : len(rows) * (part + 1) // n_parts]


class FetchParts(Protocol):
    """Interface of a `Window` whose results are parts of fetches."""

    def next_is_done(self) -> bool:
        """Return True if the next result is available without waiting, or if no results remain."""

    def __iter__(self) -> Iterator[tuple[int, FetchedMatrices]]: ...


class AssembledFetches:
    """Fetches assembled from their parts. Iterating yields ``(k, fetched)``.

    Parameters
    ----------
    window
        Window that yields the parts in order.
    n_parts
        Number of parts of each fetch.
    """

    def __init__(self, window: FetchParts, n_parts: int) -> None:
        self._window = window
        self._results = iter(window)
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
            i, result = next(self._results)
        except StopIteration:
            self._ended = True
        except Exception as error:
            self._ended, self._failure = True, error
        else:
            self._number = i // self._n_parts
            self._held.append(result)
