"""Matrices from which a store is computed, and the versions of their files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from dask.base import tokenize

from dasksc.pushdown import DaskMatrix, leaves_of
from dasksc.storage import ConcatenatedMatrix, Matrix, ReorderedMatrix, SummedMatrix


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


def token_of(matrix: Matrix) -> str:
    """Return a token of a matrix that changes with its files and, at URLs, with the metadata of its arrays."""
    places = [array.label.rpartition(":/") for leaf in leaves_read(matrix) for array in getattr(leaf, "arrays", ())]
    # The metadata of a Zarr array in a folder do not change when its chunks do.
    folders = [f"{path}/{key}" for path, _, key in places if os.path.isdir(path)]
    return str(tokenize(matrix, [sorted(_versions(folder)) for folder in folders]))


def _versions(folder: str) -> Iterator[tuple[str, int, int]]:
    for place, _, names in os.walk(folder):
        for path in (os.path.join(place, name) for name in names):
            status = os.stat(path)
            yield path, status.st_size, status.st_mtime_ns
