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
from dasksc.plan.groups import RowGroups, combined_codes, group_rows
from dasksc.plan.labels import CodedColumn
from dasksc.plan.sets import Controls

__all__ = ["ControlSource"]

_Int64s = NDArray[np.int64]

_N_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSource:
    """Control cells of an atlas, and how they match targets."""

    candidates: Candidates  # Rows to draw controls from
    is_control: NDArray[np.bool_]  # Mask of the control cells, shape (n_obs,)
    match: Sequence[CodedColumn]  # Columns in which controls and targets agree
    n_controls: int  # Number of control cells for each target cell
    # Number of neighboring control rows that are read together, if the runs of controls that match the same targets are
    # at least this long on average; otherwise, controls are drawn one by one.
    block_size: int
    drops_unmatched: bool  # If True, targets without controls are left out; otherwise, they raise an error

    def of_groups(self, targets: Candidates, groups: RowGroups) -> tuple[Controls, RowGroups, dict[str, int]]:
        """Match control cells to groups of targets, whose cells all agree in the columns to match."""
        key_rows = targets.rows(groups.first_rows())
        pools = self._pools_of(key_rows, groups.counts)
        is_unmatched = pools.of_key < 0
        found = {
            "n_control_cells": pools.n_cells,
            "n_unmatched_groups": int(is_unmatched.sum()),
            "n_unmatched_cells": int(groups.counts[is_unmatched].sum()),
        }
        return self._controls(pools, pools.of_key[~is_unmatched], EMPTY_INTS), groups.kept(~is_unmatched), found

    def of_rows(
        self, targets: Candidates, codes: NDArray[Any], n_codes: int
    ) -> tuple[Controls, RowGroups, dict[str, int]]:
        """Match control cells to single targets, whose groups are given by `codes`."""
        columns = [column.with_missing_as_label() for column in self.match]
        keys, n_keys = combined_codes(columns, slice(None), len(self.is_control))
        of_target = keys[targets.selector]
        counts, firsts = np.zeros(n_keys, dtype=np.int64), np.zeros(n_keys, dtype=np.int64)
        kernels.count_groups(np.where(codes < 0, -1, of_target), counts, firsts)
        present = np.flatnonzero(counts)
        pools = self._pools_of(targets.rows(firsts[present]), counts[present])
        pool_of_key = np.full(n_keys, -1, dtype=np.int64)
        pool_of_key[present] = pools.of_key
        is_unmatched = (pool_of_key < 0)[of_target] & (codes >= 0)
        found = {
            "n_control_cells": pools.n_cells,
            "n_unmatched_groups": len(np.unique(codes[is_unmatched])),
            "n_unmatched_cells": int(is_unmatched.sum()),
        }
        codes[is_unmatched] = -1
        return self._controls(pools, pool_of_key, keys), group_rows(codes, n_codes), found

    def _controls(self, pools: _Pools, of_group: _Int64s, codes: NDArray[Any]) -> Controls:
        block_size = self.block_size if pools.run_rows >= self.block_size else 1
        return Controls(pools.rows, pools.starts, pools.counts, of_group, codes, block_size, self.n_controls)

    def _pools_of(self, key_rows: _Int64s, n_targets: _Int64s) -> _Pools:
        """Find the control cells that agree with each key row, which stands for `n_targets` target cells."""
        positions = np.flatnonzero(self.is_control[self.candidates.selector])
        control_rows = self.candidates.rows(positions)
        rows = np.concatenate([key_rows, control_rows])
        codes, n_codes = combined_codes(self.match, rows, len(rows))
        groups = group_rows(codes[len(key_rows) :], n_codes)
        number = np.full(n_codes + 1, -1, dtype=np.int64)  # the last entry is that of code -1
        number[groups.codes] = np.arange(len(groups.codes))
        of_key = number[codes[: len(key_rows)]]
        if not self.drops_unmatched and (of_key < 0).any():
            raise self._unmatched_error(key_rows[of_key < 0], int(n_targets[of_key < 0].sum()))
        used, pool = np.unique(of_key[of_key >= 0], return_inverse=True)
        of_key[of_key >= 0] = pool
        counts = groups.counts[used]
        ends = np.cumsum(counts)
        members = groups.rows(np.repeat(groups.starts[used] - (ends - counts), counts) + np.arange(counts.sum()))
        # Other cells between two controls end a run.
        n_runs = 1 + int(np.count_nonzero(np.diff(positions[members]) != 1))
        listed = control_rows[members]
        dtype = np.int32 if not len(listed) or listed.max() < 2**31 else np.int64
        return _Pools(listed.astype(dtype), ends - counts, counts, of_key, len(listed) / n_runs, len(positions))

    def _unmatched_error(self, rows: _Int64s, n_cells: int) -> InputError:
        codes = np.stack([column.codes[rows].astype(np.int64) for column in self.match], axis=1)
        firsts = np.sort(np.unique(codes, axis=0, return_index=True)[1])[:_N_SHOWN]
        examples = "; ".join(
            ", ".join(
                f"{column.name}={column.labels[code] if code >= 0 else None!r}"
                for column, code in zip(self.match, one, strict=True)
            )
            for one in codes[firsts].tolist()
        )
        return InputError(
            f"{n_cells} of the cells to draw from have no control cell with the same "
            f"{', '.join(column.name for column in self.match)}; examples are the cells of {examples}. Leave them out "
            "with unmatched='drop', match fewer columns (match=), or add control cells (control_indices=)"
        )


@dataclass(frozen=True, slots=True)
class _Pools:
    """Pools of control cells, and the pool of each key row."""

    # rows, starts, counts: See `Controls`.
    rows: NDArray[Any]
    starts: _Int64s
    counts: _Int64s
    of_key: _Int64s  # Pool of each key row, shape (n_keys,), int64; -1 for a key without matching controls
    run_rows: float  # Mean length of the runs of neighboring rows in a pool
    n_cells: int  # Number of control cells, whether or not they match a target
