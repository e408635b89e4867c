"""Units of predictions, written one by one by any number of processes.

The rows of an atlas are divided into *units* of whole batches. Their size depends only on the number of cells and the
batch size, so a batch contains the same rows on any rank. A unit is one shard of every output, and a marker that is
written after the shards. Units are kept in a folder named by the digest of the plan: the model, the data and the
options, without rank and world size. Later runs, on any number of ranks, predict the units that have no marker.

A process claims its range of units with a locked file, so no two processes predict the same unit at the same time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError, InputError, StorageError
from dasksc.inference.outputs import Output, check_same
from dasksc.output.shards import ShardedArray, ShardWriter
from dasksc.output.work_folder import WorkFolder, atomic_path
from dasksc.platforms import lock_file

__all__ = ["Claim", "NanRows", "UnitWriter", "Work", "runs_of", "unit_rows_for"]

_LEAST_ROWS = 2**12
_MOST_ROWS = 2**16
_UNITS = 64
_CHUNK_BYTES = 2**18
# Total size, in bytes, at which the batches held in memory are written together.
_HELD_BYTES = 2**22
# Maximum number of cells with NaN that are listed.
_NAMED = 5


def unit_rows_for(n_obs: int, batch_size: int) -> int:
    """Return the number of rows of a unit: the largest ``batch_size * 2**k`` up to a limit, at least one batch.

    The limit is 1/64 of the rows, but not less than 4,096 nor more than 65,536 rows.
    """
    wanted = min(max(-(-n_obs // _UNITS), _LEAST_ROWS), _MOST_ROWS)
    return batch_size << max(0, math.floor(math.log2(max(1, wanted / batch_size))))


def runs_of(units: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges ``[first, last)`` of consecutive numbers in an ascending list."""
    first = None
    for i, unit in enumerate(units):
        first = unit if first is None else first
        if i + 1 == len(units) or units[i + 1] != unit + 1:
            yield first, unit + 1
            first = None


class NanRows(NamedTuple):
    """Number of rows with NaN, and the first few of them."""

    n: int = 0
    first: list[int] = []  # noqa: RUF012 - never changed

    def with_more(self, n: int, rows: list[int]) -> NanRows:
        """Return these rows together with later ones."""
        return NanRows(self.n + n, [*self.first, *rows][:_NAMED])


