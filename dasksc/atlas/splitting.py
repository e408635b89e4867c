"""Splits of an atlas into training, validation and test parts that share no group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from numbers import Real
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.atlas.dealing import N_TRIES, combined, deal, deal_groups, linked, shuffled, taken
from dasksc.atlas.elements import require_key
from dasksc.atlas.expressions import columns_of, holds
from dasksc.atlas.filtering import explaining_control, obs_of
from dasksc.atlas.modalities import Modalities
from dasksc.checks import names_or_none, whole_number
from dasksc.errors import InputError
from dasksc.plan.arrays import Candidates
from dasksc.plan.keys import Purpose, epoch_keys
from dasksc.plan.labels import CodedColumn, encode_labels, listed
from dasksc.readers.options import Openable

_Int64s = NDArray[np.int64]
_Names = dict[int, tuple[str, ...]]

_DEFAULT = (0.8, 0.1, 0.1)
_NAMES: _Names = {2: ("train", "test"), 3: ("train", "validation", "test")}
# Names of the parts of the conditions that are not held out, and of those that are.
_NAMES_BESIDE_HELD_OUT: _Names = {2: ("train", "validation")}
_HELD_OUT = "test"
_MAX_PARTS = 100
# Above this number of labels, the codes are renumbered without gaps.
_FEW_CODES = 256


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
        file), or an obs table. From a path, only the columns given here are read. For several modalities, columns are
        ``"modality:column"``, and row i is cell i of `Modalities`.
    fractions
        Fraction of each part: a dict by name, two numbers for ``train`` and ``test``, or three for ``train``,
        ``validation`` and ``test``. They sum to 1. With `hold_out`, they are fractions of the conditions that are not
        held out: a dict by name, or two numbers for ``train`` and ``validation``; default: all for ``train``.
    by
        Column of obs whose values are assigned to parts; all rows of a value are in the same part. With ``by="donor"``,
        `fractions` are fractions of the number of *donors*. Default: each row is assigned individually.
    groups
        Columns of obs whose values are not divided among parts. ``groups="donor"`` keeps all rows of a donor in one
        part. `fractions` are then fractions of the number of rows, unlike with `by`. With several columns, all
        constraints hold at once: with ``groups=["donor", "batch"]``, neither the rows of a donor nor those of a batch
        are divided among parts. Not allowed with `by`.
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
    >>> conditions = ["cell_line", "gene"]
    >>> held_out = {"cell_line": ["K562"]}
    >>> parts = dasksc.split("screen.h5ad", conditions=conditions, hold_out=held_out, control={"gene": "non-targeting"})
    >>> parts.table["test cells"].to_dict()
    {'K562': 1749, 'RPE1': 0}
    """
    seed = whole_number("seed", seed, 0, 2**64)
    if conditions is None:
        excluded: dict[str, Any] = {"hold_out": hold_out, "few_shot": few_shot or None, "control": control}
        why = "need conditions=, the columns of obs whose combinations are held out"
    else:
        excluded = {"by": by, "groups": groups, "stratify": stratify}
        why = "cannot be combined with conditions=; hold out a donor with conditions=['donor', ...] and hold_out="
    if given := [f"{name}=" for name, value in excluded.items() if value is not None]:
        raise InputError(f"{', '.join(given)} {why}")
    if conditions is not None:
        return _split_conditions(data, conditions, hold_out, few_shot, control, fractions, indices, seed)
    names, shares = _fractions(fractions, _NAMES)
    if by is not None and (groups is not None or not isinstance(by, str)):
        raise InputError(f"by={by!r} must be the name of one column, without groups=; for several columns give groups=")
    whole = names_or_none("groups", groups if by is None else by)
    strata = names_or_none("stratify", stratify)
    obs = obs_of(data, list(dict.fromkeys([*whole, *strata])))
    candidates = _candidates(indices, len(obs))
    classes, table, counts = combined([_classes(_column(obs, name, candidates)) for name in strata], candidates.n)
    keys = epoch_keys(seed, 0, Purpose.SPLIT, n=N_TRIES + 1)
    if whole:
        values = [_coded(_column(obs, name, candidates), "occurrence").codes for name in whole]
        # The class of rows that have no label in any column.
        unlabelled = next(iter(np.flatnonzero(~table.any(axis=1))), -1)
        parts = deal_groups(
            linked(values),
            classes,
            len(counts),
            shares,
            keys,
            count_once=by is not None,
            unlabelled=int(unlabelled),
        )
    else:
        parts = deal(classes, counts, shares, keys)
    del classes
    return _rows_of(parts, names, candidates, f"{candidates.n} rows are too few for fractions={fractions!r}")


