"""Execution of a conversion: scanning, sorting, writing and verifying the matrices."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from anndata import AnnData
from numpy.typing import NDArray

from dasksc.conversion.arguments import Recipe
from dasksc.conversion.names import StagedNames
from dasksc.conversion.rows import row_order
from dasksc.conversion.scanning import ROW, Scan, Verification, pieces
from dasksc.conversion.staging import Staging
from dasksc.conversion.tables import check_obs, write_tables
from dasksc.conversion.task_runner import TaskRunner
from dasksc.conversion.writing import Copy, CSRCopy, DenseCopy, narrowest_count, wide_enough
from dasksc.errors import CorruptDataError
from dasksc.executor.schedulers import FetchScheduler
from dasksc.memory.limits import memory_limit
from dasksc.output.inputs import leaves_read
from dasksc.output.progress_bars import progress_bar
from dasksc.output.work_folder import StoreWorkFolder, atomic_array, mapped_array
from dasksc.storage import Matrix, is_url
from dasksc.storage.arrays import logical_dtype

__all__ = ["Conversion", "needs_runs"]

# Minimum number of rows per task, and maximum number of tasks, for reading the input in order.
_SCAN_ROWS = 2**14
_SCAN_TASKS = 256
# Maximum number of values per piece if rows can be read one by one; longer pieces would not be faster.
_PIECE_VALUES = 2**22
# Number of row descriptions processed at a time.
_PIECE_ROWS = 2**20
# Memory per value while it is gathered: the stored value, a copy with wide column indices, and the output.
_VALUE_BYTES = 24
# Estimated bytes per name on disk, in the temporary file and in the store together.
_NAME_BYTES = 64


class Conversion:
    """Conversion of an AnnData object to a store.

    Parameters
    ----------
    adata
        Input.
    matrices
        Matrices of `adata` that have one row per cell, by their keys in the store.
    work_folder
        Work folder of the target.
    recipe
        Arguments of the conversion.
    names
        Names of the cells if `adata` was opened without them, otherwise None.
    limit
        Memory to use, in bytes.
    scheduler
        Scheduler that runs the tasks.
    """

    def __init__(
        self,
        adata: AnnData,
        matrices: Mapping[str, Matrix],
        work_folder: StoreWorkFolder,
        recipe: Recipe,
        *,
        names: StagedNames | None,
        limit: int,
        scheduler: FetchScheduler,
    ) -> None:
        self._recipe = recipe
        self._adata = adata
        self._names = names
        self._matrices = matrices
        self._work_folder = work_folder
        self._limit = limit
        self._scheduler = scheduler
        self._order = work_folder.folder / "order.npy"
        self._places = work_folder.folder / "places.npy"
        self._copies: dict[str, Copy] = {}
        in_order = recipe.order == "keep" and not recipe.grouped_by
        self._staged = {key for key, matrix in matrices.items() if not in_order and needs_runs(matrix)}

    def run(self, *, verify: bool, shown: bool) -> None:
        """Run or resume the conversion until the store is complete."""
        n_obs, work_folder, recipe = self._adata.n_obs, self._work_folder, self._recipe
        if not self._order.exists():
            with atomic_array(self._order, np.int64, n_obs) as out:
                row_order(self._adata.obs, order=recipe.order, group_by=recipe.grouped_by, seed=recipe.seed, out=out)
        n_passes = len(self._matrices) * (2 + verify) + len(self._staged)
        with progress_bar(total=n_obs * n_passes, shown=shown) as advance:
            runner = TaskRunner(self._scheduler, advance)
            budget = max(1, self._limit // runner.n_threads)
            rows = {}
            for key, matrix in self._matrices.items():
                rows[key] = self._scan(runner, key, matrix, budget)
                self._copies[key] = self._copy(key, matrix, rows[key], budget)
                self._write(runner, key, self._copies[key], budget, in_runs=key in self._staged)
            written = mapped_array(self._order)
            how = {"order": recipe.order, "group_by": recipe.group_by, "seed": recipe.seed}
            write_tables(self._adata, work_folder.folder / "tables", work_folder.store, written, how, self._names)
            if verify:
                try:
                    for key, matrix in self._matrices.items():
                        self._verify(runner, key, matrix, rows[key], budget)
                    check_obs(self._adata, work_folder.store, written, self._names)
                except CorruptDataError:
                    # Either the output or the scan of the input is wrong, so the conversion cannot resume from them.
                    work_folder.clear()
                    raise

    def _scan(self, runner: TaskRunner, key: str, matrix: Matrix, budget: int) -> Path:
        """Read a matrix in order; return the file with the descriptions of its rows."""
        scan = Scan(
            matrix=matrix,
            folder=self._work_folder.folder / "scan" / key,
            task_rows=max(_SCAN_ROWS, -(-matrix.shape[0] // _SCAN_TASKS)),
            piece_rows=_piece_rows(matrix, budget),
        )
        runner.run(scan, what=f"reading {key}", n_cells=matrix.shape[0])
        return scan.collect()

    def _copy(self, key: str, matrix: Matrix, rows: Path, budget: int) -> Copy:
        """Return the tasks that copy a matrix, with data types chosen from the descriptions of its rows."""
        recorded = mapped_array(rows)
        largest = float(recorded["largest"].max(initial=0))
        dtype = wide_enough(matrix.stored_dtype, largest)
        if self._recipe.narrow and not key.startswith("obsm/") and len(recorded):
            dtype = narrowest_count(dtype, largest)
        computed = logical_dtype(matrix.dtype)
        folder = self._work_folder.store / key
        if matrix.layout == "dense":
            return DenseCopy(
                matrix=matrix,
                order=self._order,
                folder=folder,
                dtype=dtype,
                computed=computed,
                # Expression values repeat within a cell, and compress better without the byte-shuffle filter.
                # Coordinates of embeddings do not repeat.
                shuffle="noshuffle" if dtype.kind == "f" and not key.startswith("obsm/") else "shuffle",
                piece_rows=_piece_rows(matrix, budget),
            )
        indptr = rows.with_name("indptr.npy")
        if not indptr.exists():
            order = mapped_array(self._order)
            with atomic_array(indptr, np.int64, len(order) + 1) as out:
                _fill_indptr(out, recorded, order)
        return CSRCopy(
            matrix=matrix,
            order=self._order,
            indptr=indptr,
            folder=folder,
            dtype=dtype,
            computed=computed,
            narrow=self._recipe.narrow,
            n_values=int(mapped_array(indptr)[-1]),
            piece_values=max(1, min(_PIECE_VALUES, budget // _VALUE_BYTES)),
        )

    def _write(self, runner: TaskRunner, key: str, copy: Copy, budget: int, *, in_runs: bool) -> None:
        """Write a matrix, by way of sorted runs if `in_runs`."""
        runs = None
        if in_runs and all(map(copy.is_done, range(copy.n_tasks))):
            runner.skip(copy.matrix.shape[0], what=f"sorting {key}")
        elif in_runs:
            runs = self._runs(runner, key, copy.matrix, budget)
            order = runs.folder / "order.npy"
            with atomic_array(order, np.int64, copy.matrix.shape[0]) as out:
                runs.fill_order(out)
            copy = replace(copy, matrix=runs.staged(), order=order)
            if isinstance(copy, CSRCopy):
                # Each piece reads from every run, so longer pieces need fewer reads.
                copy = replace(copy, piece_values=max(1, budget // _VALUE_BYTES))
        runner.run(copy, what=f"writing {key}", n_cells=copy.matrix.shape[0])
        copy.finish()
        if runs is not None:
            shutil.rmtree(runs.folder)

    def _runs(self, runner: TaskRunner, key: str, matrix: Matrix, budget: int) -> Staging:
        if not self._places.exists():
            order = mapped_array(self._order)
            with atomic_array(self._places, np.int64, len(order)) as out:
                for start, stop in pieces(0, len(order), _PIECE_ROWS):
                    out[order[start:stop]] = np.arange(start, stop)
        # Memory holds the decoded run and a sorted copy with wide column indices.
        run_rows = max(1, int(budget // (3 * matrix.cost.row)))
        staging = Staging(
            matrix=matrix,
            places=self._places,
            folder=self._work_folder.folder / "stage" / f"{key}-{run_rows}",
            run_rows=run_rows,
        )
        runner.run(staging, what=f"sorting {key}", n_cells=matrix.shape[0])
        return staging

    def _verify(self, runner: TaskRunner, key: str, matrix: Matrix, rows: Path, budget: int) -> None:
        verification = Verification(
            store=self._work_folder.store,
            key=key,
            rows=rows,
            order=self._order,
            task_rows=max(_SCAN_ROWS, -(-matrix.shape[0] // _SCAN_TASKS)),
            piece_rows=_piece_rows(matrix, budget),
            n_obs=matrix.shape[0],
        )
        runner.run(verification, what=f"checking {key}", n_cells=matrix.shape[0])

    def needed_bytes(self) -> int:
        """Estimate the bytes still to be written: uncompressed matrices, runs, obs and row descriptions."""
        n_obs = self._adata.n_obs
        total = float(self._adata.obs.memory_usage(deep=True).sum())
        total += 8 * n_obs * (not self._order.exists())
        if self._names is not None:
            total += _NAME_BYTES * n_obs
        runs = 0.0
        for key, matrix in self._matrices.items():
            copy = self._copies.get(key)
            fraction_remaining = 1.0
            if copy is None:
                # Row descriptions are written twice: first in one file per task, then all in one file. The offsets are
                # written to another file.
                total += n_obs * (2 * ROW.itemsize + 8)
            elif copy.n_tasks:
                fraction_remaining = sum(not copy.is_done(k) for k in range(copy.n_tasks)) / copy.n_tasks
            total += fraction_remaining * matrix.cost.row * n_obs
            if key in self._staged and fraction_remaining == 1:
                # The disk holds the runs of one matrix at a time.
                runs = max(runs, n_obs * (matrix.cost.row + 8 + 8 * (not self._places.exists())))
        return int(total + runs)


def needs_runs(matrix: Matrix) -> bool:
    """Return True if reading rows in random order is much slower than reading them in order."""
    if matrix.cost.chunk_rows > 0 or matrix.cost.row * matrix.shape[0] > memory_limit().n_bytes / 2:
        return True
    # In random order, each row would be a separate request.
    return any(is_url(leaf.label) for leaf in leaves_read(matrix))


def _piece_rows(matrix: Matrix, budget: int) -> int:
    """Return the number of rows to process at a time.

    Memory holds several copies of these rows: decoded, gathered, and with wide indices.
    """
    return max(1, min(_SCAN_ROWS, int(budget // (4 * matrix.cost.row))))


def _fill_indptr(indptr: NDArray[np.int64], rows: NDArray[Any], order: NDArray[np.int64]) -> None:
    """Fill `indptr` with the offset of each row of the output."""
    indptr[0] = 0
    for start, stop in pieces(0, len(order), _PIECE_ROWS):
        lengths = rows["length"][order[start:stop]]
        np.cumsum(lengths, out=indptr[start + 1 : stop + 1])
        indptr[start + 1 : stop + 1] += indptr[start]
