"""Names of cells: fast reading, placeholders, and a check for repeated names."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
import pandas as pd
from anndata import AnnData
from anndata.io import read_elem

from dasksc.atlas.options import OpenOptions
from dasksc.storage import Place
from dasksc.storage.hdf5.strings import read_strings

__all__ = ["any_repeat", "is_nameless", "nameless_index", "number_rows", "read_names"]

_FEW_NAMES = 100_000


def read_names(stored: Any, path: str | Place, options: OpenOptions) -> Any:
    """Read the names of rows; those of a local HDF5 file are read from its bytes if possible."""
    names = None
    if isinstance(stored, h5py.Dataset) and not isinstance(path, Place) and options.mmap is not False:
        names = read_strings(stored, path)
    # The data type is derived from one name: pandas would need 40 bytes per name to find the same type.
    return read_elem(stored) if names is None else pd.Index(names, dtype=pd.Index(names[:1]).dtype)


def nameless_index(n: int) -> pd.Index[Any]:
    """Return an index of `n` rows that AnnData accepts as strings, without any strings."""
    return pd.CategoricalIndex(pd.Categorical.from_codes(np.zeros(n, dtype=np.int8), categories=[""]))  # type: ignore[arg-type, unused-ignore]


def is_nameless(index: pd.Index[Any]) -> bool:
    """Return True for a `nameless_index`."""
    return isinstance(index, pd.CategoricalIndex) and index.categories.tolist() == [""]


def number_rows(adata: AnnData) -> None:
    """Replace a `nameless_index` by numbers, which AnnData converts to strings in any object that it builds."""
    tables = [table for table in adata.obsm.values() if isinstance(table, pd.DataFrame)]
    for table in (adata.obs, *tables):
        table.index = pd.RangeIndex(adata.n_obs)


def any_repeat(names: pd.Index[Any]) -> bool:
    """Return True if names repeat; large indexes are checked by sorting hashes, which is faster than a hash table."""
    if len(names) < _FEW_NAMES:
        return not names.is_unique
    hashes = np.fromiter(map(hash, names.to_numpy()), dtype=np.int64, count=len(names))
    hashes.sort()
    return bool((hashes[1:] == hashes[:-1]).any()) and not names.is_unique
