"""Tables of files: a column of paths, and columns that describe each file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dasksc.atlas.assemble import Elements, require_key
from dasksc.atlas.expressions import holds
from dasksc.errors import InputError, MissingPathError
from dasksc.storage import is_url

_A_TABLE = "files= names a column of a table of files, a DataFrame or the path of a .csv, .tsv or .parquet file"


def selected_files(table: Any, files: str, where: str | None) -> tuple[list[str], pd.DataFrame]:
    """Return the paths in a column of a table, and the other columns, of the files for which `where` holds."""
    folder = Path()
    if isinstance(table, str | os.PathLike):
        folder, table = Path(table).parent, _read(Path(table))
    elif not isinstance(table, pd.DataFrame):
        raise InputError(f"{_A_TABLE}; got a {type(table).__name__}")
    require_key("the table of files", files, table.columns)
    if where is not None:
        table = table[holds(where, table)]
        if table.empty:
            raise InputError(f"where={where!r} holds for no file of the table")
    without = [row for row, path in table[files].items() if not isinstance(path, str | os.PathLike)]
    if without:
        raise InputError(
            f"column {files!r} of the table of files has no path in {len(without)} rows, such as {without[0]!r}"
        )
    given = [os.fspath(path) for path in table[files]]
    repeated = table[files][table[files].duplicated()]
    if len(repeated):
        raise InputError(f"{repeated.iloc[0]!r} occurs {given.count(repeated.iloc[0])} times in the table of files")
    # A path that is absolute replaces the folder.
    return [path if is_url(path) else str(folder / path) for path in given], table.drop(columns=files)


def describe_rows(atlas: Elements, table: pd.DataFrame, sizes: list[int]) -> None:
    """Add the columns of a table with a row for each file to obs, each value repeated for the cells of the file."""
    both = [name for name in table.columns if name in atlas.obs]
    if both:
        raise InputError(
            f"obs of the files has the column {both[0]!r}, and the table of files, too. Rename it in the table, or "
            "leave it out"
        )
    rows = np.repeat(np.arange(len(table)), sizes)
    for name in table.columns:
        column = table[name]
        if column.dtype == object or isinstance(column.dtype, pd.StringDtype):
            column = column.astype("category")
        atlas.obs[name] = column.array[rows]


def _read(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise MissingPathError(f"the table of files {path} does not exist here; read a remote one with pandas")
    match path.suffix:
        case ".parquet":
            return pd.read_parquet(path)
        case ".csv":
            return pd.read_csv(path)
        case ".tsv":
            return pd.read_csv(path, sep="\t")
    raise InputError(f"{_A_TABLE}; got {path}")
