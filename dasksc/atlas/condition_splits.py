"""Conditions, such as a perturbation of a cell line, and rules for holding them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.atlas.filtering import columns_of, holds
from dasksc.atlas.lookup import require_key
from dasksc.errors import InputError
from dasksc.kernels import draw as draw_kernels
from dasksc.kernels import permute
from dasksc.plan.arrays import EMPTY_INTS
from dasksc.plan.labels import check_categories, listed

__all__ = ["ConditionRequest", "Conditions", "SplitRows", "is_control", "table_of"]

_Int64s = NDArray[np.int64]
_Rows = slice | _Int64s

# Maximum number of combinations. The counter of each takes eight bytes.
_MAX_COMBINATIONS = 2**28
_PIECE_ROWS = 2**20


class SplitRows(dict[str, _Int64s]):
    """Rows of each part of a split by condition, with a summary."""

    table: pd.DataFrame

    def __init__(self, parts: Mapping[str, _Int64s], table: pd.DataFrame) -> None:
        super().__init__(parts)
        self.table = table


@dataclass(frozen=True, slots=True)
class Conditions:
    """Condition of each row: a combination of values of several columns."""

    columns: tuple[str, ...]  # Names of the columns
    values: tuple[list[Any], ...]  # Values of each column, by code
    table: _Int64s  # Codes of each condition, shape (n_conditions, n_columns), int64
    of_row: NDArray[np.int32]  # Condition of each cell, as an index into `table`, shape (n,), int32

    @classmethod
    def of(cls, obs: pd.DataFrame, columns: Sequence[str], rows: _Rows, n: int) -> Conditions:
        """Enumerate the combinations of values that occur."""
        values: list[list[Any]] = []
        table = np.zeros((1, 0), dtype=np.int64)
        of_row = np.zeros(n, dtype=np.int32)
        for name in columns:
            codes, labels = _coded(obs, name, rows)
            n_missing = int((codes < 0).sum())
            if n_missing:
                raise InputError(
                    f"{name!r} is missing in {n_missing} of {n} rows, which therefore have no condition. Exclude them "
                    f"(indices=dasksc.rows_where(data, '`{name}`.notna()')), or fill in a value"
                )
            n_codes = max(1, len(labels))
            if len(table) * n_codes > _MAX_COMBINATIONS:
                raise InputError(
                    f"conditions={list(columns)!r} have {len(table):,} x {n_codes:,} combinations, more than "
                    f"{_MAX_COMBINATIONS:,}; give columns with fewer values"
                )
            of_row *= n_codes
            of_row += codes
            counted = np.zeros(len(table) * n_codes + 1, dtype=np.int64)
            draw_kernels.count_codes(n, of_row, EMPTY_INTS, counted)
            present = np.flatnonzero(counted[1:])
            lookup = np.zeros(len(counted) - 1, dtype=np.int32)
            lookup[present] = np.arange(len(present))
            for start in range(0, n, _PIECE_ROWS):
                piece = slice(start, start + _PIECE_ROWS)
                of_row[piece] = lookup[of_row[piece]]
            table = np.column_stack([table[present // n_codes], present % n_codes])
            values.append(labels)
        return cls(tuple(columns), tuple(values), table, of_row)

    def matching(self, chosen: Mapping[str, Any], option: str) -> NDArray[np.bool_]:
        """Return a mask of conditions with one of the given values in every given column, shape (n_conditions,)."""
        found = np.ones(len(self.table), dtype=bool)
        for name, wanted in chosen.items():
            if name not in self.columns:
                raise InputError(f"{option} names {name!r}, which is not one of conditions={list(self.columns)!r}")
            i = self.columns.index(name)
            codes = [self.values[i].index(require_key(name, value, self.values[i])) for value in listed(wanted)]
            found &= np.isin(self.table[:, i], codes)
        return found

    def contexts(self, columns: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
        """Return the context of each condition as an index, shape (n_conditions,), and the names of the contexts."""
        # A context is a combination of values of `columns`.
        where = [self.columns.index(name) for name in columns]
        if not where:
            return np.zeros(len(self.table), dtype=np.int64), ["all"]
        distinct, numbers = np.unique(self.table[:, where], axis=0, return_inverse=True)
        names = [
            ", ".join(str(self.values[i][code]) for i, code in zip(where, codes, strict=True))
            for codes in distinct.tolist()
        ]
        return numbers.reshape(-1).astype(np.int64), names


@dataclass(frozen=True, slots=True)
class ConditionRequest:
    """Assignment of conditions to the parts of a split, as requested by the arguments of `dasksc.split`."""

    columns: tuple[str, ...]  # Columns whose combinations are the conditions
    hold_out: tuple[Mapping[str, Any], ...]  # Mappings of columns to the values held out
    few_shot: float  # Share of the held-out conditions of each context that is used for training; 0 for none
    # Control rows: values by column, or an expression over obs; None for no controls.
    control: Mapping[str, Any] | str | None

    @classmethod
    def of(cls, conditions: Any, hold_out: Any, few_shot: Any, control: Any) -> ConditionRequest:
        """Create the request from arguments, after checks that need no data."""
        names = listed(conditions)
        if not names or not all(isinstance(name, str) for name in names):
            raise InputError(f"conditions={conditions!r} must be a column of obs, or a list of columns")
        columns = tuple(dict.fromkeys(names))
        chosen = () if hold_out is None else (hold_out,) if isinstance(hold_out, Mapping) else tuple(listed(hold_out))
        if not all(isinstance(one, Mapping) and one for one in chosen) or (hold_out is not None and not chosen):
            raise InputError(
                f"hold_out={hold_out!r} must be a dict of values by column, such as {{{columns[0]!r}: [...]}}, or a "
                "list of such dicts"
            )
        if isinstance(few_shot, bool) or not isinstance(few_shot, Real) or not 0 <= float(few_shot) < 1:
            raise InputError(f"few_shot must lie in [0, 1); got {few_shot!r}")
        if few_shot and not chosen:
            raise InputError(
                f"few_shot={few_shot!r} is a share of the conditions in hold_out=, which is missing. Give hold_out=, "
                "or use fractions= to assign conditions at random"
            )
        _control_columns(control)
        return cls(columns, chosen, float(few_shot), control)

    @property
    def needed(self) -> list[str]:
        """Columns of obs that must be read."""
        return list(dict.fromkeys([*self.columns, *_control_columns(self.control)]))

    @property
    def context_columns(self) -> tuple[str, ...]:
        """Columns whose combinations are contexts: those that `hold_out` names, or all but the last column."""
        held = {name for one in self.hold_out for name in one}
        contexts = tuple(name for name in self.columns if name in held)
        return contexts if contexts and len(contexts) < len(self.columns) else self.columns[:-1]

    def seen_of(self, held: NDArray[np.bool_], contexts: _Int64s, key: np.uint64) -> NDArray[np.bool_]:
        """Mask the conditions that `few_shot` moves from the test part to training, shape (n_conditions,)."""
        # In each context, the share `few_shot` of the held-out conditions is moved, rounded to a whole number. If
        # `few_shot` is above 0, at least one of several held-out conditions is moved, but not all. A single one is
        # never moved.
        seen = np.zeros_like(held)
        if not self.few_shot:
            return seen
        order = np.empty(len(held), dtype=np.int64)
        permute.shuffle(key, order)
        for context in np.unique(contexts[held]):
            own = order[(held & (contexts == context))[order]]
            n_seen = min(max(1, int(np.floor(self.few_shot * len(own) + 0.5))), len(own) - 1)
            seen[own[:n_seen]] = True
        if not seen.any():
            contexts_of = (
                f"each context ({', '.join(self.context_columns)}) has" if self.context_columns else "there is"
            )
            raise InputError(
                f"few_shot={self.few_shot} keeps nothing for training: {contexts_of} only one held-out condition, "
                "which stays in the test part. Hold out more conditions, or leave few_shot out"
            )
        return seen


def _control_columns(control: Any) -> list[str]:
    """Return the columns that determine control rows."""
    if control is None:
        return []
    if isinstance(control, str):
        return columns_of(control)
    if isinstance(control, Mapping) and control and all(isinstance(name, str) for name in control):
        return list(control)
    raise InputError(
        f"control={control!r} must be values by column, such as {{'gene': 'non-targeting'}}, or an expression over obs"
    )


def is_control(obs: pd.DataFrame, control: Mapping[str, Any] | str | None) -> NDArray[np.bool_]:
    """Return a mask of the control rows of a table, shape (n_obs,)."""
    if control is None:
        return np.zeros(len(obs), dtype=bool)
    if isinstance(control, str):
        return holds(control, obs)
    found = np.ones(len(obs), dtype=bool)
    for name, wanted in control.items():
        codes, labels = _coded(obs, name, slice(None))
        found &= np.isin(codes, [labels.index(require_key(name, value, labels)) for value in listed(wanted)])
    return found


def table_of(
    conditions: Conditions,
    contexts: _Int64s,
    names: list[str],
    parts: Mapping[str, _Int64s],
    control: NDArray[np.bool_],
    index_name: str,
) -> pd.DataFrame:
    """Count the conditions and cells of each context in each part."""
    columns: dict[str, _Int64s] = {}
    for name, places in parts.items():
        own = conditions.of_row[places[~control[places]]]
        cells = np.bincount(own, minlength=len(contexts))
        columns[f"{name} conditions"] = np.bincount(contexts[cells > 0], minlength=len(names))
        columns[f"{name} cells"] = np.bincount(contexts, weights=cells, minlength=len(names)).astype(np.int64)
    n_controls = np.bincount(conditions.of_row[control], minlength=len(contexts))
    columns["control cells"] = np.bincount(contexts, weights=n_controls, minlength=len(names)).astype(np.int64)
    return pd.DataFrame(columns, index=pd.Index(names, name=index_name))


def _coded(obs: pd.DataFrame, name: str, rows: _Rows) -> tuple[NDArray[np.int32], list[Any]]:
    """Return codes of the values of a column, shape (n,), int32, -1 if missing, and the values."""
    # Values are sorted as text, so that a split depends neither on the order of categories nor on that of rows.
    column = obs[require_key("obs", name, obs.columns)]
    if isinstance(column.dtype, pd.CategoricalDtype):
        codes, uniques = np.asarray(column.array.codes)[rows], column.array.categories
    else:
        codes, uniques = pd.factorize(column.iloc[rows])
    check_categories(uniques, f"obs column {name!r}")
    values = list(uniques)
    order = sorted(range(len(values)), key=lambda code: str(values[code]))
    places = np.full(len(values) + 1, -1, dtype=np.int32)  # code -1 of missing values selects the last entry
    places[order] = np.arange(len(values))
    return places[codes], [values[code] for code in order]
