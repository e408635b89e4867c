"""Matrices of cells by columns, read from files, URLs and memory."""

from __future__ import annotations

from dasksc.storage.arrays import is_of_content
from dasksc.storage.concatenated import AbsentMatrix, StackedMatrix
from dasksc.storage.files import UseMmap, mapping
from dasksc.storage.joining import join
from dasksc.storage.matrix import ColumnMaps, Columns, FetchCost, Fetched, Layout, Matrix
from dasksc.storage.opening import as_matrix, open_matrix, open_place
from dasksc.storage.remote.cache import Cache
from dasksc.storage.remote.client import shown
from dasksc.storage.remote.urls import HDF5_ENDINGS, Place, is_url
from dasksc.storage.reordered import TakenMatrix
from dasksc.storage.summed import SummedMatrix

__all__ = [
    "HDF5_ENDINGS",
    "AbsentMatrix",
    "Cache",
    "ColumnMaps",
    "Columns",
    "FetchCost",
    "Fetched",
    "Layout",
    "Matrix",
    "Place",
    "StackedMatrix",
    "SummedMatrix",
    "TakenMatrix",
    "UseMmap",
    "as_matrix",
    "is_of_content",
    "is_url",
    "join",
    "mapping",
    "open_matrix",
    "open_place",
    "shown",
]
