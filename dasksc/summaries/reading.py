"""Passes over a matrix in storage order, as in an epoch of `Streaming`."""

from __future__ import annotations

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
from dasksc.checks import check_flags, name_or_none
from dasksc.errors import InputError
from dasksc.kernels import moments as kernels
from dasksc.loader import scDataset
from dasksc.loader.dataset import components_of
from dasksc.pushdown import matrix_of
from dasksc.sampling.labels import check_categories
from dasksc.sampling.strategies import Streaming

__all__ = ["MOMENT_BYTES", "Groups", "Moments", "Pass", "PassRows", "groups_of"]

# Maximum and minimum size of a fetch, and the number of batches in it. The moments of several groups do not fit in the
# processor's caches. Each batch adds all its rows of a group at once, so with few, large batches the moments are loaded
# into the caches fewer times.
_FETCH_BYTES, _LEAST_FETCH_BYTES, _FETCH_BATCHES = 2**25, 2**21, 2
# Copies of a batch that the computation makes: converted values, and values in another order.
_BATCH_COPIES = 2
# Lower bound of the size of a row, in bytes, from which the number of rows in a batch is computed.
_LEAST_ROW_BYTES = 2**11
# Number of rows whose groups are converted to int64 at a time.
_PIECE_ROWS = 2**20
# Bytes per group and gene while moments are summed: the moments, and the results computed from them.
MOMENT_BYTES = 4 * 8 + 4 * 8


class PassRows(NamedTuple):
    """CSR rows of a pass; `places` are their numbers among all rows of the pass."""

    places: slice
    indptr: NDArray[Any]
    columns: NDArray[Any]
    values: NDArray[Any]


class Groups(NamedTuple):
    """Group of each row of a pass, in the narrowest signed type, -1 for none; and a table of the groups' labels."""

    codes: NDArray[np.signedinteger[Any]]
    labels: pd.DataFrame

    @property
    def n_rows(self) -> NDArray[np.int64]:
        """Number of rows of each group, shape (n_groups,)."""
        return _counts_of(self.codes, len(self.labels))


