"""Passes over a matrix in storage order, as an epoch of `Streaming` reads it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import pandas as pd
from anndata import AnnData
from dask.utils import format_bytes
from numpy.typing import NDArray

from dasksc import config
from dasksc.atlas import filtering
from dasksc.atlas.lookup import require_key
from dasksc.atlas.opening import open as open_atlas
from dasksc.errors import InputError
from dasksc.kernels import moments as kernels
from dasksc.loader import scDataset
from dasksc.pushdown import matrix_of
from dasksc.sampling.strategies import Streaming

__all__ = ["Groups", "Moments", "Pass", "Rows", "groups_of", "refuse_too_large"]

_BATCH_BYTES = 2**21
_FETCH_BATCHES = 16
# Rows smaller than this are read as if they had this size.
_LEAST_ROW_BYTES = 2**11
# Rows whose groups are handled together, with int64 copies.
_PIECE_ROWS = 2**20
# Of each group and gene while moments are added up: those, and what is made of them.
_MOMENT_BYTES = 4 * 8 + 4 * 8


class Rows(NamedTuple):
    """Some rows of a pass, CSR; `places` are their numbers among those of the pass."""

    places: slice
    indptr: NDArray[Any]
    columns: NDArray[Any]
    values: NDArray[Any]


class Groups(NamedTuple):
    """Group of each row of a pass, -1 for none, in the narrowest signed integers, and a table of the groups' labels."""

    codes: NDArray[np.signedinteger[Any]]
    labels: pd.DataFrame

    @property
    def n_rows(self) -> NDArray[np.int64]:
        """Number of rows of each group, shape (n_groups,)."""
        return _counts_of(self.codes, len(self.labels))


class Pass:
    """An atlas whose rows are read as often as it is iterated.

    Parameters
    ----------
    data
        What `dasksc.open` takes or returns.
    layer
        Which matrix; None: X.
    columns
        Columns of obs that are needed.
    filter
        An expression over obs, which holds for the rows that are read; None: all.
    names
        Whether the names of cells are needed.
    progress
        Show a progress bar.

    Attributes
    ----------
    adata
        The atlas.
    array
        The matrix, cells by genes.
    rows
        Numbers of the rows that are read; None: all.
    n_groups
        Number of groups that rows are added up in. Rows of several are joined to larger batches.

    Raises
    ------
    InputError
        If there is no such matrix.
    """

    def __init__(
        self,
        data: Any,
        *,
        layer: str | None,
        columns: Sequence[str] = (),
        filter: str | None = None,
        names: bool = False,
        progress: bool = False,
    ) -> None:
        wanted = [*columns, *([] if filter is None else filtering.columns_of(filter))]
        self.adata: AnnData = open_atlas(data, obs=list(dict.fromkeys(wanted)), names=names)
        self.label = "X" if layer is None else f"layer {layer!r}"
        array = self.adata.X if layer is None else self.adata.layers[require_key("layers", layer, self.adata.layers)]
        if not isinstance(array, da.Array):
            raise InputError(f"{self.label} is a {type(array).__name__}, not a numeric matrix")
        self.array = array
        self._progress = progress
        self.n_groups = 1
        self.rows: NDArray[np.int64] | None = None
        if filter is not None:
            self.rows = np.flatnonzero(filtering.holds(filter, self.adata.obs))

    @property
    def n_rows(self) -> int:
        """Number of rows to read."""
        return self.adata.n_obs if self.rows is None else len(self.rows)

    @property
    def obs(self) -> pd.DataFrame:
        """The obs of these rows."""
        return self.adata.obs if self.rows is None else self.adata.obs.iloc[self.rows]

    def __iter__(self) -> Iterator[Rows]:
        batches = self._batches()
        if self.n_groups == 1:
            yield from batches
            return
        # The moments of several groups do not fit the processor's caches, so rows of a group are added together, of as
        # many rows as there may be. Larger batches would take more memory, since several are made at a time.
        while together := list(itertools.islice(batches, _FETCH_BATCHES)):
            yield _joined(together)

    def _batches(self) -> Iterator[Rows]:
        if not self.n_rows:
            return
        row_bytes = max(_LEAST_ROW_BYTES, matrix_of(self.array).cost.row)
        dataset = scDataset(
            self.array,
            Streaming(indices=self.rows),
            batch_size=int(max(_BATCH_BYTES / row_bytes, 1)),
            fetch_factor=_FETCH_BATCHES,
            layout="csr",
            dtype=None,
            rank=0,
            world_size=1,
            progress=self._progress,
        )
        start = 0
        for X in dataset:
            stop = start + X.shape[0]
            values = X.values()
            if values.dtype.is_floating_point and values.dtype.itemsize < 4:
                values = values.float()  # kernels take no halves
            data = values.numpy()
            indptr, columns = X.crow_indices().numpy(), X.col_indices().numpy()
            yield Rows(slice(start, stop), indptr, columns, data.view(np.uint8) if data.dtype == bool else data)
            start = stop


