"""Common base of fetched CSR and dense rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError, StorageError
from dasksc.storage.arrays import memory_dtype
from dasksc.storage.dtypes import cast, holds_all, representable, text_of
from dasksc.storage.matrix import ColumnMaps, Columns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origins:
    """Source matrix of each row, for a fetch from several matrices."""

    numbers: NDArray[np.int32]  # Index of the matrix that each row comes from, shape (n_rows,), int32
    labels: tuple[str, ...]  # Names of the matrices in error messages
    # Maps from the columns of the matrices to common columns; None if all matrices have the same columns.
    maps: ColumnMaps | None


class RowBufferBase:
    """Base class of fetched CSR and dense rows."""

    def __init__(
        self, label: str, rows: NDArray[np.int64], n_vars: int, dtype: np.dtype[Any], origins: Origins | None
    ) -> None:
        self.label = label
        self.rows = rows
        self.shape = (len(rows), n_vars)
        self.dtype = dtype
        self.origins = origins
        self.column_maps = None if origins is None else origins.maps

    @property
    def nbytes(self) -> int:
        """Anonymous memory held, in bytes."""
        raise NotImplementedError

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.nbytes

    def reordered(self, order: NDArray[np.int64]) -> Self:
        """Return the same rows in another order, without copying their values."""
        # copy.copy would go through __reduce__, which copies the rows into a block.
        result = object.__new__(type(self))
        result.__dict__.update(self.__dict__)
        result.rows = self.rows[order]
        result.__dict__.pop("_maps", None)
        if self.origins is not None:
            result.origins = replace(self.origins, numbers=self.origins.numbers[order])
        return result

    @cached_property
    def _maps(self) -> NDArray[np.int32]:
        """Index of the column map of each row, shape (n_rows,), int32."""
        origins = self.origins
        if origins is None or origins.maps is None:
            return np.zeros(self.shape[0], dtype=np.int32)
        return origins.maps.which[origins.numbers]

    def _cast(
        self,
        values: NDArray[Any],
        out: NDArray[Any],
        positions: NDArray[np.int64],
        indptr: NDArray[np.int64] | None = None,
    ) -> None:
        """Copy `values` into `out`, of the same shape; raise `InputError` if `out` cannot represent a value."""
        # They are those of the fetched rows at `positions`: dense, or CSR with offsets `indptr`.
        with np.errstate(all="ignore"):
            made = cast(values, out)
        if holds_all(values, made):
            return
        element = int(np.argmin(representable(values, made)))
        place = element // out.shape[1] if indptr is None else np.searchsorted(indptr, element, side="right") - 1
        row = int(positions[place])
        raise InputError(
            f"{self._label_of(row)}: row {self.rows[row]} holds {values.flat[element]}, which "
            f"dtype={text_of(out.dtype)!r} cannot hold: it would become {made.flat[element]}. "
            f"Request dtype={self.dtype.name!r}."
        )

    def _sum_dtype_of(self, held: np.dtype[Any]) -> np.dtype[Any]:
        """Return the data type for sums of values of type `held`: 64-bit for integers, else that of the matrix."""
        held = held if held.kind in "iu" else self.dtype
        if held.kind not in "iu":
            return memory_dtype(self.dtype)
        return np.dtype(np.uint64 if held == np.uint64 else np.int64)

    def _check_sums(self, sums: NDArray[Any], dtype: np.dtype[Any]) -> None:
        """Raise an error if `dtype` is the integer data type of the matrix and cannot represent the sums."""
        if dtype != self.dtype or dtype.kind not in "iu" or not len(sums):
            return
        smallest, largest = int(sums.min()), int(sums.max())
        if smallest < np.iinfo(dtype).min or largest > np.iinfo(dtype).max:
            raise StorageError(
                f"{self.label}: some rows store several values for one column, and their sums, from {smallest} to "
                f"{largest}, do not fit {dtype}. Request another dtype, or write the file again in a wider "
                "type: adata.X = adata.X.astype('int64'); adata.X.sum_duplicates()."
            )

    def _label_of(self, row: int) -> str:
        return self.label if self.origins is None else self.origins.labels[self.origins.numbers[row]]


def indptr_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the CSR indptr of rows with the given lengths."""
    indptr = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=indptr[1:])
    return indptr


def check_positions(n_rows: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `positions` as a contiguous int64 array for the kernels; raise `InputError` if any is out of range."""
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
    """Return `positions` as a contiguous int64 array for the kernels; raise `InputError` for an invalid request."""
    if columns is not None and columns.n_vars != shape[1]:
        raise InputError(
            f"columns were selected for a matrix with {columns.n_vars} columns, but this one has {shape[1]}"
        )
    expected = (len(positions), shape[1] if columns is None else len(columns))
    if out.shape != expected or not out.flags.c_contiguous or not out.flags.writeable:
        raise InputError(
            f"out must be a writable, C-contiguous array of shape {expected}; got shape {out.shape} "
            f"and strides {out.strides}"
        )
    return check_positions(shape[0], positions)
