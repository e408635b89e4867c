"""Rows of many small CSR matrices, located with one call.

An atlas may consist of thousands of files of a few hundred cells each, and a fetch may need a few rows of each of
dozens of them. Locating the rows of every file with NumPy then takes much longer than copying them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.kernels import csr as kernels
from dasksc.storage.files import LocalFile, advise_mapped
from dasksc.storage.matrices import CSRMatrix
from dasksc.storage.matrix import Matrix
from dasksc.storage.read_timing import reading
from dasksc.storage.row_pointers import RowPointers
from dasksc.storage.uncompressed import PlainArray


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedCSR:
    """Place of a CSR matrix in a file whose bytes are its arrays."""

    file: LocalFile
    data: PlainArray
    offsets: tuple[int, ...]  # Byte offsets of `indptr`, `indices` and `data`
    dtypes: tuple[np.dtype[Any], ...]  # Data types of these three, and that for computation

    @classmethod
    def of(cls, matrix: Matrix) -> MappedCSR | None:
        """Return the place of `matrix`; None unless its arrays are uncompressed, each in one piece of one file."""
        arrays = matrix.arrays if isinstance(matrix, CSRMatrix) else ()
        plain = [array for array in arrays if isinstance(array, PlainArray)]
        places = [place for array in plain if (place := array.place) is not None]
        if len(places) < 3 or len({id(file) for file, _ in places}) > 1:
            return None
        return cls(
            file=places[0][0],
            data=plain[-1],
            offsets=tuple(offset for _, offset in places),
            dtypes=(*(array.dtype for array in plain), matrix.dtype),
        )


def locate(
    parts: Sequence[MappedCSR], which: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], RowPointers, RowPointers] | None:
    """Return lengths and addresses of row ``rows[i]`` of ``parts[which[i]]``; None if `CSRMatrix.fetch` must report."""
    with reading():
        for part in parts:
            part.file.require_unchanged()
        memories = [part.file.mapped() for part in parts]
        bases = np.array([part.offsets for part in parts]).T[:, which]
        n_values = np.array([part.data.shape[0] for part in parts])[which]

        def inside(array: int, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> RowPointers:
            dtype = parts[0].dtypes[array]
            offsets, sizes = bases[array] + starts * dtype.itemsize, lengths * dtype.itemsize
            found = RowPointers.inside(memories, dtype=dtype, which=which, offsets=offsets, sizes=sizes, held_bytes=0)
            advise_mapped(found.at, sizes)
            return found

        indptr = inside(0, rows, np.full(len(rows), 2))
        bounds = np.empty((len(rows), 2), dtype=np.int64)
        kernels.copy_rows(np.arange(len(rows)), indptr.at, bounds, indptr.like)
        starts, stops = bounds.T
        wrong = (starts < 0) | (stops < starts) | (stops > n_values)
        wrong[1:] |= (starts[1:] < stops[:-1]) & (rows[1:] > rows[:-1]) & (which[1:] == which[:-1])
        if wrong.any():
            return None
        return stops - starts, inside(1, starts, stops - starts), inside(2, starts, stops - starts)
