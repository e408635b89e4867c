"""Rows grouped by the labels of obs columns."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError, MissingKeyError, WrongTypeError
from dasksc.kernels import sets as kernels
from dasksc.plan.arrays import EMPTY_INTS
from dasksc.plan.digests import digest_of
from dasksc.plan.labels import encode_labels, listed

__all__ = ["CodedColumn", "RowGroups", "columns_named", "combined_codes", "group_rows"]

_Int64s = NDArray[np.int64]

# A table with one entry per code is always allowed up to this many entries; with many rows, the limit is larger.
_FEW_CODES = 2**22
# Maximum number of labels in an error message.
_N_SHOWN = 20


@dataclass(frozen=True, slots=True)
class CodedColumn:
    """Obs column as integer codes."""

    name: str  # Name of the column
    codes: NDArray[Any]  # Code of each row of the collection, shape (n_obs,), integers; negative for a missing label
    labels: Sequence[Any]  # Label of each code

    @classmethod
    def of(cls, name: str, labels: Any, n_obs: int) -> CodedColumn:
        """Encode the labels of a column in ascending order; categories keep their order."""
        try:
            codes, names = encode_labels(labels, by_value=True)
        except InputError as error:
            raise InputError(f"the column {name!r}: {error}") from error
        if len(codes) != n_obs:
            raise InputError(f"the column {name!r} has {len(codes)} labels for {n_obs} rows; give one per row")
        return cls(name, codes, names)

    def codes_by_label(self) -> CodesByLabel:
        """Return the code of each label."""
        return CodesByLabel(self)

    def where(self, wanted: Any) -> NDArray[np.bool_]:
        """Return a mask of the rows whose label is `wanted`, or one of several `wanted` labels."""
        several = listed(wanted)
        if not several:
            raise InputError(f"control= has no label for column {self.name!r}; give one, or a list of labels")
        codes = self.codes_by_label()
        is_wanted = np.zeros(len(self.labels) + 1, dtype=np.bool_)  # the last entry is that of code -1
        for label in several:
            try:
                is_wanted[codes[label]] = True
            except TypeError as error:  # the object is not hashable
                raise WrongTypeError(
                    f"control= has {label!r} for column {self.name!r}; give a label or a list of labels of that column"
                ) from error
        chosen: NDArray[np.bool_] = is_wanted[self.codes]
        return chosen


class CodesByLabel(dict[Any, int]):
    """Codes of a column by label."""

    def __init__(self, column: CodedColumn) -> None:
        super().__init__((label, code) for code, label in enumerate(column.labels))
        self._column = column

    def __missing__(self, label: Any) -> int:
        if isinstance(label, float | np.floating):
            with np.errstate(over="ignore"):
                nearest = float(np.float32(label))
            if nearest in self:  # float32 columns store the nearest float32 of a label such as 0.1
                return self[nearest]
        column = self._column
        present = [column.labels[code] for code in np.unique(column.codes).tolist() if code >= 0]
        by_text = {str(one): one for one in present}
        near = difflib.get_close_matches(str(label), by_text, n=3)
        if str(label) in by_text:
            same = by_text[str(label)]
            hint = f"its labels are {_kind_of(same)}: give {_shown(same)}"
        elif near:
            hint = f"did you mean {' or '.join(_shown(by_text[one]) for one in near)}?"
        else:
            hint = f"it has [{', '.join(map(_shown, present[:_N_SHOWN]))}]"
        raise MissingKeyError(f"the column {column.name!r} has no label {label!r}; {hint}")


def _kind_of(label: Any) -> str:
    kinds = ((bool | np.bool_, "booleans"), (Integral, "integers"), (Real, "numbers"), (str, "strings"))
    return next((kind for one, kind in kinds if isinstance(label, one)), f"of type {type(label).__name__}")


def _shown(label: Any) -> str:
    return repr(label.item() if isinstance(label, np.generic) else label)


def columns_named(
    argument: str, names: Iterable[str], labels_of: Callable[[str], Any], n_obs: int, known: dict[str, CodedColumn]
) -> list[CodedColumn]:
    """Return the columns with given names, and encode each only once."""
    for name in names:
        if name not in known:
            try:
                known[name] = CodedColumn.of(name, labels_of(name), n_obs)
            except InputError as error:
                error.add_note(f"The column {name!r} is given in {argument} of CellSets.")
                raise
    return [known[name] for name in names]


def combined_codes(columns: Sequence[CodedColumn], rows: _Int64s | slice, n: int) -> tuple[NDArray[Any], int]:
    """Return one code for the combination of labels of each row, and the number of codes."""
    # Codes are in lexicographic order of the combinations. Combining takes O(n) time per column, and 4 bytes per row.
    limit = max(_FEW_CODES, n // 4)
    out = np.zeros(n, dtype=np.int32)
    n_codes = 1
    for column in columns:
        radix = max(1, len(column.labels))
        if n_codes * radix > limit:
            out, n_codes = _renumbered(out, n_codes)
        if n_codes * radix >= 2**31:
            out = out.astype(np.int64)
        codes, lookup = (column.codes[rows], EMPTY_INTS) if isinstance(rows, slice) else (column.codes, rows)
        kernels.combine_codes(codes, lookup, radix, out)
        n_codes *= radix
        if n_codes > limit:
            out, n_codes = _renumbered(out, n_codes)
    return out, n_codes


def _renumbered(codes: NDArray[Any], n_codes: int) -> tuple[NDArray[np.int32], int]:
    """Return codes without gaps, in the same order."""
    if n_codes > max(_FEW_CODES, len(codes)):
        import pandas as pd

        numbers, present = pd.factorize(codes, sort=True)
        # Here a missing label has a code of its own, the lowest.
        n_below = int(len(present) > 0 and present[0] < 0)
        return (numbers - n_below).astype(np.int32), max(1, len(present) - n_below)
    is_present = np.zeros(n_codes, dtype=np.bool_)
    is_present[codes[codes >= 0]] = True
    table = np.full(n_codes + 1, -1, dtype=np.int32)  # the last entry is that of code -1
    n_present = int(is_present.sum())
    table[:-1][is_present] = np.arange(n_present, dtype=np.int32)
    return table[codes], max(1, n_present)


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
    run_rows: float  # Mean length of the runs of neighboring rows in a group

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

    def digest(self) -> str:
        """Return a hex digest."""
        return digest_of(self.codes, self.starts, self.counts, self.members)


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