class Pass:
    """Iterable over the rows of an atlas; each iteration reads them again.

    Parameters
    ----------
    data
        Any argument or result of `dasksc.open`.
    layer
        Name of the layer to read; None: X.
    columns
        Columns of obs to read.
    filter
        Expression over obs that selects the rows to read; None: all rows.
    names
        If True, read the names of cells.
    progress
        Show a progress bar.

    Attributes
    ----------
    adata
        Atlas.
    array
        Matrix of cells by genes.
    rows
        Numbers of the rows to read; None: all.

    Raises
    ------
    InputError
        If the atlas lacks the matrix.

    Notes
    -----
    Results (`reserve`) and fetches share ``dasksc.memory-limit``. Fetches use the memory that is not reserved.
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
        check_flags(progress=progress)
        name_or_none("layer", layer)
        wanted = [*columns, *([] if filter is None else filtering.columns_of(filter))]
        self.adata: AnnData = open_atlas(data, obs=list(dict.fromkeys(wanted)), names=names)
        self.label = "X" if layer is None else f"layer {layer!r}"
        layers = self.adata.layers
        array = self.adata.X if layer is None else layers[require_key("layers", layer, layers, of=self.adata)]
        if not isinstance(array, da.Array):
            raise InputError(f"{self.label} is a {type(array).__name__}, not a numeric matrix")
        self.array = array
        self._progress = progress
        self.rows: NDArray[np.int64] | None = None
        if filter is not None:
            self.rows = np.flatnonzero(filtering.holds(filter, self.adata.obs, of=self.adata))
            self.rows.flags.writeable = False  # otherwise the strategy copies them
        self._results: list[str] = []
        self._results_bytes = 0
        obs = self.adata.obs
        held = [obs[name].memory_usage(index=False, deep=True) for name in dict.fromkeys(wanted)]
        held += [obs.index.memory_usage(deep=True)] if names else []
        held += [] if self.rows is None else [self.rows.nbytes]
        self._held_bytes = int(sum(held))

    @property
    def n_rows(self) -> int:
        """Number of rows to read."""
        return self.adata.n_obs if self.rows is None else len(self.rows)

    @property
    def obs(self) -> pd.DataFrame:
        """The obs table of the rows to read."""
        return self.adata.obs if self.rows is None else self.adata.obs.iloc[self.rows]

    def reserve(self, results: str, n_bytes: int, remedy: str) -> None:
        """Reserve memory for results, in addition to earlier reservations.

        Parameters
        ----------
        results
            Description of the results.
        n_bytes
            Memory that they need, in bytes.
        remedy
            Advice on reducing this memory, as an imperative phrase for the error message.

        Raises
        ------
        InputError
            If all results and the smallest fetch need more than ``dasksc.memory-limit``.
        """
        self._results.append(results)
        self._results_bytes += n_bytes
        limit, least = config.memory_limit(None), self._held_bytes
        if self.n_rows:
            least += _demand_bytes(self._dataset(_LEAST_FETCH_BYTES))
        if self._results_bytes + least > limit:
            raise InputError(
                f"{' and '.join(self._results)} need {format_bytes(self._results_bytes)} of memory "
                f"({self._results_bytes} bytes), and reading the cells needs at least {format_bytes(least)}, but "
                f"dasksc.memory-limit is {format_bytes(limit)} ({limit} bytes). {remedy}, or raise the limit: "
                "dask.config.set({'dasksc.memory-limit': '8GiB'})"
            )

    def reserve_groups(self, n_groups: int, n_bytes: int, groups: Groups | None) -> None:
        """Reserve `n_bytes` for each gene of `n_groups` groups, as `reserve` does."""
        self._held_bytes += 0 if groups is None else groups.codes.nbytes
        n_vars = self.adata.n_vars
        what = f"statistics of {n_groups:,} groups of cells x {n_vars:,} genes"
        self.reserve(what, n_groups * n_vars * n_bytes, "Group by fewer labels")

    @property
    def projected_bytes(self) -> int:
        """Maximum anonymous memory of results and iteration, in bytes."""
        copies_bytes, dataset = self._fetching()
        return self._held_bytes + self._results_bytes + copies_bytes + (dataset.projected_bytes or 0)

    def __iter__(self) -> Iterator[PassRows]:
        if self.n_rows:
            yield from _csr_rows(self._fetching()[1])

    def _fetching(self) -> tuple[int, scDataset]:
        """Return the size of the copies of a batch in bytes, and a data set limited to the remaining memory."""
        limit = config.memory_limit(None) - self._held_bytes - self._results_bytes
        fetch_bytes = _FETCH_BYTES
        dataset = self._dataset(fetch_bytes)
        while fetch_bytes > _LEAST_FETCH_BYTES and _demand_bytes(dataset) > limit:
            fetch_bytes //= 2
            dataset = self._dataset(fetch_bytes)
        copies_bytes = _copies_bytes(dataset)
        return copies_bytes, self._dataset(fetch_bytes, limit - copies_bytes)

    def _dataset(self, fetch_bytes: int, memory_limit: int = 2**62) -> scDataset:
        row_bytes = max(_LEAST_ROW_BYTES, matrix_of(self.array).cost.row)
        return scDataset(
            self.array,
            Streaming(indices=self.rows),
            batch_size=int(max(fetch_bytes / _FETCH_BATCHES / row_bytes, 1)),
            fetch_factor=_FETCH_BATCHES,
            layout="csr",
            dtype=None,
            rank=0,
            world_size=1,
            memory_limit=memory_limit,
            progress=self._progress,
        )


def _demand_bytes(dataset: scDataset) -> int:
    """Return the minimum memory in bytes that a data set needs to read, including copies of a batch."""
    return components_of(dataset).projection.least_demand(_FETCH_BATCHES).anonymous + _copies_bytes(dataset)


def _copies_bytes(dataset: scDataset) -> int:
    return int(_BATCH_COPIES * components_of(dataset).projection.batch_bytes)


def _csr_rows(dataset: scDataset) -> Iterator[PassRows]:
    start = 0
    for X in dataset:
        stop = start + X.shape[0]
        values = X.values()
        if values.dtype.is_floating_point and values.dtype.itemsize < 4:
            values = values.float()  # kernels do not support float16
        data = values.numpy()
        indptr, columns = X.crow_indices().numpy(), X.col_indices().numpy()
        yield PassRows(slice(start, stop), indptr, columns, data.view(np.uint8) if data.dtype == bool else data)
        start = stop


class Moments:
    """Moments of the values of each gene in each group of rows: counts, means and squared differences.

    Add all rows before the first result is read; results are computed once.

    Parameters
    ----------
    n_rows
        Number of rows in each group, shape (n_groups,).
    n_vars
        Number of genes.

    Notes
    -----
    Nonzeros are summed relative to the first of them, and zeros are included at the end. This avoids the difference of
    two large numbers.
    """

    def __init__(self, n_rows: NDArray[np.int64], n_vars: int) -> None:
        self._n_rows = n_rows.astype(np.float64)[:, None]
        # Filled immediately, so that the loader does not count this memory as available.
        self._sums = np.full((len(n_rows), n_vars, 4), 0.0)

    def add(self, rows: PassRows, groups: NDArray[Any], values: NDArray[Any] | None = None) -> None:
        """Add rows that belong to `groups`; if given, `values` are used instead of the values of the rows."""
        given = rows.values if values is None else values
        groups = groups.astype(np.int64, copy=False)
        # A stable sort keeps the order of the rows of a group, so it does not change any sum.
        order = np.argsort(groups, kind="stable") if len(self._sums) > 1 else np.arange(len(groups))
        kernels.add_moments(rows.indptr, rows.columns, given, groups, order, self._sums)

    @cached_property
    def _finished(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        shape = self._sums.shape[:2]
        results = np.empty(shape, dtype=np.int64), np.empty(shape), np.empty(shape), np.empty(shape)
        kernels.finish_moments(self._sums, self._n_rows[:, 0].astype(np.int64), *results)
        del self._sums  # frees memory for computations on the results
        return results

    @property
    def n_nonzero(self) -> NDArray[np.int64]:
        """Number of nonzero values, shape (n_groups, n_vars)."""
        return self._finished[0]

    @property
    def sum(self) -> NDArray[np.float64]:
        """Sums of the values, shape (n_groups, n_vars)."""
        return self._finished[1]

    @property
    def mean(self) -> NDArray[np.float64]:
        """Means of the values, shape (n_groups, n_vars); NaN for a group without rows."""
        return self._finished[2]

    @property
    def squares(self) -> NDArray[np.float64]:
        """Sums of squared differences from the mean, shape (n_groups, n_vars)."""
        return self._finished[3]

    def variance(self) -> NDArray[np.float64]:
        """Return variances with ``ddof=1``, shape (n_groups, n_vars); NaN for a group with fewer than two rows."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self._n_rows > 1, self.squares / (self._n_rows - 1), np.nan)

    def over_all(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the mean of each gene over the rows of all groups, and the sum of squared differences from it.

        Both have shape (n_vars,).
        """
        n = self._n_rows.sum()
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = self.sum.sum(axis=0) / n
            means = np.where(self._n_rows > 0, self.mean, mean)
            return mean, (self.squares + self._n_rows * (means - mean) ** 2).sum(axis=0)


def groups_of(table: pd.DataFrame, names: Sequence[str]) -> Groups:
    """Return the groups that columns of obs define: the combinations of labels that occur.

    Parameters
    ----------
    table
        Table of the cells (obs).
    names
        One or several columns. The name of a group consists of its labels, joined by ``_``, as in
        `scanpy.get.aggregate`.

    Raises
    ------
    InputError
        If `names` is empty, or has too many columns.
    MissingKeyError
        If obs lacks a column.
    """
    if not names:
        raise InputError("by=[] is empty; leave it out for statistics over all cells")
    columns = [pd.Categorical(table[require_key("obs", name, table)]).remove_unused_categories() for name in names]
    for name, column in zip(names, columns, strict=True):
        check_categories(column.categories, f"obs column {name!r}")
    if len(columns) == 1:
        found = columns[0].codes
        combinations = np.arange(len(columns[0].categories))
    else:
        combinations, found = _combined(columns)
    labels = {}
    for name, column in reversed(list(zip(names, columns, strict=True))):
        combinations, code = np.divmod(combinations, max(len(column.categories), 1))
        labels[name] = pd.Categorical.from_codes(code, column.categories)
    ordered = {name: labels[name] for name in names}
    index = ["_".join(map(str, label)) for label in zip(*ordered.values(), strict=True)]
    return Groups(found, pd.DataFrame(ordered, index=pd.Index(index, dtype=object)))


def _combined(columns: Sequence[pd.Categorical]) -> tuple[NDArray[np.int64], NDArray[np.signedinteger[Any]]]:
    """Return the combinations of codes that occur, each as one number, and for each row the index of its combination.

    The index is -1 if a label is missing.
    """
    n_possible = math.prod(max(len(column.categories), 1) for column in columns)
    if n_possible >= 2**63:
        raise InputError(
            f"by= names {len(columns)} columns with {' x '.join(str(len(one.categories)) for one in columns)} labels, "
            "but at most 2**63 combinations can be numbered. Group by fewer columns"
        )
    codes = np.zeros(len(columns[0]), dtype=np.min_scalar_type(-n_possible - 1))
    has_all = np.ones(len(codes), dtype=bool)
    for column in columns:
        codes *= codes.dtype.type(max(len(column.categories), 1))
        codes += column.codes.astype(codes.dtype, copy=False)
        has_all &= column.codes >= 0
    codes[~has_all] = -1
    combinations = pd.unique(codes)
    combinations = np.sort(combinations[combinations >= 0]).astype(np.int64)
    found = np.empty(len(codes), dtype=np.min_scalar_type(-len(combinations) - 1))
    for start in range(0, len(codes), _PIECE_ROWS):
        piece = slice(start, start + _PIECE_ROWS)
        found[piece] = np.where(has_all[piece], np.searchsorted(combinations, codes[piece]), -1)
    return combinations, found


def _counts_of(codes: NDArray[np.signedinteger[Any]], n_groups: int) -> NDArray[np.int64]:
    """Count the rows of each group, shape (n_groups,); rows with a negative code belong to none."""
    counts = np.zeros(n_groups, dtype=np.int64)
    for start in range(0, len(codes), _PIECE_ROWS):  # bincount converts its argument to int64
        piece = codes[start : start + _PIECE_ROWS]
        counts += np.bincount(piece[piece >= 0], minlength=n_groups)
    return counts
