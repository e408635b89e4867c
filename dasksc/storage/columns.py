"""Selected columns of a matrix, and maps from the columns of several matrices to common columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.kernels import csr as kernels


@dataclass(frozen=True, slots=True, eq=False)
class Lookups:
    """Tables of output columns for `dasksc.kernels.csr`, with one row per map."""

    # Output column of each stored column, shape (n_maps, n_columns), int32. -1 marks a dropped column, and -2 a column
    # beyond the width of the matrix, which no row may contain.
    to: NDArray[np.int32]
    drops: bool  # True if a map drops a column
    ascends: bool  # True if every map preserves the order of the kept columns
    adds_up: bool = False  # True if several columns map to one output column, in which their values are summed

    @classmethod
    def of(cls, to: NDArray[np.int32], *, adds_up: bool = False) -> Lookups:
        """Return the tables for the output columns `to`."""
        ascends = all(bool((np.diff(one[one >= 0]) > 0).all()) for one in to)
        return cls(to=to, drops=bool((to == -1).any()), ascends=ascends, adds_up=adds_up)


NOWHERE, ZERO = kernels.NOWHERE, kernels.ZERO
"""Sources of output columns without a stored column: `NOWHERE` if a part lacks it, `ZERO` if zeros are requested."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Columns to keep when gathering, and the output column of each."""

    positions: NDArray[np.int64]  # Columns of the matrix, shape (n_taken,), without repeats
    n_vars: int  # Number of columns of the matrix
    # Output column of each taken column, shape (n_taken,); None for one each, in order. Columns with the same output
    # column are summed, in the order of the matrix. Output columns without a source are 0.
    to: NDArray[np.int64] | None = None
    n_out: int | None = None  # Number of output columns; None for the number of taken columns
    lookup: NDArray[np.int32] = field(init=False, repr=False)  # Output column of each column; -1 for dropped ones
    lookups: Lookups = field(init=False, repr=False)  # `lookup` as tables for the kernels, with one row
    sources: NDArray[np.int64] = field(init=False, repr=False)  # Column or `ZERO` for each output column, (1, n_out)
    sums: Sums | None = field(init=False, repr=False)  # Output columns that are sums of several columns

    def __post_init__(self) -> None:
        positions = np.ascontiguousarray(self.positions, dtype=np.int64)
        object.__setattr__(self, "positions", positions)
        if len(positions) and (positions.min() < 0 or positions.max() >= self.n_vars):
            raise InputError(f"column positions must lie in [0, {self.n_vars}); got {positions}")
        if len(np.unique(positions)) != len(positions):
            raise InputError("a column was requested twice; request each gene once")
        to = np.arange(len(positions)) if self.to is None else np.asarray(self.to, dtype=np.int64)
        n_out = len(positions) if self.n_out is None else self.n_out
        if to.shape != positions.shape or (len(to) and (to.min() < 0 or to.max() >= n_out)):
            raise InputError(
                f"to= must have one output position in [0, {n_out}) for each of {len(positions)} columns; got {to}"
            )
        object.__setattr__(self, "n_out", n_out)
        lookup = np.full(self.n_vars, -1, dtype=np.int32)
        lookup[positions] = to
        targets = np.flatnonzero(np.bincount(to, minlength=n_out) > 1)
        sources = np.full(n_out, ZERO, dtype=np.int64)
        sources[to] = positions
        object.__setattr__(self, "lookup", lookup)
        object.__setattr__(self, "lookups", Lookups.of(lookup[None], adds_up=bool(len(targets))))
        object.__setattr__(self, "sources", sources[None])
        object.__setattr__(self, "sums", Sums.of(lookup, targets) if len(targets) else None)

    def __len__(self) -> int:
        return int(self.sources.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Output columns that are sums of several columns of a dense matrix."""

    targets: NDArray[np.int64]  # Output columns that are sums
    columns: Columns  # Columns to add, grouped by target, ascending within each
    starts: NDArray[np.int64]  # Start of each target in `columns`, and the end of the last one

    @classmethod
    def of(cls, lookup: NDArray[np.int32], targets: NDArray[np.int64]) -> Sums:
        """Return the sums for ascending `targets`, to each of which `lookup` assigns several columns."""
        found = np.flatnonzero(np.isin(lookup, targets))
        order = np.argsort(lookup[found], kind="stable")
        counts = np.unique(lookup[found], return_counts=True)[1]
        starts = np.zeros(len(targets) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        return cls(targets=targets, columns=Columns(found[order], len(lookup)), starts=starts)


class ColumnMaps:
    """Maps from the columns of several matrices to common columns."""

    # `positions` holds an array per matrix, which matrices may share: the common column of each of its columns, or -1
    # for a dropped one. Common columns that a matrix lacks are 0 in CSR matrices, and `fill_value` (default: NaN) in
    # dense ones. `which` holds the row of each matrix in the tables that `lookups` and `sources` return.

    def __init__(
        self, positions: Sequence[NDArray[np.integer[Any]]], n_vars: int, *, fill_value: float | None = None
    ) -> None:
        shared = {id(one): one for one in positions}
        numbers = {key: number for number, key in enumerate(shared)}
        self.n_vars = n_vars
        self.fill_value = fill_value
        self.n_columns = max(len(one) for one in positions)
        self.which = np.array([numbers[id(one)] for one in positions], dtype=np.int32)
        # Rows of a narrower matrix must not contain columns beyond its width.
        lookups = np.full((len(shared), self.n_columns), -2, dtype=np.int32)
        for lookup, one in zip(lookups, shared.values(), strict=True):
            lookup[: len(one)] = one
        self._all = Lookups.of(lookups), _sources(lookups, n_vars)
        self._selected: tuple[tuple[Columns, _Tables], ...] = ()

    def lookups(self, columns: Columns | None) -> Lookups:
        """Return the output column of each stored column if only `columns` are kept; None keeps all common columns."""
        return self._tables(columns)[0]

    def sources(self, columns: Columns | None) -> NDArray[np.int64]:
        """Return the source of each kept column (stored column, `NOWHERE` or `ZERO`), shape (n_maps, n_kept), int64."""
        return self._tables(columns)[1]

    def n_filled(self) -> int:
        """Return the number of common columns that at least one matrix lacks."""
        return int((self.sources(None) == NOWHERE).any(axis=0).sum())

    def filled_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return a data type that represents dense values of `dtype` as well as the fill value of missing columns."""
        if dtype.kind == "f":
            return dtype
        if self.fill_value is None or self.fill_value % 1:
            return np.dtype(np.float64)
        needed = np.min_scalar_type(int(self.fill_value))
        return dtype if self.fill_value in (0, 1) else np.promote_types(dtype, needed)

    def _tables(self, columns: Columns | None) -> _Tables:
        if columns is None:
            return self._all
        # Every batch of an epoch requests the same two selections: `columns`, and the columns of `Sums`. Two results
        # are therefore kept. Replacing the tuple is atomic, so threads may race.
        kept = self._selected
        for selection, tables in kept:
            if selection is columns:
                return tables
        # Negative numbers mark dropped and refused columns, and do not change.
        to = self._all[0].to.copy()
        goes = to >= 0
        to[goes] = columns.lookup[to[goes]]
        sources = _sources(to, len(columns))
        sources[:, columns.sources[0] == ZERO] = ZERO
        tables = Lookups.of(to, adds_up=columns.lookups.adds_up), sources
        self._selected = (*kept[-1:], (columns, tables))
        return tables

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_selected": ()}


_Tables = tuple[Lookups, NDArray[np.int64]]


def _sources(lookups: NDArray[np.int32], n_kept: int) -> NDArray[np.int64]:
    sources = np.full((len(lookups), n_kept), NOWHERE, dtype=np.int64)
    maps, taken = np.nonzero(lookups >= 0)
    sources[maps, lookups[maps, taken]] = taken
    return sources
