"""Reading matrices of cells by columns, from files and from memory."""

from __future__ import annotations

from dasksc.storage.fetched import join
from dasksc.storage.matrix import ColumnMaps, Columns, FetchCost, Fetched, Layout, Matrix
from dasksc.storage.opening import as_matrix, open_matrix
from dasksc.storage.stacked import StackedMatrix

__all__ = [
    "ColumnMaps",
    "Columns",
    "FetchCost",
    "Fetched",
    "Layout",
    "Matrix",
    "StackedMatrix",
    "as_matrix",
    "join",
    "open_matrix",
]
