"""Reading matrices of cells by columns, from files and from memory."""

from __future__ import annotations

from dasksc.storage.fetched import join
from dasksc.storage.matrix import Columns, FetchCost, Fetched, Layout, Matrix
from dasksc.storage.opening import as_matrix, open_matrix

__all__ = ["Columns", "FetchCost", "Fetched", "Layout", "Matrix", "as_matrix", "join", "open_matrix"]
