"""Fetched dense rows, and the gathering of batches from them."""

from __future__ import annotations

import contextlib
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.kernels import csr as kernels
from dasksc.storage import buffers
from dasksc.storage.arrays import RowPointers, memory_dtype
from dasksc.storage.columns import NOWHERE, Columns, Sums
from dasksc.storage.dtypes import BFLOAT16, can_round, kernel_target, may_round, written
from dasksc.storage.fetched_rows import Empty, Layout, Origins, RowBuffer, check_gather, indptr_of


class DenseRowBuffer(RowBuffer):
    """Fetched dense rows."""

    layout: Layout = "dense"

    def __init__(
        self,
        *,
        label: str,
        rows: NDArray[np.int64],
        n_vars: int,
        dtype: np.dtype[Any],
        values: RowPointers,
        origins: Origins | None = None,
    ) -> None:
        super().__init__(label, rows, n_vars, dtype, (values,), origins)

    @property
    def values(self) -> RowPointers:
        return self.pointers[0]

    def gather(
        self,
        positions: NDArray[np.int64],
        *,
        out: NDArray[Any],
        columns: Columns | None = None,
    ) -> None:
        positions = check_gather(self.shape, positions, out=out, columns=columns)
        if columns is None and self.column_maps is None and can_round(self.values.dtype, out.dtype):
            bits, like, infinity = written(out, self.values.like)
            kernels.copy_rows(positions, self.values.at, bits, like)
            if not kernels.has_infinity(bits.reshape(-1), infinity):
                return
        if out.dtype == BFLOAT16:
            values = buffers.empty(out.shape, np.float32)
            self.gather(positions, out=values, columns=columns)
            self._cast(values, out, positions)
            return
        sources = self._sources(columns)
        held = self.values.dtype
        if may_round(held, out.dtype):
            widths = np.array([self.shape[1]]) if sources is None else sources.max(axis=1, initial=-1) + 1
            held = self._source_dtype(self.values, widths[self._maps], positions, out.dtype)
        target = kernel_target(out, held)
        if sources is None:
            kernels.copy_rows(positions, self.values.at, target, self.values.like)
        else:
            fill = self._fill_value(out.dtype, sources)
            missing = fill if target is out else np.zeros(1, dtype=target.dtype)
            kernels.copy_columns(positions, self.values.at, self._maps, sources, target, missing, self.values.like)
        if target is not out:
            self._cast(target, out, positions)
            if sources is not None and fill[0] != 0:  # the type of `target` may not hold the fill value
                out[(sources == NOWHERE)[self._maps[positions]]] = fill[0]
        if columns is not None and columns.sums is not None:
            self._add_up(positions, out, columns.sums)

    def _add_up(self, positions: NDArray[np.int64], out: NDArray[Any], sums: Sums) -> None:
        """Write the sums of columns that map to the same column of `out`."""
        held = self._held_dtype
        values = np.empty((len(positions), len(sums.columns)), dtype=held)
        self.gather(positions, out=values, columns=sums.columns)
        added = np.empty((len(positions), len(sums.targets)), dtype=self._sum_dtype_of(held))
        kernels.add_up(values, sums.starts, added)
        self._check_sums(added, out.dtype)
        converted = np.empty(added.shape, dtype=out.dtype)
        self._cast(added, converted, positions)
        out[:, sums.targets] = converted

    @property
    def _held_dtype(self) -> np.dtype[Any]:
        """Data type that represents both the stored values and the fill value of columns that a part lacks."""
        return self.values.dtype if self.column_maps is None else memory_dtype(self.dtype)

    def _fill_value(self, dtype: np.dtype[Any], sources: NDArray[np.int64]) -> NDArray[Any]:
        """Return the fill value of columns that a part lacks, shape (1,); raise an error if `dtype` cannot hold it."""
        fill = None if self.column_maps is None else self.column_maps.fill_value
        value = np.nan if fill is None else fill
        missing = np.zeros(1, dtype=dtype)
        with contextlib.suppress(ValueError, OverflowError), np.errstate(over="ignore"):
            missing[0] = value
        is_held = np.isinf(missing[0]) == np.isinf(value) if dtype.kind == "f" else missing[0] == value
        if not is_held and dtype.kind != "b" and (sources == NOWHERE).any():
            raise InputError(
                f"{self.label} is filled with {value} where atlases lack columns, but {dtype} cannot hold this "
                "value. Request a float dtype, or open the atlases with fill_value=0"
            )
        return missing

    def gather_csr(
        self,
        positions: NDArray[np.int64],
        *,
        dtype: np.dtype[Any] | None = None,
        columns: Columns | None = None,
        empty: Empty = buffers.empty,
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
        dtype = self.dtype if dtype is None else np.dtype(dtype)
        n_vars = self.shape[1] if columns is None else len(columns)
        held = self._held_dtype
        if columns is not None and columns.sums is not None:
            held = self._sum_dtype_of(held)
        dense = np.empty((len(positions), n_vars), dtype=held)
        self.gather(positions, out=dense, columns=columns)
        counts = np.empty(len(positions), dtype=np.int64)
        kernels.count_nonzeros(dense, counts)
        indptr = indptr_of(counts)
        indices = empty(int(indptr[-1]), np.int32)
        data = empty(int(indptr[-1]), dtype)
        target = kernel_target(data, held)
        kernels.squeeze(dense, indptr, indices, target)
        if target is not data:
            self._cast(target, data, positions, indptr)
        return indptr, indices, data

    def compact(self) -> Self:
        return self if self._block is not None else self.converted(self._held_dtype)

    def converted(self, *dtypes: np.dtype[Any]) -> Self:
        block = buffers.empty(self.shape, *dtypes)
        self.gather(np.arange(self.shape[0], dtype=np.int64), out=block)
        return self.of_block(self.label, self.rows, self.dtype, block)

    @classmethod
    def of_block(cls, label: str, rows: NDArray[np.int64], dtype: np.dtype[Any], block: NDArray[Any]) -> Self:
        """Wrap all rows of a C-contiguous `block`, shape (n_rows, n_vars)."""
        at = np.arange(len(rows), dtype=np.int64)
        values = RowPointers.in_block(block, at, at + 1)
        fetched = cls(label=label, rows=rows, n_vars=block.shape[1], dtype=dtype, values=values)
        fetched._block = block
        return fetched

    def __reduce__(self) -> tuple[Any, ...]:
        return DenseRowBuffer.of_block, (self.label, self.rows, self.dtype, self.block)

    def _sources(self, columns: Columns | None) -> NDArray[np.int64] | None:
        """Return the stored column of each output column; None if columns are unchanged."""
        if self.column_maps is not None:
            return self.column_maps.sources(columns)
        return None if columns is None else columns.sources