def leaks(
    data: Openable | Modalities | Sequence[Openable] | Mapping[str, Openable] | pd.DataFrame,
    parts: Mapping[str, Any],
    by: Sequence[str | Sequence[str]] = (),
) -> pd.DataFrame:
    """Report which cells, donors or conditions are in more than one of the given parts.

    Parameters
    ----------
    data
        Any argument or result of `dasksc.open`, or an obs table, as for `dasksc.split`. From a path, only the columns
        in `by` are read.
    parts
        Rows of each part, by name: row numbers, a boolean mask or a slice. The result of `dasksc.split` or rows from
        anywhere else.
    by
        Columns of obs to compare, such as ``"donor"``. A list of columns stands for their combinations, such as the
        condition ``["cell_line", "gene"]``.

    Returns
    -------
    DataFrame
        For every pair of parts (columns ``first`` and ``second``), a row for the cells in both (``what`` is
        ``"cells"``) and one for each entry of `by`. ``shared`` is the number of values in both parts, int64;
        ``first cells`` and ``second cells`` are the numbers of cells of the two parts with such values, int64;
        ``examples`` lists up to three of the values. Rows with a missing value are not compared.

    Raises
    ------
    InputError
        If `parts` are not at least two parts by name, or contain invalid rows.
    MissingKeyError
        If obs lacks a column.

    Examples
    --------
    >>> parts = dasksc.split("atlas.h5ad", by="donor", fractions=(0.75, 0.25), seed=0)
    >>> dasksc.leaks("atlas.h5ad", parts, by=["donor"])["shared"].tolist()
    [0, 0]
    """
    given: Any = parts
    if not isinstance(given, Mapping) or len(given) < 2:
        raise InputError(f"parts={parts!r:.100} must be a dict of at least two parts, such as that of dasksc.split")
    if isinstance(by, str):
        raise InputError(f"by={by!r} is a string; give a list of columns: by=[{by!r}]")
    compared = [names_or_none("by", one) for one in by]
    obs = obs_of(data, list(dict.fromkeys(name for one in compared for name in one)))
    chosen = {name: Candidates.of(rows, len(obs)) for name, rows in parts.items()}
    rows_of = {name: one.rows(np.arange(one.n, dtype=np.int64)) for name, one in chosen.items()}
    keys: dict[tuple[str, ...], _Int64s] = {(): np.arange(len(obs), dtype=np.int64)}
    for names in compared:
        held = obs[[require_key("obs", name, obs.columns) for name in names]]
        groups = held.groupby(names, observed=True, sort=False)  # leaves out missing values, whose number is -1
        keys[tuple(names)] = groups.ngroup().fillna(-1).to_numpy(dtype=np.int64)
    found = []
    for first, second in combinations(rows_of, 2):
        for what, codes in keys.items():
            own, other = codes[rows_of[first]], codes[rows_of[second]]
            shared = np.intersect1d(own[own >= 0], other[other >= 0])
            examples: Any = np.flatnonzero(np.isin(codes, shared[:3]))
            if what:
                values = obs.iloc[examples][list(what)].drop_duplicates().astype(str)
                examples = values.agg(", ".join, axis=1) if len(values) else ()
            n_own, n_other = int(np.isin(own, shared).sum()), int(np.isin(other, shared).sum())
            found.append((first, second, ", ".join(what) or "cells", len(shared), n_own, n_other, list(examples)))
    columns = ["first", "second", "what", "shared", "first cells", "second cells", "examples"]
    return pd.DataFrame(found, columns=columns)


class SplitRows(dict[str, _Int64s]):
    """Rows of each part of a split by condition; `table` counts conditions and cells by context and part."""

    table: pd.DataFrame


