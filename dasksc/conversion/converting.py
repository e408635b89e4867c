"""Steps of a conversion: reading, writing and verifying the matrices, and writing the tables."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.checks import names_or_none
from dasksc.conversion.contents import Contents
from dasksc.conversion.scanning import Pass, pieces, verify_rows
from dasksc.conversion.tables import StagedNames, check_obs, write_tables
from dasksc.conversion.writing import Copy
from dasksc.errors import CorruptDataError
from dasksc.executor.progress import progress_bar
from dasksc.executor.schedulers import default_threads
from dasksc.kernels.draw import count_codes
from dasksc.kernels.groups import put_by_code
from dasksc.memory import memory_limit
from dasksc.output.work_folder import StoreWorkFolder, atomic_array, mapped_array
from dasksc.plan.deal import BlockOrder
from dasksc.plan.labels import CodedColumn
from dasksc.plan.sets import combined_codes
from dasksc.pushdown import leaves_read
from dasksc.storage import Matrix, is_url, open_matrix

# Minimum number of rows per task, and maximum number of tasks, for reading a matrix in order.
_SCAN_ROWS = 2**14
_SCAN_TASKS = 256
# Maximum number of values per piece if rows can be read one by one; longer pieces would not be faster.
_PIECE_VALUES = 2**22
# Number of row numbers processed at a time.
_PIECE_ROWS = 2**20
# Memory per value while it is gathered: the stored value, a copy with wide column indices, and the output.
_VALUE_BYTES = 24


class Conversion:
    """Conversion of `contents` to a store; `names` are those of the cells if `contents` lacks them."""

    def __init__(
        self,
        contents: Contents,
        work_folder: StoreWorkFolder,
        plan: Mapping[str, Any],
        *,
        names: StagedNames | None,
        limit_bytes: int,
    ) -> None:
        self._contents = contents
        self._matrices = contents.matrices
        self._n_obs = contents.n_obs
        self._work_folder = work_folder
        self._plan = plan
        self._names = names
        self._n_threads = default_threads()
        self._budget = max(1, limit_bytes // self._n_threads)
        self._order = work_folder.folder / "order.npy"
        self._places = work_folder.folder / "places.npy"
        in_order = plan["order"] == "keep" and not plan["group_by"]
        self._staged = {key for key, matrix in contents.matrices.items() if not in_order and needs_runs(matrix)}
        self._advance: Callable[[float, str], None] = lambda n, what: None

    def run(self, *, verify: bool, shown: bool) -> None:
        n_obs, store = self._n_obs, self._work_folder.store
        how = {name: self._plan[name] for name in ("order", "group_by", "seed")}
        groups = names_or_none("group_by", how["group_by"])
        if not self._order.exists():
            with atomic_array(self._order, np.int64, n_obs) as out:
                _fill_order(self._contents.cells["obs"], order=how["order"], group_by=groups, seed=how["seed"], out=out)
        with progress_bar(total=n_obs * len(self._matrices) * (2 + verify), shown=shown) as self._advance:
            for key, matrix in self._matrices.items():
                self._convert(key, matrix)
            order = mapped_array(self._order)
            write_tables(self._contents, self._work_folder.folder / "tables", store, order, how, self._names)
            if verify:
                try:
                    for key in self._matrices:
                        self._verify(key)
                    check_obs(self._contents.cells["obs"], store, order, self._names)
                except CorruptDataError:
                    # Either the output or the scan of the input is wrong, so the conversion cannot resume from them.
                    self._work_folder.clear()
                    raise

    def _run(
        self, what: str, task: Callable[[int], Any], n_tasks: int, is_done: Callable[[int], bool] = lambda k: False
    ) -> None:
        """Run a step that is split into tasks, except those that are done."""
        remaining = [k for k in range(n_tasks) if not is_done(k)]
        share = self._n_obs / max(1, n_tasks)
        self._advance(self._n_obs - share * len(remaining), what)
        with ThreadPoolExecutor(self._n_threads) as threads:
            try:
                for future in as_completed([threads.submit(task, k) for k in remaining]):
                    future.result()
                    self._advance(share, what)
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def _convert(self, key: str, matrix: Matrix) -> None:
        """Read a matrix in order to describe its rows, and write it."""
        rows = self._rows(key)
        copy = self._copy(key, matrix) if rows.exists() else None
        if copy is None or (key in self._staged and not copy.is_complete):
            reading = self._pass(key, matrix)
            self._run(f"reading {key}", reading, len(reading.parts), reading.is_done)
            if not rows.exists():
                reading.collect(rows)
            copy = self._copy(key, matrix)
        else:
            self._advance(self._n_obs, f"reading {key}")
        if key in self._staged and not copy.is_complete:
            copy.matrix, copy.order = reading.staged()
            # Each piece reads from every file, so longer pieces need fewer reads.
            copy.piece_values = max(1, self._budget // _VALUE_BYTES)
        self._run(f"writing {key}", copy, copy.n_shards, copy.is_done)
        copy.finish()
        for folder in rows.parent.glob("parts-*"):
            shutil.rmtree(folder)

    def _rows(self, key: str) -> Path:
        """Return the file with the descriptions of the input rows of a matrix."""
        return self._work_folder.folder / "scan" / key / "rows.npy"

    def _pass(self, key: str, matrix: Matrix) -> Pass:
        part_rows = max(_SCAN_ROWS, -(-matrix.shape[0] // _SCAN_TASKS))
        if key in self._staged:
            # Memory holds the decoded part and a sorted copy with wide column indices.
            part_rows = max(1, int(self._budget // (3 * matrix.cost.row)))
            if not self._places.exists():
                order = mapped_array(self._order)
                with atomic_array(self._places, np.int64, len(order)) as out:
                    for start, stop in pieces(0, len(order), _PIECE_ROWS):
                        out[order[start:stop]] = np.arange(start, stop)
        return Pass(
            matrix=matrix,
            folder=self._rows(key).with_name(f"parts-{part_rows}"),
            parts=list(pieces(0, self._n_obs, part_rows)),
            piece_rows=self._piece_rows(matrix),
            places=self._places if key in self._staged else None,
        )

    def _piece_rows(self, matrix: Matrix) -> int:
        """Return the number of rows to process at a time, of which memory holds several copies."""
        return max(1, min(_SCAN_ROWS, int(self._budget // (4 * matrix.cost.row))))

    def _copy(self, key: str, matrix: Matrix) -> Copy:
        is_csr = matrix.layout == "csr"
        return Copy(
            matrix,
            self._order,
            rows=self._rows(key),
            folder=self._work_folder.store / key,
            is_expression=not key.startswith("obsm/"),
            narrow=self._plan["narrow"],
            piece_rows=max(1, int(self._budget // (3 * matrix.cost.row))) if is_csr else self._piece_rows(matrix),
            piece_values=max(1, min(_PIECE_VALUES, self._budget // _VALUE_BYTES)),
        )

    def _verify(self, key: str) -> None:
        matrix = open_matrix(self._work_folder.store, key)
        n_obs, piece_rows = matrix.shape[0], self._piece_rows(self._matrices[key])
        parts = list(pieces(0, n_obs, max(_SCAN_ROWS, -(-n_obs // _SCAN_TASKS))))
        rows, order = mapped_array(self._rows(key)), mapped_array(self._order)
        self._run(f"checking {key}", lambda k: verify_rows(matrix, rows, order, *parts[k], piece_rows), len(parts))


def _fill_order(obs: pd.DataFrame, *, order: str, group_by: Sequence[str], seed: int, out: NDArray[np.int64]) -> None:
    """Compute the input row of each output row; groups are sorted by the first column, then by the next."""
    n_obs = len(obs)
    keyed = BlockOrder.storage(n_obs) if order == "keep" or n_obs == 0 else BlockOrder.shuffled(n_obs, seed, 0)
    if group_by:
        grouped = {name: pd.Categorical(obs[name]) for name in group_by}
        # A missing value is a group, the last one of its column.
        columns = [
            CodedColumn(name, np.where(one.codes < 0, len(one.categories), one.codes), [*one.categories, None])
            for name, one in grouped.items()
        ]
        codes, n_codes = combined_codes(columns, slice(None), n_obs)
        counts = np.zeros(n_codes + 1, dtype=np.int64)
        count_codes(codes, counts)
        places = np.concatenate([[0], np.cumsum(counts[1:])])
    for start, stop in pieces(0, n_obs, _PIECE_ROWS):
        rows = keyed.at(np.arange(start, stop, dtype=np.int64))
        if not group_by:
            out[start:stop] = rows
        else:
            put_by_code(rows, codes[rows].astype(np.int32), places, out)


def needs_runs(matrix: Matrix) -> bool:
    """Return True if reading rows in random order is much slower than reading them in order."""
    if matrix.cost.chunk_rows > 0 or matrix.cost.row * matrix.shape[0] > memory_limit().n_bytes / 2:
        return True
    # In random order, each row would be a separate request.
    return any(is_url(leaf.label) for leaf in leaves_read(matrix))
