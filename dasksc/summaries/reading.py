"""Passes over a matrix in storage order, and moments of its genes in groups of cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import pandas as pd
from dask.utils import format_bytes
from numpy.typing import NDArray

from dasksc import config
from dasksc.atlas.elements import require_key
from dasksc.atlas.filtering import rows_where
from dasksc.atlas.opening import open as open_atlas
from dasksc.checks import check_flags, name_or_none
from dasksc.errors import InputError
from dasksc.kernels import statistics as kernels
from dasksc.loader import scDataset
from dasksc.plan.labels import check_categories
from dasksc.plan.strategies import Streaming
from dasksc.pushdown import matrix_of

# Maximum and minimum size of a fetch, its share of the memory that is left, and the number of batches in it. With few,
# large batches, the moments of each group are loaded into the processor's caches fewer times.
_FETCH_BYTES, _LEAST_FETCH_BYTES, _FETCH_SHARE, _FETCH_BATCHES = 2**25, 2**21, 32, 2
# Lower bound of the size of a row, in bytes, from which the number of rows in a batch is computed.
_LEAST_ROW_BYTES = 2**11
_ALLOCATOR_BYTES = 2**22  # kept by the allocator for the threads, beyond what arrays take


class PassRows(NamedTuple):
    """CSR rows of a pass; `places` are their numbers among all rows of the pass."""

    places: slice
    indptr: NDArray[Any]
    columns: NDArray[Any]
    values: NDArray[Any]


class Pass:
    """Rows of an atlas; each iteration reads them, in the memory that the results (`reserve`) leave of the limit."""

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
        self.adata = open_atlas(data, obs=list(dict.fromkeys(columns)), names=names)
        self.label = "X" if layer is None else f"layer {layer!r}"
        layers = self.adata.layers
        array = self.adata.X if layer is None else layers[require_key("layers", layer, layers, of=self.adata)]
        if not isinstance(array, da.Array):
            raise InputError(f"{self.label} is a {type(array).__name__}, not a numeric matrix")
        self.array = array
        self._progress = progress
        self.rows = None if filter is None else rows_where(data, filter)
        self.obs = self.adata.obs[list(dict.fromkeys(columns))]
        self.reserved_bytes = _ALLOCATOR_BYTES + int(self.obs.memory_usage(index=names, deep=True).sum())
        if self.rows is not None:
            self.rows.flags.writeable = False  # otherwise the strategy copies them
            self.obs = self.obs.iloc[self.rows]
            self.reserved_bytes += self.rows.nbytes + int(self.obs.memory_usage(index=names, deep=True).sum())
        self.n_rows = len(self.obs)

    def reserve(self, results: str, n_bytes: int, remedy: str) -> None:
        """Set memory aside for results; raise an error with advice if the rest is too small to read the rows."""
        self.reserved_bytes += n_bytes
        try:
            self.dataset()
        except InputError as error:
            limit = config.memory_limit(None)
            raise InputError(
                f"{results} need {format_bytes(n_bytes)} of memory ({n_bytes} bytes); dasksc.memory-limit is "
                f"{format_bytes(limit)} ({limit} bytes), and with what is left, the cells cannot be read: {error}. "
                f"{remedy}, or raise the limit: dask.config.set({{'dasksc.memory-limit': '8GiB'}})"
            ) from error

    def dataset(self) -> scDataset:
        """Return the data set that an iteration reads; raise an error if too little memory is left for it."""
        left = config.memory_limit(None) - self.reserved_bytes
        fetch_bytes = min(max(left // _FETCH_SHARE, _LEAST_FETCH_BYTES), _FETCH_BYTES)
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
            memory_limit=left,
            progress=self._progress,
        )

    def __iter__(self) -> Iterator[PassRows]:
        start = 0
        for X in self.dataset() if self.n_rows else ():
            places = slice(start, start + X.shape[0])
            values = X.values()
            if values.dtype.is_floating_point and values.dtype.itemsize < 4:
                values = values.float()  # kernels do not support float16
            data = values.numpy()
            data = data.view(np.uint8) if data.dtype == bool else data
            yield PassRows(places, X.crow_indices().numpy(), X.col_indices().numpy(), data)
            start = places.stop


class Groups:
    """Combinations of labels in obs, one per row of `labels`; rows that lack a label count last in `n_rows`."""

    def __init__(self, obs: pd.DataFrame, names: Sequence[str], *, is_sorted: bool = False) -> None:
        columns = {name: pd.Categorical(obs[name]) for name in names}
        for name, column in columns.items():
            check_categories(column.categories, f"obs column {name!r}")
            if is_sorted:
                columns[name] = column.reorder_categories(column.categories.sort_values())
        self.labels = pd.DataFrame(index=pd.Index(["all"], dtype=object))
        codes = np.zeros(len(obs), dtype=np.int64)
        if columns:
            grouped = pd.DataFrame(columns).groupby(list(columns), observed=True)
            codes = np.array(grouped.ngroup().fillna(-1), dtype=np.int64)  # -1 if a label is missing
            labels = grouped.size().reset_index()[list(columns)].apply(lambda one: one.cat.remove_unused_categories())
            index = ["_".join(map(str, label)) for label in labels.itertuples(index=False)]
            self.labels = labels.set_axis(pd.Index(index, dtype=object))
        n_rows = np.bincount(codes[codes >= 0])
        n_missing = int((codes < 0).sum())
        self.n_rows = np.array([*n_rows, *[n_missing] * (n_missing > 0)], dtype=np.int64)
        codes[codes < 0] = len(n_rows)
        self._codes = codes.astype(np.min_scalar_type(len(n_rows)))
        self.nbytes = self._codes.nbytes

    def codes(self, places: slice) -> NDArray[np.int64]:
        """Return the position of each row's group in `n_rows`."""
        return self._codes[places].astype(np.int64)


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of each gene in each group, shape (n_groups, n_vars); `squares` are summed about `mean`."""

    n_rows: NDArray[np.int64]
    n_nonzero: NDArray[np.int64]
    sum: NDArray[np.float64]
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]

    def variance(self) -> NDArray[np.float64]:
        """Return variances with ``ddof=1``; NaN for a group with fewer than two rows."""
        n_rows = self.n_rows[:, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(n_rows > 1, self.squares / (n_rows - 1), np.nan)

    def over_all(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return mean and squares over the rows of all groups, both of shape (n_vars,)."""
        n_rows = self.n_rows[:, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = self.sum.sum(axis=0) / n_rows.sum()
            means = np.where(n_rows > 0, self.mean, mean)
            return mean, (self.squares + n_rows * (means - mean) ** 2).sum(axis=0)


def moments_of(source: Pass, groups: Groups, each: Callable[[PassRows], None], value_bytes: int = 64) -> Moments:
    """Read all rows, pass them to `each`, and return their moments; each of a group's genes needs `value_bytes`."""
    n_groups, n_vars = len(groups.n_rows), source.adata.n_vars
    source.reserved_bytes += groups.nbytes
    what = f"statistics of {n_groups:,} groups of cells x {n_vars:,} genes"
    source.reserve(what, n_groups * n_vars * value_bytes, "Group by fewer labels")
    # Filled immediately, so that the loader does not count this memory as available.
    sums = np.full((n_groups, n_vars, 4), 0.0)
    for rows in source:
        codes = groups.codes(rows.places)
        # A stable sort keeps the order of the rows of a group, so it does not change any sum.
        order = np.argsort(codes, kind="stable") if n_groups > 1 else np.arange(len(codes))
        kernels.add_moments(rows.indptr, rows.columns, rows.values, codes, order, sums)
        each(rows)
    n_nonzero = np.empty((n_groups, n_vars), dtype=np.int64)
    total, mean, squares = (np.empty((n_groups, n_vars)) for _ in range(3))
    with np.errstate(all="ignore"):
        for i, n in enumerate(groups.n_rows):
            count, first, rest, square = sums[i].T
            n_nonzero[i], total[i] = count, count * first + rest
            mean[i] = total[i] / n
            # The squared differences of nonzeros and of zeros are combined by the formula of Chan, Golub and LeVeque
            # (1983).
            away = rest / np.maximum(count, 1)  # distance of the mean of the nonzeros from the first one
            apart = (first + away) ** 2 * count * ((n - count) / n)
            squares[i] = np.maximum(square - rest * away, 0) + apart
    return Moments(groups.n_rows, n_nonzero, total, mean, squares)
