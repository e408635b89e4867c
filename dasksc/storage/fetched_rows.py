"""Rows of a fetch: what CSR and dense rows share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dasksc.errors import InputError, StorageError
from dasksc.kernels import csr as kernels
from dasksc.storage import buffers
from dasksc.storage.arrays import RowPointers, memory_dtype
from dasksc.storage.columns import ColumnMaps, Columns
from dasksc.storage.dtypes import cast, holds_all, may_round, representable, text_of

Layout = Literal["csr", "dense"]
Empty: TypeAlias = Callable[[Any, DTypeLike], NDArray[Any]]
"""Allocation of an uninitialized array of a shape and a data type."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origins:
    """Source matrix of each row, for a fetch from several matrices."""

    numbers: NDArray[np.int32]  # Index of the matrix that each row comes from, shape (n_rows,), int32
    labels: tuple[str, ...]  # Names of the matrices in error messages
    # Maps from the columns of the matrices to common columns; None if all matrices have the same columns.
    maps: ColumnMaps | None


class RowBuffer:
    """Rows of one fetch, in memory or memory-mapped, at arbitrary addresses."""

    layout: Layout

    def __init__(
        self,
        label: str,
        rows: NDArray[np.int64],
        n_vars: int,
        dtype: np.dtype[Any],
        pointers: tuple[RowPointers, ...],
        origins: Origins | None,
    ) -> None:
        self.label = label
        self.rows = rows
        self.shape = (len(rows), n_vars)
        self.dtype: np.dtype[Any] = dtype  # for computation, whatever the data type in which the values are held
        self.pointers = pointers  # values, and column indices of CSR rows
        self.origins = origins
        self.column_maps = None if origins is None else origins.maps
        self._block: Any = None  # all rows, if they are in a contiguous block

    @property
    def nbytes(self) -> int:
        """Anonymous memory held, in bytes; mapped pages do not count."""
        return sum(one.held_bytes for one in self.pointers)

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.nbytes

    @property
    def types(self) -> tuple[np.dtype[Any], ...]:
        """Data types in which values, and column indices of CSR rows, are held."""
        return tuple(one.dtype for one in self.pointers)

    @abstractmethod
    def gather(
        self,
        positions: NDArray[np.int64],
        *,
        out: NDArray[Any],
        columns: Columns | None = None,
    ) -> None:
        """Write the rows at `positions` into a dense `out`; raise `InputError` if its type cannot hold a value."""
        # Repeated columns of a row are summed first. `out` is C-contiguous, shape (len(positions), n_vars or
        # len(columns)); every element is written. Several threads may call this at once.

    @abstractmethod
    def gather_csr(
        self,
        positions: NDArray[np.int64],
        *,
        dtype: np.dtype[Any] | None = None,
        columns: Columns | None = None,
        empty: Empty = buffers.empty,
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
        """Return ``(indptr, indices, data)`` of the rows at `positions`, in that order."""
        # `empty` allocates `indices` and `data`. `indices` are strictly ascending within each row. Repeated columns of
        # a row are summed in stored order, in the data type of the matrix (integers in 64 bits), and then converted to
        # `dtype` (default: that for computation).

    @abstractmethod
    def compact(self) -> Self:
        """Copy the rows into a contiguous block, which can be pickled; return self if they are in one already."""

    @abstractmethod
    def converted(self, *dtypes: np.dtype[Any]) -> Self:
        """Copy the rows into a contiguous block, with the given data types (see `types`) and the common columns."""

    @property
    def block(self) -> Any:
        """Rows as one array or as ``(indptr, indices, data)``; copies unless they are in a contiguous block."""
        return self.compact()._block

    def reordered(self, order: NDArray[np.int64]) -> Self:
        """Return the same rows in another order, without copying their values."""
        # copy.copy would go through __reduce__, which copies the rows into a block.
        result = object.__new__(type(self))
        result.__dict__.update(self.__dict__)
        result.rows = self.rows[order]
        result.pointers = tuple(one.ordered(order) for one in self.pointers)
        result._block = None
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
            f"Request dtype={(values if may_round(values.dtype, self.dtype) else self).dtype.name!r}."
        )

    def _source_dtype(
        self, values: RowPointers, lengths: NDArray[np.int64], positions: NDArray[np.int64], dtype: np.dtype[Any]
    ) -> np.dtype[Any]:
        """Return the data type of stored `values` to be written as `dtype`."""
        # It is float64 for 64-bit integers that no float64 rounds, which can be written as floats without a check.
        if not may_round(values.dtype, dtype):
            return values.dtype
        is_signed = np.int64(-1 if values.dtype.kind == "i" else 0)
        exceeds = kernels.exceeds(positions, lengths, values.at, 53, is_signed, values.like.view(np.int64))
        return values.dtype if exceeds else np.dtype(np.float64)

    def _sum_dtype_of(self, held: np.dtype[Any]) -> np.dtype[Any]:
        """Return the data type for sums of values of type `held`: 64-bit for integers, else that of the matrix."""
        held = held if held.kind in "iu" else self.dtype
        if held.kind not in "iub":
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
