"""Splits of an atlas into training, validation and test parts that share no group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

from dasksc.atlas.condition_splits import ConditionRequest, Conditions, SplitRows, is_control, table_of
from dasksc.atlas.filtering import explaining_control, obs_of
from dasksc.atlas.lookup import require_key
from dasksc.atlas.modalities import Modalities
from dasksc.checks import whole_number
from dasksc.errors import InputError
from dasksc.kernels import draw as draw_kernels
from dasksc.kernels import permute
from dasksc.kernels import split as kernels
from dasksc.plan.candidates import Candidates
from dasksc.plan.keys import Purpose, epoch_keys
from dasksc.plan.labels import check_categories, encode_labels
from dasksc.readers.options import Openable

__all__ = ["split"]

_DEFAULT = (0.8, 0.1, 0.1)
# Name of the part with the conditions that are held out.
_HELD_OUT = "test"
_NAMES = {2: ("train", "test"), 3: ("train", "validation", "test")}
_MAX_PARTS = 100
# Maximum size of the table of counts by group and class, with eight bytes per count.
_MAX_COUNTS = 2**28
# Number of random orders in which groups are assigned; the best result is used. Fewer orders are tried if there are
# many groups, classes or parts, since each assignment then takes long.
_N_TRIES = 16
_TRIED_COUNTS = 2**26
# Above this number of labels, the codes are renumbered without gaps.
_FEW_CODES = 256
# Number of rows that are processed together.
_PIECE_ROWS = 2**20


def split(
    data: Openable | Modalities | Sequence[Openable] | Mapping[str, Openable] | pd.DataFrame,
    *,
    fractions: Mapping[str, float] | Sequence[float] = _DEFAULT,
    by: str | None = None,
    groups: str | Sequence[str] | None = None,
    stratify: str | Sequence[str] | None = None,
    indices: Any = None,
    seed: int = 0,
    conditions: str | Sequence[str] | None = None,
    hold_out: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    few_shot: float = 0.0,
    control: Mapping[str, Any] | str | None = None,
) -> dict[str, NDArray[np.int64]]:
    """Split rows at random into parts that share no group, such as a donor or a perturbation of a cell line.

    Parameters
    ----------
    data
        Any argument or result of `dasksc.open`, several modalities (`Modalities`, a MuData, the path of an ``.h5mu``
        file), or an obs table. From a path, only the columns given here are read. For several
        modalities, columns are ``"modality:column"``, and row i is cell i of `Modalities`.
    fractions
        Fraction of each part: a dict by name, two numbers for ``train`` and ``test``, or three for ``train``,
        ``validation`` and ``test``. They sum to 1. With `hold_out`, they are fractions of the conditions that are not
        held out: a dict by name, or two numbers for ``train`` and ``validation``; default: all for ``train``.
    by
        Column of obs whose values are assigned to parts; all rows of a value are in the same part. With ``by="donor"``,
        `fractions` are fractions of the number of *donors*. Default: each row is assigned individually.
    groups
        Columns of obs whose values are not divided among parts. ``groups="donor"`` keeps all rows of a donor in one
        part. `fractions` are then fractions of the number of rows, unlike with `by`. With several columns, or with `by`
        as well, all constraints hold at once: with ``groups=["donor", "batch"]``, neither the rows of a donor nor those
        of a batch are divided among parts.
    stratify
        Column of obs whose classes have the same proportions in each part. With several columns, classes are their
        combinations. Rows without a label (missing, or integers below 0, as for `ClassBalancedSampling`) form a
        further class. With `by`, each value counts once, as a member of the most frequent class of its labeled rows.
    indices
        Rows to split, without repeats: row numbers, a boolean mask or a slice.
    seed
        Seed of the split, an integer in [0, 2**64). The same seed, data and arguments give the same parts.
    conditions
        Columns of obs whose combinations are conditions, such as ``["cell_line", "gene"]``. All rows of a condition are
        in one part. A context, such as a cell line, is a combination of values of the columns that `hold_out` names. If
        `hold_out` names all columns or is not given, all columns of `conditions` but the last define the contexts.
        Without `hold_out`, the conditions of each context are assigned at random by `fractions`. Not allowed with `by`,
        `groups` and `stratify`.
    hold_out
        Conditions of the part ``test``, by values of columns: ``{"cell_line": ["K562"]}`` holds out a whole cell line
        (zero-shot). A condition is held out if each given column has one of the given values. With a list of mappings,
        it is held out if it matches any of them.
    few_shot
        Share of the held-out conditions of each context that is assigned to the first part instead, so that some
        conditions of the context are seen in training. With ``few_shot=0.2`` and 10 held-out conditions, 2 are in
        ``train`` and 8 in ``test``. Numbers are rounded. If `few_shot` is above 0, a context with two or more held-out
        conditions has at least one in each of the two parts.
    control
        Control cells: values by column, such as ``{"gene": "non-targeting"}``, or an expression as for
        `dasksc.rows_where`. They belong to no condition, and all are in the first part, including those of held-out
        contexts.

    Returns
    -------
    dict
        Row numbers of each part, ascending, int64, suitable as ``indices`` of a strategy. Every row is in exactly one
        part, and no part is empty. With `conditions`, the dict has an attribute ``table``, a DataFrame with the number
        of conditions and cells of each context in each part.

    Raises
    ------
    InputError
        If an argument is invalid (checked before data are read); if fractions do not sum to 1; if a row has no group
        or condition; if there are fewer groups than parts; or if a column to stratify by is continuous.
    MissingKeyError
        If obs lacks a column, or a column lacks a value to hold out.

    Notes
    -----
    Without `by`, `groups` and `conditions`, all splits are equally likely, given the number of rows of each class in
    each part. The number of rows of each class in a part differs by less than one row from the exact share. The total
    size of a part differs from its share by fewer rows than there are parts.

    With `by` or `groups`, a part exceeds its fraction by at most the largest group. The function assigns groups in up
    to 16 random orders, and uses the result closest to the fractions of every class (by chi-square). With few groups,
    different seeds therefore often give the same split.

    Time and memory are linear in the number of rows; memory holds a few integers per row.

    Examples
    --------
    >>> parts = dasksc.split("atlas.h5ad", by="donor", fractions=(0.75, 0.25), seed=0)
    >>> {name: len(rows) for name, rows in parts.items()}
    {'train': 1547, 'test': 453}
    >>> parts = dasksc.split("atlas.h5ad", groups="donor", stratify="cell_type", fractions=(0.8, 0.1, 0.1))
    >>> {name: len(rows) for name, rows in parts.items()}
    {'train': 1673, 'validation': 158, 'test': 169}
    >>> held_out = dasksc.split(
    ...     "screen.h5ad",
    ...     conditions=["cell_line", "gene"],
    ...     hold_out={"cell_line": ["K562"]},
    ...     control={"gene": "non-targeting"},
    ... )
    >>> held_out.table["test cells"].to_dict()
    {'K562': 1749, 'RPE1': 0}
    >>> few_shot = dasksc.split(
    ...     "screen.h5ad",
    ...     conditions=["cell_line", "gene"],
    ...     hold_out={"cell_line": ["K562"]},
    ...     few_shot=0.4,
    ...     control={"gene": "non-targeting"},
    ... )
    >>> few_shot.table[["train conditions", "test conditions"]].loc["K562"].to_list()
    [2, 3]
    """
    if conditions is not None:
        refused = {"by": by, "groups": groups, "stratify": stratify}
        if given := [f"{name}=" for name, value in refused.items() if value is not None]:
            raise InputError(
                f"{', '.join(given)} cannot be combined with conditions=, which already defines the groups of cells. "
                "Hold out a donor with conditions=['donor', ...] and hold_out={'donor': [...]}"
            )
        request = ConditionRequest.of(conditions, hold_out, few_shot, control)
        return _split_conditions(data, request, fractions, indices, seed)
    of_conditions = {"hold_out": hold_out is not None, "few_shot": bool(few_shot), "control": control is not None}
    if any(of_conditions.values()):
        listed = ", ".join(f"{name}=" for name, is_given in of_conditions.items() if is_given)
        raise InputError(f"to use {listed}, also give conditions=, the columns of obs whose combinations are held out")
    names, shares = _fractions(fractions)
    if by is not None and not isinstance(by, str):
        raise InputError(f"by={by!r} must be the name of one column; for several columns give groups=")
    whole = list(dict.fromkeys([*([] if by is None else [by]), *_listed("groups", groups)]))
    strata = _listed("stratify", stratify)
    seed = whole_number("seed", seed, 0, 2**64)
    obs = obs_of(data, list(dict.fromkeys([*whole, *strata])))
    candidates, rows = _candidates(indices, len(obs))
    classes, counts, unlabelled = _classes(obs, strata, rows, candidates.n)
    keys = epoch_keys(seed, 0, Purpose.SPLIT, n=_N_TRIES + 1)
    if whole:
        parts = _parts_of_groups(
            [_codes(obs, name, rows) for name in whole],
            classes,
            len(counts),
            shares,
            keys,
            what=" and ".join(whole),
            counts_values=by is not None,
            unlabelled=unlabelled,
        )
    else:
        quotas = _quotas(counts, shares, keys[0])
        parts = np.empty(candidates.n, dtype=np.int8)
        kernels.deal_by_quota(classes, quotas, keys[1], parts)
    del classes
    found = {name: np.flatnonzero(parts == k) for k, name in enumerate(names)}
    empty = [name for name, rows_of_part in found.items() if not len(rows_of_part)]
    if empty:
        raise InputError(
            f"{candidates.n} rows are too few for fractions={fractions!r}: {', '.join(empty)} would be empty"
        )
    return _to_rows(found, candidates)


def _candidates(indices: Any, n_obs: int) -> tuple[Candidates, slice | NDArray[np.int64]]:
    """Return the rows to split, as `Candidates` and as an index into a column of obs."""
    candidates = Candidates.of(indices, n_obs)
    if candidates.array is None:
        return candidates, slice(candidates.start, candidates.start + candidates.n)
    if (candidates.array[1:] == candidates.array[:-1]).any():
        raise InputError("indices repeat rows; give each row once")
    return candidates, candidates.array


def _to_rows(found: dict[str, NDArray[np.int64]], candidates: Candidates) -> dict[str, NDArray[np.int64]]:
    """Replace positions among the candidates by row numbers, in place."""
    for positions in found.values():
        for piece in _pieces(len(positions)):
            positions[piece] = candidates.rows(positions[piece])
    return found


def _split_conditions(data: Any, request: ConditionRequest, fractions: Any, indices: Any, seed: int) -> SplitRows:
    """Assign held-out conditions to ``test``, others by `fractions`, and control cells to the first part."""
    if not request.hold_out:
        names, shares = _fractions(fractions)
    elif fractions is _DEFAULT:
        names, shares = ["train"], np.ones(1)
    else:
        is_pair = (
            isinstance(fractions, Sequence | np.ndarray) and not isinstance(fractions, str) and len(fractions) == 2
        )
        names, shares = _fractions(dict(zip(("train", "validation"), fractions, strict=True)) if is_pair else fractions)
    if request.hold_out:
        if _HELD_OUT in names:
            raise InputError(
                f"fractions={fractions!r} contain the part {_HELD_OUT!r}, which hold_out= defines; give fractions of "
                "the other parts, such as {'train': 0.9, 'validation': 0.1}"
            )
        names = [*names, _HELD_OUT]
    seed = whole_number("seed", seed, 0, 2**64)
    with explaining_control(request.control):
        obs = obs_of(data, request.needed)
        is_control_row = is_control(obs, request.control)
    candidates, rows = _candidates(indices, len(obs))
    conditions = Conditions.of(obs, request.columns, rows, candidates.n)
    control = is_control_row[rows]
    if request.control is not None and not control.any():
        raise InputError(f"control={request.control!r} matches none of the {candidates.n} rows")
    keys = epoch_keys(seed, 0, Purpose.SPLIT, n=3)
    contexts, context_names = conditions.contexts(request.context_columns)
    n_conditions = len(conditions.table)
    is_dealt = np.bincount(conditions.of_row[~control], minlength=n_conditions) > 0
    held = np.zeros(n_conditions, dtype=bool)
    for chosen in request.hold_out:
        held |= conditions.matching(chosen, "hold_out")
    held &= is_dealt
    part_of = np.zeros(n_conditions, dtype=np.int8)
    part_of[held & ~request.seen_of(held, contexts, keys[2])] = len(names) - 1
    others = is_dealt & ~held
    quotas = _quotas(np.bincount(contexts[others], minlength=len(context_names)), shares, keys[0])
    dealt = np.empty(int(others.sum()), dtype=np.int8)
    kernels.deal_by_quota(contexts[others], quotas, keys[1], dealt)
    part_of[others] = dealt
    parts = part_of[conditions.of_row]
    parts[control] = 0
    found = {name: np.flatnonzero(parts == k) for k, name in enumerate(names)}
    empty = [name for name, places in found.items() if not len(places)]
    if empty:
        raise InputError(
            f"{', '.join(empty)} would be empty: {int(is_dealt.sum())} combinations of {', '.join(request.columns)} "
            f"({int(held.sum())} of them held out) are too few for {len(names)} parts"
        )
    index_name = ", ".join(request.context_columns) or "conditions"
    table = table_of(conditions, contexts, context_names, found, control, index_name)
    return SplitRows(_to_rows(found, candidates), table)


def _fractions(fractions: Any) -> tuple[list[str], NDArray[np.float64]]:
    """Return the names of the parts and their fractions, normalized to sum to 1."""
    try:
        given = dict(fractions) if isinstance(fractions, Mapping) else list(fractions)
        shares = np.asarray(list(given.values()) if isinstance(given, dict) else given, dtype=np.float64)
    except (TypeError, ValueError):
        shares = np.empty((0, 0))
    if shares.ndim != 1 or isinstance(fractions, str | bytes):
        raise InputError(
            f"fractions={fractions!r} must be one number for each part: two or three as in (0.8, 0.1, 0.1), or a dict "
            "by name as in {'train': 0.9, 'test': 0.1}"
        )
    if isinstance(given, dict):
        names = [str(name) for name in given]
    elif len(given) in _NAMES:
        names = list(_NAMES[len(given)])
    else:
        raise InputError(
            f"fractions={fractions!r} have {len(given)} entries; give two, three, or a dict with a name for each part"
        )
    if len(set(names)) < len(names):
        raise InputError(f"fractions={fractions!r} use one name for two parts; give each part a different name")
    if not 2 <= len(shares) <= _MAX_PARTS or not (shares > 0).all() or not abs(shares.sum() - 1) <= 1e-6:
        raise InputError(
            f"fractions={fractions!r} must be 2 to {_MAX_PARTS} positive numbers that sum to 1; the sum is "
            f"{shares.sum():g}"
        )
    return names, shares / shares.sum()


def _listed(option: str, names: Any) -> list[str]:
    """Return the column or columns given for an option as a list."""
    if names is None:
        return []
    # Sets are refused, since their order differs between processes.
    is_several = isinstance(names, Sequence | np.ndarray | pd.Index) and not isinstance(names, str)
    listed = list(names) if is_several else [names]
    if not all(isinstance(name, str) for name in listed):
        raise InputError(f"{option}={names!r} must be the name of a column of obs, or a list of names")
    return listed


def _pieces(n: int) -> Iterator[slice]:
    return (slice(start, min(start + _PIECE_ROWS, n)) for start in range(0, n, _PIECE_ROWS))


def _codes(obs: pd.DataFrame, name: str, rows: slice | NDArray[np.int64]) -> tuple[NDArray[np.int32], str]:
    """Return codes of the values of a column, shape (n,), -1 if missing, and its name."""
    column = obs[require_key("obs", name, obs.columns)]
    if isinstance(column.dtype, pd.CategoricalDtype):
        codes, values = np.asarray(column.array.codes)[rows], column.array.categories
    else:
        codes, values = pd.factorize(column.iloc[rows])
    check_categories(values, f"obs column {name!r}")
    return codes.astype(np.int32, copy=False), name


def _labels(obs: pd.DataFrame, name: str, rows: slice | NDArray[np.int64]) -> NDArray[np.int32]:
    """Return codes of the labels of a column, shape (n,), -1 for rows without a label."""
    codes, names = encode_labels(obs[require_key("obs", name, obs.columns)].iloc[rows])
    if len(names) > _FEW_CODES:  # integer labels are their own codes, possibly with gaps
        codes = np.where(codes < 0, -1, pd.factorize(codes)[0])
    return codes.astype(np.int32, copy=False)


def _classes(
    obs: pd.DataFrame, strata: list[str], rows: slice | NDArray[np.int64], n: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
    """Return the class of each row, the number of rows per class, and the class of unlabeled rows, or -1."""
    # Classes are the labels of one column, or combinations of labels.
    classes, counts = np.zeros(n, dtype=np.int32), np.array([n])
    unlabelled = 0
    for name in strata:
        codes = _labels(obs, name, rows)
        n_codes = int(codes.max(initial=-1)) + 2
        if len(counts) * n_codes > _MAX_COUNTS:
            raise InputError(f"stratify={strata!r} has too many combinations; give columns with fewer values")
        classes *= n_codes
        classes += codes
        classes += 1
        counted = np.zeros(len(counts) * n_codes + 1, dtype=np.int64)
        draw_kernels.count_codes(n, classes, np.empty(0, dtype=np.int64), counted)
        # Renumber, so that only combinations that occur are counted.
        present = np.flatnonzero(counted[1:])
        lookup = np.zeros(len(counted) - 1, dtype=np.int32)
        lookup[present] = np.arange(len(present))
        for piece in _pieces(n):
            classes[piece] = lookup[classes[piece]]
        counts = counted[1:][present] if len(present) else np.array([0])
        # Rows that have no label in any of the columns so far.
        found = np.flatnonzero(present == unlabelled * n_codes)
        unlabelled = int(found[0]) if len(found) else -1
    return classes, counts, unlabelled


def _quotas(counts: NDArray[np.int64], shares: NDArray[np.float64], key: np.uint64) -> NDArray[np.int64]:
    """Return the number of rows of each class in each part, shape (n_classes, n_parts), summing to `counts`."""
    # The exact numbers are rounded, one class after another: up for the parts whose totals so far are furthest below
    # the exact totals, and down for the others.
    exact = counts[:, None] * shares
    quotas = np.floor(exact * (1 + 1e-12)).astype(np.int64)
    order = np.empty(len(counts), dtype=np.int64)
    permute.shuffle(key, order)
    short = np.zeros(len(shares))
    for c in order:
        rest = exact[c] - quotas[c]
        short += rest
        # Numbers that are integers already are not changed.
        shortest_first = np.argsort(np.where(rest > 1e-9, -short, np.inf), kind="stable")
        more = shortest_first[: counts[c] - quotas[c].sum()]
        quotas[c, more] += 1
        short[more] -= 1
    return quotas


def _parts_of_groups(
    columns: list[tuple[NDArray[np.int32], str]],
    classes: NDArray[np.int32],
    n_classes: int,
    shares: NDArray[np.float64],
    keys: NDArray[np.uint64],
    *,
    what: str,
    counts_values: bool,
    unlabelled: int,
) -> NDArray[np.int8]:
    """Return the part of each row; rows that share a value of any column get the same part."""
    # With `counts_values`, each value of the first column counts once, as a member of the most frequent class of its
    # labeled rows. It belongs to the class `unlabelled` only if none of its rows has a label.
    for codes, name in columns:
        n_missing = int((codes < 0).sum())
        if n_missing:
            raise InputError(
                f"{name!r} is missing in {n_missing} of {len(codes)} rows, which could belong to any group. Exclude "
                f"them (indices=dasksc.rows_where(data, '`{name}`.notna()')), or fill in a value"
            )
    first = columns[0][0]
    unit_of_value = _joined([codes for codes, _ in columns])
    counts = _counted(first, classes, n_classes, unit_of_value)
    occurs = counts.sum(axis=1) > 0
    if counts_values:
        by_value = _counted(first, classes, n_classes)
        values = np.flatnonzero(by_value.sum(axis=1))
        if unlabelled >= 0:
            # The unlabeled class applies only to values without any label.
            by_value[:, unlabelled] = by_value.sum(axis=1) == by_value[:, unlabelled]
        counts = np.zeros_like(counts)
        np.add.at(counts, (unit_of_value[values], by_value[values].argmax(axis=1)), 1)
    units = np.flatnonzero(occurs)
    if len(units) < len(shares):
        raise InputError(
            f"grouping by {what} gives too few separate groups ({len(units)}) for {len(shares)} non-empty parts. Give "
            "fewer parts, or smaller groups"
        )
    best, parts = np.inf, np.zeros(len(counts), dtype=np.int8)
    n_tries = int(np.clip(_TRIED_COUNTS // (counts.size * len(shares)), 1, _N_TRIES))
    for key in keys[:n_tries]:
        order, found = np.empty(len(units), dtype=np.int64), np.zeros(len(counts), dtype=np.int8)
        permute.shuffle(key, order)
        distance = kernels.assign_units(counts, units[order], shares, found)
        if distance < best:
            best, parts = distance, found
    part_of_value = parts[unit_of_value]
    dealt = np.empty(len(first), dtype=np.int8)
    for piece in _pieces(len(first)):
        dealt[piece] = part_of_value[first[piece]]
    return dealt


def _joined(columns: list[NDArray[np.int32]]) -> NDArray[np.int64]:
    """Return the unit of each value of the first column, shape (n_values,), int64."""
    # A unit is a set of values that must be in one part, since other columns link their rows.
    first = columns[0]
    n_values = int(first.max(initial=-1)) + 1
    if len(columns) == 1:
        return np.arange(n_values)
    size, ends = n_values, []
    for other in columns[1:]:
        # Even millions of rows have few distinct pairs.
        pairs = np.empty(0, dtype=np.int64)
        for piece in _pieces(len(first)):
            pairs = np.union1d(pairs, first[piece].astype(np.int64) << 32 | other[piece])
        ends.append((pairs >> 32, (pairs & 0xFFFFFFFF) + size))
        size += int(other.max(initial=-1)) + 1
    rows, cols = (np.concatenate(nodes) for nodes in zip(*ends, strict=True))
    graph = sp.coo_matrix((np.ones(len(rows), dtype=np.int8), (rows, cols)), shape=(size, size))
    units: NDArray[np.int64] = connected_components(graph, directed=False)[1][:n_values].astype(np.int64)
    return units


def _counted(
    values: NDArray[np.int32], classes: NDArray[np.int32], n_classes: int, units: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Count rows by value (or unit of values) and class, shape (n_units, n_classes)."""
    n_units = int((values if units is None else units).max(initial=-1)) + 1
    if n_units * n_classes > _MAX_COUNTS:
        raise InputError(
            f"a table of {n_units:,} groups x {n_classes:,} classes has {n_units * n_classes:,} entries, but at most "
            f"{_MAX_COUNTS:,} are supported. Use a column with fewer classes for stratify="
        )
    counts = np.zeros((n_units, n_classes), dtype=np.int64)
    for piece in _pieces(len(values)):
        kernels.count_pairs(values[piece] if units is None else units[values[piece]], classes[piece], counts)
    return counts
