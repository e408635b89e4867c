"""Control cells in pools, and their matching with target cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.plan.candidates import Candidates
from dasksc.plan.groups import combined_codes
from dasksc.plan.labels import CodedColumn

_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Controls:
    """Control cells in pools; all cells of a pool match the same targets."""

    # Row numbers, pool by pool, shape (n,), int32 or int64. No row belongs to several pools, so that one set draws none
    # twice.
    rows: NDArray[Any]
    # starts, counts: First row and number of rows of each pool, shape (n_pools,), int64.
    starts: _Int64s
    counts: _Int64s
    # Pool of each row of the collection, shape (n_obs,), of the smallest integer type; -1 where no control matches.
    pools: NDArray[Any]
    block_size: int  # Number of neighbors that are read together
    n_controls: int  # Number of control cells for each target cell


def matched_controls(
    targets: Candidates,
    codes: NDArray[Any],
    source: Candidates,
    is_control: NDArray[np.bool_],
    match: Sequence[CodedColumn],
    *,
    n_controls: int,
    block_size: int,
    drops_unmatched: bool,
) -> tuple[Controls, NDArray[np.bool_]]:
    """Match control cells of `source` to the targets with a code; also return a mask of the unmatched targets."""
    # Neighboring controls are read together if the runs of controls that match the same targets have at least
    # `block_size` rows on average; otherwise, controls are drawn one by one.
    keys, n_keys = combined_codes(match, slice(None), len(is_control))
    positions = np.flatnonzero(is_control[source.selector])
    rows = source.rows(positions)
    # The last entry of each table is that of code -1.
    is_wanted, is_found = np.zeros((2, n_keys + 1), dtype=np.bool_)
    is_wanted[keys[targets.selector][codes >= 0]] = True
    is_found[keys[rows]] = True
    used = np.flatnonzero((is_wanted & is_found)[:-1])
    pool_of_key = np.full(n_keys + 1, -1, dtype=np.min_scalar_type(-max(1, len(used))))
    pool_of_key[used] = np.arange(len(used))
    pools = pool_of_key[keys]
    is_unmatched = (codes >= 0) & (pools[targets.selector] < 0)
    if not drops_unmatched and is_unmatched.any():
        raise _unmatched_error(match, targets.rows(np.flatnonzero(is_unmatched)))
    of_control = pools[rows]
    order = np.argsort(of_control, kind="stable")[np.count_nonzero(of_control < 0) :]
    counts = np.bincount(of_control[order], minlength=len(used))
    # Other cells between two controls end a run.
    n_runs = 1 + int(np.count_nonzero(np.diff(positions[order]) != 1))
    together = block_size if len(order) / n_runs >= block_size else 1
    listed = rows[order].astype(np.int32 if len(keys) < 2**31 else np.int64)
    return Controls(listed, np.cumsum(counts) - counts, counts, pools, together, n_controls), is_unmatched


def _unmatched_error(match: Sequence[CodedColumn], rows: _Int64s) -> InputError:
    codes = np.stack([column.codes[rows[0]] for column in match]).tolist()
    example = ", ".join(
        f"{column.name}={column.labels[code] if code >= 0 else None!r}"
        for column, code in zip(match, codes, strict=True)
    )
    return InputError(
        f"{len(rows)} of the cells to draw from have no control cell with the same "
        f"{', '.join(column.name for column in match)}; an example is a cell of {example}. Leave them out "
        "with unmatched='drop', match fewer columns (match=), or add control cells (control_indices=)"
    )
