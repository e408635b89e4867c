"""Matrices from which a store is computed, and the versions of their files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dask.base import tokenize

from dasksc.pushdown import DaskMatrix, leaves_of
from dasksc.storage import ConcatenatedMatrix, Matrix, ReorderedMatrix, SummedMatrix

__all__ = ["leaves_read", "token_of"]


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
    """Return a token of a matrix that changes with its files and with the metadata of its arrays."""
    return str(tokenize(matrix))
