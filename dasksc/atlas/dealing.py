"""Assignment of rows, conditions or groups of rows to parts, close to given fractions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

from dasksc.errors import InputError
from dasksc.kernels import groups as kernels
from dasksc.kernels import permute
from dasksc.plan.arrays import EMPTY_INTS
from dasksc.plan.labels import CodedColumn
from dasksc.plan.sets import combined_codes

_Int64s = NDArray[np.int64]
_Int32s = NDArray[np.int32]

# Maximum number of entries of a table of counts, with eight bytes each.
_MAX_COUNTS = 2**28
# Groups are dealt in up to this number of random orders, but in fewer if the table of counts is large.
N_TRIES = 16
_TRIED_COUNTS = 2**26
# Number of rows that are processed together.
_PIECE_ROWS = 2**20


def combined(columns: Sequence[CodedColumn], n: int) -> tuple[_Int32s, _Int64s, _Int64s]:
    """Return the combination of codes of each row, the codes of each combination, and its number of rows."""
    codes, n_codes = combined_codes(columns, slice(None), n)
    counts, firsts = np.zeros((2, n_codes), dtype=np.int64)
    kernels.count_groups(codes, counts, firsts)
    present = np.flatnonzero(counts)
    numbers = np.zeros(n_codes, dtype=np.int32)
    numbers[present] = np.arange(len(present))
    table = np.array([column.codes[firsts[present]] for column in columns], dtype=np.int64)
    return taken(numbers, codes, out=codes), table.reshape(len(columns), len(present)).T, counts[present]


def deal(classes: _Int32s, counts: _Int64s, shares: NDArray[np.float64], keys: NDArray[np.uint64]) -> NDArray[np.int8]:
    """Assign each row to a part, so that each class differs by less than one row from its shares."""
    parts = np.empty(len(classes), dtype=np.int8)
    kernels.deal_by_quota(classes, _quotas(counts, shares, keys[0]), keys[1], parts)
    return parts


def _quotas(counts: _Int64s, shares: NDArray[np.float64], key: np.uint64) -> _Int64s:
    """Return the number of rows of each class in each part, shape (n_classes, n_parts), summing to `counts`."""
    # The exact numbers are rounded, one class after another: up for the parts whose totals so far are furthest below
    # the exact totals, and down for the others.
    exact = counts[:, None] * shares
    quotas = np.floor(exact * (1 + 1e-12)).astype(np.int64)
    short = np.zeros(len(shares))
    for c in shuffled(len(counts), key):
        rest = exact[c] - quotas[c]
        short += rest
        # Numbers that are integers already are not changed.
        shortest_first = np.argsort(np.where(rest > 1e-9, -short, np.inf), kind="stable")
        more = shortest_first[: counts[c] - quotas[c].sum()]
        quotas[c, more] += 1
        short[more] -= 1
    return quotas


def linked(columns: Sequence[_Int32s]) -> _Int32s:
    """Return the group of each row: rows are in one group if they share a value of any column, also indirectly."""
    first, *others = columns
    if not others:
        return first
    n_values = size = int(first.max(initial=-1)) + 1
    ends = []
    for other in others:
        pairs = EMPTY_INTS  # even millions of rows have few distinct pairs
        for start in range(0, len(first), _PIECE_ROWS):
            piece = slice(start, start + _PIECE_ROWS)
            pairs = np.union1d(pairs, first[piece].astype(np.int64) << 32 | other[piece])
        ends.append((pairs >> 32, (pairs & 0xFFFFFFFF) + size))
        size += int(other.max(initial=-1)) + 1
    rows, cols = (np.concatenate(nodes) for nodes in zip(*ends, strict=True))
    graph = sp.coo_matrix((np.ones(len(rows), dtype=np.int8), (rows, cols)), shape=(size, size))
    return taken(connected_components(graph, directed=False)[1][:n_values].astype(np.int32), first)


def deal_groups(
    groups: _Int32s,
    classes: _Int32s,
    n_classes: int,
    shares: NDArray[np.float64],
    keys: NDArray[np.uint64],
    *,
    count_once: bool,
    unlabelled: int,
) -> NDArray[np.int8]:
    """Return the part of each row, the same for all rows of a group; with `count_once`, groups count, not rows."""
    n_groups = int(groups.max(initial=-1)) + 1
    if n_groups * n_classes > _MAX_COUNTS:
        raise InputError(
            f"a table of {n_groups:,} groups x {n_classes:,} classes has more than {_MAX_COUNTS:,} entries. Use a "
            "column with fewer classes for stratify="
        )
    counts = np.zeros((n_groups, n_classes), dtype=np.int64)
    for start in range(0, len(groups), _PIECE_ROWS):
        piece = slice(start, start + _PIECE_ROWS)
        np.add.at(counts.reshape(-1), groups[piece].astype(np.int64) * n_classes + classes[piece], 1)
    occurring = np.flatnonzero(counts.any(axis=1))
    if len(occurring) < len(shares):
        raise InputError(
            f"there are too few separate groups ({len(occurring)}) for {len(shares)} non-empty parts. Give fewer "
            "parts, or smaller groups"
        )
    if count_once:
        # The class of a group is the most frequent one of its rows with a label, if there are any.
        if unlabelled >= 0:
            counts[:, unlabelled] = counts.sum(axis=1) == counts[:, unlabelled]
        major = counts[occurring].argmax(axis=1)
        counts = np.zeros_like(counts)
        counts[occurring, major] = 1
    best, parts = np.inf, np.zeros(len(counts), dtype=np.int8)
    n_tries = int(np.clip(_TRIED_COUNTS // (counts.size * len(shares)), 1, N_TRIES))
    for key in keys[:n_tries]:
        found = np.zeros(len(counts), dtype=np.int8)
        order = occurring[shuffled(len(occurring), key)]
        distance = kernels.assign_units(counts, order, shares, found)
        if distance < best:
            best, parts = distance, found
    return taken(parts, groups)


def shuffled(n: int, key: np.uint64) -> _Int64s:
    """Return the numbers below `n` in random order."""
    order = np.empty(n, dtype=np.int64)
    permute.shuffle(key, order)
    return order


def taken(table: NDArray[Any], places: NDArray[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return ``table[places]``, in pieces, since NumPy converts `places` to 64 bits; `out` may be `places` itself."""
    out = np.empty(len(places), dtype=table.dtype) if out is None else out
    for start in range(0, len(places), _PIECE_ROWS):
        piece = slice(start, start + _PIECE_ROWS)
        out[piece] = table[places[piece]]
    return out
