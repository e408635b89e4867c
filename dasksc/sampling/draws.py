"""Draws: the rows of one epoch, all of them or chosen ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dasksc.sampling.candidates import Candidates
from dasksc.sampling.digests import digest_of

__all__ = ["AllRows", "ChosenRows", "Draw", "sorted_rows"]

_Int64s = NDArray[np.int64]


class Draw(Protocol):
    """The rows of one epoch, in storage order."""

    def rows(self, positions: _Int64s, *, ascending: bool = False) -> _Int64s:
        """Return the row numbers at `positions`, each in [0, n_rows); or these rows in ascending order."""

    def digest(self) -> bytes:
        """Return what tells this draw from another."""


def sorted_rows(rows: _Int64s) -> _Int64s:
    """Return rows in ascending order; `rows` itself where they are."""
    return np.sort(rows) if np.any(rows[1:] < rows[:-1]) else rows


@dataclass(frozen=True, slots=True)
class AllRows:
    """Every candidate once; `n_skipped` of them, from `skip_from` on, left out."""

    candidates: Candidates
    skip_from: int = 0
    n_skipped: int = 0

    def rows(self, positions: _Int64s, *, ascending: bool = False) -> _Int64s:
        """See `Draw.rows`."""
        if self.n_skipped:
            positions = positions + self.n_skipped * (positions >= self.skip_from)
        rows = self.candidates.rows(positions)
        return sorted_rows(rows) if ascending else rows

    def digest(self) -> bytes:
        """See `Draw.digest`."""
        return f"{self.skip_from},{self.n_skipped}".encode()


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """Candidates held one by one: shape (n_rows,), integers."""

    candidates: Candidates
    chosen: NDArray[Any]

    def rows(self, positions: _Int64s, *, ascending: bool = False) -> _Int64s:
        """See `Draw.rows`."""
        rows = self.candidates.rows(self.chosen[positions].astype(np.int64, copy=False))
        return sorted_rows(rows) if ascending else rows

    def digest(self) -> bytes:
        """See `Draw.digest`."""
        return digest_of(self.chosen).encode()
