"""Sets of cells of one group with matched control cells: rows by group, pools of controls, and their sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.kernels import draw as draw_kernels
from dasksc.kernels import groups as kernels
from dasksc.plan.arrays import EMPTY_INTS, Candidates
from dasksc.plan.keys import Purpose, epoch_keys
from dasksc.plan.labels import CodedColumn
from dasksc.plan.samplers import Sampler

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
        kernels.combine_codes(column.codes[rows], radix, out)
        n_codes *= radix
        if n_codes > limit:
            out, n_codes = _renumbered(out)
    return out, n_codes


def _renumbered(codes: NDArray[Any]) -> tuple[NDArray[np.int32], int]:
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
        return int(self.counts.sum())

    def rows(self, members: _Int64s) -> _Int64s:
        return self.members[members].astype(np.int64, copy=False) if len(self.members) else members

    def first_rows(self) -> _Int64s:
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


# Maximum number of blocks of a group that a table permutes; filling the table takes microseconds.
_TABLE_BLOCKS = 16_384


@dataclass(frozen=True)
class SetSampler(Sampler):
    """Sampler of sets of cells of one group."""

    candidates: Candidates  # Rows that the members of `groups` refer to
    groups: RowGroups  # Candidates by group
    columns: tuple[CodedColumn, ...] = field(compare=False)  # Columns that define the groups
    set_size: int  # Number of cells in a set
    n_sets: int  # Number of sets in an epoch, over all ranks
    block_rows: int  # Number of neighbors in a group that are read together
    # Cumulative sums of the weights of the groups, float64; None if each cell is drawn once per epoch.
    cumulative: NDArray[np.float64] | None
    # Cumulative sums of the numbers of sets of the groups, int64; None if groups are drawn by weight.
    ends: _Int64s | None
    controls: Controls | None  # Control cells, or None
    # Numbers found by binding: groups to draw from (n_groups), their cells (n_cells), cells without a label
    # (n_unlabelled), control cells, cells without a matching control and the groups of these (n_control_cells,
    # n_unmatched_cells, n_unmatched_groups), groups smaller than a set (n_short_groups), and whether these are dropped.
    accounts: dict[str, int] = field(compare=False)
    block_size = 1
    shuffle_rows = False

    @property
    def unit(self) -> int:
        return self.set_size

    @property
    def n_rows(self) -> int:
        return self.n_sets * self.set_size

    @property
    def n_controls(self) -> int:
        return 0 if self.controls is None else self.controls.n_controls

    @property
    def run_rows(self) -> float:
        """Mean number of neighboring rows that are read together, including controls."""
        if self.controls is None:
            return float(self.block_rows)
        n_controls = self.controls.n_controls
        return (1 + n_controls) / (1 / self.block_rows + n_controls / self.controls.block_size)

    @property
    def is_shuffled(self) -> bool:
        return self.cumulative is not None

    def draw(self, seed: int, epoch: int) -> SetDraw:
        return SetDraw(self, epoch_keys(seed, epoch, Purpose.SETS, n=3))

    @cached_property
    def table(self) -> Any:
        """Labels of the groups, a data frame with one row per group and one column per column of `by`."""
        rows = self.candidates.rows(self.groups.first_rows())
        columns = {
            one.name: pd.Categorical.from_codes(one.codes[rows], categories=list(one.labels)) for one in self.columns
        }
        return pd.DataFrame(columns)


@dataclass(frozen=True, slots=True)
class SetDraw:
    """Draw of the sets of one epoch; each set depends only on the keys and on its number."""

    sampler: SetSampler  # Sampler of the bound strategy
    keys: NDArray[np.uint64]  # Keys of groups, members and controls, shape (3,), uint64

    def sets(self, numbers: _Int64s) -> tuple[_Int64s, _Int64s, _Int64s | None]:
        """Return the group of each set, the rows set by set, and their controls row by row (None without controls)."""
        groups, rows = self._targets(numbers)
        sampler = self.sampler
        if sampler.controls is None:
            return groups, rows, None
        controls = sampler.controls
        control_keys = np.empty(len(numbers), dtype=np.uint64)
        kernels.set_keys(self.keys[2], numbers, control_keys)
        chosen = np.empty(len(rows) * controls.n_controls, dtype=np.int64)
        pools = controls.pools[rows].astype(np.int64), controls.starts, controls.counts
        sizes = controls.block_size, controls.n_controls, sampler.set_size
        kernels.fill_controls(control_keys, *pools, *sizes, np.empty(_TABLE_BLOCKS, dtype=np.int64), chosen)
        return groups, rows, controls.rows[chosen].astype(np.int64, copy=False)

    def _targets(self, numbers: _Int64s) -> tuple[_Int64s, _Int64s]:
        """Return the group of each set, and the rows set by set."""
        sampler = self.sampler
        keys = np.empty(len(numbers), dtype=np.uint64)
        firsts = np.zeros(len(numbers), dtype=np.int64)
        if sampler.ends is None:
            assert sampler.cumulative is not None
            shares, cumulative = np.empty(len(numbers), dtype=np.float64), sampler.cumulative
            draw_kernels.uniforms(numbers, self.keys[0], shares)
            groups = np.searchsorted(cumulative, shares * cumulative[-1], side="right")
            # Rounding may yield the total itself, which stands for the last group with a positive weight.
            groups = np.minimum(groups, np.searchsorted(cumulative, cumulative[-1]))
            kernels.set_keys(self.keys[1], numbers, keys)
        else:
            groups = np.searchsorted(sampler.ends, numbers, side="right")
            firsts = (numbers - np.where(groups > 0, sampler.ends[groups - 1], 0)) * sampler.set_size
            kernels.set_keys(self.keys[1], groups, keys)
        members = np.empty(len(numbers) * sampler.set_size, dtype=np.int64)
        source = sampler.groups.starts, sampler.groups.counts, sampler.block_rows, sampler.set_size
        kernels.fill_sets(groups, keys, firsts, *source, np.empty(_TABLE_BLOCKS, dtype=np.int64), members)
        return groups, sampler.candidates.rows(sampler.groups.rows(members))

    def rows(self, positions: _Int64s) -> _Int64s:
        size = self.sampler.set_size
        numbers, place = np.unique(positions // size, return_inverse=True)
        _, drawn = self._targets(numbers)
        rows: _Int64s = drawn.reshape(-1, size)[place, positions % size]
        return rows
