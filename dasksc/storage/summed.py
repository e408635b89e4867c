"""Sums of columns of a matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.storage.arrays import memory_dtype
from dasksc.storage.dtypes import sum_dtype
from dasksc.storage.fetched_csr import CSRRowBuffer
from dasksc.storage.fetched_dense import DenseRowBuffer
from dasksc.storage.matrices import check_rows
from dasksc.storage.matrix import Columns, FetchCost, Layout, Matrix, RowBuffer


class SummedMatrix:
    """Selected columns of a matrix, some of which are summed. Rows are computed when they are fetched."""

    def __init__(self, matrix: Matrix, columns: Columns) -> None:
        self.parts = (matrix,)
        self._matrix = matrix
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
        cost = self._matrix.cost
        widening = max(1, self.stored_dtype.itemsize // memory_dtype(self._matrix.stored_dtype).itemsize)
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
        fetched = self._matrix.fetch(rows)
        every = np.arange(len(rows), dtype=np.int64)
        held = memory_dtype(self.stored_dtype)
        if self.layout == "csr":
            block = fetched.gather_csr(every, dtype=held, columns=self._columns)
            return CSRRowBuffer.of_block(self.label, rows, self.shape[1], self.dtype, block)
        out = np.empty((len(rows), self.shape[1]), dtype=held)
        fetched.gather(every, out=out, columns=self._columns)
        return DenseRowBuffer.of_block(self.label, rows, self.dtype, out)

    def __repr__(self) -> str:
        return f"<SummedMatrix {self.shape[1]} columns of {self._matrix!r}>"
