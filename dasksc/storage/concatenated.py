"""Row-wise concatenation of several matrices."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from dask.base import tokenize
from numpy.typing import DTypeLike, NDArray

from dasksc.errors import InputError
from dasksc.storage.fetched_csr import CSRRowBuffer
from dasksc.storage.fetched_dense import DenseRowBuffer
from dasksc.storage.fetched_rows import Origins
from dasksc.storage.files import mapping_of
from dasksc.storage.joining import stack
from dasksc.storage.mapped_rows import MappedCSR, locate
from dasksc.storage.matrices import check_rows
from dasksc.storage.matrix import ColumnMaps, Columns, FetchCost, Layout, Matrix, RowBuffer

# Parts with more runs of rows than this in a fetch are read one by one: a request to read a run ahead takes about a
# microsecond, and only a part that is read by itself requests none if its rows are in the page cache.
_MOST_RUNS = 64


class AbsentMatrix:
    """Matrix without columns, a placeholder for a missing matrix in a concatenation."""

    def __init__(self, n_obs: int, layout: Layout, dtype: DTypeLike = np.float64) -> None:
        self.label = "absent matrix"
        self.shape = n_obs, 0
        self.layout = layout
        self.dtype = self.stored_dtype = np.dtype(dtype)
        self.cost = FetchCost(row=0.0, held=0.0)

    def fetch(self, rows: NDArray[np.int64]) -> RowBuffer:
        rows = check_rows(self.label, self.shape[0], rows)
        if self.layout == "dense":
            return DenseRowBuffer.of_block(self.label, rows, self.dtype, np.empty((len(rows), 0), self.dtype))
        nothing = np.zeros(len(rows) + 1, np.int64), np.empty(0, np.int32), np.empty(0, self.dtype)
        return CSRRowBuffer.of_block(self.label, rows, 0, self.dtype, nothing)

    def __repr__(self) -> str:
        return f"<AbsentMatrix of {self.shape[0]} rows>"


class ConcatenatedMatrix:
    """Row-wise concatenation of matrices. No data are rewritten: columns are renumbered when rows are gathered."""

    # The result is CSR if any part is CSR. A column that a part lacks is 0 in a CSR matrix. In a dense matrix, it has
    # the fill value of `maps`, which is NaN by default. The data type of the result can represent this value, as in
    # `anndata.concat`.

    def __init__(self, *, label: str, parts: Sequence[Matrix], maps: ColumnMaps | None) -> None:
        if not parts:
            raise InputError(f"{label}: no matrix was given to concatenate")
        widths = {part.shape[1] for part in parts}
        if maps is None and len(widths) > 1:
            raise InputError(
                f"{label}: matrices of {sorted(widths)} columns cannot be stacked without a map of columns"
            )
        self.label = label
        self.parts = tuple(parts)
        self.maps = maps  # columns of the parts in the result; None if all parts have the same
        self._labels = tuple(part.label for part in parts)
        sizes = [part.shape[0] for part in parts]
        self._ends: NDArray[np.int64] = np.cumsum(sizes, dtype=np.int64)
        self._begins = self._ends - sizes
        self.shape = int(self._ends[-1]), parts[0].shape[1] if maps is None else maps.n_vars
        self.layout: Layout = "csr" if any(part.layout == "csr" for part in parts) else "dense"
        is_filled = self.layout == "dense" and maps is not None and bool(maps.n_filled())
        self.dtype = self._common([part.dtype for part in parts], is_filled=is_filled)
        self.stored_dtype = self._common([part.stored_dtype for part in parts], is_filled=is_filled)

    def _common(self, dtypes: Sequence[np.dtype[Any]], *, is_filled: bool) -> np.dtype[Any]:
        """Return a data type that represents the values of all `dtypes` and, if `is_filled`, also the fill value."""
        common: np.dtype[Any] = np.result_type(*dtypes)
        return self.maps.filled_dtype(common) if is_filled and self.maps is not None else common

    def n_missing(self, columns: Columns | None = None) -> int:
        """Return the number of columns that are NaN because a part lacks them."""
        # If `columns` is given, only these columns are counted.
        if self.layout == "csr" or self.maps is None or self.maps.fill_value is not None:
            return 0
        return self.maps.n_filled(columns)

    @property
    def shares(self) -> NDArray[np.float64]:
        """Share of the rows in each part, shape (n_parts,)."""
        # Empty parts have a small weight, so that the shares are defined if all parts are empty.
        n_rows = np.array([max(1, part.shape[0]) for part in self.parts], dtype=np.float64)
        shares: NDArray[np.float64] = n_rows / n_rows.sum()
        return shares

    @property
    def cost(self) -> FetchCost:
        """Memory that a fetch takes if its rows come from all parts in proportion to their sizes."""
        # Parts are read one by one.
        costs = [part.cost for part in self.parts]
        row, held, working = (
            float(self.shares @ [getattr(cost, name) for cost in costs]) for name in ("row", "held", "working")
        )
        return FetchCost(
            row=row,
            held=held,
            working=working,
            fixed=max(cost.fixed for cost in costs),
            kept=sum(cost.kept for cost in costs),
            chunk_rows=max(cost.chunk_rows for cost in costs),
            decoded_rows=max(cost.decoded_rows for cost in costs),
        )

    def fetch(self, rows: NDArray[np.int64]) -> RowBuffer:
        rows = check_rows(self.label, self.shape[0], rows)
        which = np.searchsorted(self._ends, rows, side="right")
        # If no rows are requested, the first part determines the data types.
        numbers = np.unique(which) if len(rows) else np.array([0])
        n_runs = np.count_nonzero(np.diff(rows) > 1)
        fetched: list[RowBuffer] = []
        for _, group in itertools.groupby(numbers.tolist(), key=self._kind):
            members = list(group)
            together = None
            if len(members) > 1 and n_runs <= _MOST_RUNS * len(numbers):
                together = self._fetch_together(members, rows, which)
            fetched += [self._fetch_part(number, rows, which) for number in members] if together is None else [together]
        origins = Origins(numbers=which.astype(np.int32), labels=self._labels, maps=self.maps)
        return stack(fetched, label=self.label, dtype=self.dtype, layout=self.layout, origins=origins)

    @functools.cached_property
    def _mapped(self) -> tuple[MappedCSR | None, ...]:
        return tuple(MappedCSR.of(part) for part in self.parts)

    def _kind(self, number: int) -> object:
        """Return a key that neighboring parts share if they can be fetched together in this thread."""
        mapped = self._mapped[number]
        if mapped is None:
            return number
        with mapping_of(self._labels[number]):
            return mapped.dtypes if mapped.data.is_mapped else number

    def _fetch_part(self, number: int, rows: NDArray[np.int64], which: NDArray[np.int64]) -> RowBuffer:
        first, last = np.searchsorted(which, [number, number + 1])
        with mapping_of(self._labels[number]):
            return self.parts[number].fetch(rows[first:last] - self._begins[number])

    def _fetch_together(
        self, members: list[int], rows: NDArray[np.int64], which: NDArray[np.int64]
    ) -> CSRRowBuffer | None:
        """Fetch the rows of parts of the same kind; return None if these must be read one by one."""
        first, last = np.searchsorted(which, [members[0], members[-1] + 1])
        which = which[first:last]
        rows = rows[first:last] - self._begins[which]
        parts = [mapped for mapped in (self._mapped[number] for number in members) if mapped is not None]
        found = locate(parts, np.searchsorted(members, which), rows)
        if found is None:
            return None
        lengths, indices, data = found
        return CSRRowBuffer(
            label=self.label,
            rows=rows,
            n_vars=self.shape[1] if self.maps is None else self.maps.n_columns,
            dtype=parts[0].dtypes[-1],
            lengths=lengths,
            data=data,
            indices=indices,
            origins=Origins(numbers=which.astype(np.int32), labels=self._labels, maps=None),
        )

    def __dask_tokenize__(self) -> object:
        # Dask pickles what it hashes, so the parts are hashed one by one.
        return ("dasksc.ConcatenatedMatrix", self.label, [tokenize(part) for part in self.parts], tokenize(self.maps))

    def __repr__(self) -> str:
        return f"<ConcatenatedMatrix {self.label} {self.shape[0]}x{self.shape[1]} {self.dtype} of {len(self.parts)}>"
