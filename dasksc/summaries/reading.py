"""Passes over a matrix in storage order, as an epoch of `Streaming` reads it."""

from __future__ import annotations

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
from dasksc.atlas.lookup import known
from dasksc.atlas.opening import open as open_atlas
from dasksc.errors import InputError
from dasksc.kernels import moments as kernels
from dasksc.loader import scDataset
from dasksc.pushdown import matrix_of
from dasksc.sampling.strategies import Streaming

__all__ = ["Groups", "Moments", "Pass", "Rows", "groups_of", "refuse_too_large"]

_BATCH_BYTES = 2**21
_MOST_BATCH_ROWS = 1024
_FETCH_BATCHES = 16
# Of each group and gene while moments are added up: those, and what is made of them.
_MOMENT_BYTES = 4 * 8 + 4 * 8


class Rows(NamedTuple):
    """Some rows of a pass, CSR; `places` are their numbers among those of the pass."""

    places: slice
    indptr: NDArray[Any]
    columns: NDArray[Any]
    values: NDArray[Any]


class Groups(NamedTuple):
    """The groups of the rows of a pass: the number of each row's, -1 without one, and a table of their labels."""

    codes: NDArray[np.int64]
    labels: pd.DataFrame

    @property
    def n_rows(self) -> NDArray[np.int64]:
        """How many rows each group has, shape (n_groups,)."""
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self.labels)).astype(np.int64)


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
        array = self.adata.X if layer is None else self.adata.layers[known("layers", layer, self.adata.layers)]
        if not isinstance(array, da.Array):
            raise InputError(f"{self.label} is a {type(array).__name__}, not a numeric matrix")
        self.array = array
        self._progress = progress
        self.rows: NDArray[np.int64] | None = None
        if filter is not None:
            self.rows = np.flatnonzero(filtering.holds(filter, self.adata.obs))

    @property
    def n_rows(self) -> int:
        """How many rows are read."""
        return self.adata.n_obs if self.rows is None else len(self.rows)

    @property
    def obs(self) -> pd.DataFrame:
        """The obs of these rows."""
        return self.adata.obs if self.rows is None else self.adata.obs.iloc[self.rows]

    def __iter__(self) -> Iterator[Rows]:
        if not self.n_rows:
            return
        row_bytes = max(1.0, matrix_of(self.array).cost.row)
        dataset = scDataset(
            self.array,
            Streaming(indices=self.rows),
            batch_size=int(min(max(_BATCH_BYTES / row_bytes, 1), _MOST_BATCH_ROWS)),
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


class Moments:
    """Numbers, means and squared differences of the values of each gene in each group of rows.

    Rows are added first, all of them; then results are asked for, which are computed once.

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

    def add(self, rows: Rows, groups: NDArray[np.int64], values: NDArray[Any] | None = None) -> None:
        """Add rows; `groups` are the numbers of theirs, and `values` others than their own."""
        given = rows.values if values is None else values
        kernels.add_moments(rows.indptr, rows.columns, given, groups, self._sums)

    @cached_property
    def _finished(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        shape = self._sums.shape[:2]
        made = np.empty(shape, dtype=np.int64), np.empty(shape), np.empty(shape), np.empty(shape)
        kernels.finish_moments(self._sums, self._n_rows[:, 0].astype(np.int64), *made)
        return made

    @property
    def n_nonzero(self) -> NDArray[np.int64]:
        """How many values are not zero, shape (n_groups, n_vars)."""
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
    MissingKeyError
        If there is no such column.
    """
    if not names:
        raise InputError("by=[] names no column of obs; leave it out for statistics over all cells")
    columns = [pd.Categorical(table[known("obs", name, table)]).remove_unused_categories() for name in names]
    codes = np.zeros(len(table), dtype=np.int64)
    has_all = np.ones(len(table), dtype=bool)
    for column in columns:
        codes = codes * max(len(column.categories), 1) + column.codes
        has_all &= column.codes >= 0
    there, numbers = np.unique(codes[has_all], return_inverse=True)
    found = np.full(len(table), -1, dtype=np.int64)
    found[has_all] = numbers
    labels = {}
    for name, column in reversed(list(zip(names, columns, strict=True))):
        there, code = np.divmod(there, max(len(column.categories), 1))
        labels[name] = pd.Categorical.from_codes(code, column.categories)
    ordered = {name: labels[name] for name in names}
    index = ["_".join(map(str, label)) for label in zip(*ordered.values(), strict=True)]
    return Groups(found, pd.DataFrame(ordered, index=pd.Index(index, dtype=object)))


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
