"""Arrays of predictions, written shard by shard in a work folder, and published by a rename.

The rows of an atlas are divided into *units* of whole batches, whose size depends only on the number of cells and the
batch size: a batch has the same rows on any number of ranks. A unit is one shard of every output. A shard has a
temporary name until it is complete, so a shard exists or does not, and a later call writes the missing ones. The work
folder appears with the first rows that are written. Values are stored uncompressed, so a shard is the rows followed by
the index of its chunks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from anndata.io import write_elem
from numpy.typing import NDArray

from dasksc.errors import InputError, StorageError
from dasksc.inference.model import Output, check_same, nan_rows
from dasksc.inference.publishing import Names, complete_store, extend_store, metadata_of, require_same_cells
from dasksc.inspection.report import Report
from dasksc.output import shards
from dasksc.output.work_folder import WorkFolder, as_anndata_writes, is_node, remove_leftovers

__all__ = ["COMPLETE", "NEW", "PredictionStore", "ShardWriter"]

COMPLETE, NEW = "complete", "new"
# Attribute of each array: the options of the call with the name of its run.
_ATTRIBUTE = "dasksc-predicted"
_ARRAY = {"encoding-type": "array", "encoding-version": "0.2.0"}
_CATEGORICAL = {"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False}
_LEAST_ROWS = 2**12
_MOST_ROWS = 2**16
_UNITS = 64
_CHUNK_BYTES = 2**18
# Total size, in bytes, at which the batches held in memory are written together; rows are read again in such pieces.
_HELD_BYTES = 2**22
# Maximum number of cells with NaN that are listed.
_NAMED = 5


def _unit_rows(n_obs: int, batch_size: int) -> int:
    """Return the rows of a unit: the largest ``batch_size * 2**k`` up to 1/64 of the rows, within limits."""
    wanted = min(max(-(-n_obs // _UNITS), _LEAST_ROWS), _MOST_ROWS)
    return batch_size << max(0, math.floor(math.log2(max(1, wanted / batch_size))))


class PredictionStore(WorkFolder):
    """Predictions of an atlas with the options in `plan`, for a new store or one of the same cells."""

    def __init__(self, path: Path, plan: Mapping[str, Any], *, names: Names) -> None:
        self.plan: dict[str, Any] = json.loads(json.dumps(plan))
        folder = path.with_name(path.name + ".partial")
        super().__init__(path, folder, what="prediction")
        # The folder of a new store remains if a process is killed after the rename.
        if is_node(path) and not self._is_same(self.read_plan()):
            self.folder = path.with_name(f"{path.name}.{plan['key']}.partial")
        self._names = names
        self._run: str | None = None
        self._is_begun = False
        self.outputs: list[Output] = []
        self.n_obs: int = plan["n_obs"]
        self.unit_rows = _unit_rows(self.n_obs, plan["batch_size"])
        self.n_units = -(-self.n_obs // self.unit_rows)

    def _is_same(self, begun: Mapping[str, Any] | None) -> bool:
        return begun is not None and begun.get("plan") == self.plan

    def start(self, *, overwrite: bool) -> str:
        """Return the name of the run for `join`, or `NEW`, or `COMPLETE` if there is nothing to do; create nothing."""
        begun = self.read_plan()
        if not overwrite:
            if begun is not None and not self._is_same(begun):
                raise self.other_plan_error(begun.get("plan", begun), self.plan)
            if self.is_complete():
                if begun is not None:  # the process that published the result was killed
                    with self.locked(wait=True):
                        self.clear()
                return COMPLETE
        if is_node(self.target):
            require_same_cells(self.target, self.n_obs, self._names)
        else:
            next(iter(self._names() or ()), None)  # unreadable names raise an error before anything is predicted
        if not overwrite:
            return NEW if begun is None else str(begun["run"])
        if self.folder.exists():
            with self.locked(wait=True):
                self.clear()
        return os.urandom(8).hex()

    def join(self, run: str) -> None:
        """Continue a run, or begin one with this name; the rank that writes first names a `NEW` run."""
        self._run = None if run == NEW else run
        begun = self.read_plan()
        if begun is not None and self._is_same(begun) and begun["run"] == self._run:
            self._is_begun = True
            self.outputs = self._recorded(begun)

    def check_keys(self, outputs: Sequence[Output], *, overwrite: bool) -> None:
        """Refuse outputs whose key is that of the cell names, or exists and is not to be overwritten."""
        if not is_node(self.target):
            return
        index = f"obs/{metadata_of(self.target / 'obs')['attributes']['_index']}"
        found = self.found()  # a process that was killed may have published some keys
        for one in outputs:
            if one.key == index:
                raise InputError(
                    f"the model returned {index!r}, which is the key of the cell names in {self.target}. Return the "
                    "predictions under another name"
                )
            if not overwrite and one.key not in found and os.path.lexists(self.target / one.key):
                raise InputError(
                    f"{self.target} already has {one.key!r}. Give another key= or out=, or overwrite=True (--overwrite)"
                )

    def _begin(self, outputs: list[Output]) -> None:
        """Create the arrays, unless another rank has; call this method under the lock."""
        self.outputs = outputs
        begun = self.read_plan()
        if begun is None and not self._is_begun and not self.found():
            self.clear()
            self._run = self._run or os.urandom(8).hex()
            with as_anndata_writes():
                for one in outputs:
                    self._create(one)
            recorded = [[one.name, one.width, one.dtype] for one in outputs]
            self.write_plan({"plan": self.plan, "run": self._run, "outputs": recorded})
        elif begun is None or not self._is_same(begun) or self._run not in (None, begun["run"]):
            raise StorageError(
                f"another call has published, removed or overwritten the predictions in {self.folder}. Run the same "
                "command again to predict what is missing"
            )
        else:
            check_same(self._recorded(begun), outputs, "these cells")
            self._run = begun["run"]
        self._is_begun = True

    def _recorded(self, begun: Mapping[str, Any]) -> list[Output]:
        return [Output(name=name, width=n, dtype=dtype) for name, n, dtype in begun["outputs"]]

    def _create(self, one: Output) -> None:
        own: dict[str, Any] = {_ATTRIBUTE: self.plan | {"run": self._run}}
        if (labels := self.plan["categories"].get(one.name)) is not None:
            group = zarr.create_group(self._store / one.key, attributes=_CATEGORICAL | own)
            write_elem(group, "categories", np.array(labels))
            own = {}
        self._array(one).write_metadata(_ARRAY | own)

    @property
    def _store(self) -> Path:
        return self.folder / "store"

    def _array(self, one: Output) -> shards.ShardedArray:
        """Return the array of an output; a chunk, the unit of reading, divides a shard."""
        most = max(1, _CHUNK_BYTES // one.row_bytes)
        return shards.ShardedArray(
            folder=self._store / one.key / ("codes" if one.name in self.plan["categories"] else ""),
            shape=one.shape(self.n_obs),
            dtype=np.dtype(one.dtype),
            chunk_rows=next(n for n in range(min(most, self.unit_rows), 0, -1) if self.unit_rows % n == 0),
            shuffle=None,
            given_shard_rows=self.unit_rows,
        )

    def rows(self, k: int) -> tuple[int, int]:
        return k * self.unit_rows, min((k + 1) * self.unit_rows, self.n_obs)

    def missing(self, first: int, last: int) -> list[int]:
        """Return the units of ``[first, last)`` that lack a shard."""
        # A process that was killed may have published some of the arrays.
        found = self.found() if self.outputs else {}
        left = [self._array(one) for one in self.outputs if one.key not in found]
        units = range(first, last)
        return [k for k in units if not self.outputs or not all(array.path(k).exists() for array in left)]

    def open_shards(self, k: int, outputs: list[Output]) -> tuple[list[shards.ShardWriter], contextlib.ExitStack]:
        """Return a writer of the shard of each output, and the stack that completes the shards."""
        with self.explaining(), self.locked(wait=True), contextlib.ExitStack() as stack:
            self._begin(outputs)
            writers = [stack.enter_context(shards.shard_writer(self._array(one), k)) for one in outputs]
            return writers, stack.pop_all()

    @contextlib.contextmanager
    def keeping_only_shards(self, writer: ShardWriter) -> Iterator[None]:
        """After an error, remove unfinished shards, and the work folder if no rank has written a shard."""
        try:
            yield
        except BaseException as error:
            writer.abandon(error)
            if self.folder.exists():
                with contextlib.suppress(OSError), self.locked(wait=True):
                    begun = self.read_plan()
                    if begun is not None and self._is_same(begun):
                        arrays = [self._array(one).folder / "c" for one in self._recorded(begun)]
                        # Temporary files are those of other ranks, or of processes that were killed.
                        if not any(path.is_file() for folder in arrays for path in folder.rglob("*")):
                            self.clear()
            if self.folder.exists():
                error.add_note(f"Finished predictions are kept in {self.folder}. Run the same command again to resume.")
            raise

    def publish(self, *, overwrite: bool) -> None:
        """Make the predictions visible if all shards exist."""
        if not self.outputs or self.read_plan() is None:
            return
        with self.explaining(), as_anndata_writes(), self.locked(wait=True):
            begun = self.read_plan()
            if begun is None or begun.get("run") != self._run or self.missing(0, self.n_units):
                return
            self.check_keys(self.outputs, overwrite=overwrite)
            found = self.found()
            written = [one for one in self.outputs if one.key not in found]  # others were renamed before a kill
            remove_leftovers(self._store)
            columns = [one.name for one in self.outputs if one.width is None]
            if is_node(self.target):
                extend_store(self.target, self._store, [one.key for one in written], columns)
            else:
                complete_store(self._store, self.n_obs, self._names, columns)
                os.rename(self._store, self.target)
            with contextlib.suppress(OSError):  # another process may be waiting for the lock; it removes the folder
                self.remove()

    def found(self) -> dict[str, str]:
        """Return shape and type of the predictions of this run, or of any with these options if it has no name yet."""
        found = {}
        for folder in (file.parent for group in ("obsm", "obs") for file in (self.target / group).glob("*/zarr.json")):
            attributes = metadata_of(folder).get("attributes", {})
            made = attributes.get(_ATTRIBUTE)
            if isinstance(made, dict) and made == self.plan | {"run": self._run or made.get("run")}:
                array = metadata_of(folder / "codes") or metadata_of(folder)
                found[f"{folder.parent.name}/{folder.name}"] = f"{tuple(array['shape'])} {array['data_type']}"
        return found

    def is_complete(self) -> bool:
        """Return True if the predictions are published, and no process that was killed left a part of them."""
        return bool(self.found()) and not (self._store.exists() and self._is_same(self.read_plan()))

    def nan_cells(self, key: str) -> Report | None:
        """Return the number of cells with NaN in published predictions and the first of these, or None."""
        array = zarr.open(self.target / key, mode="r")
        if isinstance(array, zarr.Group):  # codes of labels
            return None
        step = max(1, _HELD_BYTES // (array.dtype.itemsize * math.prod(array.shape[1:])))
        n_cells, first = 0, list[int]()
        for start in range(0, self.n_obs, step):
            rows = nan_rows(np.asarray(array[start : start + step]))
            n_cells, first = n_cells + len(rows), [*first, *(start + rows[:_NAMED]).tolist()][:_NAMED]
        return Report(output=key, n_cells=n_cells, first=self.named(first)) if n_cells else None

    def named(self, rows: Sequence[int]) -> list[tuple[int, str]]:
        """Return rows with the names of their cells; names are empty if the cells have none."""
        found, start = dict.fromkeys(rows, ""), 0
        for piece in self._names() or ():
            found |= {row: piece[row - start] for row in rows if start <= row < start + len(piece)}
            start += len(piece)
            if start > max(rows):
                break
        return list(found.items())


class ShardWriter:
    """Writer of batches in ascending order of rows; a thread writes several together, so the model need not wait."""

    def __init__(self, store: PredictionStore) -> None:
        self._store = store
        self._outputs: list[Output] = []
        self._held: list[Mapping[str, NDArray[Any]]] = []
        self._held_bytes = 0
        self._writers: list[shards.ShardWriter] = []
        self._stack = contextlib.ExitStack()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dasksc-shards")
        self._writing: Future[None] | None = None

    def write(self, start: int, arrays: Mapping[str, NDArray[Any]], outputs: list[Output]) -> bool:
        """Write the predictions of the batch that begins at row `start`; return True if it is the last of a unit."""
        n_rows = len(next(iter(arrays.values())))
        check_same(self._outputs or outputs, outputs, f"cells {start} to {start + n_rows - 1}")
        self._outputs = outputs
        self._held.append({name: array.copy() for name, array in arrays.items()})  # a model may reuse the memory
        self._held_bytes += sum(array.nbytes for array in arrays.values())
        k = start // self._store.unit_rows
        is_last = start + n_rows == self._store.rows(k)[1]
        if is_last or self._held_bytes >= _HELD_BYTES:
            self.flush()
            self._writing = self._thread.submit(self._write, k, self._held, is_last=is_last)
            self._held, self._held_bytes = [], 0
        return is_last

    def _write(self, k: int, batches: list[Mapping[str, NDArray[Any]]], *, is_last: bool) -> None:
        """Append batches to the shards of a unit, and complete the shards after the last ones."""
        if not self._writers:
            self._writers, self._stack = self._store.open_shards(k, self._outputs)
        with self._store.explaining():
            for one, writer in zip(self._outputs, self._writers, strict=True):
                for arrays in batches:
                    writer.append(arrays[one.name])
            if is_last:
                self._stack.close()
                self._writers = []

    def flush(self) -> None:
        """Wait until the batches passed to the thread are written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def abandon(self, error: BaseException) -> None:
        """Remove the files of an unfinished unit."""
        self._thread.shutdown()
        with contextlib.suppress(OSError):
            self._stack.__exit__(type(error), error, error.__traceback__)
