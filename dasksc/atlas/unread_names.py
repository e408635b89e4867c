"""Cell names that are read in pieces, never all at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd
import zarr
from anndata.io import read_elem, write_elem

from dasksc.atlas.attaching import path_names
from dasksc.atlas.cell_names import stored_names
from dasksc.atlas.element_sizes import check_before_reading, items_of_table
from dasksc.atlas.elements import is_group
from dasksc.atlas.inputs import atlas_inputs
from dasksc.atlas.options import OpenOptions
from dasksc.atlas.stores import holds_modalities, naming_errors, root_of, where_of

__all__ = ["UnreadNames"]


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
        given = [data] if parts is None else [part.data for part in parts]
        if not all(isinstance(one, str | os.PathLike) for one in given):
            return None
        paths = tuple(map(os.fspath, given))
        kinds = {_kind_of(path, options) for path in paths}
        kind = kinds.pop() if len(kinds) == 1 else None
        return None if kind is None else cls(paths=paths, options=options, name=kind[0], dtype=kind[1])

    def pieces(self) -> Iterator[list[str]]:
        """Yield the names in the order of the cells, some at a time."""
        for path in self.paths:
            yield from path_names(path, self.options)

    def index(self, names: Sequence[str]) -> pd.Index[Any]:
        """Return the given names as an index with the name and data type of the index that `open` returns."""
        return pd.Index(names, name=self.name, dtype=self.dtype)


def _kind_of(path: str, options: OpenOptions) -> tuple[str | None, Any] | None:
    """Return the `name` and `dtype` of the index of cell names; None if the names can only be read as a whole."""
    if holds_modalities(path):
        return None
    where = where_of(path, options)
    with naming_errors(where), root_of(where, options) as root:
        if "obs" not in root or not is_group(root["obs"]):
            return None
        table = root["obs"]
        if table.attrs.get("encoding-version") != "0.2.0" or stored_names(table, where) is None:
            return None
        check_before_reading(where, {"obs": items_of_table(table, [], options)})
        key = str(table.attrs["_index"])
        encoding = table[key].attrs.get("encoding-type")
        if encoding == "nullable-string-array" and not table[key]["mask"][:].any():
            dtype = _dtype_of_nullable(table[key])
        elif encoding == "string-array":
            dtype = pd.Index(["a"]).dtype
        else:
            return None
        return (None if key == "_index" else key), dtype


def _dtype_of_nullable(stored: Any) -> Any:
    """Return the data type of nullable strings, which depends on their attributes and on the version of AnnData."""
    sample = zarr.open_group(zarr.storage.MemoryStore(), mode="w", zarr_format=2)
    write_elem(sample, "values", np.array(["a"], dtype=object))
    write_elem(sample, "mask", np.array([False]))
    determining = ("encoding-type", "encoding-version", "na-value")
    sample.attrs.update({name: str(stored.attrs[name]) for name in determining if name in stored.attrs})
    return cast(Any, read_elem(sample)).dtype