def _joined(batches: Sequence[Rows]) -> Rows:
    if len(batches) == 1:
        return batches[0]
    ends = itertools.accumulate((int(one.indptr[-1]) for one in batches), initial=0)
    indptr = [one.indptr[:-1] + end for one, end in zip(batches, ends, strict=False)]
    columns, values = (np.concatenate([getattr(one, name) for one in batches]) for name in ("columns", "values"))
    places = slice(batches[0].places.start, batches[-1].places.stop)
    return Rows(places, np.append(np.concatenate(indptr), len(columns)), columns, values)


class Moments:
    """Numbers, means and squared differences of the values of each gene in each group of rows.

    Add all rows before the first result is read; results are computed once.

    Parameters
    ----------
    n_rows
        Rows of each group, shape (n_groups,).
    n_vars
        Genes.

    Notes
    -----
    What is not zero is added up relative to its first value, and zeros are joined at the end: no two large numbers are
    subtracted from each other.
    """

    def __init__(self, n_rows: NDArray[np.int64], n_vars: int) -> None:
        refuse_too_large(len(n_rows), n_vars, _MOMENT_BYTES)
        self._n_rows = n_rows.astype(np.float64)[:, None]
        self._sums = np.zeros((len(n_rows), n_vars, 4))

    def add(self, rows: Rows, groups: NDArray[Any], values: NDArray[Any] | None = None) -> None:
        """Add rows; `groups` are the numbers of theirs, and `values` others than their own."""
        given = rows.values if values is None else values
        groups = groups.astype(np.int64, copy=False)
        # A stable sort leaves the rows of a group in their order, and so every sum as it would be without it.
        order = np.argsort(groups, kind="stable") if len(self._sums) > 1 else np.arange(len(groups))
        kernels.add_moments(rows.indptr, rows.columns, given, groups, order, self._sums)

    @cached_property
    def _finished(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        shape = self._sums.shape[:2]
        made = np.empty(shape, dtype=np.int64), np.empty(shape), np.empty(shape), np.empty(shape)
        kernels.finish_moments(self._sums, self._n_rows[:, 0].astype(np.int64), *made)
        del self._sums  # makes room for what is computed from the results
        return made

    @property
    def n_nonzero(self) -> NDArray[np.int64]:
        """Number of nonzero values, shape (n_groups, n_vars)."""
        return self._finished[0]

    @property
    def sum(self) -> NDArray[np.float64]:
        """Sums, of that shape."""
        return self._finished[1]

    @property
    def mean(self) -> NDArray[np.float64]:
        """Means, NaN where there is no row."""
        return self._finished[2]

    @property
    def squares(self) -> NDArray[np.float64]:
        """Sums of squared differences from the mean."""
        return self._finished[3]

    def variance(self) -> NDArray[np.float64]:
        """Return variances with ``ddof=1``, NaN where a group has no two rows."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self._n_rows > 1, self.squares / (self._n_rows - 1), np.nan)

    def over_all(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the mean of each gene over all groups, and the sum of squared differences from it, (n_vars,)."""
        n = self._n_rows.sum()
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = self.sum.sum(axis=0) / n
            means = np.where(self._n_rows > 0, self.mean, mean)
            return mean, (self.squares + self._n_rows * (means - mean) ** 2).sum(axis=0)


def groups_of(table: pd.DataFrame, names: Sequence[str]) -> Groups:
    """Return the groups that columns of obs make: the combinations of their labels that there are.

    Parameters
    ----------
    table
        An obs.
    names
        One column or several. Groups are named by their labels, joined by ``_``, as `scanpy.get.aggregate` does.

    Raises
    ------
    InputError
        If `names` is empty, or has too many columns.
    MissingKeyError
        If there is no such column.
    """
    if not names:
        raise InputError("by=[] is empty; leave it out for statistics over all cells")
    columns = [pd.Categorical(table[require_key("obs", name, table)]).remove_unused_categories() for name in names]
    if len(columns) == 1:
        found = columns[0].codes
        there = np.arange(len(columns[0].categories))
    else:
        there, found = _combined(columns)
    labels = {}
    for name, column in reversed(list(zip(names, columns, strict=True))):
        there, code = np.divmod(there, max(len(column.categories), 1))
        labels[name] = pd.Categorical.from_codes(code, column.categories)
    ordered = {name: labels[name] for name in names}
    index = ["_".join(map(str, label)) for label in zip(*ordered.values(), strict=True)]
    return Groups(found, pd.DataFrame(ordered, index=pd.Index(index, dtype=object)))


def _combined(columns: Sequence[pd.Categorical]) -> tuple[NDArray[np.int64], NDArray[np.signedinteger[Any]]]:
    """Return the combinations of codes that rows have, as one number each, and the place of each row's among them."""
    n_possible = math.prod(max(len(column.categories), 1) for column in columns)
    if n_possible >= 2**63:
        raise InputError(
            f"by= names {len(columns)} columns with {' x '.join(str(len(one.categories)) for one in columns)} labels, "
            "and at most 2**63 combinations can be numbered. Group by fewer columns"
        )
    codes = np.zeros(len(columns[0]), dtype=np.min_scalar_type(-n_possible - 1))
    has_all = np.ones(len(codes), dtype=bool)
    for column in columns:
        codes *= codes.dtype.type(max(len(column.categories), 1))
        codes += column.codes.astype(codes.dtype, copy=False)
        has_all &= column.codes >= 0
    codes[~has_all] = -1
    there = pd.unique(codes)
    there = np.sort(there[there >= 0]).astype(np.int64)
    found = np.empty(len(codes), dtype=np.min_scalar_type(-len(there) - 1))
    for start in range(0, len(codes), _PIECE_ROWS):
        piece = slice(start, start + _PIECE_ROWS)
        found[piece] = np.where(has_all[piece], np.searchsorted(there, codes[piece]), -1)
    return there, found


def _counts_of(codes: NDArray[np.signedinteger[Any]], n_groups: int) -> NDArray[np.int64]:
    """Count the rows of each group, shape (n_groups,); rows below 0 have none."""
    counts = np.zeros(n_groups, dtype=np.int64)
    for start in range(0, len(codes), _PIECE_ROWS):  # bincount converts what it counts to int64
        piece = codes[start : start + _PIECE_ROWS]
        counts += np.bincount(piece[piece >= 0], minlength=n_groups)
    return counts


def refuse_too_large(n_groups: int, n_vars: int, n_bytes: int) -> None:
    """Refuse results that need more memory than the process may use.

    Parameters
    ----------
    n_groups, n_vars
        How many groups, and genes of each.
    n_bytes
        Bytes of each gene of each group.

    Raises
    ------
    InputError
        If that is more than ``dasksc.memory-limit``.
    """
    needed, limit = n_groups * n_vars * n_bytes, config.memory_limit(None)
    if needed > limit:
        raise InputError(
            f"{n_groups:,} groups of {n_vars:,} genes need {format_bytes(needed)} of memory ({needed} bytes), but "
            f"dasksc.memory-limit is {format_bytes(limit)} ({limit} bytes). Group by fewer labels, or raise the limit: "
            "dask.config.set({'dasksc.memory-limit': '8GiB'})"
        )
