"""Rows within reach of memory, and the batches gathered from them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError, InputError, StorageError
from dasksc.kernels import csr as kernels
from dasksc.storage import buffers
from dasksc.storage.arrays import memory_dtype
from dasksc.storage.matrix import ColumnMaps, Columns, Fetched, Layout, Lookups
from dasksc.storage.reach import Reached

__all__ = ["CSRFetched", "DenseFetched", "holds_all", "join", "sum_dtype"]

# Columns that tables for putting rows in order are made of; a batch of a wider matrix has few of them.
_MOST_NUMBERED = 2**22


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origins:
    """Which of several matrices each row of a fetch is of.

    Parameters
    ----------
    numbers
        Number of its matrix, shape (n_rows,), int32.
    labels
        What to call the matrices in errors.
    maps
        How their columns become common ones; None: they have the same.
    """

    numbers: NDArray[np.int32]
    labels: tuple[str, ...]
    maps: ColumnMaps | None

    def without_maps(self) -> Origins:
        """Return the same of rows whose columns are the common ones already."""
        return replace(self, maps=None)


class _Rows:
    """What CSR and dense rows have in common; parameters as for `CSRFetched`."""

    def __init__(
        self, label: str, rows: NDArray[np.int64], n_vars: int, dtype: np.dtype[Any], origins: Origins | None
    ) -> None:
        self.label = label
        self.rows = rows
        self.shape = (len(rows), n_vars)
        self.dtype = dtype
        self._origins = origins
        self._column_maps = None if origins is None else origins.maps
        self._kept_maps: NDArray[np.int32] | None = None

    @property
    def _maps(self) -> NDArray[np.int32]:
        """Number of the map of each row's columns, shape (n_rows,)."""
        # Made when it is first needed, and kept for the other batches.
        if self._kept_maps is None:
            origins = self._origins
            if origins is None or origins.maps is None:
                self._kept_maps = np.zeros(self.shape[0], dtype=np.int32)
            else:
                self._kept_maps = origins.maps.which[origins.numbers]
        return self._kept_maps

    def _cast(self, values: NDArray[Any], out: NDArray[Any], rows_of: Callable[[int], int]) -> None:
        """Copy `values` into `out`, of the same shape, or name one that its type cannot hold.

        `rows_of` says which row fetched an element is of, by its place in `values`.
        """
        with np.errstate(all="ignore"):
            out[...] = values
        if holds_all(values, out):
            return
        fits = representable(values, out.dtype)
        place = int(np.argmin(fits))
        row = rows_of(place)
        label = self._label_of(row)
        near = [int(self.rows[i]) for i in range(self.shape[0]) if self._label_of(i) == label]
        raise InputError(
            f"{label}: row {self.rows[row]} (of rows {min(near)} to {max(near)}, which were read together) holds "
            f"{values.flat[place]}, which dtype={out.dtype.name!r} cannot hold: it would become {out.flat[place]}. Ask "
            f"for dtype={self.dtype.name!r}, which holds it."
        )

    def _label_of(self, row: int) -> str:
        return self.label if self._origins is None else self._origins.labels[self._origins.numbers[row]]


