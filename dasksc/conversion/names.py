"""Temporary files with the names of cells, from which names can be read in any order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.atlas.inputs import atlas_inputs
from dasksc.atlas.stored import path_names
from dasksc.output.work_folder import atomic_array, atomic_path, mapped_array
from dasksc.readers.locations import where_of
from dasksc.readers.names import any_equal
from dasksc.readers.options import OpenOptions
from dasksc.readers.registry import opened
from dasksc.storage.hdf5.strings import strings_at


@dataclass(slots=True, kw_only=True)
class StagedNames:
    """Names of the cells of files and stores; memory holds a piece of them."""

    paths: tuple[str, ...]  # in the order of their cells
    options: OpenOptions
    name: str | None  # of the index that `open` returns
    dtype: Any  # of this index
    folder: Path
    rows: NDArray[np.int64] | None = None  # the cells to convert, ascending; None for all

    @classmethod
    def of(cls, data: Any, options: OpenOptions, folder: Path) -> StagedNames | None:
        """Return the names of one or several atlases, or None if they can only be read as a whole."""
        # Names cannot be read in pieces if they are in an AnnData, in files of old formats or of other programs, or in
        # several files whose names have different types.
        parts = atlas_inputs(data, options.storage_options)
        given = [data] if parts is None else [one for _, one in parts]
        if not all(isinstance(one, str | os.PathLike) for one in given):
            return None
        paths = tuple(map(os.fspath, given))
        types = set()
        for path in paths:
            with opened(where_of(path, options), options) as store:
                types.add(None if store.modalities() else store.names_type())
        found = types.pop() if len(types) == 1 else None
        return (
            None if found is None else cls(paths=paths, options=options, name=found[0], dtype=found[1], folder=folder)
        )

    def write(self, n: int) -> bool:
        """Write the files with all `n` names; return True if two names have the same hash."""
        hashes = np.empty(n, dtype=np.int64)
        start = n_bytes = 0
        with (
            atomic_array(self.folder / "offsets.npy", np.int64, n + 1) as offsets,
            atomic_path(self.folder / "text") as path,
            path.open("wb") as file,
        ):
            for names in self._pieces():
                stop = start + len(names)
                encoded = [name.encode("utf-8", "surrogateescape") for name in names]
                hashes[start:stop] = np.fromiter(map(hash, names), dtype=np.int64, count=len(names))
                offsets[start + 1 : stop + 1] = n_bytes + np.cumsum(list(map(len, encoded)), dtype=np.int64)
                start, n_bytes = stop, n_bytes + file.write(b"".join(encoded))
        return any_equal(hashes)

    def take(self, rows: NDArray[np.int64]) -> Any:
        return self.index(rows).array

    def index(self, rows: NDArray[np.int64]) -> pd.Index[Any]:
        """Return the names of rows in any order, as an index of the type that `dasksc.open` returns."""
        offsets = mapped_array(self.folder / "offsets.npy")
        starts = offsets[rows]
        # An empty file cannot be mapped.
        text = np.memmap(self.folder / "text", mode="r") if offsets[-1] else np.empty(0, dtype=np.uint8)
        return self._index(strings_at(np.asarray(text), starts, offsets[rows + 1] - starts))

    def _index(self, names: Sequence[str]) -> pd.Index[Any]:
        return pd.Index(names, name=self.name, dtype=self.dtype)

    def match_input(self) -> bool:
        """Read the names of the input again; return True if the files hold the same names."""
        start = 0
        for names in self._pieces():
            if self.take(np.arange(start, start + len(names))).tolist() != names:
                return False
            start += len(names)
        return True

    def first(self) -> pd.Index[Any]:
        """Return an index with the first name to convert, empty if there are no cells."""
        return self._index(next(filter(None, self._pieces()), [])[:1])

    def _pieces(self) -> Iterator[list[str]]:
        start = 0
        for names in (piece for path in self.paths for piece in path_names(path, self.options)):
            stop = start + len(names)
            if self.rows is None:
                yield names
            else:
                first, end = np.searchsorted(self.rows, [start, stop])
                yield [names[row] for row in (self.rows[first:end] - start).tolist()]
            start = stop
