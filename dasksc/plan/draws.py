"""Draws: the rows of one epoch, either all candidates or chosen ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dasksc.plan.candidates import Candidates
from dasksc.plan.digests import digest_of

__all__ = ["AllRows", "ChosenRows", "Draw", "sorted_rows"]

_Int64s = NDArray[np.int64]


class Draw(Protocol):
    """Rows of one epoch, in storage order."""

    def rows(self, positions: _Int64s, *, ascending: bool = False) -> _Int64s:
        """Return the row numbers at `positions`, each in [0, n_rows); with `ascending`, in ascending order."""

    def digest(self) -> bytes:
        """Return bytes that distinguish this draw from others."""


def sorted_rows(rows: _Int64s) -> _Int64s:
    """Return `rows` in ascending order; `rows` itself if they are sorted."""
    return np.sort(rows) if np.any(rows[1:] < rows[:-1]) else rows


@dataclass(frozen=True, slots=True)
class AllRows:
    """Draw of every candidate once, except `n_skipped` candidates from `skip_from` on."""

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
    """Draw given by an array of candidate positions, shape (n_rows,), integers."""

    candidates: Candidates
    chosen: NDArray[Any]

    def rows(self, positions: _Int64s, *, ascending: bool = False) -> _Int64s:
        """See `Draw.rows`."""
        rows = self.candidates.rows(self.chosen[positions].astype(np.int64, copy=False))
        return sorted_rows(rows) if ascending else rows

    def digest(self) -> bytes:
        """See `Draw.digest`."""
        return digest_of(self.chosen).encode()
