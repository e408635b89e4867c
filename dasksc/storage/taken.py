"""Some rows of a matrix, in another order."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.storage.fetched import CSRFetched, DenseFetched
from dasksc.storage.matrices import check_rows
from dasksc.storage.matrix import Columns, FetchCost, Fetched, Layout, Matrix
from dasksc.storage.reach import Reached
from dasksc.storage.stacked import StackedMatrix

__all__ = ["TakenMatrix"]


class TakenMatrix:
    """Rows of a matrix in any order. They are read in the order they are stored in, and nothing is copied.

    Parameters
    ----------
    matrix
        Whose rows.
    rows
        Row numbers in it, shape (n_obs,), int64; repeats allowed.
    """

    def __init__(self, matrix: Matrix, rows: NDArray[np.int64]) -> None:
        if len(rows) and (rows.min() < 0 or rows.max() >= matrix.shape[0]):
            raise InputError(f"{matrix.label}: rows must lie in [0, {matrix.shape[0]})")
        self._matrix = matrix
        self._rows = rows
        self.shape = len(rows), matrix.shape[1]
        self.label = matrix.label
        self.layout: Layout = matrix.layout
        self.dtype: np.dtype[Any] = matrix.dtype
        self.stored_dtype: np.dtype[Any] = matrix.stored_dtype

    def n_missing(self, columns: Columns | None = None) -> int:
        """Return how many columns are NaN where what they are of lacks them; see `StackedMatrix.n_missing`."""
        return self._matrix.n_missing(columns) if isinstance(self._matrix, StackedMatrix | TakenMatrix) else 0

    @property
    def cost(self) -> FetchCost:
        """What memory a fetch takes: that of the matrix."""
        return self._matrix.cost

    def fetch(self, rows: NDArray[np.int64]) -> Fetched:
        """Bring `rows` within reach; see `Matrix.fetch`."""
        wanted = self._rows[check_rows(self.label, self.shape[0], rows)]
        if not np.any(wanted[1:] < wanted[:-1]):
            return self._matrix.fetch(wanted)
        order = np.argsort(wanted, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return _reordered(self._matrix.fetch(wanted[order]), places)

    def __repr__(self) -> str:
        return f"<TakenMatrix {self.shape[0]} rows of {self._matrix!r}>"


def _reordered(fetched: Fetched, order: NDArray[np.int64]) -> Fetched:
    """Return the same rows in another order: where they lie stays as it is."""
    if not isinstance(fetched, CSRFetched | DenseFetched):
        raise TypeError(f"fetched rows of an unknown kind: {type(fetched).__name__}")
    result = copy.copy(fetched)
    result.rows = fetched.rows[order]
    result._block = result._kept_maps = None
    if fetched._origins is not None:
        result._origins = replace(fetched._origins, numbers=fetched._origins.numbers[order])
    if isinstance(result, CSRFetched):
        result._lengths = result._lengths[order]
        result._data, result._indices = _at(result._data, order), _at(result._indices, order)
    else:
        result._values = _at(result._values, order)
    return result


def _at(reached: Reached, order: NDArray[np.int64]) -> Reached:
    return replace(reached, at=reached.at[order])
