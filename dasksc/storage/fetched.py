"""Rows within reach of memory, and the batches gathered from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError, InputError
from dasksc.kernels import csr as kernels
from dasksc.storage import memory
from dasksc.storage.arrays import memory_dtype
from dasksc.storage.matrix import Columns, Fetched, Layout
from dasksc.storage.reach import Reached

__all__ = ["CSRFetched", "DenseFetched", "join"]


class CSRFetched:
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
        Type of the values as stored.
    lengths
        Nonzeros of each row, shape (n_rows,), int64.
    data, indices
        Where each row's values and column numbers lie.
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
    ) -> None:
        self.label = label
        self.rows = rows
        self.shape = (len(rows), n_vars)
        self.dtype = dtype
        self._lengths = lengths
        self._data = data
        self._indices = indices
        self._block: tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]] | None = None

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
        target = kernel_target(out, self._data.dtype)
        if columns is None:
            bad = kernels.scatter_rows(
                positions, *self._where, self.shape[1], target, self._data.like, self._indices.like
            )
        else:
            bad = kernels.scatter_columns(
                positions, *self._where, columns.lookup, target, self._data.like, self._indices.like
            )
        self._refuse(bad)
        if target is not out:
            out[...] = target

    def gather_csr(
        self,
        positions: NDArray[np.int64],
        *,
        dtype: np.dtype[Any] | None = None,
        columns: Columns | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
        """Return ``(indptr, indices, data)`` of the rows at `positions`; see `Fetched.gather_csr`."""
        positions = np.ascontiguousarray(positions, dtype=np.int64)
        dtype = self.dtype if dtype is None else np.dtype(dtype)
        indptr = np.empty(len(positions) + 1, dtype=np.int64)
        n_values = kernels.row_starts(positions, self._lengths, indptr)
        if n_values < 0:
            check_positions(self.shape[0], positions)
        if columns is not None:
            counts = np.empty(len(positions), dtype=np.int64)
            self._refuse(
                kernels.count_columns(
                    positions, self._lengths, self._indices.at, columns.lookup, counts, self._indices.like
                )
            )
            indptr = indptr_of(counts)
            n_values = int(indptr[-1])
        indices, data = csr_pair(n_values, dtype if has_kernel_dtype(dtype) else self._data.dtype)
        self._copy(positions, indptr=indptr, indices=indices, data=data, columns=columns)
        return indptr, indices, data.astype(dtype, copy=False)

    def compact(self) -> CSRFetched:
        """Return the same rows in a block of their own; a block returns itself.

        Values keep their stored type; column numbers take two bytes where that is enough.
        """
        if self._block is not None:
            return self
        positions = np.arange(self.shape[0], dtype=np.int64)
        indptr = indptr_of(self._lengths)
        indices = memory.empty(int(indptr[-1]), narrowest(self._indices.dtype, self.shape[1]))
        data = memory.empty(int(indptr[-1]), self._data.dtype)
        self._copy(positions, indptr=indptr, indices=indices, data=data, columns=None)
        return CSRFetched.of_block(self.label, self.rows, self.shape[1], self.dtype, (indptr, indices, data))

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

    def _copy(
        self,
        positions: NDArray[np.int64],
        *,
        indptr: NDArray[np.int64],
        indices: NDArray[Any],
        data: NDArray[Any],
        columns: Columns | None,
    ) -> None:
        likes = (self._data.like, self._indices.like)
        if columns is None:
            self._refuse(
                kernels.copy_rows_csr(positions, *self._where, self.shape[1], indptr[:-1], indices, data, *likes)
            )
        else:
            self._refuse(
                kernels.copy_columns_csr(positions, *self._where, columns.lookup, indptr[:-1], indices, data, *likes)
            )

    def _refuse(self, bad_row: int) -> None:
        if bad_row >= 0:
            raise CorruptDataError(
                f"{self.label}/indices: row {self.rows[bad_row]} has a column outside [0, {self.shape[1]}). "
                "The file is corrupt, or its shape attribute does not belong to it; write it again from its source."
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


class DenseFetched:
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
        Type of the values as stored.
    values
        Where each row lies.
    """

    layout: Layout = "dense"

    def __init__(
        self, *, label: str, rows: NDArray[np.int64], n_vars: int, dtype: np.dtype[Any], values: Reached
    ) -> None:
        self.label = label
        self.rows = rows
        self.shape = (len(rows), n_vars)
        self.dtype = dtype
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
        if columns is None:
            kernels.copy_rows(positions, self._values.at, target, self._values.like)
        else:
            kernels.copy_columns(positions, self._values.at, columns.positions, target, self._values.like)
        if target is not out:
            out[...] = target

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
        dense = np.empty((len(positions), n_vars), dtype=self._values.dtype)
        self.gather(positions, out=dense, columns=columns)
        counts = np.empty(len(positions), dtype=np.int64)
        kernels.count_nonzeros(dense, counts)
        indptr = indptr_of(counts)
        indices, data = csr_pair(int(indptr[-1]), dtype if has_kernel_dtype(dtype) else self._values.dtype)
        kernels.squeeze(dense, indptr[:-1], indices, data)
        return indptr, indices, data.astype(dtype, copy=False)

    def compact(self) -> DenseFetched:
        """Return the same rows in a block of their own, in the type they are stored in; a block returns itself."""
        if self._block is not None:
            return self
        block = memory.empty(self.shape, self._values.dtype)
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


def join(parts: Sequence[Fetched]) -> Fetched:
    """Return fetches of one matrix as one, their rows one after the other; nothing of them is copied."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, CSRFetched):
        sparse = cast(Sequence[CSRFetched], parts)
        return CSRFetched(
            label=first.label,
            rows=np.concatenate([part.rows for part in sparse]),
            n_vars=first.shape[1],
            dtype=first.dtype,
            lengths=np.concatenate([part._lengths for part in sparse]),
            data=Reached.joined([part._data for part in sparse]),
            indices=Reached.joined([part._indices for part in sparse]),
        )
    dense = cast(Sequence[DenseFetched], parts)
    return DenseFetched(
        label=dense[0].label,
        rows=np.concatenate([part.rows for part in dense]),
        n_vars=first.shape[1],
        dtype=first.dtype,
        values=Reached.joined([part._values for part in dense]),
    )


def csr_pair(n_values: int, dtype: np.dtype[Any]) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """Return uninitialised column numbers and values of CSR rows, in one piece of memory."""
    types = sorted((np.dtype(np.int32), dtype), key=lambda of: -of.itemsize)  # so that both are aligned
    first = n_values * types[0].itemsize
    piece = memory.empty(first + n_values * types[1].itemsize, np.uint8)
    wide, narrow = piece[:first].view(types[0]), piece[first:].view(types[1])
    return (wide, narrow) if types[1] is dtype else (narrow, wide)


def narrowest(dtype: np.dtype[Any], n_vars: int) -> np.dtype[Any]:
    """Return the smaller of `dtype` and a two-byte type that numbers `n_vars` columns, if one does."""
    two_bytes = np.dtype(np.uint16)
    return two_bytes if n_vars <= 2**16 and dtype.itemsize > two_bytes.itemsize else dtype


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


def kernel_target(out: NDArray[Any], source: np.dtype[Any]) -> NDArray[Any]:
    """Return an array the kernels can write: `out`, or one of the `source` type where numba lacks out's."""
    return out if has_kernel_dtype(out.dtype) else np.empty(out.shape, dtype=source)


def has_kernel_dtype(dtype: np.dtype[Any]) -> bool:
    """Return whether the kernels can write `dtype`."""
    return bool(memory_dtype(dtype) == dtype)
