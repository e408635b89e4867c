"""Fetched CSR rows, and the gathering of batches from them."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError
from dasksc.kernels import csr as kernels
from dasksc.storage import buffers
from dasksc.storage.arrays import RowPointers
from dasksc.storage.columns import Columns, Lookups
from dasksc.storage.dtypes import can_round, converts, counts_dtype, kernel_target, narrowest, written
from dasksc.storage.fetched_rows import Empty, Layout, Origins, RowBuffer, check_gather, check_positions, indptr_of

CSRBlock: TypeAlias = tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]
"""CSR rows as ``(indptr, indices, data)``."""


class CSRRowBuffer(RowBuffer):
    """Fetched CSR rows."""

    layout: Layout = "csr"

    def __init__(
        self,
        *,
        label: str,
        rows: NDArray[np.int64],
        n_vars: int,
        dtype: np.dtype[Any],
        lengths: NDArray[np.int64],
        data: RowPointers,
        indices: RowPointers,
        origins: Origins | None = None,
    ) -> None:
        super().__init__(label, rows, n_vars, dtype, (data, indices), origins)
        self.lengths = lengths
        self._n_columns = n_vars if self.column_maps is None else self.column_maps.n_columns
        # Set by the first batch that has a row with unsorted columns, so that later batches skip the fast path.
        self._unordered = False

    @property
    def data(self) -> RowPointers:
        return self.pointers[0]

    @property
    def indices(self) -> RowPointers:
        return self.pointers[1]

    def gather(
        self,
        positions: NDArray[np.int64],
        *,
        out: NDArray[Any],
        columns: Columns | None = None,
    ) -> None:
        positions = check_gather(self.shape, positions, out=out, columns=columns)
        held = self._source_dtype(self.data, self.lengths, positions, out.dtype)
        if (converts(held, out.dtype) or can_round(held, out.dtype)) and self._scatter(positions, out, columns):
            return
        # Values to be summed or checked are converted as CSR, which has fewer, and their bits are written.
        indptr, indices, data = self.gather_csr(positions, dtype=out.dtype, columns=columns)
        if data.dtype.kind == "f":
            data += 0  # -0.0 becomes 0.0, as in sums
        bits = np.dtype(f"u{out.itemsize}")
        block = indptr, indices, data.view(bits)
        merged = self.of_block(self.label, self.rows[positions], out.shape[1], self.dtype, block)
        merged._scatter(np.arange(len(positions), dtype=np.int64), out.view(bits), None)

    def _scatter(self, positions: NDArray[np.int64], target: NDArray[Any], columns: Columns | None) -> bool:
        """Write rows into a dense `target`; return False if they must be summed or checked in another type first."""
        any_order = bool(target.dtype == self._sum_dtype)
        mapped = self._mapped(columns)
        adds_up = mapped is not None and mapped[1].adds_up
        if (self._unordered or adds_up) and not any_order:
            return False
        out, like, infinity = written(target, self.data.like)
        to = out, like, self.indices.like
        if mapped is not None:
            tables = mapped[0], mapped[1].to, mapped[1].drops
            bad = kernels.scatter_columns(positions, *self._where, *tables, *to, any_order)
        elif infinity is not None:
            return self._is_ordered(kernels.scatter_rounded(positions, *self._where, self._n_columns, *to, infinity))
        else:
            bad = kernels.scatter_rows(positions, *self._where, self._n_columns, *to, any_order)
        return self._is_ordered(bad) and not (infinity is not None and kernels.has_infinity(out.reshape(-1), infinity))

    def gather_csr(
        self,
        positions: NDArray[np.int64],
        *,
        dtype: np.dtype[Any] | None = None,
        columns: Columns | None = None,
        empty: Empty = buffers.empty,
        any_order: bool = False,
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
        # With `any_order`, columns are left as stored, and repeated ones are not summed.
        dtype = self.dtype if dtype is None else np.dtype(dtype)
        positions = np.ascontiguousarray(positions, dtype=np.int64)
        indptr = np.empty(len(positions) + 1, dtype=np.int64)
        n_values = kernels.row_starts(positions, self.lengths, indptr)
        if n_values < 0:
            check_positions(self.shape[0], positions)
        mapped = self._mapped(columns)
        if mapped is not None and mapped[1].drops:
            counts = np.empty(len(positions), dtype=np.int64)
            tables = mapped[0], mapped[1].to
            self._refuse(
                kernels.count_columns(positions, self.lengths, self.indices.at, *tables, counts, self.indices.like)
            )
            indptr = indptr_of(counts)
            n_values = int(indptr[-1])
        indices = empty(n_values, np.int32)
        data = empty(n_values, dtype)
        held = self._source_dtype(self.data, self.lengths, positions, dtype)
        target = data if can_round(held, dtype) else kernel_target(data, held)
        if not self._copy(positions, (indptr, indices, target), columns, any_order=any_order):
            sums = kernel_target(data, self._sum_dtype)
            self._merge(positions, (indptr, indices, sums), columns)
            n_values = int(indptr[-1])
            self._check_sums(sums[:n_values], dtype)
            if sums is data:
                return indptr, indices[:n_values], data[:n_values]
            indices, data, target = indices[:n_values], data[:n_values], sums[:n_values]
        if target is not data:
            self._cast(target, data, positions, indptr)
        return indptr, indices, data

    def compact(self) -> Self:
        # Columns of several matrices are mapped to their common columns. Column indices take two bytes, if possible.
        # Values take one or two bytes if they are counts, which many atlases store as floats. Batches gathered from the
        # copy are identical, bit for bit, to those gathered from the original rows.
        if self._block is not None:
            return self
        converted = self.converted(self.data.dtype, narrowest(self.indices.dtype, self.shape[1]))
        indptr, indices, data = converted.block
        narrow = counts_dtype(data)
        if narrow == data.dtype:
            return converted
        counts = buffers.empty(len(data), narrow)
        counts[...] = data
        return self.of_block(self.label, self.rows, self.shape[1], self.dtype, (indptr, indices, counts))

    @property
    def _sum_dtype(self) -> np.dtype[Any]:
        """Data type in which repeated columns are summed: 64 bits for integers, otherwise that of the matrix."""
        return self._sum_dtype_of(self.data.dtype)

    def converted(self, *dtypes: np.dtype[Any]) -> Self:
        # Columns keep their stored order, and repeated ones are not summed, since sums may not fit into `data`.
        data, indices = dtypes
        positions = np.arange(self.shape[0], dtype=np.int64)
        if self.column_maps is not None:
            indptr, columns, values = self.gather_csr(positions, dtype=data, any_order=True)
            columns = columns.astype(indices, copy=False)
        else:
            indptr = indptr_of(self.lengths)
            columns, values = buffers.empty(int(indptr[-1]), indices), buffers.empty(int(indptr[-1]), data)
            target = kernel_target(values, self._source_dtype(self.data, self.lengths, positions, data))
            self._copy(positions, (indptr, columns, target), None, any_order=True)
            if target is not values:
                self._cast(target, values, positions, indptr)
        return self.of_block(self.label, self.rows, self.shape[1], self.dtype, (indptr, columns, values))

    @classmethod
    def of_block(
        cls,
        label: str,
        rows: NDArray[np.int64],
        n_vars: int,
        dtype: np.dtype[Any],
        block: CSRBlock,
    ) -> Self:
        """Wrap all rows of a CSR `block` ``(indptr, indices, data)`` whose column indices have been checked."""
        indptr, indices, data = block
        fetched = cls(
            label=label,
            rows=rows,
            n_vars=n_vars,
            dtype=dtype,
            lengths=np.diff(indptr),
            data=RowPointers.in_block(data, indptr[:-1], indptr[1:]),
            indices=RowPointers.in_block(indices, indptr[:-1], indptr[1:]),
        )
        fetched._block = block
        return fetched

    def __reduce__(self) -> tuple[Any, ...]:
        # Addresses are meaningless in another process, so the block is pickled.
        return CSRRowBuffer.of_block, (self.label, self.rows, self.shape[1], self.dtype, self.block)

    def reordered(self, order: NDArray[np.int64]) -> Self:
        result = super().reordered(order)
        result.lengths = self.lengths[order]
        return result

    @property
    def _where(self) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint64]]:
        return self.lengths, self.data.at, self.indices.at

    def _mapped(self, columns: Columns | None) -> tuple[NDArray[np.int32], Lookups] | None:
        """Return the maps and lookups that renumber columns; None if columns are unchanged."""
        if self.column_maps is not None:
            return self._maps, self.column_maps.lookups(columns)
        return None if columns is None else (self._maps, columns.lookups)

    def _copy(self, positions: NDArray[np.int64], block: CSRBlock, columns: Columns | None, *, any_order: bool) -> bool:
        """Copy rows as stored; return False if columns must be ascending but are not, or values must be checked."""
        indptr, indices, data = block
        mapped = self._mapped(columns)
        if not any_order and (self._unordered or (mapped is not None and not mapped[1].ascends)):
            return False
        out, like, infinity = written(data, self.data.like)
        to = indptr[:-1], indices, out, like, self.indices.like, any_order
        if mapped is None:
            bad = kernels.copy_rows_csr(positions, *self._where, self._n_columns, *to)
        else:
            bad = kernels.copy_columns_csr(positions, *self._where, mapped[0], mapped[1].to, mapped[1].drops, *to)
        return self._is_ordered(bad) and not (infinity is not None and kernels.has_infinity(out, infinity))

    def _merge(self, positions: NDArray[np.int64], block: CSRBlock, columns: Columns | None) -> None:
        """Copy rows, sorting their columns and summing repeated ones; also write their offsets, the first array."""
        mapped = self._mapped(columns)
        tables = (self._maps, self._identity) if mapped is None else (mapped[0], mapped[1].to)
        sums = np.empty(self.shape[1] if columns is None else len(columns), dtype=self._sum_dtype)
        likes = self.data.like, self.indices.like
        bad = kernels.merge_columns_csr(positions, *self._where, *tables, *block, sums, *likes)
        self._refuse(bad)

    @cached_property
    def _identity(self) -> NDArray[np.int32]:
        return np.arange(self._n_columns, dtype=np.int32)[None]

    def _is_ordered(self, bad_row: int) -> bool:
        if bad_row == kernels.UNORDERED:
            self._unordered = True
        if bad_row in (kernels.UNORDERED, kernels.INFINITE):
            return False
        self._refuse(bad_row)
        return True

    def _refuse(self, bad_row: int) -> None:
        if bad_row >= 0:
            raise CorruptDataError(
                f"{self._label_of(bad_row)}/indices: row {self.rows[bad_row]} has a column index outside "
                f"[0, {self._n_columns}). The file is corrupt, or its shape attribute is wrong; write it "
                "again from its source."
            )
