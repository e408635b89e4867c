"""Matrices of cells by columns, read from files, URLs and memory."""

from __future__ import annotations

from dasksc.storage.arrays import caused_by_data
from dasksc.storage.columns import ColumnMaps, Columns
from dasksc.storage.combined import AbsentMatrix, ConcatenatedMatrix, ReorderedMatrix, SummedMatrix, join, part_costs
from dasksc.storage.dtypes import BFLOAT16
from dasksc.storage.fetched_rows import Layout, RowBuffer
from dasksc.storage.files import UseMmap, hashing, mapping, mapping_of
from dasksc.storage.matrix import FetchCost, Matrix
from dasksc.storage.opening import as_matrix, open_matrix
from dasksc.storage.remote.client import SCHEMES, redact_url
from dasksc.storage.remote.remote_file import Cache
from dasksc.storage.remote.urls import HDF5_ENDINGS, RemoteLocation, is_url

__all__ = [
    "BFLOAT16",
    "HDF5_ENDINGS",
    "SCHEMES",
    "AbsentMatrix",
    "Cache",
    "ColumnMaps",
    "Columns",
    "FetchCost",
    "RowBuffer",
    "Layout",
    "Matrix",
    "RemoteLocation",
    "ConcatenatedMatrix",
    "SummedMatrix",
    "ReorderedMatrix",
    "UseMmap",
    "as_matrix",
    "caused_by_data",
    "hashing",
    "is_url",
    "join",
    "mapping",
    "mapping_of",
    "part_costs",
    "open_matrix",
    "redact_url",
]
