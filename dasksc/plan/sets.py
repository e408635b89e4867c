"""Sampler of sets of cells of one group, with matched control cells."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.kernels import draw as draw_kernels
from dasksc.kernels import sets as kernels
from dasksc.plan.candidates import Candidates
from dasksc.plan.controls import Controls
from dasksc.plan.groups import RowGroups
from dasksc.plan.keys import Purpose, epoch_keys
from dasksc.plan.labels import CodedColumn
from dasksc.plan.samplers import Sampler

_Int64s = NDArray[np.int64]

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
    def group_codes(self) -> list[NDArray[Any]]:
        """Code of each group in each of `columns`."""
        rows = self.candidates.rows(self.groups.first_rows())
        return [column.codes[rows] for column in self.columns]

    @cached_property
    def table(self) -> Any:
        """Labels of the groups, a data frame with one row per group and one column per column of `by`."""
        import pandas as pd

        named = zip(self.columns, self.group_codes, strict=True)
        return pd.DataFrame(
            {column.name: pd.Categorical.from_codes(codes, categories=list(column.labels)) for column, codes in named}
        )


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
        kernels.fill_controls(
            control_keys,
            controls.pools[rows].astype(np.int64),
            controls.starts,
            controls.counts,
            controls.block_size,
            controls.n_controls,
            sampler.set_size,
            np.empty(_TABLE_BLOCKS, dtype=np.int64),
            chosen,
        )
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
        kernels.fill_sets(
            groups,
            keys,
            firsts,
            sampler.groups.starts,
            sampler.groups.counts,
            sampler.block_rows,
            sampler.set_size,
            np.empty(_TABLE_BLOCKS, dtype=np.int64),
            members,
        )
        return groups, sampler.candidates.rows(sampler.groups.rows(members))

    def rows(self, positions: _Int64s, *, ascending: bool = False) -> _Int64s:
        size = self.sampler.set_size
        numbers, place = np.unique(positions // size, return_inverse=True)
        _, drawn = self._targets(numbers)
        rows = drawn.reshape(-1, size)[place, positions % size]
        return np.sort(rows) if ascending else rows
