"""Sampling strategy for sets of cells with matched control cells."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.checks import check_one_of, names_or_none, true_or_false, whole_number
from dasksc.displays import brief
from dasksc.errors import InputError
from dasksc.plan.arrays import Candidates
from dasksc.plan.labels import CodedColumn
from dasksc.plan.sets import SetSampler, combined_codes, group_rows, matched_controls
from dasksc.plan.strategies import BuiltInStrategy

logger = logging.getLogger("dasksc.plan")


@dataclass(frozen=True, eq=False, repr=False)
class CellSets(BuiltInStrategy):
    """Strategy that draws sets of cells of one group, such as one perturbation in one cell line, with matched controls.

    A batch holds ``batch_size / set_size`` whole sets, with the rows of a set next to each other. Sets are shuffled;
    rows never leave their set. A `Batch` also has the entry ``batch.sets``: the group of each set, as its row number in
    the data frame ``dataset.groups``, shape (n_sets,), int64. With `control`, ``batch.control`` is a `Batch` of control
    cells, whose rows ``i * n_controls`` to ``(i + 1) * n_controls - 1`` match row i of the batch.

    Each set depends only on the seed, the epoch and its number in the epoch. The sets are therefore the same for any
    number of ranks and workers, and after resuming.

    Parameters
    ----------
    by
        One or several obs columns, whose combinations of labels are the groups. Cells with a missing
        label in one of these columns are never drawn as targets.
    set_size
        Number of cells in a set.
    n_sets
        Number of sets in an epoch, over all ranks. Default: the number with which every cell is drawn about once.
    weights
        Weights of the groups in the draw: ``"cells"``, their numbers of cells; or ``"groups"``, equal weights.
    incomplete
        Treatment of a set that a group cannot fill: ``"repeat"`` fills it by repeating cells of the group, ``"drop"``
        leaves it out.
    replace
        If True, sets are drawn independently. A cell occurs twice in a set only if its group is smaller than a set. If
        False, every cell is drawn once per epoch, except that the last, incomplete set of a group repeats cells or is
        left out (see `incomplete`).
    block_size
        Number of neighboring cells of a group that are drawn and read together. It has an effect only if the atlas is
        sorted by group, for example with ``dasksc convert --group-by``; otherwise, cells are drawn one by one.
    indices
        Rows to draw the cells of the sets (targets) from: row numbers in any order, a boolean mask or a slice. None:
        all. A row that is given twice counts as two cells, and may occur twice in a set.
    control
        Control cells: labels by obs column, such as ``{"gene": "non-targeting"}`` (or a list of labels), an expression
        over obs as in ``scDataset(filter=)``, or a boolean mask over all rows.
    match
        Names of the obs columns in which control cells agree with their target. Default: the columns of `by` that
        `control` does not name. With columns that are not in `by`, cells of one set may match different controls.
    n_controls
        Number of control cells for each target cell. A control cell is repeated in a set only if fewer match than are
        drawn.
    unmatched
        What to do with cells without a matching control cell: ``"error"`` raises an error, ``"drop"`` leaves them out.
    control_indices
        Rows to draw control cells from, instead of `indices`. The filter of `scDataset` applies to them, too.
    include_control
        If True, groups of control cells are also targets. A control cell may then be its own control.

    Raises
    ------
    InputError
        If a column or label is missing, no cells remain to draw, cells are unmatched, or arguments contradict each
        other.

    Notes
    -----
    Preparing the strategy for n rows, when `scDataset` is created, takes O(n) time. Memory is 4 bytes per row, or none
    if each group is one run of rows, as in an atlas sorted by group; with `control`, one byte more, or two if there are
    more than 128 combinations of labels to match. A fetch reads targets and controls in one ascending pass.

    Examples
    --------
    >>> sets = dasksc.CellSets(by=["cell_line", "gene"], set_size=32, control={"gene": "non-targeting"})
    >>> dataset = dasksc.scDataset("screen.h5ad", sets, batch_size=128, seed=0)  # 4 sets a batch
    >>> next(iter(dataset))
    Batch
      X              (128, 200) float32
      index          (128,) int64
      sets           (4,) int64
      control.X      (128, 200) float32
      control.index  (128,) int64
    """

    by: str | Sequence[str]
    set_size: int
    _: KW_ONLY
    n_sets: int | None = None
    weights: str = "cells"
    incomplete: str = "repeat"
    replace: bool = True
    block_size: int = 8
    indices: Any = None
    control: Mapping[str, Any] | str | Any = None
    match: str | Sequence[str] | None = None
    n_controls: int = 1
    unmatched: str = "error"
    control_indices: Any = None
    include_control: bool = False

    def __post_init__(self) -> None:
        by = _names("by", self.by)
        if not by:
            raise InputError("by= is empty; give at least one obs column")
        object.__setattr__(self, "by", by)
        if self.match is not None:
            object.__setattr__(self, "match", _names("match", self.match))
        for name in ("set_size", "block_size", "n_controls", "n_sets"):
            value = getattr(self, name)
            if value is not None or name != "n_sets":
                object.__setattr__(self, name, whole_number(name, value))
        for name in ("replace", "include_control"):
            object.__setattr__(self, name, true_or_false(name, getattr(self, name)))
        check_one_of("incomplete", self.incomplete, ("repeat", "drop"))
        check_one_of("unmatched", self.unmatched, ("error", "drop"))
        check_one_of("weights", self.weights, ("cells", "groups"))
        if not self.replace and (self.n_sets is not None or self.weights != "cells"):
            raise InputError(
                "replace=False draws every cell once, so n_sets= and weights= have no effect; omit them, or draw "
                "with replace=True"
            )
        if self.control is None:
            given = {"match": self.match, "control_indices": self.control_indices}
            named = [f"{name}=" for name, value in given.items() if value is not None]
            named += ["n_controls="] * (self.n_controls != 1) + ["include_control="] * bool(self.include_control)
            if named:
                raise InputError(f"to use {', '.join(named)}, also give control=, which selects the control cells")
        elif isinstance(self.control, Mapping):
            names_or_none("control", list(self.control))

    @property
    def obs_columns(self) -> tuple[str, ...]:
        """Names of the obs columns that the strategy reads."""
        control = tuple(self.control) if isinstance(self.control, Mapping) else ()
        return tuple(dict.fromkeys((*self.by, *control, *(self.match or ()))))

    def with_control(self, mask: NDArray[np.bool_], columns: Sequence[str]) -> CellSets:
        """Return the strategy with the expression over obs replaced by its result for each row.

        Parameters
        ----------
        mask
            True for each row that is a control cell, shape (n_obs,), bool.
        columns
            Names of the obs columns in the expression.
        """
        match = tuple(name for name in self.by if name not in columns) if self.match is None else self.match
        return replace(self, control=mask, match=match)

    def bind(self, n_obs: int, labels_of: Callable[[str], Any]) -> SetSampler:
        """See `BuiltInStrategy.bind`."""

        @functools.cache
        def column(name: str) -> CodedColumn:
            return CodedColumn.of(name, labels_of(name), n_obs)

        candidates = Candidates.of(self.indices, n_obs)
        by = [column(name) for name in self.by]
        codes, n_codes = combined_codes(by, candidates.selector, candidates.n)
        n_unlabelled = int(np.count_nonzero(codes < 0))
        if n_unlabelled:
            logger.warning("%d of %d cells have no label in %s and are never drawn", n_unlabelled, len(codes), self.by)
        controls, found = None, dict.fromkeys(("n_control_cells", "n_unmatched_groups", "n_unmatched_cells"), 0)
        if self.control is not None:
            source, is_control, match = candidates, self._is_control(n_obs, column), self._match()
            if self.control_indices is not None:
                source = Candidates.of(self.control_indices, n_obs, name="control_indices")
            n_control_cells = int(is_control[source.selector].sum())
            if not n_control_cells:
                raise InputError(
                    f"none of the {source.n} rows to draw controls from matches control={brief(self.control)}; give "
                    "rows with control cells in control_indices="
                )
            if not self.include_control:
                codes[is_control[candidates.selector]] = -1
            if codes.max(initial=-1) < 0:
                raise self._no_sets_error(candidates)
            controls, is_unmatched = matched_controls(
                *(candidates, codes, source, is_control, [column(name) for name in match]),
                n_controls=self.n_controls,
                block_size=self.block_size,
                drops_unmatched=self.unmatched == "drop",
            )
            found = {
                "n_control_cells": n_control_cells,
                "n_unmatched_groups": len(np.unique(codes[is_unmatched])),
                "n_unmatched_cells": int(is_unmatched.sum()),
            }
            if not set(match) <= set(self.by):
                codes[is_unmatched] = -1
        groups = group_rows(codes, n_codes)
        del codes  # 4 bytes per row
        if controls is not None:
            groups = groups.kept(controls.pools[candidates.rows(groups.first_rows())] >= 0)
        is_short = groups.counts < self.set_size
        n_short = int(np.count_nonzero(is_short))
        if self.incomplete == "drop":
            groups = groups.kept(~is_short)
        if not len(groups.counts):
            raise self._no_sets_error(candidates)
        ends = cumulative = None
        if self.replace:
            n_sets = -(-groups.n_rows // self.set_size) if self.n_sets is None else self.n_sets
            weights = np.ones(len(groups.counts)) if self.weights == "groups" else groups.counts.astype(np.float64)
            cumulative = np.cumsum(weights)
        else:
            n_short_rows = self.set_size - 1 if self.incomplete == "repeat" else 0
            ends = np.cumsum((groups.counts + n_short_rows) // self.set_size)
            n_sets = int(ends[-1])
        return SetSampler(
            candidates=candidates,
            groups=groups,
            columns=tuple(by),
            set_size=self.set_size,
            n_sets=n_sets,
            # Neighbors in a group are neighbors in storage only if the rows of a group are stored together.
            block_rows=min(self.block_size, self.set_size) if groups.run_rows >= self.block_size else 1,
            cumulative=cumulative,
            ends=ends,
            controls=controls,
            accounts={
                "n_groups": len(groups.counts),
                "n_cells": groups.n_rows,
                "n_unlabelled": n_unlabelled,
                **found,
                "n_short_groups": n_short,
                "drops_short": self.incomplete == "drop",
            },
        )

    def _no_sets_error(self, candidates: Candidates) -> InputError:
        return InputError(
            f"no set can be drawn: of {candidates.n} rows, none is left in a group of {', '.join(self.by)} without "
            f"control cells, unlabelled cells, with unmatched={self.unmatched!r} cells without a control, and with "
            f"incomplete={self.incomplete!r} groups of fewer than {self.set_size} cells"
        )

    def _match(self) -> tuple[str, ...]:
        if self.match is not None:
            return tuple(self.match)
        if not isinstance(self.control, Mapping):
            raise InputError(
                "control= is a mask, so match= is required: the columns in which controls and targets must agree"
            )
        return tuple(name for name in self.by if name not in self.control)

    def _is_control(self, n_obs: int, column: Callable[[str], CodedColumn]) -> NDArray[np.bool_]:
        control = self.control
        if isinstance(control, str):
            raise InputError(
                f"control={control!r} is an expression, which only scDataset can evaluate. Without scDataset, give a "
                "dict of labels by column or a boolean mask"
            )
        if isinstance(control, Mapping):
            if not control:
                raise InputError("control= is empty; give labels by column: {'gene': 'non-targeting'}")
            masks = [column(name).where("control=", labels) for name, labels in control.items()]
            return np.asarray(np.logical_and.reduce(masks))
        mask = np.asarray(control)
        if mask.dtype != np.bool_ or mask.shape != (n_obs,):
            raise InputError(
                f"control must be a dict of labels by column, an expression, or a boolean mask of {n_obs} "
                f"rows; got {mask.dtype} of shape {mask.shape}"
            )
        return mask


def _names(argument: str, given: Any) -> tuple[str, ...]:
    names = tuple(names_or_none(argument, given))
    if len(set(names)) < len(names):
        raise InputError(f"{argument}={list(names)} names a column twice")
    return names
