"""Conversion of a `Matrix` to a Dask array, and of a Dask array to a `Matrix`.

The Dask array that `to_dask` makes, with one task and one `csr_matrix` or `ndarray` per row chunk, is for inspection
and computations on the whole array. Batches never index it: `matrix_of` finds the `Matrix` behind it, from which each
fetch reads its rows. Dask operations on such an array are called array code. They run on the fetched rows alone if they
treat every row independently (`RowLocalMatrix`). Other Dask arrays become a `DaskMatrix`, which computes whole chunks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence

import dask.array as da
import numpy as np
from dask.base import tokenize

from dasksc.errors import InputError
from dasksc.pushdown.compiler import NotRowLocalError
from dasksc.pushdown.dask_arrays import MatrixRows, chunk_rows_for, gather_block, leaf_matrix, leaves_of, to_dask
from dasksc.pushdown.functions import row_local
from dasksc.pushdown.matrices import DaskMatrix, RowLocalMatrix
from dasksc.storage import ConcatenatedMatrix, Matrix, ReorderedMatrix, SummedMatrix, hashing

__all__ = [
    "DaskMatrix",
    "MatrixRows",
    "RowLocalMatrix",
    "chunk_rows_for",
    "gather_block",
    "leaf_matrix",
    "leaves_of",
    "leaves_read",
    "matrix_of",
    "row_local",
    "to_dask",
    "token_of",
]

logger = logging.getLogger("dasksc.lazy")


def matrix_of(array: da.Array) -> Matrix:
    """Return the matrix from which rows of a Dask array are fetched."""
    if array.ndim != 2:
        raise InputError(
            f"the Dask array {array.name!r} has {array.ndim} dimensions; rows can be fetched only "
            "from two-dimensional arrays (cells by columns). Reshape it first."
        )
    if any(np.isnan(size) for sizes in array.chunks for size in sizes):
        raise InputError(
            f"the Dask array {array.name!r} has unknown chunk sizes ({array.chunks}), so its rows cannot be "
            "numbered. Call its method compute_chunk_sizes() first."
        )
    if (leaf := leaf_matrix(array)) is not None:
        return leaf
    try:
        return RowLocalMatrix(array)
    except NotRowLocalError as reason:
        matrix = DaskMatrix(array)
        if array.name not in _warned:
            _warned.add(array.name)
            logger.warning(
                "%s cannot be computed row by row: %s. Every fetch computes the row chunks (%d, of up to %d rows) that "
                "contain any of its rows, and everything that these chunks are computed from. Use fewer rows per chunk "
                "or a larger block_size, or write the array to a file and open that file. Compute values that all "
                "chunks use yourself: m = X.mean(axis=0).compute(), then X - m",
                *(matrix.label, reason, len(array.chunks[0]), max(array.chunks[0], default=0)),
            )
        return matrix


_warned: set[str] = set()


def leaves_read(matrix: Matrix) -> Iterator[Matrix]:
    """Yield the underlying matrices, in files or in memory, from which a matrix is read."""
    if isinstance(matrix, ConcatenatedMatrix | SummedMatrix | ReorderedMatrix):
        parts: Sequence[Matrix] = matrix.parts
    elif isinstance(matrix, DaskMatrix):
        parts = leaves_of(matrix.array)
    else:
        yield matrix
        return
    for part in parts:
        yield from leaves_read(part)


def require_unchanged(matrix: Matrix) -> None:
    """Raise `CorruptDataError` if a local array of a matrix has changed since it was opened; URLs are left to reads."""
    nothing = np.empty(0, dtype=np.int64)
    arrays = [array for leaf in leaves_read(matrix) for array in getattr(leaf, "arrays", ())]
    for array in {id(getattr(array, "file", array)): array for array in arrays}.values():
        array.locate(nothing, nothing)  # every read checks this first


def token_of(matrix: Matrix) -> str:
    """Return a token of a matrix that changes with its files and, at URLs, with the metadata of its arrays."""
    places = [array.label.rpartition(":/") for leaf in leaves_read(matrix) for array in getattr(leaf, "arrays", ())]
    # The metadata of a Zarr array in a folder do not change when its chunks do.
    folders = [f"{path}/{key}" for path, _, key in places if os.path.isdir(path)]
    with hashing():
        return str(tokenize(matrix, [sorted(_versions(folder)) for folder in folders]))


def _versions(folder: str) -> Iterator[tuple[str, int, int]]:
    for place, _, names in os.walk(folder):
        for path in (os.path.join(place, name) for name in names):
            status = os.stat(path)
            yield path, status.st_size, status.st_mtime_ns
