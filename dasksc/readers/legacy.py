"""File layouts of AnnData before version 0.7."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
import pandas as pd
import zarr
from numpy.typing import NDArray


def is_record_array(stored: Any) -> bool:
    """Return True if a stored element is an array of records, the old layout of tables and mappings."""
    return isinstance(stored, h5py.Dataset | zarr.Array) and stored.dtype.names is not None


def table_of_records(stored: Any) -> pd.DataFrame:
    """Read obs or var from an array of records, one per row; the first field is the name."""
    records = stored[()]
    table = pd.DataFrame({name: _decoded(records[name]) for name in records.dtype.names})
    return table.set_index(table.columns[0])


def entry_of_records(stored: Any, field: str) -> NDArray[Any]:
    """Read an entry of obsm or varm from an array of records, one per row; each field is an entry."""
    array = np.ascontiguousarray(stored[()][field])
    return array[:, None] if array.ndim == 1 else array


def decode_old_categories(tables: list[pd.DataFrame], uns: dict[str, Any]) -> list[pd.DataFrame]:
    """Decode categoricals stored as codes in the table and ``"<name>_categories"`` in uns."""
    suffix = "_categories"
    for key in [key for key in uns if key.endswith(suffix)]:
        name, categories = key.removesuffix(suffix), np.atleast_1d(uns[key])
        for table in tables:
            if name in table and (table[name] < len(categories)).all():
                table[name] = pd.Categorical.from_codes(table[name].to_numpy(), categories)
                uns.pop(key, None)
    return tables


def _decoded(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8").astype(object)
    if values.dtype.kind == "O":
        return np.array([v.decode() if isinstance(v, bytes) else v for v in values], dtype=object)
    return values