def _split_conditions(
    data: Any, conditions: Any, hold_out: Any, few_shot: Any, control: Any, fractions: Any, indices: Any, seed: int
) -> SplitRows:
    """Assign held-out conditions to ``test``, others by `fractions`, and control cells to the first part."""
    columns = list(dict.fromkeys(names_or_none("conditions", conditions)))
    if not columns:
        raise InputError(f"conditions={conditions!r} must be a column of obs, or a list of columns")
    chosen = _held_out(hold_out, columns)
    is_share = not isinstance(few_shot, bool) and isinstance(few_shot, Real) and 0 <= float(few_shot) < 1
    if not is_share or (few_shot and not chosen):
        raise InputError(
            f"few_shot={few_shot!r} must be the share, in [0, 1), of the conditions in hold_out= that are used for "
            "training; without hold_out=, use fractions="
        )
    if chosen and fractions is _DEFAULT:
        names, shares = ["train"], np.ones(1)
    else:
        names, shares = _fractions(fractions, _NAMES_BESIDE_HELD_OUT if chosen else _NAMES)
    if chosen and _HELD_OUT in names:
        raise InputError(
            f"fractions={fractions!r} contain the part {_HELD_OUT!r}, which hold_out= defines; give fractions of the "
            "other parts, such as {'train': 0.9, 'validation': 0.1}"
        )
    names += [_HELD_OUT] * bool(chosen)
    with explaining_control(control):
        obs = obs_of(data, list(dict.fromkeys([*columns, *_control_columns(control)])))
        is_control = _is_control(obs, control)
    candidates = _candidates(indices, len(obs))
    is_control = is_control[candidates.selector]
    if control is not None and not is_control.any():
        raise InputError(f"control={control!r} matches none of the {candidates.n} rows")

    # The order of text makes the split independent of the order of categories, and of that of rows.
    coded = [_coded(_column(obs, name, candidates), "text") for name in columns]
    of_row, table, counts = combined(coded, candidates.n)
    n_dealt = np.bincount(of_row[~is_control], minlength=len(counts))
    held = np.zeros(len(counts), dtype=bool)
    for one in chosen:
        found = n_dealt > 0
        for name, wanted in one.items():
            i = columns.index(name)
            found &= np.isin(table[:, i], coded[i].codes_of("hold_out=", listed(wanted)))
        held |= found
    # A context is a combination of values in the columns that `hold_out` names, or in all but the last.
    of_context = [name for name in columns if any(name in one for one in chosen)]
    of_context = of_context if 0 < len(of_context) < len(columns) else columns[:-1]
    contexts, context_names = _contexts(table, coded, [columns.index(name) for name in of_context])
    keys = epoch_keys(seed, 0, Purpose.SPLIT, n=3)
    others = (n_dealt > 0) & ~held
    part_of = np.zeros(len(counts), dtype=np.int8)
    part_of[held] = len(names) - 1
    if few_shot:
        part_of[_seen(held, contexts, few_shot, keys[2], of_context)] = 0
    n_others = np.bincount(contexts[others], minlength=len(context_names))
    part_of[others] = deal(contexts[others].astype(np.int32), n_others, shares, keys)
    parts = taken(part_of, of_row)
    parts[is_control] = 0
    too_few = (
        f"{(n_dealt > 0).sum()} combinations of {', '.join(columns)} ({held.sum()} of them held out) are too few for "
        f"{len(names)} parts"
    )
    result = SplitRows(_rows_of(parts, names, candidates, too_few))

    def cells(rows: NDArray[np.bool_]) -> _Int64s:
        return np.bincount(of_row[rows], minlength=len(counts))

    def by_context(n: NDArray[Any]) -> _Int64s:
        return np.bincount(contexts, weights=n, minlength=len(context_names)).astype(np.int64)

    in_parts = {name: cells((parts == k) & ~is_control) for k, name in enumerate(names)}
    counted: dict[str, _Int64s] = {}
    for name, n in in_parts.items():
        counted |= {f"{name} conditions": by_context(n > 0), f"{name} cells": by_context(n)}
    counted["control cells"] = by_context(cells(is_control))
    result.table = pd.DataFrame(counted, index=pd.Index(context_names, name=", ".join(of_context) or "conditions"))
    return result


def _held_out(hold_out: Any, columns: list[str]) -> list[Mapping[str, Any]]:
    """Return the mappings of columns to held-out values; empty for None."""
    if hold_out is None:
        return []
    chosen = [hold_out] if isinstance(hold_out, Mapping) else listed(hold_out)
    if not chosen or not all(isinstance(one, Mapping) and one and set(one) <= set(columns) for one in chosen):
        raise InputError(
            f"hold_out={hold_out!r} must be a dict of values by column of conditions={columns!r}, such as "
            f"{{{columns[0]!r}: [...]}}, or a list of such dicts"
        )
    return chosen


def _contexts(table: _Int64s, coded: list[CodedColumn], where: list[int]) -> tuple[_Int64s, list[str]]:
    """Return the context of each condition as an index, shape (n_conditions,), and the names of the contexts."""
    if not where:
        return np.zeros(len(table), dtype=np.int64), ["all"]
    distinct, contexts = np.unique(table[:, where], axis=0, return_inverse=True)
    names = [", ".join(str(coded[i].labels[code]) for i, code in zip(where, codes, strict=True)) for codes in distinct]
    return contexts.reshape(-1).astype(np.int64), names


