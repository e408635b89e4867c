"""Base of matrices whose rows another library reads."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.storage.fetched_csr import CSRRowBuffer
from dasksc.storage.fetched_dense import DenseRowBuffer
from dasksc.storage.matrices import check_rows
from dasksc.storage.matrix import Layout, RowBuffer

Block = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]] | NDArray[Any]


class RowsMatrix:
    """Matrix whose subclasses read ascending, distinct rows as a block: a dense array, or a CSR triple."""

    label: str
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    stored_dtype: np.dtype[Any]
    layout: Layout

    def fetch(self, rows: NDArray[np.int64]) -> RowBuffer:
        rows = check_rows(self.label, self.shape[0], rows)
        distinct, positions = np.unique(rows, return_inverse=True)
        block = self._read(distinct)
        if not isinstance(block, tuple):
            block = block if len(distinct) == len(rows) else block[positions]
            return DenseRowBuffer.of_block(self.label, rows, self.dtype, block)
        if len(distinct) < len(rows):
            fetched = CSRRowBuffer.of_block(self.label, distinct, self.shape[1], self.dtype, block)
            block = fetched.gather_csr(positions, dtype=block[2].dtype, any_order=True)
        return CSRRowBuffer.of_block(self.label, rows, self.shape[1], self.dtype, block)

    @abstractmethod
    def _read(self, rows: NDArray[np.int64]) -> Block:
        """Read ascending, distinct rows."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label} {self.shape[0]}x{self.shape[1]} {self.dtype}>"
