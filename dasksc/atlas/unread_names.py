"""Cell names that are read in pieces, never all at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dasksc.atlas.inputs import atlas_inputs
from dasksc.atlas.stored import path_names
from dasksc.readers.locations import where_of
from dasksc.readers.options import OpenOptions
from dasksc.readers.registry import opened


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadNames:
    """Names of the cells of one or several files or stores."""

    paths: tuple[str, ...]  # Paths and URLs of the files and stores, in the order of their cells
    options: OpenOptions  # Options of `open`
    name: str | None  # Name of the index that `open` returns
    dtype: Any  # Data type of this index

    @classmethod
    def of(cls, data: Any, options: OpenOptions) -> UnreadNames | None:
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
        return None if found is None else cls(paths=paths, options=options, name=found[0], dtype=found[1])

    def pieces(self) -> Iterator[list[str]]:
        """Yield the names in the order of the cells, some at a time."""
        for path in self.paths:
            yield from path_names(path, self.options)

    def index(self, names: Sequence[str]) -> pd.Index[Any]:
        """Return the given names as an index with the name and data type of the index that `open` returns."""
        return pd.Index(names, name=self.name, dtype=self.dtype)
