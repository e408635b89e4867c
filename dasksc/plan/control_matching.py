"""Matching of control cells to target cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.kernels import sets as kernels
from dasksc.plan.arrays import EMPTY_INTS
from dasksc.plan.candidates import Candidates
from dasksc.plan.groups import CodedColumn, RowGroups, combined_codes, group_rows
from dasksc.plan.sets import Controls

__all__ = ["MatchRequest", "match_groups", "match_rows"]

_Int64s = NDArray[np.int64]

_N_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchRequest:
    """Request to match control cells, from the arguments of `CellSets`."""

    by: Sequence[str]  # Names of the columns that define groups
    match: Sequence[CodedColumn]  # Columns in which controls and targets agree
    n_controls: int  # Number of control cells for each target cell
    # Number of neighboring control rows that are read together, if the runs of controls that match the same targets are
    # at least this long on average; otherwise, controls are drawn one by one.
    block_size: int
    unmatched: str  # ``"error"`` or ``"drop"``


@dataclass(frozen=True, slots=True)
class _Pools:
    """Pools of control cells, and the pool of each key. A key is a combination of labels to match, or a group."""

    # rows, starts, counts: See `Controls`.
    rows: NDArray[Any]
    starts: _Int64s
    counts: _Int64s
    of_key: _Int64s  # Pool of each key, shape (n_keys,), int64; -1 for a key without matching controls
    run_rows: float  # Mean length of the runs of neighboring rows in a pool


def match_groups(
    request: MatchRequest,
    targets: Candidates,
    groups: RowGroups,
    *,
    control_candidates: Candidates,
    is_control: NDArray[np.bool_],
) -> tuple[Controls, RowGroups, dict[str, int]]:
    """Match control cells to groups of targets, if all columns of `match` are in `by`."""
    positions = np.flatnonzero(is_control[control_candidates.selector])
    key_rows = targets.rows(groups.first_rows())
    pools = _pools_of(key_rows, request, control_candidates, positions)
    is_unmatched = pools.of_key < 0
    _refuse_unmatched(request, groups.counts, key_rows, is_unmatched)
    found = {
        "n_control_cells": len(positions),
        "n_unmatched_groups": int(is_unmatched.sum()),
        "n_unmatched_cells": int(groups.counts[is_unmatched].sum()),
    }
    return _controls(request, pools, pools.of_key[~is_unmatched], EMPTY_INTS), groups.kept(~is_unmatched), found


def match_rows(
    request: MatchRequest,
    targets: Candidates,
    codes: NDArray[Any],
    n_codes: int,
    *,
    control_candidates: Candidates,
    is_control: NDArray[np.bool_],
) -> tuple[Controls, RowGroups, dict[str, int]]:
    """Match control cells to single targets, if `match` has columns that are not in `by`."""
    positions = np.flatnonzero(is_control[control_candidates.selector])
    n_obs = len(is_control)
    keys, n_keys = combined_codes([_missing_as_label(column) for column in request.match], slice(None), n_obs)
    of_target = keys[targets.selector]
    counts, firsts = np.zeros(n_keys, dtype=np.int64), np.zeros(n_keys, dtype=np.int64)
    kernels.count_groups(np.where(codes < 0, -1, of_target), counts, firsts)
    present = np.flatnonzero(counts)
    key_rows = targets.rows(firsts[present])
    pools = _pools_of(key_rows, request, control_candidates, positions)
    _refuse_unmatched(request, counts[present], key_rows, pools.of_key < 0)
    pool_of_key = np.full(n_keys, -1, dtype=np.int64)
    pool_of_key[present] = pools.of_key
    is_unmatched = (pool_of_key < 0)[of_target] & (codes >= 0)
    found = {
        "n_control_cells": len(positions),
        "n_unmatched_groups": len(np.unique(codes[is_unmatched])),
        "n_unmatched_cells": int(is_unmatched.sum()),
    }
    codes[is_unmatched] = -1
    return _controls(request, pools, pool_of_key, keys), group_rows(codes, n_codes), found


def _controls(request: MatchRequest, pools: _Pools, of_group: _Int64s, codes: NDArray[Any]) -> Controls:
    block_size = request.block_size if pools.run_rows >= request.block_size else 1
    return Controls(pools.rows, pools.starts, pools.counts, of_group, codes, block_size, request.n_controls)


def _missing_as_label(column: CodedColumn) -> CodedColumn:
    """Return a column in which a missing label counts as a label."""
    is_missing = column.codes < 0
    if not is_missing.any():
        return column
    n_labels = len(column.labels)
    codes = np.where(is_missing, n_labels, column.codes.astype(np.min_scalar_type(-n_labels - 1), copy=False))
    return CodedColumn(column.name, codes, [*column.labels, None])


def _pools_of(key_rows: _Int64s, request: MatchRequest, control_candidates: Candidates, positions: _Int64s) -> _Pools:
    """Find the control cells that agree with each key row in all columns of ``match``."""
    control_rows = control_candidates.rows(positions)
    rows = np.concatenate([key_rows, control_rows])
    codes, n_codes = combined_codes(request.match, rows, len(rows))
    groups = group_rows(codes[len(key_rows) :], n_codes)
    number = np.full(n_codes + 1, -1, dtype=np.int64)  # the last entry is that of code -1
    number[groups.codes] = np.arange(len(groups.codes))
    of_key = number[codes[: len(key_rows)]]
    used, pool = np.unique(of_key[of_key >= 0], return_inverse=True)
    of_key[of_key >= 0] = pool
    counts = groups.counts[used]
    ends = np.cumsum(counts)
    members = groups.rows(np.repeat(groups.starts[used] - (ends - counts), counts) + np.arange(counts.sum()))
    # Other cells between two controls end a run.
    n_runs = 1 + int(np.count_nonzero(np.diff(positions[members]) != 1))
    listed = control_rows[members]
    dtype = np.int32 if not len(listed) or listed.max() < 2**31 else np.int64
    return _Pools(listed.astype(dtype), ends - counts, counts, of_key, len(listed) / n_runs)


def _refuse_unmatched(
    request: MatchRequest, cells: _Int64s, key_rows: _Int64s, is_unmatched: NDArray[np.bool_]
) -> None:
    """Raise an error for cells without controls if ``unmatched="error"``."""
    if request.unmatched != "error" or not is_unmatched.any():
        return
    names = ", ".join(column.name for column in request.match)
    rows = key_rows[is_unmatched]
    codes = np.stack([column.codes[rows].astype(np.int64) for column in request.match], axis=1)
    _, firsts = np.unique(codes, axis=0, return_index=True)

    def label(column: CodedColumn, code: int) -> Any:
        return column.labels[code] if code >= 0 else None

    examples = "; ".join(
        ", ".join(f"{column.name}={label(column, code)!r}" for column, code in zip(request.match, one, strict=True))
        for one in codes[np.sort(firsts)[:_N_SHOWN]].tolist()
    )
    raise InputError(
        f"{int(cells[is_unmatched].sum())} of the cells to draw from have no control cell with the same {names}; "
        f"examples are the cells of {examples}. Leave them out with unmatched='drop', match fewer columns "
        "(match=), or add control cells (control_indices=)"
    )
