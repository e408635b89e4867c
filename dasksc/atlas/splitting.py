"""Parts of an atlas for training, validation and test, without leaking groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

from dasksc.atlas.filtering import obs_of
from dasksc.atlas.lookup import known
from dasksc.atlas.modalities import Modalities
from dasksc.atlas.options import Openable
from dasksc.config import whole_number
from dasksc.errors import InputError
from dasksc.kernels import draw as draw_kernels
from dasksc.kernels import permute
from dasksc.kernels import split as kernels
from dasksc.sampling.candidates import Candidates
from dasksc.sampling.labels import encode_labels
from dasksc.sampling.random_keys import Purpose, epoch_keys

__all__ = ["split"]

_NAMES = {2: ("train", "test"), 3: ("train", "validation", "test")}
_MAX_PARTS = 100
# Of groups by classes, counted in eight bytes each.
_MAX_COUNTS = 2**28
# Orders in which groups are dealt, the best of which is taken; fewer where dealing takes long.
_N_TRIES = 16
_TRIED_COUNTS = 2**26
# With more labels, those that are there are numbered anew.
_FEW_CODES = 256
# Rows that are looked at together.
_PIECE_ROWS = 2**20


def split(
    data: Openable | Modalities | Sequence[Openable] | Mapping[str, Openable] | pd.DataFrame,
    *,
    fractions: Mapping[str, float] | Sequence[float] = (0.8, 0.1, 0.1),
    by: str | None = None,
    groups: str | Sequence[str] | None = None,
    stratify: str | Sequence[str] | None = None,
    indices: Any = None,
    seed: int = 0,
) -> dict[str, NDArray[np.int64]]:
    """Split rows at random into parts that share no group, such as no donor.

    Parameters
    ----------
    data
        What `dasksc.open` takes or returns, several modalities (`Modalities`, a MuData, the path of an ``.h5mu``
        file), an AnnCollection, or a table of obs. Of a path only the columns named here are read. Of several
        modalities columns are ``"modality:column"``, and row i is cell i of `Modalities`.
    fractions
        Of each part, summing to 1: by name, or two for ``train`` and ``test``, or three for ``train``, ``validation``
        and ``test``.
    by
        An obs column whose values are dealt: ``by="donor"`` puts that fraction of the *donors* into each part, each
        with all its rows. Default: rows are dealt.
    groups
        Columns of obs whose values no two parts share, while `fractions` are still of the rows: ``groups="donor"``
        keeps every donor in one part. Of several columns (and `by`) none is shared: donors of one batch stay together,
        and so do batches of one donor.
    stratify
        An obs column (of several: their combinations) of which each part is to have its share. Rows without a label
        (missing, and whole numbers below 0, as for `ClassBalancedSampling`) are split, too: each part gets its share of
        them, as of a class. Beside `by` a value counts once, for the class that most of its labelled rows have.
    indices
        Split only these rows, each once: row numbers, a boolean mask or a slice.
    seed
        In [0, 2**64). The same seed, data and arguments give the same parts.

    Returns
    -------
    dict
        For each part its row numbers, ascending, int64: ``indices`` of a strategy. Every row is in exactly one part,
        and none is empty.

    Raises
    ------
    InputError
        If an argument is none of these, which is told before anything is read; if fractions do not sum to 1, a row
        has no group, there are fewer groups than parts, or a column to stratify by is continuous.
    MissingKeyError
        If obs has no such column.

    Notes
    -----
    Without `by` and `groups`, of each class a part gets less than one row more or less than its fraction, and every
    choice of rows is as likely as another; of the whole it is off by fewer rows than there are parts. Groups cannot be
    cut: a part is over its fraction by no more than the largest group. Of up to 16 orders of dealing groups that is
    taken which comes nearest to the fractions of every class (by chi-square), so few groups are split in few ways,
    whatever the seed. Takes time and memory linear in the rows (a few columns of integers).
    """
    names, shares = _fractions(fractions)
    if by is not None and not isinstance(by, str):
        raise InputError(f"by={by!r} must be the name of one column; columns that are kept whole together are groups=")
    whole = list(dict.fromkeys([*([] if by is None else [by]), *_listed("groups", groups)]))
    strata = _listed("stratify", stratify)
    seed = whole_number("seed", seed, 0, 2**64)
    obs = obs_of(data, list(dict.fromkeys([*whole, *strata])))
    candidates = Candidates.of(indices, len(obs))
    if candidates.array is not None and (candidates.array[1:] == candidates.array[:-1]).any():
        raise InputError("indices repeat rows; a split holds each once")
    rows = slice(candidates.start, candidates.start + candidates.n) if candidates.array is None else candidates.array
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
    for positions in found.values():
        for piece in _pieces(len(positions)):
            positions[piece] = candidates.rows(positions[piece])
    return found


def _fractions(fractions: Any) -> tuple[list[str], NDArray[np.float64]]:
    """Return the names of the parts and their fractions, which sum to 1."""
    try:
        given = dict(fractions) if isinstance(fractions, Mapping) else list(fractions)
        shares = np.asarray(list(given.values()) if isinstance(given, dict) else given, dtype=np.float64)
    except (TypeError, ValueError):
        shares = np.empty((0, 0))
    if shares.ndim != 1 or isinstance(fractions, str | bytes):
        raise InputError(
            f"fractions={fractions!r} must be numbers, one for each part: two or three as in (0.8, 0.1, 0.1), or by "
            "name of the part as in {'train': 0.9, 'test': 0.1}"
        )
    if isinstance(given, dict):
        names = [str(name) for name in given]
    elif len(given) in _NAMES:
        names = list(_NAMES[len(given)])
    else:
        raise InputError(f"fractions={fractions!r} are {len(given)}; give two, three, or a dict by name of the part")
    if len(set(names)) < len(names):
        raise InputError(f"fractions={fractions!r} give two parts one name; give each part a name of its own")
    if not 2 <= len(shares) <= _MAX_PARTS or not (shares > 0).all() or not abs(shares.sum() - 1) <= 1e-6:
        raise InputError(
            f"fractions={fractions!r} must be 2 to {_MAX_PARTS} positive numbers that sum to 1; the sum is "
            f"{shares.sum():g}"
        )
    return names, shares / shares.sum()


def _listed(option: str, names: Any) -> list[str]:
    """Return the columns that an option names, one or several."""
    if names is None:
        return []
    # Not a set, whose order differs between processes.
    is_several = isinstance(names, Sequence | np.ndarray | pd.Index) and not isinstance(names, str)
    listed = list(names) if is_several else [names]
    if not all(isinstance(name, str) for name in listed):
        raise InputError(f"{option}={names!r} must be the name of a column of obs, or a list of names")
    return listed


def _pieces(n: int) -> Iterator[slice]:
    return (slice(start, min(start + _PIECE_ROWS, n)) for start in range(0, n, _PIECE_ROWS))


def _codes(obs: pd.DataFrame, name: str, rows: slice | NDArray[np.int64]) -> tuple[NDArray[np.int32], str]:
    """Return numbers for the values of a column, shape (n,), -1 for missing ones; and its name."""
    column = obs[known("obs", name, obs.columns)]
    if isinstance(column.dtype, pd.CategoricalDtype):
        codes = np.asarray(column.array.codes)[rows]
    else:
        codes = pd.factorize(column.iloc[rows])[0]
    return codes.astype(np.int32, copy=False), name


def _labels(obs: pd.DataFrame, name: str, rows: slice | NDArray[np.int64]) -> NDArray[np.int32]:
    """Return numbers for the labels of a column, shape (n,), -1 where there is none."""
    codes, names = encode_labels(obs[known("obs", name, obs.columns)].iloc[rows])
    if len(names) > _FEW_CODES:  # whole numbers are their own codes, with any gaps between them
        codes = np.where(codes < 0, -1, pd.factorize(codes)[0])
    return codes.astype(np.int32, copy=False)


def _classes(
    obs: pd.DataFrame, strata: list[str], rows: slice | NDArray[np.int64], n: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
    """Return the class of each row, how many rows each has, and the class of those without any label, or -1.

    Classes are those of one column, or combinations.
    """
    classes, counts = np.zeros(n, dtype=np.int32), np.array([n])
    unlabelled = 0
    for name in strata:
        codes = _labels(obs, name, rows)
        n_codes = int(codes.max(initial=-1)) + 2
        if len(counts) * n_codes > _MAX_COUNTS:
            raise InputError(f"stratify={strata!r} has too many combinations; give columns of fewer values")
        classes *= n_codes
        classes += codes
        classes += 1
        counted = np.zeros(len(counts) * n_codes + 1, dtype=np.int64)
        draw_kernels.count_codes(n, classes, np.empty(0, dtype=np.int64), counted)
        # Numbered anew: only combinations that there are count.
        present = np.flatnonzero(counted[1:])
        lookup = np.zeros(len(counted) - 1, dtype=np.int32)
        lookup[present] = np.arange(len(present))
        for piece in _pieces(n):
            classes[piece] = lookup[classes[piece]]
        counts = counted[1:][present] if len(present) else np.array([0])
        # Those that had no label so far, and have none here.
        found = np.flatnonzero(present == unlabelled * n_codes)
        unlabelled = int(found[0]) if len(found) else -1
    return classes, counts, unlabelled


def _quotas(counts: NDArray[np.int64], shares: NDArray[np.float64], key: np.uint64) -> NDArray[np.int64]:
    """Return how many rows of each class each part gets, shape (n_classes, n_parts), summing to `counts`.

    Each is the exact number rounded down or up. Up for the parts that are shortest over all classes so far.
    """
    exact = counts[:, None] * shares
    quotas = np.floor(exact * (1 + 1e-12)).astype(np.int64)
    order = np.empty(len(counts), dtype=np.int64)
    permute.shuffle(key, order)
    short = np.zeros(len(shares))
    for c in order:
        rest = exact[c] - quotas[c]
        short += rest
        # What is exact already stays so.
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
    """Return the part of each row, those that share a value of any column in one.

    With `counts_values` a value has the class that most of its rows have, other than `unlabelled`.
    """
    for codes, name in columns:
        n_missing = int((codes < 0).sum())
        if n_missing:
            raise InputError(
                f"{name!r} is missing in {n_missing} of {len(codes)} rows, which might belong to any group. Leave "
                f"these out (indices=dasksc.rows_where(data, '`{name}`.notna()')), or give them a value"
            )
    first = columns[0][0]
    unit_of_value = _joined([codes for codes, _ in columns])
    counts = _counted(first, classes, n_classes, unit_of_value)
    is_there = counts.sum(axis=1) > 0
    if counts_values:
        by_value = _counted(first, classes, n_classes)
        values = np.flatnonzero(by_value.sum(axis=1))
        if unlabelled >= 0:
            # It counts only where no row has a label.
            by_value[:, unlabelled] = by_value.sum(axis=1) == by_value[:, unlabelled]
        counts = np.zeros_like(counts)
        np.add.at(counts, (unit_of_value[values], by_value[values].argmax(axis=1)), 1)
    units = np.flatnonzero(is_there)
    if len(units) < len(shares):
        raise InputError(
            f"there are {len(units)} groups by {what} that share nothing, too few for {len(shares)} parts of which "
            "none is empty. Give fewer parts, or groups that are finer"
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
    """Return for each value of the first column its unit: values that are linked by any other column share one."""
    first = columns[0]
    n_values = int(first.max(initial=-1)) + 1
    if len(columns) == 1:
        return np.arange(n_values)
    size, ends = n_values, []
    for other in columns[1:]:
        # Of rows by the million few pairs are different.
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
    """Return how many rows of each class each value has, or each unit of values, shape (n_units, n_classes)."""
    n_units = int((values if units is None else units).max(initial=-1)) + 1
    if n_units * n_classes > _MAX_COUNTS:
        raise InputError(
            f"{n_units:,} groups of {n_classes:,} classes are too many to count ({_MAX_COUNTS:,} at most); stratify= "
            "by fewer classes"
        )
    counts = np.zeros((n_units, n_classes), dtype=np.int64)
    for piece in _pieces(len(values)):
        kernels.count_pairs(values[piece] if units is None else units[values[piece]], classes[piece], counts)
    return counts
