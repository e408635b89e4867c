"""Resolution of inputs to atlases with names, and tables of files."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dasksc.atlas.elements import Elements, require_key
from dasksc.atlas.expressions import holds
from dasksc.errors import DaskscError, InputError, MissingPathError
from dasksc.readers.options import naming_errors
from dasksc.readers.registry import is_file_name, is_listed_name, reader_of
from dasksc.storage import RemoteLocation, is_url, redact_url
from dasksc.storage.remote.urls import is_recursive, matching

logger = logging.getLogger("dasksc.parts")


def atlas_inputs(data: Any, options: Mapping[str, Any], *, skips_errors: bool = False) -> list[tuple[str, Any]] | None:
    """Return the names and the paths or objects of the atlases that `data` represents; None if it is a single one."""
    # The name of an atlas is its key, the end of its path, or its number.

    def inside(given: Any) -> list[Any]:
        try:
            return _paths_at(given, options) or [given]
        except DaskscError:
            if not skips_errors:
                raise
            return [given]  # opening it raises an error again

    if isinstance(data, Mapping):
        return [(str(key), _only(key, given, inside(given))) for key, given in data.items()]
    if isinstance(data, list | tuple):
        return _named([one for given in data for one in inside(given)])
    found = _paths_at(data, options)
    return None if found is None else _named(found)


def reopenable(data: Any) -> Any:
    """Return an input that stays the same if the working directory or the given list or dict changes."""
    if isinstance(data, Mapping):
        return {key: reopenable(given) for key, given in data.items()}
    if isinstance(data, list | tuple):
        return list(map(reopenable, data))
    path = os.fspath(data) if isinstance(data, str | os.PathLike) else ""
    return os.path.abspath(path) if path and not is_url(path) else data


def quoted(data: Any) -> str:
    """Return a short text for the input in error messages, without the secrets of a URL."""
    return f"{redact_url(data) if isinstance(data, str) and is_url(data) else data!r:.100}"


def stem_of(path: str | os.PathLike[str]) -> str:
    """Return the name of an atlas from its path or URL, without suffix and query."""
    text = os.fspath(path)
    return Path((redact_url(text) if is_url(text) else text).removesuffix(".zip")).stem


def _only(key: Any, data: Any, parts: list[Any]) -> Any:
    if len(parts) > 1:
        raise InputError(
            f"{key!r}: {quoted(data)} contains {len(parts)} atlases, but a dict has one atlas per key. Give a list, or "
            "a key for each atlas"
        )
    return parts[0]


def _named(parts: Sequence[Any]) -> list[tuple[str, Any]]:
    """Name the parts: paths by their stems, preceded by folders if stems repeat."""
    paths = [part for part in parts if isinstance(part, str | os.PathLike)]
    stems = list(map(stem_of, paths))
    names = iter(stems if len(set(stems)) == len(stems) else _unique_names(paths))
    return [(next(names) if isinstance(one, str | os.PathLike) else str(i), one) for i, one in enumerate(parts)]


def _unique_names(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the paths from the last folder that all share; suffixes are included only if nothing else differs."""
    given = [os.fspath(path) for path in paths]
    texts = [redact_url(text) if is_url(text) else os.path.abspath(text) for text in given]
    parts = [text.rstrip("/").split("/") for text in texts]
    n_shared = len(list(takewhile(lambda level: len(set(level)) == 1, zip(*(one[:-1] for one in parts), strict=False))))
    of_stems = ["/".join([*one[n_shared:-1], stem_of(text)]) for one, text in zip(parts, texts, strict=True)]
    return of_stems if len(set(of_stems)) == len(texts) else ["/".join(one[n_shared:]) for one in parts]


def _paths_at(data: Any, options: Mapping[str, Any]) -> list[str] | None:
    """Return the atlases that a pattern or directory represents, sorted by name; None for a single atlas."""
    if not isinstance(data, str | os.PathLike):
        return None
    path = os.fspath(data)
    if is_url(path):
        location = RemoteLocation.of(path, options)
        if location.local is None:
            return _urls_at(location)
        path = location.local
    if os.path.exists(path):
        return _atlases_in(path) or None
    # The existing part of the path is no pattern, even if a folder has a name such as run[3].
    folder = os.path.dirname(path)
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    pattern = path[len(folder) :]
    if not glob.has_magic(pattern):
        return None
    found = [(one, _atlases_in(one)) for one in matching(glob.escape(folder) + pattern)]
    return _joined(path, found)


def _urls_at(location: RemoteLocation) -> list[str] | None:
    """Return the atlases at a URL, as `_paths_at` does for paths."""
    if glob.has_magic(location.key) and not location.is_zarr() and not location.exists():
        found = [(one.url, _atlases_in(one)) for one in location.matching()]
        return _joined(str(location), found)
    return _atlases_in(location) or None


def _atlases_in(path: str | RemoteLocation) -> list[str] | None:
    """Return the atlases in a folder or store, possibly none; None if the path is an atlas itself."""
    # At a URL, every question to a reader may take requests.
    if is_file_name(path.name) if isinstance(path, RemoteLocation) else not os.path.isdir(path):
        return None
    reader = reader_of(path)
    if reader is not None:
        return reader.parts(path) or None
    if not isinstance(path, RemoteLocation):
        with naming_errors(path):
            return sorted(entry.path for entry in os.scandir(path) if is_listed_name(entry.name))
    if path.is_on_web:
        raise MissingPathError(
            f"there is nothing at {path}. If it is a folder, give the URLs of its atlases as a list, since web "
            "servers do not list folders"
        )
    return [one.url for one in path.children() if is_listed_name(one.name)]


def _joined(pattern: str, found: Sequence[tuple[str, list[str] | None]]) -> list[str]:
    """Return the distinct matches of a pattern: atlases, and the atlases in matching folders."""
    # Unless the pattern is recursive, a folder without atlases is kept, so that opening it raises an error.
    inside = ([one] if paths is None or not (paths or is_recursive(pattern)) else paths for one, paths in found)
    if joined := list(dict.fromkeys(path for paths in inside for path in paths)):
        return joined
    raise MissingPathError(f"no file matches the pattern {pattern!r}")


_A_TABLE = "files= names a column of a table of files, a DataFrame or the path of a .csv, .tsv or .parquet file"


def selected_files(table: Any, files: str, where: str | None) -> tuple[list[str], pd.DataFrame]:
    """Return the paths in a column of a table, and the other columns, of the files for which `where` holds."""
    folder = Path()
    if isinstance(table, str | os.PathLike):
        folder, table = Path(table).parent, _read(Path(table))
    elif not isinstance(table, pd.DataFrame):
        raise InputError(f"{_A_TABLE}; got a {type(table).__name__}")
    require_key("the table of files", files, table.columns)
    if not table.columns.is_unique:
        raise InputError(f"the table of files repeats the column {table.columns[table.columns.duplicated()][0]!r}")
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
        raise InputError(
            f"{quoted(repeated.iloc[0])} occurs {given.count(repeated.iloc[0])} times in the table of files"
        )
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
