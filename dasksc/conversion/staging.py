"""Sorted runs of the input, for shuffling input that is slow to read in random order.

Reading a single row of a compressed file requires decoding a whole chunk. In a file larger than memory, it requires a
disk seek. The input is therefore read once, in runs whose length is limited by the memory. Each run is written
uncompressed, with its rows sorted by their position in the output. A range of output rows is then a contiguous range in
every run, and takes one read per run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from dasksc.output.work_folder import atomic_path, mapped_array
from dasksc.storage import ConcatenatedMatrix, Matrix, open_matrix
from dasksc.storage.fetched_csr import CSRRowBuffer

__all__ = ["Staging"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Tasks that write the sorted runs of a matrix, one task per run.

    Parameters
    ----------
    matrix
        Input matrix.
    places
        File with the output row of each row of the matrix.
    folder
        Folder of the runs.
    run_rows
        Number of rows per run.
    """

    matrix: Matrix
    places: Path
    folder: Path
    run_rows: int

    @property
    def n_tasks(self) -> int:
        """Number of runs."""
        return -(-self.matrix.shape[0] // self.run_rows)

    def rows(self, k: int) -> tuple[int, int]:
        """Return the range ``[start, stop)`` of the rows of run `k`."""
        return k * self.run_rows, min((k + 1) * self.run_rows, self.matrix.shape[0])

    def is_done(self, k: int) -> bool:
        """Return True if run `k` has been written."""
        return self._path(k).exists()

    def _path(self, k: int) -> Path:
        return self.folder / f"{k}.h5"

    def __call__(self, k: int) -> None:
        """Write run `k`."""
        start, stop = self.rows(k)
        ranked = np.argsort(mapped_array(self.places)[start:stop])
        fetched = self.matrix.fetch(np.arange(start, stop, dtype=np.int64))
        with atomic_path(self._path(k)) as path, h5py.File(path, "w") as file:
            if isinstance(fetched, CSRRowBuffer):
                # Repeated columns are summed later, when the run is read, since their sums may need a wider type.
                write_csr(file, fetched.shape, *fetched.gather_stored(ranked, dtype=self.matrix.stored_dtype))
            else:
                block = np.empty(fetched.shape, dtype=self.matrix.stored_dtype)
                fetched.gather(ranked, out=block)
                file["X"] = block

    def fill_order(self, order: NDArray[np.int64]) -> None:
        """Fill `order` with the position of each output row in the concatenated runs."""
        places = mapped_array(self.places)
        for k in range(self.n_tasks):
            start, stop = self.rows(k)
            order[np.sort(places[start:stop])] = np.arange(start, stop)

    def staged(self) -> ConcatenatedMatrix:
        """Return the concatenated runs as one matrix."""
        runs = [open_matrix(self._path(k), "X") for k in range(self.n_tasks)]
        return ConcatenatedMatrix(label=f"{self.matrix.label}, staged", parts=runs, maps=None)


def write_csr(
    file: h5py.File,
    shape: tuple[int, int],
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    data: NDArray[Any],
) -> None:
    """Write a CSR matrix in AnnData's format, uncompressed and contiguous, so that it can be memory-mapped."""
    group = file.create_group("X")
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": shape})
    group["indptr"] = indptr
    group["indices"] = indices.astype(np.uint16) if shape[1] <= 2**16 else indices
    group["data"] = data