class Claim:
    """Exclusive use of a range of units by one process, until it is released or the process ends.

    Parameters
    ----------
    path
        Path of a file to create and lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(exist_ok=True)
        self._file: IO[str] = path.open("w")
        self._file.write(f"process {os.getpid()} on {platform.node()}")
        self._file.flush()
        lock_file(self._file, wait=False)

    def release(self) -> None:
        """Release the units."""
        if not self._file.closed:
            self._file.close()
            self._path.unlink(missing_ok=True)


class Work(WorkFolder):
    """Work folder of predictions.

    Parameters
    ----------
    target
        Path of the file or store for the predictions.
    folder
        Path of the work folder, on the same file system.
    plan
        Model, data and options that determine the predictions, as plain types. A ``"run"``, the name of a call that
        predicts all cells again, ends the digest.
    n_obs, batch_size
        Number of cells, and rows of a batch.
    """

    def __init__(self, target: Path, folder: Path, plan: dict[str, Any], *, n_obs: int, batch_size: int) -> None:
        super().__init__(target, folder, what="prediction")
        begun = self.read_plan()
        # A call without a run of its own resumes the run that an interrupted call with overwrite=True has begun.
        if begun is not None and "run" not in plan and begun == plan | {"run": begun.get("run")}:
            plan = begun
        self.plan = plan
        compared = json.dumps({name: plan[name] for name in plan if name != "run"}, sort_keys=True)
        run = f"-{plan['run']}" if "run" in plan else ""
        self.digest = hashlib.blake2b(compared.encode(), digest_size=16).hexdigest() + run
        self.n_obs = n_obs
        self.batch_size = batch_size
        self.unit_rows = unit_rows_for(n_obs, batch_size)
        # Each plan has its own folder inside the work folder, since an earlier run with another plan may still be
        # writing.
        self._own = folder / self.digest
        self.store = self._own / "store"

    @property
    def n_units(self) -> int:
        """Number of units."""
        return -(-self.n_obs // self.unit_rows)

    def rows(self, k: int) -> tuple[int, int]:
        """Return the range ``[start, stop)`` of the rows of unit `k`."""
        return k * self.unit_rows, min((k + 1) * self.unit_rows, self.n_obs)

    def begin(self, *, overwrite: bool) -> None:
        """Prepare the work folder for the plan, or join the processes that work on this plan.

        Raises
        ------
        InputError
            If the work folder holds complete units of another plan and `overwrite` is False.
        StorageError
            If another process works on another plan.
        """
        begun = self.read_plan()
        if begun == self.plan:
            return
        self._refuse_claimed(0, None)
        if begun is not None and not overwrite and any(self.folder.glob("*/done/*.json")):
            raise self.other_plan_error(begun, self.plan)
        self.clear()
        self.write_plan(self.plan)

    def is_begun(self) -> bool:
        """Return True if the folder holds the plan of this work."""
        return self.read_plan() == self.plan

    # --- Claims ---------------------------------------------------------------------------------------

    def claim(self, first: int, last: int) -> Claim:
        """Claim the units ``[first, last)`` for this process; call it under the lock.

        Raises
        ------
        StorageError
            If another process works on any of the units.
        """
        self._refuse_claimed(first, last)
        return Claim(self.folder / "claims" / f"{first}-{last}-{os.urandom(4).hex()}")

    def _refuse_claimed(self, first: int, last: int | None) -> None:
        owner = next(self._owners(first, last), None)
        if owner is not None:
            raise StorageError(
                f"{self.target} is being written by {owner}, which predicts the same cells. Wait for that process or "
                "stop it, or give another out="
            )

    def is_claimed(self) -> bool:
        """Return True if a process works on any unit."""
        return any(True for _ in self._owners(0, None))

    def _owners(self, first: int, last: int | None) -> Iterator[str]:
        """Yield the processes with a claim on any unit of ``[first, last)``; remove claims of processes that ended."""
        for path in sorted((self.folder / "claims").glob("*-*-*")):
            start, stop = map(int, path.name.split("-")[:2])
            if stop <= first or (last is not None and start >= last):
                continue
            try:
                with path.open("r+") as file:
                    owner = file.read()
                    lock_file(file, wait=False)
            except FileNotFoundError:  # released in the meantime
                continue
            except BlockingIOError:
                yield owner or "another process"
                continue
            path.unlink(missing_ok=True)

    # --- Units ----------------------------------------------------------------------------------------

    def _marker(self, k: int) -> Path:
        return self._own / "done" / f"{k}.json"

    def is_done(self, k: int) -> bool:
        """Return True if unit `k` is complete."""
        try:
            # A power failure may leave the name of a file without its contents.
            return self._marker(k).stat().st_size > 0
        except FileNotFoundError:
            return False

    def missing(self, first: int = 0, last: int | None = None) -> list[int]:
        """Return the units of ``[first, last)`` that are not complete."""
        return [k for k in range(first, self.n_units if last is None else last) if not self.is_done(k)]

    def array(self, output: Output) -> ShardedArray:
        """Return the array of an output, with one shard for each unit."""
        most = max(1, _CHUNK_BYTES // output.row_bytes)
        chunk = next(n for n in range(min(most, self.unit_rows), 0, -1) if self.unit_rows % n == 0)
        return ShardedArray(
            shape=output.shape(self.n_obs),
            dtype=np.dtype(output.dtype),
            chunk_rows=chunk,
            shard_rows=self.unit_rows,
            codec="stored" if np.dtype(output.dtype).kind == "f" else "lz4hc",
        )

    def folder_of(self, output: Output) -> Path:
        """Return the folder to which the array of an output is written."""
        return self.store / output.key / ("codes" if output.labels is not None else "")

    def mark(self, k: int, outputs: tuple[Output, ...], nan: Mapping[str, NanRows]) -> None:
        """Record that unit `k` is complete.

        Parameters
        ----------
        k
            Number of the unit.
        outputs
            Specifications of its arrays.
        nan
            Rows with NaN, by name of the output.
        """
        note = {"outputs": [[one.name, one.width, one.dtype] for one in outputs], "nan": dict(nan)}
        with atomic_path(self._marker(k)) as path:
            path.write_text(json.dumps(note))

    def collected(
        self, categories: Mapping[str, Any], published: Collection[str] = ()
    ) -> tuple[tuple[Output, ...], dict[str, NanRows]]:
        """Return the outputs of all units, and the rows with NaN by output.

        Parameters
        ----------
        categories
            Labels of integer codes, by name.
        published
            Keys that an interrupted process has already published; their shards are in the target, not in the work
            folder.

        Raises
        ------
        InputError
            If units have different outputs, because ranks ran different models.
        CorruptDataError
            If a file of a complete unit is missing.
        """
        expected: tuple[Output, ...] = ()
        nan: dict[str, NanRows] = {}
        for k in range(self.n_units):
            note = json.loads(self._marker(k).read_text())
            outputs = tuple(
                Output(
                    name=name,
                    width=width,
                    dtype=dtype,
                    labels=tuple(categories[name]) if name in categories else None,
                )
                for name, width, dtype in note["outputs"]
            )
            expected = expected or outputs
            start, stop = self.rows(k)
            check_same(expected, outputs, f"cells {start} to {stop - 1}")
            for one in outputs:
                array = self.array(one)
                if one.key in published or not array.n_shards:
                    continue
                if not array.path(self.folder_of(one), k).exists():
                    raise CorruptDataError(
                        f"{array.path(self.folder_of(one), k)} was removed. Remove {self.folder} and predict again."
                    )
            for name, found in note["nan"].items():
                nan[name] = NanRows(*found) if name not in nan else nan[name].with_more(*found)
        return expected, nan


class UnitWriter:
    """Writer of successive batches of successive units.

    A thread writes several batches at a time. The prediction loop does not write, since each system call releases the
    GIL, and reacquiring it takes milliseconds while other threads make batches.

    Parameters
    ----------
    work
        Work that the units belong to.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._outputs: tuple[Output, ...] = ()
        self._at: int | None = None
        self._held: list[Mapping[str, NDArray[Any]]] = []
        self._held_bytes = 0
        self._nan: dict[str, NanRows] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        # Files of the current unit. While the writing thread runs, only the writing thread uses them.
        self._open: ExitStack | None = None
        self._writers: dict[str, ShardWriter] = {}

    def write_batch(
        self,
        start: int,
        arrays: Mapping[str, NDArray[Any]],
        outputs: tuple[Output, ...],
        nan: Mapping[str, NDArray[np.int64]],
    ) -> None:
        """Write the predictions of the batch that begins at row `start`.

        The batch must begin a unit or follow the previous batch.

        Parameters
        ----------
        start
            First row of the batch in the collection.
        arrays
            Arrays by name. They are copied, since a model may reuse the memory of its results.
        outputs
            Specifications of the arrays.
        nan
            Rows of the batch with NaN, by name of the output.

        Raises
        ------
        InputError
            If the batch does not follow the previous one, or has other outputs.
        OSError
            If earlier batches cannot be written, such as on a full disk.
        """
        n_rows = len(next(iter(arrays.values())))
        k = start // self._work.unit_rows
        first, last = self._work.rows(k)
        if self._outputs:
            check_same(self._outputs, outputs, f"cells {start} to {start + n_rows - 1}")
        self._outputs = outputs
        expected = first if self._at is None else self._at
        if start != expected:
            raise InputError(f"cells {expected} to {start - 1} were skipped; predict cells in order")
        self._held.append({name: array.copy() for name, array in arrays.items()})
        self._held_bytes += sum(array.nbytes for array in arrays.values())
        for name, rows in nan.items():
            self._nan[name] = self._nan.get(name, NanRows()).with_more(len(rows), (start + rows[:_NAMED]).tolist())
        is_last = start + n_rows == last
        self._at = None if is_last else start + n_rows
        if is_last or self._held_bytes >= _HELD_BYTES:
            self.flush()
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="dasksc-unit")
            held, self._held, self._held_bytes = self._held, [], 0
            nan_rows, self._nan = (self._nan, {}) if is_last else ({}, self._nan)
            self._writing = self._thread.submit(self._write, k, held, nan_rows, is_last=is_last)

    def _write(
        self, k: int, batches: list[Mapping[str, NDArray[Any]]], nan: Mapping[str, NanRows], *, is_last: bool
    ) -> None:
        """Append batches to unit `k`, and complete it after the last one."""
        if self._open is None:
            self._open = ExitStack()
            for one in self._outputs:
                array = self._work.array(one)
                if array.n_shards:
                    shard = ShardWriter(array, self._work.folder_of(one), k)
                    self._writers[one.name] = self._open.enter_context(shard)
        for arrays in batches:
            for name, writer in self._writers.items():
                writer.append(arrays[name])
        if is_last:
            opened, self._open, self._writers = self._open, None, {}
            opened.close()
            self._work.mark(k, self._outputs, nan)

    def flush(self) -> None:
        """Wait until the batches passed to the thread are written.

        Raises
        ------
        OSError
            If they cannot be written, such as on a full disk.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def abandon(self) -> None:
        """Remove the files of an unfinished unit."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()
        self._held.clear()
        opened, self._open = self._open, None
        if opened is not None:
            error = InterruptedError("the unit is left unfinished")
            opened.__exit__(type(error), error, None)
