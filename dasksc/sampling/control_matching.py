"""Matching of control cells to target cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.kernels import sets as kernels
from dasksc.sampling.arrays import EMPTY_INTS
from dasksc.sampling.candidates import Candidates
from dasksc.sampling.groups import CodedColumn, RowGroups, combined_codes, group_rows
from dasksc.sampling.set_sampler import Controls

__all__ = ["MatchRequest", "match_groups", "match_rows"]

_Int64s = NDArray[np.int64]

_N_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchRequest:
    """Request to match control cells, from the arguments of `CellSets`.

    Parameters
    ----------
    by
        Names of the columns that define groups.
    match
        Columns in which controls and targets agree. With ``unmatched="loosen"``, columns are ignored one by one,
        starting with the last, until controls are found.
    n_controls
        Number of control cells for each target cell.
    block_size
        Number of neighboring control rows that are read together, if the runs of controls that match the same targets
        are at least this long on average; otherwise, controls are drawn one by one.
    unmatched
        ``"error"``, ``"drop"`` or ``"loosen"``.
    """

    by: Sequence[str]
    match: Sequence[CodedColumn]
    n_controls: int
    block_size: int
    unmatched: str


@dataclass(frozen=True, slots=True)
class _Pools:
    """Pools of control cells, and the pool of each key. A key is a combination of labels to match, or a group.

    Parameters
    ----------
    rows, starts, counts
        See `Controls`.
    of_key
        Pool of each key, shape (n_keys,), int64; -1 for a key without matching controls.
    is_loosened
        True for each key whose pool matches fewer columns than requested, shape (n_keys,), bool.
    run_rows
        Mean length of the runs of neighboring rows in a pool.
    """

    rows: NDArray[Any]
    starts: _Int64s
    counts: _Int64s
    of_key: _Int64s
    is_loosened: NDArray[np.bool_]
    run_rows: float


def match_groups(
    request: MatchRequest,
    targets: Candidates,
    groups: RowGroups,
    *,
    control_candidates: Candidates,
    is_control: NDArray[np.bool_],
) -> tuple[Controls, RowGroups, dict[str, int]]:
    """Match control cells to groups of targets, if all columns of `match` are in `by`.

    Parameters
    ----------
    request
        Columns and options of the match.
    targets
        Rows to draw targets from.
    groups
        Targets by group.
    control_candidates
        Rows to draw controls from.
    is_control
        True for each row of the collection that is a control cell, shape (n_obs,).

    Returns
    -------
    controls, groups, accounts
        Controls, the groups that have controls, and a dict of counts whose keys are names of fields of `SetAccounts`.

    Raises
    ------
    InputError
        If cells are unmatched and ``unmatched="error"``.
    """
    positions = np.flatnonzero(is_control[control_candidates.selector])
    key_rows = targets.rows(groups.first_rows())
    pools = _pools_of(key_rows, request, control_candidates, positions)
    found = _accounts(groups.counts, pools) | {"n_control_cells": len(positions)}
    found |= {f"n_{what}_groups": int(mask.sum()) for what, mask in _affected_keys(pools).items()}
    is_unmatched = pools.of_key < 0
    _refuse_unmatched(request, groups.counts, key_rows, is_unmatched)
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
    """Match control cells to single targets, if `match` has columns that are not in `by`.

    Parameters
    ----------
    request, targets, control_candidates, is_control
        As for `match_groups`.
    codes, n_codes
        Group code of each target, -1 for none, and the number of codes. The codes of targets to leave out are set
        to -1 in place.

    Returns
    -------
    controls, groups, accounts
        As for `match_groups`.

    Raises
    ------
    InputError
        If cells are unmatched and ``unmatched="error"``.
    """
    positions = np.flatnonzero(is_control[control_candidates.selector])
    n_obs = len(is_control)
    keys, n_keys = combined_codes([_missing_as_label(column) for column in request.match], slice(None), n_obs)
    of_target = keys[targets.selector]
    counts, firsts = np.zeros(n_keys, dtype=np.int64), np.zeros(n_keys, dtype=np.int64)
    kernels.count_groups(np.where(codes < 0, -1, of_target), counts, firsts)
    present = np.flatnonzero(counts)
    key_rows = targets.rows(firsts[present])
    pools = _pools_of(key_rows, request, control_candidates, positions)
    found = _accounts(counts[present], pools) | {"n_control_cells": len(positions)}
    _refuse_unmatched(request, counts[present], key_rows, pools.of_key < 0)
    for what, mask in _affected_keys(pools).items():
        is_affected = np.zeros(n_keys, dtype=np.bool_)
        is_affected[present[mask]] = True
        cells = is_affected[of_target] & (codes >= 0)
        found[f"n_{what}_groups"] = len(np.unique(codes[cells]))
        if what == "unmatched":
            codes[cells] = -1
    pool_of_key = np.full(n_keys, -1, dtype=np.int64)
    pool_of_key[present] = pools.of_key
    return _controls(request, pools, pool_of_key, keys), group_rows(codes, n_codes), found


def _controls(request: MatchRequest, pools: _Pools, of_group: _Int64s, codes: NDArray[Any]) -> Controls:
    block_size = request.block_size if pools.run_rows >= request.block_size else 1
    return Controls(pools.rows, pools.starts, pools.counts, of_group, codes, block_size, request.n_controls)


def _affected_keys(pools: _Pools) -> dict[str, NDArray[np.bool_]]:
    return {"unmatched": pools.of_key < 0, "loosened": pools.is_loosened}


def _accounts(cells: _Int64s, pools: _Pools) -> dict[str, int]:
    return {f"n_{what}_cells": int(cells[mask].sum()) for what, mask in _affected_keys(pools).items()}


def _missing_as_label(column: CodedColumn) -> CodedColumn:
    """Return a column in which a missing label counts as a label."""
    is_missing = column.codes < 0
    if not is_missing.any():
        return column
    n_labels = len(column.labels)
    codes = np.where(is_missing, n_labels, column.codes.astype(np.min_scalar_type(-n_labels - 1), copy=False))
    return CodedColumn(column.name, codes, [*column.labels, None])


def _pools_of(key_rows: _Int64s, request: MatchRequest, control_candidates: Candidates, positions: _Int64s) -> _Pools:
    """Find the control cells that agree with each key row in as many leading columns of ``match`` as possible.

    Unless ``unmatched="loosen"``, they must agree in all columns.

    Parameters
    ----------
    key_rows
        One row of the collection for each key, shape (n_keys,), int64.
    request
        Columns to match, and the option to ignore some of them.
    control_candidates, positions
        Rows to draw controls from, and the positions of control cells among them, shape (n,), int64.
    """
    control_rows = control_candidates.rows(positions)
    of_key = np.full(len(key_rows), -1, dtype=np.int64)
    is_loosened = np.zeros(len(key_rows), dtype=np.bool_)
    listed: list[_Int64s] = []
    starts: list[_Int64s] = []
    counts: list[_Int64s] = []
    n_listed = n_pools = n_runs = 0
    fewest = 0 if request.unmatched == "loosen" else len(request.match)
    for n_columns in range(len(request.match), fewest - 1, -1):
        is_open = np.flatnonzero(of_key < 0)
        if not len(is_open):
            break
        rows = np.concatenate([key_rows[is_open], control_rows])
        codes, n_codes = combined_codes(request.match[:n_columns], rows, len(rows))
        groups = group_rows(codes[len(is_open) :], n_codes)
        number = np.full(n_codes + 1, -1, dtype=np.int64)  # the last entry is that of code -1
        number[groups.codes] = np.arange(len(groups.codes))
        group_of_key = number[codes[: len(is_open)]]
        used, pool = np.unique(group_of_key[group_of_key >= 0], return_inverse=True)
        found = is_open[group_of_key >= 0]
        of_key[found] = n_pools + pool
        is_loosened[found] = n_columns < len(request.match)
        n_members = groups.counts[used]
        ends = np.cumsum(n_members)
        members = groups.rows(
            np.repeat(groups.starts[used] - (ends - n_members), n_members) + np.arange(ends[-1:].sum())
        )
        listed.append(control_rows[members])
        starts.append(n_listed + ends - n_members)
        counts.append(n_members)
        # Other cells between two controls end a run.
        n_runs += 1 + int(np.count_nonzero(np.diff(positions[members]) != 1))
        n_listed += len(members)
        n_pools += len(used)
    all_rows = np.concatenate(listed)
    dtype = np.int32 if not len(all_rows) or all_rows.max() < 2**31 else np.int64
    return _Pools(
        all_rows.astype(dtype),
        np.concatenate(starts),
        np.concatenate(counts),
        of_key,
        is_loosened,
        n_listed / max(1, n_runs),
    )


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
        f"examples are the cells of {examples}. Leave them out with unmatched='drop', match fewer columns with "
        "unmatched='loosen' or match=, or add control cells with control_indices="
    )
