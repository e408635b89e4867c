"""Reading of obs and var from a file or store, column by column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from anndata.io import read_elem

from dasksc.atlas.cell_names import nameless_index, read_names
from dasksc.atlas.element_sizes import check_table, lengths_of
from dasksc.atlas.legacy import is_record_array, table_of_records
from dasksc.atlas.lookup import known_columns
from dasksc.atlas.options import OpenOptions
from dasksc.storage import RemoteLocation

__all__ = ["column_names", "read_table"]


def read_table(
    stored: Any, columns: Sequence[str] | None, path: str | RemoteLocation, options: OpenOptions
) -> pd.DataFrame:
    """Read obs or var; only `columns`, if the encoding stores columns separately."""
    if is_record_array(stored):
        table = table_of_records(stored)
    else:
        check_table(stored, path)
        version = stored.attrs.get("encoding-version")
        if version == "0.2.0" or (columns is not None and version != "0.1.0"):
            return _read_columns(stored, columns, path, options)
        table = read_elem(stored)
    return table if options.has_names else table.set_axis(nameless_index(len(table)))


def _read_columns(
    stored: Any, columns: Sequence[str] | None, path: str | RemoteLocation, options: OpenOptions
) -> pd.DataFrame:
    """Read the requested columns of a table one by one."""
    order = _column_order(stored)
    kept = order if columns is None else known_columns(columns, order, path, may_lack=options.may_lack)
    index_key = stored.attrs["_index"]
    if options.has_names:
        index = read_names(stored[index_key], path, options)
    else:
        index = nameless_index(lengths_of(stored)[index_key])
    table = pd.DataFrame({name: read_elem(stored[name]) for name in kept}, index=index, columns=kept)
    if index_key != "_index" and options.has_names:
        table.index.name = index_key
    return table


def column_names(stored: Any) -> list[str]:
    """Return the columns of a stored table, in order."""
    return list(stored.dtype.names) if is_record_array(stored) else _column_order(stored)


def _column_order(stored: Any) -> list[str]:
    return [str(name) for name in stored.attrs["column-order"]]
