"""Matrices made of other matrices: rows of several, selected and reordered rows, and sums of columns."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from dask.base import tokenize
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.storage.arrays import MemoryArray, RowPointers, memory_dtype, reading
from dasksc.storage.columns import ColumnMaps, Columns
from dasksc.storage.dtypes import sum_dtype
from dasksc.storage.fetched_csr import CSRRowBuffer
from dasksc.storage.fetched_dense import DenseRowBuffer
from dasksc.storage.fetched_rows import Layout, Origins, RowBuffer
from dasksc.storage.files import LocalFile, advise_mapped, mapping_of
from dasksc.storage.matrices import CSRMatrix, DenseMatrix, check_rows, row_bounds
from dasksc.storage.matrix import FetchCost, Matrix
from dasksc.storage.uncompressed import PlainArray

# Parts with more runs of rows than this in a fetch are read one by one: a request to read a run ahead takes about a
# microsecond, and only a part that is read by itself requests none if its rows are in the page cache.
_MOST_RUNS = 64


class AbsentMatrix(DenseMatrix):
    """Matrix without columns, a placeholder for a missing matrix in a concatenation."""

    cost = FetchCost(row=0.0, held=0.0)

    def __init__(self, n_obs: int, dtype: np.dtype[Any]) -> None:
        super().__init__(label="absent matrix", values=MemoryArray(np.empty((n_obs, 0), dtype), "absent matrix"))


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

    def n_missing(self) -> int:
        """Return the number of columns that are NaN because a part lacks them."""
        if self.layout == "csr" or self.maps is None or self.maps.fill_value is not None:
            return 0
        return self.maps.n_filled()

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
            return mapped.dtypes if mapped.file.is_mapped else number

    def _fetch_part(self, number: int, rows: NDArray[np.int64], which: NDArray[np.int64]) -> RowBuffer:
        first, last = np.searchsorted(which, [number, number + 1])
        with mapping_of(self._labels[number]):
            return self.parts[number].fetch(rows[first:last] - self._begins[number])

    def _fetch_together(
        self, members: list[int], rows: NDArray[np.int64], which: NDArray[np.int64]
    ) -> CSRRowBuffer | None:
        """Fetch the rows of parts of the same kind; return None if these must be read one by one, or report errors."""
        first, last = np.searchsorted(which, [members[0], members[-1] + 1])
        which = which[first:last]
        rows = rows[first:last] - self._begins[which]
        of = np.searchsorted(members, which)
        parts = [mapped for mapped in (self._mapped[number] for number in members) if mapped is not None]
        with reading():
            for part in parts:
                part.file.require_unchanged()
            memories = [part.file.mapped() for part in parts]
            bases = np.array([part.offsets for part in parts]).T[:, of]
            n_values = np.array([part.data.shape[0] for part in parts])[of]

            def inside(array: int, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> RowPointers:
                dtype = parts[0].dtypes[array]
                offsets, sizes = bases[array] + starts * dtype.itemsize, lengths * dtype.itemsize
                found = RowPointers.inside(memories, dtype=dtype, which=of, offsets=offsets, sizes=sizes, held_bytes=0)
                advise_mapped(found.at, sizes)
                return found

            is_later = (rows[1:] > rows[:-1]) & (of[1:] == of[:-1])
            starts, stops, wrong = row_bounds(inside(0, rows, np.full(len(rows), 2)), n_values, is_later)
            if wrong.any():
                return None
            return CSRRowBuffer(
                label=self.label,
                rows=rows,
                n_vars=self.shape[1] if self.maps is None else self.maps.n_columns,
                dtype=parts[0].dtypes[-1],
                lengths=stops - starts,
                indices=inside(1, starts, stops - starts),
                data=inside(2, starts, stops - starts),
                origins=Origins(numbers=which.astype(np.int32), labels=self._labels, maps=None),
            )

    def __dask_tokenize__(self) -> object:
        # Dask pickles what it hashes, so the parts are hashed one by one.
        return ("dasksc.ConcatenatedMatrix", self.label, [tokenize(part) for part in self.parts], tokenize(self.maps))

    def __repr__(self) -> str:
        return f"<ConcatenatedMatrix {self.label} {self.shape[0]}x{self.shape[1]} {self.dtype} of {len(self.parts)}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedCSR:
    """Place of a CSR matrix in a file whose bytes are its arrays."""

    # An atlas may consist of thousands of files of a few hundred cells each, and a fetch may need a few rows of each of
    # dozens of them. Locating the rows of every file with NumPy then takes much longer than copying them.

    file: LocalFile
    data: PlainArray
    offsets: tuple[int, ...]  # Byte offsets of `indptr`, `indices` and `data`
    dtypes: tuple[np.dtype[Any], ...]  # Data types of these three, and that for computation

    @classmethod
    def of(cls, matrix: Matrix) -> MappedCSR | None:
        """Return the place of `matrix`; None unless its arrays are uncompressed, each in one piece of one file."""
        arrays = matrix.arrays if isinstance(matrix, CSRMatrix) else ()
        plain = [array for array in arrays if isinstance(array, PlainArray)]
        places = [place for array in plain if (place := array.place) is not None]
        if len(places) < 3 or len({id(file) for file, _ in places}) > 1:
            return None
        return cls(
            file=places[0][0],
            data=plain[-1],
            offsets=tuple(offset for _, offset in places),
            dtypes=(*(array.dtype for array in plain), matrix.dtype),
        )


def join(parts: Sequence[RowBuffer]) -> RowBuffer:
    """Concatenate fetches of one matrix, without copying if they hold the same data types."""
    if len(parts) == 1:
        return parts[0]
    origins = [buffer.origins for buffer in parts if buffer.origins is not None]
    joined = replace(origins[0], numbers=np.concatenate([one.numbers for one in origins])) if origins else None
    first = parts[0]
    if len({buffer.types for buffer in parts}) == 1:
        return _concatenated(parts, label=first.label, dtype=first.dtype, origins=joined)
    # The matrix is a concatenation, and the data types of a fetch depend on the parts that it has read.
    return stack(
        parts,
        label=first.label,
        dtype=first.dtype,
        layout=first.layout,
        origins=None if joined is None else replace(joined, maps=None),  # columns are the common ones by then
    )


def stack(
    parts: Sequence[RowBuffer], *, label: str, dtype: np.dtype[Any], layout: Layout, origins: Origins | None
) -> RowBuffer:
    """Concatenate fetches of several matrices; only parts that differ in data type or layout are copied."""
    if layout == "csr":
        parts = [_as_csr(buffer) for buffer in parts]
    held = [np.result_type(*types) for types in zip(*(buffer.types for buffer in parts), strict=True)]
    parts = [
        buffer if buffer.column_maps is None and list(buffer.types) == held else buffer.converted(*held)
        for buffer in parts
    ]
    return _concatenated(parts, label=label, dtype=dtype, origins=origins)


def _concatenated(
    parts: Sequence[RowBuffer], *, label: str, dtype: np.dtype[Any], origins: Origins | None
) -> RowBuffer:
    rows = np.concatenate([buffer.rows for buffer in parts])
    n_vars = parts[0].shape[1] if origins is None or origins.maps is None else origins.maps.n_vars
    values, *indices = (RowPointers.joined(own) for own in zip(*(buffer.pointers for buffer in parts), strict=True))
    if not indices:
        return DenseRowBuffer(label=label, rows=rows, n_vars=n_vars, dtype=dtype, values=values, origins=origins)
    return CSRRowBuffer(
        label=label,
        rows=rows,
        n_vars=n_vars,
        dtype=dtype,
        lengths=np.concatenate([buffer.lengths for buffer in parts if isinstance(buffer, CSRRowBuffer)]),
        data=values,
        indices=indices[0],
        origins=origins,
    )


def _as_csr(buffer: RowBuffer) -> RowBuffer:
    if buffer.layout == "csr":
        return buffer
    held = buffer.types[0] if buffer.column_maps is None else None
    block = buffer.gather_csr(np.arange(buffer.shape[0], dtype=np.int64), dtype=held)
    return CSRRowBuffer.of_block(buffer.label, buffer.rows, buffer.shape[1], buffer.dtype, block)


class ReorderedMatrix:
    """Selected rows of a matrix in any order. Rows are read in stored order, and no data are rewritten."""

    def __init__(self, matrix: Matrix, rows: NDArray[np.int64]) -> None:
        if len(rows) and (rows.min() < 0 or rows.max() >= matrix.shape[0]):
            raise InputError(f"{matrix.label}: rows must lie in [0, {matrix.shape[0]})")
        self.parts = (matrix,)
        self._rows = rows
        self.shape = len(rows), matrix.shape[1]
        self.label = matrix.label
        self.layout: Layout = matrix.layout
        self.dtype: np.dtype[Any] = matrix.dtype
        self.stored_dtype: np.dtype[Any] = matrix.stored_dtype

    @property
    def cost(self) -> FetchCost:
        """Memory that a fetch takes, equal to that of the underlying matrix."""
        return self.parts[0].cost

    def fetch(self, rows: NDArray[np.int64]) -> RowBuffer:
        wanted = self._rows[check_rows(self.label, self.shape[0], rows)]
        if not np.any(wanted[1:] < wanted[:-1]):
            return self.parts[0].fetch(wanted)
        order = np.argsort(wanted, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return self.parts[0].fetch(wanted[order]).reordered(places)

    def __repr__(self) -> str:
        return f"<ReorderedMatrix {self.shape[0]} rows of {self.parts[0]!r}>"


def part_costs(matrix: Matrix, share: float = 1.0) -> Iterator[tuple[str, FetchCost]]:
    """Yield the label and the cost of each part of a concatenated matrix."""
    # `row` and `held` are multiplied by the share of the rows in the part. A matrix that is not a concatenation counts
    # as a single part.
    if isinstance(matrix, ReorderedMatrix):
        yield from part_costs(matrix.parts[0], share)
    elif isinstance(matrix, ConcatenatedMatrix):
        for part, share_of_part in zip(matrix.parts, matrix.shares.tolist(), strict=True):
            yield from part_costs(part, share * share_of_part)
    else:
        cost = matrix.cost
        yield matrix.label, replace(cost, row=share * cost.row, held=share * cost.held)


class SummedMatrix:
    """Selected columns of a matrix, some of which are summed. Rows are computed when they are fetched."""

    def __init__(self, matrix: Matrix, columns: Columns) -> None:
        self.parts = (matrix,)
        self._columns = columns
        self.shape = matrix.shape[0], len(columns)
        self.label = matrix.label
        self.layout: Layout = matrix.layout
        self.dtype: np.dtype[Any] = matrix.dtype
        # Sums of integers have 64 bits, since their own type may be too narrow.
        self.stored_dtype: np.dtype[Any] = sum_dtype(matrix.stored_dtype)

    @property
    def cost(self) -> FetchCost:
        """Memory that a fetch takes: that of the underlying matrix, and the computed rows."""
        cost = self.parts[0].cost
        widening = max(1, self.stored_dtype.itemsize // memory_dtype(self.parts[0].stored_dtype).itemsize)
        dense = len(self._columns) * memory_dtype(self.stored_dtype).itemsize
        row = dense if self.layout == "dense" else widening * cost.row
        return FetchCost(
            row=row,
            held=row,
            working=cost.held + cost.working + row,
            fixed=cost.fixed,
            kept=cost.kept,
            chunk_rows=cost.chunk_rows,
        )

    def fetch(self, rows: NDArray[np.int64]) -> RowBuffer:
        rows = check_rows(self.label, self.shape[0], rows)
        fetched = self.parts[0].fetch(rows)
        every = np.arange(len(rows), dtype=np.int64)
        held = memory_dtype(self.stored_dtype)
        if self.layout == "csr":
            block = fetched.gather_csr(every, dtype=held, columns=self._columns)
            return CSRRowBuffer.of_block(self.label, rows, self.shape[1], self.dtype, block)
        out = np.empty((len(rows), self.shape[1]), dtype=held)
        fetched.gather(every, out=out, columns=self._columns)
        return DenseRowBuffer.of_block(self.label, rows, self.dtype, out)

    def __repr__(self) -> str:
        return f"<SummedMatrix {self.shape[1]} columns of {self.parts[0]!r}>"
