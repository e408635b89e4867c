"""Protocol between the readers and all layers above them.

A *matrix* is an array on disk or in memory whose rows are cells. `Matrix.fetch` maps or reads the
requested rows and returns a `RowBuffer`, from which minibatches are gathered in any order. All higher
layers (Dask tasks, batches) use only these two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dasksc.storage.fetched_rows import Layout, RowBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchCost:
    """Anonymous memory of a fetch, in bytes, for rows of average length."""

    row: float  # Size of a row in memory, in the stored data types; depends only on the stored data
    held: float  # Memory per row while batches are made from the fetch; less if files are memory-mapped
    working: float = 0.0  # Additional memory per row during the read
    fixed: int = 0  # Additional memory during the read that does not depend on the rows, such as decoded chunks
    kept: int = 0  # Memory kept from the first fetch on, such as offsets and converted arrays
    # Number of rows per chunk, the unit of decoding; below 1 if rows are longer, and 0 if rows can be read one by one.
    chunk_rows: float = 0.0
    decoded_rows: float = 0.0  # The same, but 0 if parts of chunks can be decoded alone


@runtime_checkable
class Matrix(Protocol):
    """Stored array of cells by columns. Instances can be pickled, and processes share no open file."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of cells and of columns."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type of the values for computation."""

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """Data type of the values as stored, for sizes and exact copies only: arithmetic in it may overflow."""

    @property
    def layout(self) -> Layout:
        """Layout of the rows: ``"csr"`` or ``"dense"``."""

    @property
    def label(self) -> str:
        """Name of the matrix in error messages, such as ``"/data/atlas.h5ad:/X"``."""

    @property
    def cost(self) -> FetchCost:
        """Memory that a fetch takes."""

    def fetch(self, rows: NDArray[np.int64]) -> RowBuffer:
        """Fetch ascending rows, which may repeat; raise `CorruptDataError` if the stored array is inconsistent."""
