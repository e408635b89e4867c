"""Rows grouped by the labels of obs columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.kernels import sets as kernels
from dasksc.plan.arrays import EMPTY_INTS
from dasksc.plan.labels import CodedColumn

_Int64s = NDArray[np.int64]

# A table with one entry per code is always allowed up to this many entries; with many rows, the limit is larger.
_FEW_CODES = 2**22


def combined_codes(columns: Sequence[CodedColumn], rows: _Int64s | slice, n: int) -> tuple[NDArray[Any], int]:
    """Return one code for the combination of labels of each row, and the number of codes."""
    # Codes are in lexicographic order of the combinations. Combining takes O(n) time per column, and 4 bytes per row.
    limit = max(_FEW_CODES, n // 4)
    out = np.zeros(n, dtype=np.int32)
    n_codes = 1
    for column in columns:
        radix = max(1, len(column.labels))
        if n_codes * radix > limit:
            out, n_codes = _renumbered(out)
        if n_codes * radix >= 2**31:
            out = out.astype(np.int64)
        codes, lookup = (column.codes[rows], EMPTY_INTS) if isinstance(rows, slice) else (column.codes, rows)
        kernels.combine_codes(codes, lookup, radix, out)
        n_codes *= radix
        if n_codes > limit:
            out, n_codes = _renumbered(out)
    return out, n_codes


def _renumbered(codes: NDArray[Any]) -> tuple[NDArray[np.int32], int]:
    """Return codes without gaps, in the same order."""
    import pandas as pd

    numbers, present = pd.factorize(codes, sort=True)
    # Here a missing label has a code of its own, the lowest.
    n_below = int(len(present) > 0 and present[0] < 0)
    return (numbers - n_below).astype(np.int32), max(1, len(present) - n_below)


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Rows by group."""

    codes: _Int64s  # Code of each group, ascending, shape (n_groups,), int64
    # starts, counts: First member and number of members of each group, shape (n_groups,), int64.
    starts: _Int64s
    counts: _Int64s
    # Rows, group by group and ascending within each, shape (n,), int32 or int64; empty if every group is one run of
    # rows. Member numbers are then row numbers.
    members: NDArray[Any]
    run_rows: float = field(compare=False)  # Mean length of the runs of neighboring rows in a group

    @property
    def n_rows(self) -> int:
        """Number of rows in all groups."""
        return int(self.counts.sum())

    def rows(self, members: _Int64s) -> _Int64s:
        """Return the rows with given member numbers."""
        return self.members[members].astype(np.int64, copy=False) if len(self.members) else members

    def first_rows(self) -> _Int64s:
        """Return the first row of each group, shape (n_groups,)."""
        return self.rows(self.starts)

    def kept(self, keep: NDArray[np.bool_]) -> RowGroups:
        """Return the groups to keep; members of other groups remain listed but are never drawn."""
        return RowGroups(self.codes[keep], self.starts[keep], self.counts[keep], self.members, self.run_rows)


def group_rows(codes: NDArray[Any], n_codes: int) -> RowGroups:
    """Group rows by code; rows with negative codes belong to no group."""
    # Grouping takes O(n) time. Memory per row is 4 bytes (8 beyond 2**31 rows), or none if every group is one run.
    counts = np.zeros(n_codes, dtype=np.int64)
    firsts = np.zeros(n_codes, dtype=np.int64)
    _, n_runs = kernels.count_groups(codes, counts, firsts)
    present = np.flatnonzero(counts)
    counted = counts[present]
    run_rows = float(counted.sum() / max(1, n_runs))
    if n_runs == len(present):
        return RowGroups(present, firsts[present], counted, EMPTY_INTS, run_rows)
    starts = np.cumsum(counts) - counts
    members = np.empty(int(counted.sum()), dtype=np.int32 if len(codes) < 2**31 else np.int64)
    kernels.list_members(codes, starts.copy(), members)
    return RowGroups(present, starts[present], counted, members, run_rows)
