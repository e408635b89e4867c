"""Recorders of reads. With them, tests check which arrays are read, and in most cases that none is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import h5py
import numpy as np
from zarr.storage import LocalStore

from dasksc.storage import arrays, chunked
from dasksc.storage import uncompressed as plain


@dataclass(frozen=True)
class Reach:
    """Call of `StoredArray.locate`: the array, and the number of elements or rows requested."""

    label: str
    n_runs: int
    n_items: int


@dataclass
class Reads:
    """Reads of all threads, recorded in a block."""

    reached: list[Reach] = field(default_factory=list)  # calls of ``locate`` on arrays of `dasksc.storage`
    h5py_names: list[str] = field(default_factory=list)  # datasets read through h5py, by any caller: ``"/X/data"``
    zarr_keys: list[str] = field(default_factory=list)  # chunks, not metadata, that zarr-python read: ``"X/data/c/0"``

    def n_calls(self, end: str) -> int:
        """Return the number of reads of arrays whose label ends in `end`, e.g. ``"X/data"``."""
        return sum(reach.label.endswith(end) for reach in self.reached)

    def n_items(self, end: str) -> int:
        """Return the number of elements (rows, if dense) requested from arrays whose label ends in `end`."""
        return sum(reach.n_items for reach in self.reached if reach.label.endswith(end))

    def of(self, part: str) -> list[str]:
        """Return every read, by any library, of arrays with `part` in their name."""
        names = [reach.label for reach in self.reached] + self.h5py_names + self.zarr_keys
        return [name for name in names if part in name]


@contextmanager
def recorded_reads() -> Iterator[Reads]:
    """Record the reads of this process until the end of the block."""
    reads = Reads()

    def recording_reach(original: Any) -> Any:
        def locate(self: Any, starts: Any, stops: Any) -> Any:
            if len(starts):  # without runs, only the file is checked
                reads.reached.append(Reach(self.label, len(starts), int(np.sum(stops - starts))))
            return original(self, starts, stops)

        return locate

    def recording_h5py(original: Any) -> Any:
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            reads.h5py_names.append(self.name)
            return original(self, *args, **kwargs)

        return read

    original_get = LocalStore.get

    async def get(self: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        if key.rpartition("/")[2] not in ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"):
            reads.zarr_keys.append(key)
        return await original_get(self, key, *args, **kwargs)

    changed = [(LocalStore, "get", get)]
    stored = (arrays.MemoryArray, chunked.ChunkedArray, plain.PlainArray, arrays.SlicedArray)
    changed += [(cls, "locate", recording_reach(cls.locate)) for cls in stored]
    changed += [
        (h5py.Dataset, name, recording_h5py(getattr(h5py.Dataset, name))) for name in ("__getitem__", "read_direct")
    ]
    with ExitStack() as stack:
        for owner, name, function in changed:
            stack.enter_context(mock.patch.object(owner, name, function))
        yield reads
