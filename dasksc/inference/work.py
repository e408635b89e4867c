"""Units of predictions, written one by one by any number of processes.

The rows of an atlas are cut into *units* of whole batches. Their size depends on the number of cells and on the batch
size alone, so a batch holds the same rows whoever reads it. A unit is one shard of every output, and a marker that is
written after them. Units are kept in a folder that the digest of the plan names: a digest of the model, the data and
the options, without rank and world size. A process of any later run, of any number of ranks, does what has no marker.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError, InputError
from dasksc.inference.outputs import Output, check_same
from dasksc.output.shards import ShardedArray, ShardWriter
from dasksc.output.work_folder import WorkFolder, appearing

__all__ = ["NanRows", "UnitWriter", "Work", "runs_of", "unit_rows_for"]

_LEAST_ROWS = 2**10
_MOST_ROWS = 2**16
_UNITS = 64
_CHUNK_BYTES = 2**18
# Cells with NaN that are named.
_NAMED = 5


def unit_rows_for(n_obs: int, batch_size: int) -> int:
    """Return the number of rows of a unit: whole batches, for about 64 units of 1,024 to 65,536 rows."""
    wanted = min(max(-(-n_obs // _UNITS), _LEAST_ROWS), _MOST_ROWS)
    return batch_size << max(0, math.floor(math.log2(max(1, wanted / batch_size))))


def runs_of(units: list[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges ``[first, last)`` of neighbouring numbers in an ascending list."""
    first = None
    for i, unit in enumerate(units):
        first = unit if first is None else first
        if i + 1 == len(units) or units[i + 1] != unit + 1:
            yield first, unit + 1
            first = None


class NanRows(NamedTuple):
    """Number of rows with NaN, and the first of them."""

    n: int = 0
    first: list[int] = []  # noqa: RUF012 - never changed

    def with_more(self, n: int, rows: list[int]) -> NanRows:
        """Return these and later rows."""
        return NanRows(self.n + n, [*self.first, *rows][:_NAMED])


class Work(WorkFolder):
    """Work folder of predictions.

    Parameters
    ----------
    target
        Path of the file or store that gets the predictions.
    folder
        Path of the work folder, on the same file system.
    plan
        What determines the predictions, as plain types.
    n_obs, batch_size
        Number of cells, and rows of a batch.
    """

    def __init__(self, target: Path, folder: Path, plan: dict[str, Any], *, n_obs: int, batch_size: int) -> None:
        super().__init__(target, folder, what="prediction")
        self.plan = plan
        self.digest = hashlib.blake2b(json.dumps(plan, sort_keys=True).encode(), digest_size=16).hexdigest()
        self.n_obs = n_obs
        self.batch_size = batch_size
        self.unit_rows = unit_rows_for(n_obs, batch_size)
        # A run that this one replaces may still be writing, to a folder of its own.
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
        """Prepare the folder for the plan, or join the processes that work on it.

        Raises
        ------
        InputError
            If the folder holds another plan and `overwrite` is False.
        """
        begun = self.begun()
        if begun is not None and begun != self.plan and not overwrite:
            raise self.differing(begun, self.plan)
        if begun != self.plan:
            self.clear()
            self.write_plan(self.plan)

    def is_begun(self) -> bool:
        """Return True if the folder holds the plan of this work."""
        return self.begun() == self.plan

    # --- Units ----------------------------------------------------------------------------------------

    def _marker(self, k: int) -> Path:
        return self._own / "done" / f"{k}.json"

    def is_done(self, k: int) -> bool:
        """Return True if unit `k` is complete."""
        return self._marker(k).exists()

    def missing(self, first: int = 0, last: int | None = None) -> list[int]:
        """Return the units of ``[first, last)`` that are not complete."""
        return [k for k in range(first, self.n_units if last is None else last) if not self.is_done(k)]

    def array(self, output: Output) -> ShardedArray:
        """Return the array of an output, one shard for each unit."""
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
        """Return the folder of an array while it is written."""
        return self.store / output.key / ("codes" if output.labels is not None else "")

    def mark(self, k: int, outputs: tuple[Output, ...], nan: Mapping[str, NanRows]) -> None:
        """Record that unit `k` is complete.

        Parameters
        ----------
        k
            Number of the unit.
        outputs
            Its arrays.
        nan
            Rows with NaN, by output.
        """
        note = {"outputs": [[one.name, one.width, one.dtype] for one in outputs], "nan": dict(nan)}
        with appearing(self._marker(k)) as path:
            path.write_text(json.dumps(note))

    def collected(self, categories: Mapping[str, Any]) -> tuple[tuple[Output, ...], dict[str, NanRows]]:
        """Return the outputs of all units, and the rows with NaN of those that have any.

        Raises
        ------
        InputError
            If units have other outputs than the first: ranks ran different models.
        CorruptDataError
            If a file of a complete unit is gone.
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
                if array.n_shards and not array.path(self.folder_of(one), k).exists():
                    raise CorruptDataError(
                        f"{array.path(self.folder_of(one), k)} was removed. Remove {self.folder} and predict again."
                    )
            for name, found in note["nan"].items():
                nan[name] = NanRows(*found) if name not in nan else nan[name].with_more(*found)
        return expected, nan


class UnitWriter:
    """Writer of successive batches of successive units.

    Parameters
    ----------
    work
        Work that the units belong to.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._outputs: tuple[Output, ...] = ()
        self._open: ExitStack | None = None
        self._writers: dict[str, ShardWriter] = {}
        self._nan: dict[str, NanRows] = {}
        self._at = 0

    def take(
        self,
        start: int,
        arrays: Mapping[str, NDArray[Any]],
        outputs: tuple[Output, ...],
        nan: Mapping[str, NDArray[np.int64]],
    ) -> None:
        """Write the predictions of the batch that begins at row `start`; the previous one ended there, or its unit did.

        Parameters
        ----------
        start
            Row of the collection.
        arrays
            Arrays by name.
        outputs
            What they are.
        nan
            Rows of the batch with NaN, by name.
        """
        work = self._work
        n_rows = len(next(iter(arrays.values())))
        k = start // work.unit_rows
        first, last = work.rows(k)
        if self._outputs:
            check_same(self._outputs, outputs, f"cells {start} to {start + n_rows - 1}")
        self._outputs = outputs
        if self._open is None:
            if start != first:
                raise InputError(f"cells {first} to {start - 1} were not predicted before those after them")
            self._begin(k, outputs)
        elif start != self._at:
            raise InputError(f"cells {self._at} to {start - 1} were not predicted before those after them")
        for name, array in arrays.items():
            if name in self._writers:
                self._writers[name].append(array)
        for name, rows in nan.items():
            self._nan[name] = self._nan.get(name, NanRows()).with_more(len(rows), (start + rows[:_NAMED]).tolist())
        self._at = start + n_rows
        if self._at == last:
            self._finish(k)

    def _begin(self, k: int, outputs: tuple[Output, ...]) -> None:
        self._open = ExitStack()
        for one in outputs:
            array = self._work.array(one)
            if array.n_shards:
                self._writers[one.name] = self._open.enter_context(ShardWriter(array, self._work.folder_of(one), k))

    def _finish(self, k: int) -> None:
        assert self._open is not None
        opened, self._open = self._open, None
        self._writers = {}
        opened.close()
        self._work.mark(k, self._outputs, self._nan)
        self._nan = {}

    def abandon(self) -> None:
        """Remove the files of an unfinished unit."""
        opened, self._open = self._open, None
        if opened is not None:
            error = InterruptedError("the unit is left unfinished")
            opened.__exit__(type(error), error, None)
