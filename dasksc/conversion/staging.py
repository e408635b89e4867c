"""The input sorted roughly by where its rows go, for a shuffle of what can only be read in runs.

A row of a compressed file costs a chunk to read, and of a file larger than memory a seek. So the input is read once,
in runs as long as memory allows, and each run is written down again, uncompressed, its rows by ascending place in the
output. A stretch of the output is then a stretch of every run: as many reads as there are runs, each of many rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from dasksc.conversion.work_folder import appearing, mapped_array
from dasksc.storage import Matrix, StackedMatrix, open_matrix
from dasksc.storage.fetched_csr import CSRFetched

__all__ = ["Staging"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """The runs of a matrix, one task for each.

    Parameters
    ----------
    matrix
        What is read.
    places
        File: which row of the output each row of the matrix is.
    folder
        Where the runs go.
    run_rows
        Rows of a run.
    """

    matrix: Matrix
    places: Path
    folder: Path
    run_rows: int

    @property
    def n_tasks(self) -> int:
        """How many runs there are."""
        return -(-self.matrix.shape[0] // self.run_rows)

    def rows(self, k: int) -> tuple[int, int]:
        """Return the rows of run `k`: [start, stop)."""
        return k * self.run_rows, min((k + 1) * self.run_rows, self.matrix.shape[0])

    def is_done(self, k: int) -> bool:
        """Whether run `k` is written."""
        return self._path(k).exists()

    def _path(self, k: int) -> Path:
        return self.folder / f"{k}.h5"

    def __call__(self, k: int) -> None:
        """Write run `k`."""
        start, stop = self.rows(k)
        ranked = np.argsort(mapped_array(self.places)[start:stop])
        fetched = self.matrix.fetch(np.arange(start, stop, dtype=np.int64))
        with appearing(self._path(k)) as path, h5py.File(path, "w") as file:
            if isinstance(fetched, CSRFetched):
                # Values at one place are added up when the run is read: their sums may need a wider type.
                write_csr(file, fetched.shape, *fetched.gather_stored(ranked, dtype=self.matrix.stored_dtype))
            else:
                block = np.empty(fetched.shape, dtype=self.matrix.stored_dtype)
                fetched.gather(ranked, out=block)
                file["X"] = block

    def fill_order(self, order: NDArray[np.int64]) -> None:
        """Write which row of the runs, one below the other, each row of the output is."""
        places = mapped_array(self.places)
        for k in range(self.n_tasks):
            start, stop = self.rows(k)
            order[np.sort(places[start:stop])] = np.arange(start, stop)

    def staged(self) -> StackedMatrix:
        """Return the runs as one matrix."""
        runs = [open_matrix(self._path(k), "X") for k in range(self.n_tasks)]
        return StackedMatrix(label=f"{self.matrix.label}, staged", parts=runs, maps=None)


def write_csr(
    file: h5py.File,
    shape: tuple[int, int],
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    data: NDArray[Any],
) -> None:
    """Write a CSR matrix as AnnData does, uncompressed and in one piece, so that it can be mapped."""
    group = file.create_group("X")
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": shape})
    group["indptr"] = indptr
    group["indices"] = indices.astype(np.uint16) if shape[1] <= 2**16 else indices
    group["data"] = data