def _seen(
    held: NDArray[np.bool_], contexts: _Int64s, few_shot: float, key: np.uint64, of_context: list[str]
) -> _Int64s:
    """Draw the held-out conditions that are used for training: a share of each context, if it has several."""
    order = shuffled(len(held), key)
    seen = []
    for context in np.unique(contexts[held]):
        own = order[(held & (contexts == context))[order]]
        seen.append(own[: min(max(1, int(np.floor(few_shot * len(own) + 0.5))), len(own) - 1)])
    if not sum(map(len, seen)):
        where = f"each context ({', '.join(of_context)}) has" if of_context else "there is"
        raise InputError(
            f"few_shot={few_shot} keeps nothing for training: {where} only one held-out condition, which stays in the "
            "test part. Hold out more conditions, or leave few_shot out"
        )
    return np.concatenate(seen)


def _control_columns(control: Any) -> list[str]:
    if isinstance(control, str):
        return columns_of(control)
    if not (control is None or (isinstance(control, Mapping) and control)):
        raise InputError(
            f"control={control!r} must be values by column, such as {{'gene': 'non-targeting'}}, or an expression over "
            "obs"
        )
    return names_or_none("control", None if control is None else list(control))


def _is_control(obs: pd.DataFrame, control: Mapping[str, Any] | str | None) -> NDArray[np.bool_]:
    if isinstance(control, str):
        return holds(control, obs)
    found = np.full(len(obs), control is not None)
    for name, wanted in (control or {}).items():
        column = obs[require_key("obs", name, obs.columns)]
        found &= CodedColumn.in_order(column, "occurrence").where("control=", wanted)
    return found


def _fractions(fractions: Any, names_of: _Names) -> tuple[list[str], NDArray[np.float64]]:
    """Return the names of the parts and their fractions, normalized to sum to 1."""
    try:
        is_named = isinstance(fractions, Mapping)
        shares = np.asarray(list(fractions.values() if is_named else fractions), dtype=np.float64)
        names = list(map(str, fractions if is_named else names_of[len(shares)]))
    except (TypeError, ValueError, KeyError):
        names, shares = [], np.empty(0)
    is_valid = shares.ndim == 1 and 2 <= len(shares) <= _MAX_PARTS and len(set(names)) == len(shares)
    if not is_valid or not (shares > 0).all() or not abs(shares.sum() - 1) <= 1e-6:
        raise InputError(
            f"fractions={fractions!r} must be positive numbers that sum to 1: {' or '.join(map(str, names_of))} of "
            f"them, such as (0.8, 0.1, 0.1), or 2 to {_MAX_PARTS} by name, such as {{'train': 0.9, 'validation': 0.1}}"
        )
    return names, shares / shares.sum()


def _candidates(indices: Any, n_obs: int) -> Candidates:
    candidates = Candidates.of(indices, n_obs)
    if candidates.array is not None and (candidates.array[1:] == candidates.array[:-1]).any():
        raise InputError("indices repeat rows; give each row once")
    return candidates


def _column(obs: pd.DataFrame, name: str, candidates: Candidates) -> pd.Series[Any]:
    return obs[require_key("obs", name, obs.columns)].iloc[candidates.selector]


def _coded(column: pd.Series[Any], order: Literal["occurrence", "text"]) -> CodedColumn:
    """Return the codes of a column without missing values, int32."""
    coded = CodedColumn.in_order(column, order)
    n_missing = int((coded.codes < 0).sum())
    if n_missing:
        raise InputError(
            f"{column.name!r} is missing in {n_missing} of {len(column)} rows, which could be in any group. Exclude "
            f"them (indices=dasksc.rows_where(data, '`{column.name}`.notna()')), or fill in a value"
        )
    return replace(coded, codes=coded.codes.astype(np.int32, copy=False))


def _classes(column: pd.Series[Any]) -> CodedColumn:
    """Return codes of the labels of a column, 0 for rows without a label."""
    codes, names = encode_labels(column)
    if len(names) > _FEW_CODES:  # integer labels are their own codes, possibly with gaps
        codes = np.where(codes < 0, -1, pd.factorize(codes)[0])
    codes = codes.astype(np.int32)
    codes += 1
    return CodedColumn(str(column.name), codes, range(int(codes.max(initial=0)) + 1))


def _rows_of(
    parts: NDArray[np.int8], names: list[str], candidates: Candidates, too_few: str
) -> dict[str, NDArray[np.int64]]:
    """Return the row numbers of each part; raise an error if a part is empty."""
    found = {name: candidates.rows(np.flatnonzero(parts == k)) for k, name in enumerate(names)}
    if empty := [name for name, rows in found.items() if not len(rows)]:
        raise InputError(f"{', '.join(empty)} would be empty: {too_few}")
    return found
