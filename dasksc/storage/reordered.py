"""Selection and reordering of the rows of a matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.storage.concatenated import ConcatenatedMatrix
from dasksc.storage.fetched_csr import CSRRowBuffer
from dasksc.storage.fetched_dense import DenseRowBuffer
from dasksc.storage.matrices import check_rows
from dasksc.storage.matrix import Columns, FetchCost, Layout, Matrix, RowBuffer


class ReorderedMatrix:
    """Selected rows of a matrix in any order. Rows are read in stored order, and no data are rewritten."""

    def __init__(self, matrix: Matrix, rows: NDArray[np.int64]) -> None:
        if len(rows) and (rows.min() < 0 or rows.max() >= matrix.shape[0]):
            raise InputError(f"{matrix.label}: rows must lie in [0, {matrix.shape[0]})")
        self.parts = (matrix,)
        self._matrix = matrix
        self._rows = rows
        self.shape = len(rows), matrix.shape[1]
        self.label = matrix.label
        self.layout: Layout = matrix.layout
        self.dtype: np.dtype[Any] = matrix.dtype
        self.stored_dtype: np.dtype[Any] = matrix.stored_dtype

    def n_missing(self, columns: Columns | None = None) -> int:
        """Return the number of columns that are NaN because a part lacks them; see `ConcatenatedMatrix.n_missing`."""
        return self._matrix.n_missing(columns) if isinstance(self._matrix, ConcatenatedMatrix | ReorderedMatrix) else 0

    @property
    def cost(self) -> FetchCost:
        """Memory that a fetch takes, equal to that of the underlying matrix."""
        return self._matrix.cost

    def fetch(self, rows: NDArray[np.int64]) -> RowBuffer:
        wanted = self._rows[check_rows(self.label, self.shape[0], rows)]
        if not np.any(wanted[1:] < wanted[:-1]):
            return self._matrix.fetch(wanted)
        order = np.argsort(wanted, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        fetched = self._matrix.fetch(wanted[order])
        if not isinstance(fetched, CSRRowBuffer | DenseRowBuffer):
            raise TypeError(f"fetched rows of an unknown kind: {type(fetched).__name__}")
        return fetched.reordered(places)

    def __repr__(self) -> str:
        return f"<ReorderedMatrix {self.shape[0]} rows of {self._matrix!r}>"


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