class CSRFetched(_Rows):
    """CSR rows, each lying somewhere in memory.

    Parameters
    ----------
    label
        The matrix they come from.
    rows
        Their numbers in it, shape (n_rows,), for errors.
    n_vars
        Columns of the matrix.
    dtype
        Type to compute in.
    lengths
        Nonzeros of each row, shape (n_rows,), int64.
    data, indices
        Where each row's values and column numbers lie.
    origins
        Which matrices the rows are of, if of several.
    """

    layout: Layout = "csr"

    def __init__(
        self,
        *,
        label: str,
        rows: NDArray[np.int64],
        n_vars: int,
        dtype: np.dtype[Any],
        lengths: NDArray[np.int64],
        data: Reached,
        indices: Reached,
        origins: Origins | None = None,
    ) -> None:
        super().__init__(label, rows, n_vars, dtype, origins)
        self._lengths = lengths
        self._data = data
        self._indices = indices
        self._n_columns = n_vars if self._column_maps is None else self._column_maps.n_columns
        self._block: tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]] | None = None
        # Found by the first batch that has a row whose columns do not ascend, for the other batches.
        self._unordered = False

    @property
    def nbytes(self) -> int:
        """Anonymous memory held, in bytes."""
        return self._data.held_bytes + self._indices.held_bytes

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.nbytes

    def gather(
        self,
        positions: NDArray[np.int64],
        *,
        out: NDArray[Any],
        columns: Columns | None = None,
    ) -> None:
        """Write the rows at `positions` into `out`, dense; see `Fetched.gather`."""
        positions = check_gather(self.shape, positions, out=out, columns=columns)
        # Counts may be held in a byte each. An integer type is checked for room, so nothing is converted before.
        narrow = out.dtype.kind in "iu"
        held = self._data.dtype if narrow else np.result_type(self._data.dtype, memory_dtype(self.dtype))
        target = kernel_target(out, held)
        if not self._scatter(positions, target, columns):
            block = self.gather_csr(positions, dtype=self._sum_dtype, columns=columns)
            self._check_sums(block[2], out.dtype)
            merged = self.of_block(self.label, self.rows[positions], out.shape[1], self.dtype, block)
            target = kernel_target(out, self._sum_dtype)
            merged._scatter(np.arange(len(positions), dtype=np.int64), target, None)
        if target is not out:
            self._cast(target, out, lambda place: int(positions[place // out.shape[1]]))

    def _scatter(self, positions: NDArray[np.int64], target: NDArray[Any], columns: Columns | None) -> bool:
        """Write rows into `target`, dense; return False if values have to be added up in another type first."""
        any_order = bool(target.dtype == self._sum_dtype)
        if self._unordered and not any_order:
            return False
        mapped = self._mapped(columns)
        to = target, self._data.like, self._indices.like, any_order
        if mapped is None:
            bad = kernels.scatter_rows(positions, *self._where, self._n_columns, *to)
        else:
            maps, lookups = mapped
            if lookups.renumbered is None:
                bad = kernels.scatter_columns(positions, *self._where, maps, lookups.to, lookups.kinds, *to)
            else:
                bad = kernels.renumber_rows(positions, *self._where, maps, lookups.renumbered, *to)
        return self._is_ordered(bad)

    def gather_csr(
        self,
        positions: NDArray[np.int64],
        *,
        dtype: np.dtype[Any] | None = None,
        columns: Columns | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
        """Return ``(indptr, indices, data)`` of the rows at `positions`; see `Fetched.gather_csr`."""
        return self._gather_csr(positions, self.dtype if dtype is None else np.dtype(dtype), columns)

    def gather_stored(
        self, positions: NDArray[np.int64], *, dtype: np.dtype[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
        """Return ``(indptr, indices, data)`` of rows with their values as they are stored: in any order, repeated."""
        return self._gather_csr(positions, dtype, any_order=True)

    def _gather_csr(
        self,
        positions: NDArray[np.int64],
        dtype: np.dtype[Any],
        columns: Columns | None = None,
        *,
        any_order: bool = False,
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
        positions = np.ascontiguousarray(positions, dtype=np.int64)
        indptr = np.empty(len(positions) + 1, dtype=np.int64)
        n_values = kernels.row_starts(positions, self._lengths, indptr)
        if n_values < 0:
            check_positions(self.shape[0], positions)
        mapped = self._mapped(columns)
        if mapped is not None and mapped[1].renumbered is None:
            counts = np.empty(len(positions), dtype=np.int64)
            maps, lookups = mapped
            self._refuse(
                kernels.count_columns(
                    positions, self._lengths, self._indices.at, maps, lookups.kinds, counts, self._indices.like
                )
            )
            indptr = indptr_of(counts)
            n_values = int(indptr[-1])
        indices = buffers.empty(n_values, np.int32)
        data = buffers.empty(n_values, dtype)
        target = kernel_target(data, self._data.dtype)
        if not self._copy(positions, indptr, indices, target, columns, any_order=any_order):
            sums = kernel_target(data, self._sum_dtype)
            self._merge(positions, indptr, indices, sums, columns)
            n_values = int(indptr[-1])
            self._check_sums(sums[:n_values], dtype)
            if sums is data:
                return indptr, indices[:n_values], data[:n_values]
            indices, data, target = indices[:n_values], data[:n_values], sums[:n_values]
        if target is not data:
            self._cast(target, data, lambda place: int(positions[np.searchsorted(indptr, place, side="right") - 1]))
        return indptr, indices, data

    def compact(self) -> CSRFetched:
        """Return the same rows in a block of their own, their columns the common ones; a block returns itself.

        Column numbers take two bytes where that is enough, values one or two if they are counts that fit: atlases
        hold counts as floats. The rows are the same to the last bit all the same.
        """
        if self._block is not None:
            return self
        converted = self.converted(self._data.dtype, narrowest(self._indices.dtype, self.shape[1]))
        indptr, indices, data = converted.block
        narrow = counts_dtype(data)
        if narrow == data.dtype:
            return converted
        counts = buffers.empty(len(data), narrow)
        counts[...] = data
        return CSRFetched.of_block(self.label, self.rows, self.shape[1], self.dtype, (indptr, indices, counts))

    @property
    def _types(self) -> tuple[np.dtype[Any], ...]:
        return self._data.dtype, self._indices.dtype

    @property
    def _sum_dtype(self) -> np.dtype[Any]:
        """Type in which values at one column are added up: integers in 64 bits, all else in that of the matrix."""
        held = self._data.dtype if self._data.dtype.kind in "iu" else self.dtype
        if held.kind not in "iu":
            return memory_dtype(self.dtype)
        return np.dtype(np.uint64 if held == np.uint64 else np.int64)

    def converted(self, data: np.dtype[Any], indices: np.dtype[Any]) -> CSRFetched:
        """Return the same rows in a block of their own, in the given types, their columns the common ones.

        Columns are in the order they are stored in, also where they repeat: their sums may not fit into `data`.
        """
        positions = np.arange(self.shape[0], dtype=np.int64)
        if self._column_maps is not None:
            indptr, columns, values = self._gather_csr(positions, data, any_order=True)
            columns = columns.astype(indices, copy=False)
        else:
            indptr = indptr_of(self._lengths)
            columns, values = buffers.empty(int(indptr[-1]), indices), buffers.empty(int(indptr[-1]), data)
            self._copy(positions, indptr, columns, values, any_order=True)
        return CSRFetched.of_block(self.label, self.rows, self.shape[1], self.dtype, (indptr, columns, values))

    @classmethod
    def of_block(
        cls,
        label: str,
        rows: NDArray[np.int64],
        n_vars: int,
        dtype: np.dtype[Any],
        block: tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]],
    ) -> CSRFetched:
        """Return rows that are the whole of a CSR `block`: ``(indptr, indices, data)``, checked columns."""
        indptr, indices, data = block
        fetched = cls(
            label=label,
            rows=rows,
            n_vars=n_vars,
            dtype=dtype,
            lengths=np.diff(indptr),
            data=_within(data, indptr),
            indices=_within(indices, indptr),
        )
        fetched._block = block
        return fetched

    @property
    def block(self) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:
        """The rows as ``(indptr, indices, data)``; copies, unless `compact` made them."""
        compact = self.compact()._block
        assert compact is not None
        return compact

    def __reduce__(self) -> tuple[Any, ...]:
        # Addresses mean nothing elsewhere: what travels is the block.
        return CSRFetched.of_block, (self.label, self.rows, self.shape[1], self.dtype, self.block)

    @property
    def _where(self) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint64]]:
        return self._lengths, self._data.at, self._indices.at

    def _mapped(self, columns: Columns | None) -> tuple[NDArray[np.int32], Lookups] | None:
        """Return the maps and lookups by which columns go elsewhere; None if all stay where they are."""
        if self._column_maps is not None:
            return self._maps, self._column_maps.lookups(columns)
        return None if columns is None else (self._maps, columns.lookups)

    def _copy(
        self,
        positions: NDArray[np.int64],
        indptr: NDArray[np.int64],
        indices: NDArray[Any],
        data: NDArray[Any],
        columns: Columns | None = None,
        *,
        any_order: bool,
    ) -> bool:
        """Write rows as they are stored; return False if their columns do not ascend, unless they need not."""
        mapped = self._mapped(columns)
        if not any_order and (self._unordered or (mapped is not None and not mapped[1].ascends)):
            return False
        to = (indptr[:-1], indices, data, self._data.like, self._indices.like, any_order)
        if mapped is None:
            bad = kernels.copy_rows_csr(positions, *self._where, self._n_columns, *to)
        else:
            maps, lookups = mapped
            if lookups.renumbered is None:
                bad = kernels.copy_columns_csr(positions, *self._where, maps, lookups.to, lookups.kinds, *to)
            else:
                n_kept = self.shape[1] if columns is None else len(columns)
                bad = kernels.renumber_rows_csr(positions, *self._where, maps, lookups.renumbered, n_kept, *to)
        return self._is_ordered(bad)

    def _merge(
        self,
        positions: NDArray[np.int64],
        indptr: NDArray[np.int64],
        indices: NDArray[Any],
        data: NDArray[Any],
        columns: Columns | None,
    ) -> None:
        """Write rows with ascending columns, values at one column added up, and where they lie into `indptr`."""
        mapped = self._mapped(columns)
        if mapped is None and self._n_columns > _MOST_NUMBERED:
            # Without tables as wide as the matrix: the columns that there are get numbers of their own.
            values = np.empty(len(data), dtype=self._data.dtype)
            self._copy(positions, indptr, indices, values, any_order=True)
            present, numbers = np.unique(indices, return_inverse=True)
            block = indptr.copy(), numbers.astype(np.int32), values
            numbered = self.of_block(self.label, self.rows[positions], len(present), self.dtype, block)
            numbered._merge(np.arange(len(positions), dtype=np.int64), indptr, indices, data, None)
            indices[: indptr[-1]] = present[indices[: indptr[-1]]]
            return
        maps, lookups = (self._maps, self._unchanged) if mapped is None else mapped
        sums = np.empty(self.shape[1] if columns is None else len(columns), dtype=self._sum_dtype)
        likes = self._data.like, self._indices.like
        bad = kernels.merge_columns_csr(
            positions, *self._where, maps, lookups.to, lookups.kinds, indptr, indices, data, sums, *likes
        )
        self._refuse(bad)

    @cached_property
    def _unchanged(self) -> Lookups:
        return Lookups.of(np.arange(self._n_columns, dtype=np.int32)[None])

    def _is_ordered(self, bad_row: int) -> bool:
        if bad_row == kernels.UNORDERED:
            self._unordered = True
            return False
        self._refuse(bad_row)
        return True

    def _check_sums(self, sums: NDArray[Any], dtype: np.dtype[Any]) -> None:
        """Refuse sums that the type of the matrix cannot hold, where they are wanted in that type."""
        if dtype != self.dtype or dtype.kind not in "iu" or not len(sums):
            return
        smallest, largest = int(sums.min()), int(sums.max())
        if smallest < np.iinfo(dtype).min or largest > np.iinfo(dtype).max:
            raise StorageError(
                f"{self.label}: rows have values at one column more than once, which add up to numbers from {smallest} "
                f"to {largest}; {dtype} cannot hold them. Ask for another dtype, or write the file again in a wider "
                "type: adata.X = adata.X.astype('int64'); adata.X.sum_duplicates()."
            )

    def _refuse(self, bad_row: int) -> None:
        if bad_row >= 0:
            raise CorruptDataError(
                f"{self._label_of(bad_row)}/indices: row {self.rows[bad_row]} has a column outside "
                f"[0, {self._n_columns}). The file is corrupt, or its shape attribute does not belong to it; write it "
                "again from its source."
            )


def _within(array: NDArray[Any], indptr: NDArray[np.int64]) -> Reached:
    return Reached.inside(
        (array,),
        dtype=array.dtype,
        which=0,
        offsets=indptr[:-1] * array.itemsize,
        sizes=np.diff(indptr) * array.itemsize,
        held_bytes=array.nbytes,
    )


class DenseFetched(_Rows):
    """Dense rows, each lying somewhere in memory.

    Parameters
    ----------
    label
        The matrix they come from.
    rows
        Their numbers in it, shape (n_rows,).
    n_vars
        Columns of the matrix.
    dtype
        Type to compute in.
    values
        Where each row lies.
    origins
        Which matrices the rows are of, if of several.
    """

    layout: Layout = "dense"

    def __init__(
        self,
        *,
        label: str,
        rows: NDArray[np.int64],
        n_vars: int,
        dtype: np.dtype[Any],
        values: Reached,
        origins: Origins | None = None,
    ) -> None:
        super().__init__(label, rows, n_vars, dtype, origins)
        self._values = values
        self._block: NDArray[Any] | None = None

    @property
    def nbytes(self) -> int:
        """Anonymous memory held, in bytes."""
        return self._values.held_bytes

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.nbytes

    def gather(
        self,
        positions: NDArray[np.int64],
        *,
        out: NDArray[Any],
        columns: Columns | None = None,
    ) -> None:
        """Write the rows at `positions` into `out`; see `Fetched.gather`."""
        positions = check_gather(self.shape, positions, out=out, columns=columns)
        target = kernel_target(out, self._values.dtype)
        sources = self._sources(columns)
        if sources is None:
            kernels.copy_rows(positions, self._values.at, target, self._values.like)
        else:
            self._missing(out.dtype, sources)
            missing = self._missing(target.dtype, sources)
            kernels.copy_columns(positions, self._values.at, self._maps, sources, target, missing, self._values.like)
        if target is not out:
            self._cast(target, out, lambda place: int(positions[place // out.shape[1]]))

    def _missing(self, dtype: np.dtype[Any], sources: NDArray[np.int64]) -> NDArray[Any]:
        """Return what stands in columns that come from nowhere, shape (1,)."""
        fill = None if self._column_maps is None else self._column_maps.fill_value
        value = np.nan if fill is None else fill
        missing = np.zeros(1, dtype=dtype)
        with contextlib.suppress(ValueError, OverflowError):
            missing[0] = value
        if dtype.kind != "f" and missing[0] != value and (sources < 0).any():
            raise InputError(
                f"{self.label} is {value} where parts lack columns, which {dtype} cannot hold. Ask for a float, or "
                "open the parts with fill_value=0"
            )
        return missing

    def gather_csr(
        self,
        positions: NDArray[np.int64],
        *,
        dtype: np.dtype[Any] | None = None,
        columns: Columns | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
        """Return ``(indptr, indices, data)`` of the rows at `positions`, without their zeros."""
        dtype = self.dtype if dtype is None else np.dtype(dtype)
        n_vars = self.shape[1] if columns is None else len(columns)
        held = self._values.dtype if self._column_maps is None else memory_dtype(self.dtype)
        dense = np.empty((len(positions), n_vars), dtype=held)
        self.gather(positions, out=dense, columns=columns)
        counts = np.empty(len(positions), dtype=np.int64)
        kernels.count_nonzeros(dense, counts)
        indptr = indptr_of(counts)
        indices = buffers.empty(int(indptr[-1]), np.int32)
        data = buffers.empty(int(indptr[-1]), dtype)
        target = kernel_target(data, held)
        kernels.squeeze(dense, indptr[:-1], indices, target)
        if target is not data:
            self._cast(target, data, lambda place: int(positions[np.searchsorted(indptr, place, side="right") - 1]))
        return indptr, indices, data

    def compact(self) -> DenseFetched:
        """Return the same rows in a block of their own, in the type they are stored in; a block returns itself."""
        if self._block is not None:
            return self
        return self.converted(self._values.dtype if self._column_maps is None else memory_dtype(self.dtype))

    @property
    def _types(self) -> tuple[np.dtype[Any], ...]:
        return (self._values.dtype,)

    def converted(self, dtype: np.dtype[Any]) -> DenseFetched:
        """Return the same rows in a block of their own, in the given type, their columns the common ones."""
        block = buffers.empty(self.shape, dtype)
        self.gather(np.arange(self.shape[0], dtype=np.int64), out=block)
        return DenseFetched.of_block(self.label, self.rows, self.dtype, block)

    @classmethod
    def of_block(cls, label: str, rows: NDArray[np.int64], dtype: np.dtype[Any], block: NDArray[Any]) -> DenseFetched:
        """Return rows that are the whole of a C-contiguous `block`, shape (n_rows, n_vars)."""
        size = block.shape[1] * block.itemsize
        values = Reached.inside(
            (block,),
            dtype=block.dtype,
            which=0,
            offsets=np.arange(len(rows), dtype=np.int64) * size,
            sizes=np.full(len(rows), size),
            held_bytes=block.nbytes,
        )
        fetched = cls(label=label, rows=rows, n_vars=block.shape[1], dtype=dtype, values=values)
        fetched._block = block
        return fetched

    @property
    def block(self) -> NDArray[Any]:
        """The rows as one array; a copy, unless `compact` made it."""
        compact = self.compact()._block
        assert compact is not None
        return compact

    def __reduce__(self) -> tuple[Any, ...]:
        return DenseFetched.of_block, (self.label, self.rows, self.dtype, self.block)

    def _sources(self, columns: Columns | None) -> NDArray[np.int64] | None:
        """Return where each column out comes from; None if all stay where they are."""
        if self._column_maps is not None:
            return self._column_maps.sources(columns)
        return None if columns is None else columns.positions[None]


def join(parts: Sequence[Fetched]) -> Fetched:
    """Return fetches of one matrix as one, their rows one after the other; nothing of them is copied."""
    if len(parts) == 1:
        return parts[0]
    rows = cast(Sequence[CSRFetched | DenseFetched], parts)
    origins = [part._origins for part in rows if part._origins is not None]
    joined = replace(origins[0], numbers=np.concatenate([one.numbers for one in origins])) if origins else None
    if len({part._types for part in rows}) == 1:
        return _concatenated(rows, label=rows[0].label, dtype=rows[0].dtype, origins=joined)
    # Of several matrices: what each part of the fetch holds depends on which it met.
    first = rows[0]
    return stack(
        parts,
        label=first.label,
        dtype=first.dtype,
        layout=first.layout,
        origins=None if joined is None else joined.without_maps(),
    )


def stack(
    parts: Sequence[Fetched], *, label: str, dtype: np.dtype[Any], layout: Layout, origins: Origins | None
) -> Fetched:
    """Return fetches of several matrices as one; only what differs in type or layout is copied.

    Parameters
    ----------
    parts
        At least one.
    label, dtype, layout, origins
        Of the result; it is CSR if any of the parts is.
    """
    rows = cast(Sequence[CSRFetched | DenseFetched], parts)
    if layout == "csr":
        rows = [_as_csr(part) for part in rows]
    held = [np.result_type(*types) for types in zip(*(part._types for part in rows), strict=True)]
    rows = [part if part._column_maps is None and list(part._types) == held else part.converted(*held) for part in rows]
    return _concatenated(rows, label=label, dtype=dtype, origins=origins)


def _concatenated(
    parts: Sequence[CSRFetched | DenseFetched], *, label: str, dtype: np.dtype[Any], origins: Origins | None
) -> Fetched:
    rows = np.concatenate([part.rows for part in parts])
    n_vars = parts[0].shape[1] if origins is None or origins.maps is None else origins.maps.n_vars
    if isinstance(parts[0], DenseFetched):
        dense = cast(Sequence[DenseFetched], parts)
        values = Reached.joined([part._values for part in dense])
        return DenseFetched(label=label, rows=rows, n_vars=n_vars, dtype=dtype, values=values, origins=origins)
    sparse = cast(Sequence[CSRFetched], parts)
    return CSRFetched(
        label=label,
        rows=rows,
        n_vars=n_vars,
        dtype=dtype,
        lengths=np.concatenate([part._lengths for part in sparse]),
        data=Reached.joined([part._data for part in sparse]),
        indices=Reached.joined([part._indices for part in sparse]),
        origins=origins,
    )


def _as_csr(part: CSRFetched | DenseFetched) -> CSRFetched:
    if isinstance(part, CSRFetched):
        return part
    held = part._values.dtype if part._column_maps is None else None
    indptr, indices, data = part.gather_csr(np.arange(part.shape[0], dtype=np.int64), dtype=held)
    return CSRFetched.of_block(part.label, part.rows, part.shape[1], part.dtype, (indptr, indices, data))


def narrowest(dtype: np.dtype[Any], n_vars: int) -> np.dtype[Any]:
    """Return the smaller of `dtype` and a two-byte type that numbers `n_vars` columns, if one does."""
    two_bytes = np.dtype(np.uint16)
    return two_bytes if n_vars <= 2**16 and dtype.itemsize > two_bytes.itemsize else dtype


def counts_dtype(values: NDArray[Any]) -> np.dtype[Any]:
    """Return the unsigned type of one or two bytes that holds `values` exactly, or the type that they have."""
    if values.dtype.kind not in "iuf" or values.dtype.itemsize not in (2, 4, 8) or not has_kernel_dtype(values.dtype):
        return values.dtype
    n_bytes = kernels.count_bytes(values, values.view(f"u{values.dtype.itemsize}"))
    return np.dtype(f"u{n_bytes}") if 0 < n_bytes < values.dtype.itemsize else values.dtype


def indptr_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where rows of the given lengths begin, and where the last one ends."""
    indptr = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=indptr[1:])
    return indptr


def check_positions(n_rows: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `positions` as the kernels take them."""
    positions = np.ascontiguousarray(positions, dtype=np.int64)
    if len(positions) and (positions.min() < 0 or positions.max() >= n_rows):
        raise InputError(f"positions must lie in [0, {n_rows}), the rows of this fetch; got {positions}")
    return positions


def check_gather(
    shape: tuple[int, int],
    positions: NDArray[np.int64],
    *,
    out: NDArray[Any],
    columns: Columns | None,
) -> NDArray[np.int64]:
    """Return `positions` as the kernels take them, or say what is wrong with the request."""
    if columns is not None and columns.n_vars != shape[1]:
        raise InputError(f"columns are of a matrix with {columns.n_vars} columns; this one has {shape[1]}")
    expected = (len(positions), shape[1] if columns is None else len(columns))
    if out.shape != expected or not out.flags.c_contiguous or not out.flags.writeable:
        raise InputError(
            f"out must be a writable, C-contiguous array of shape {expected}; got shape {out.shape} "
            f"and strides {out.strides}"
        )
    return check_positions(shape[0], positions)


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which values of `dtype` are added up: of integers, one of 64 bits."""
    if dtype.kind == "f":
        return dtype
    return np.dtype(np.int64 if dtype.kind == "i" else np.uint64)


def kernel_target(out: NDArray[Any], source: np.dtype[Any]) -> NDArray[Any]:
    """Return an array the kernels can write values of the `source` type to.

    It is `out`, or one of the `source` type: where numba lacks out's, or where that is of integers which may not hold
    all such values. Floats do, within their precision; a boolean says which values are not zero.
    """
    wraps = out.dtype.kind in "iu" and not np.can_cast(source, out.dtype, "safe")
    return np.empty(out.shape, dtype=source) if wraps or not has_kernel_dtype(out.dtype) else out


def holds_all(values: NDArray[Any], out: NDArray[Any]) -> bool:
    """Return whether `out`, cast from `values`, holds all of them, for floats within their precision."""
    if not values.size:
        return True
    if out.dtype.kind not in "iu":
        return bool(np.isfinite(out).all()) or bool(representable(values, out.dtype).all())
    limits = np.iinfo(out.dtype)
    # Python compares its own numbers exactly, of whatever types they were; NaN is in no range.
    in_range = limits.min <= values.min().item() and values.max().item() <= limits.max
    return in_range and (values.dtype.kind != "f" or bool((out == values).all()))


def representable(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.bool_]:
    """Return which of `values` an integer type or float16 holds; rounding of floats does not count."""
    if dtype.kind not in "iu":
        with np.errstate(over="ignore"):
            return np.asarray(~np.isfinite(values) | np.isfinite(values.astype(dtype)))
    limits = np.iinfo(dtype)
    in_range = np.array([limits.min <= value <= limits.max for value in values.ravel().tolist()]).reshape(values.shape)
    return np.asarray(in_range & (values == np.floor(values)) if values.dtype.kind == "f" else in_range)


def has_kernel_dtype(dtype: np.dtype[Any]) -> bool:
    """Return whether the kernels can write `dtype`."""
    return bool(memory_dtype(dtype) == dtype)
