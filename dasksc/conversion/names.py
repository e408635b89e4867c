"""Temporary files with the names of cells, from which names can be read in any order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.atlas.unread_names import UnreadNames
from dasksc.output.work_folder import atomic_array, atomic_path, mapped_array
from dasksc.readers.names import any_equal
from dasksc.storage.hdf5.strings import strings_at


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedNames:
    """Names of the cells to convert (`rows` of the input, ascending; None for all); memory holds a piece of them."""

    unread: UnreadNames
    rows: NDArray[np.int64] | None
    folder: Path

    @property
    def dtype(self) -> Any:
        return self.unread.dtype

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
        return self.unread.index(strings_at(np.asarray(text), starts, offsets[rows + 1] - starts))

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
        return self.unread.index(next(filter(None, self._pieces()), [])[:1])

    def _pieces(self) -> Iterator[list[str]]:
        start = 0
        for names in self.unread.pieces():
            stop = start + len(names)
            if self.rows is None:
                yield names
            else:
                first, end = np.searchsorted(self.rows, [start, stop])
                yield [names[row] for row in (self.rows[first:end] - start).tolist()]
            start = stop
