"""Options and functions that several commands share."""

from __future__ import annotations

import difflib
import glob
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dasksc
from dasksc.errors import InputError, MissingPathError
from dasksc.options import Parser, arguments_of, parameters_of

__all__ = [
    "add_paths",
    "check_paths",
    "data_of",
    "genes_of",
    "given_to_open",
    "opened",
    "show",
    "shows_progress",
    "title_of",
]

_NO_OPTIONS = ("data", "obs", "names", "mmap")


def add_paths(parser: Parser, *, with_open: bool = True) -> None:
    """Add the paths of atlases, ``--json``, and the options of `dasksc.open`."""
    parser.add_argument("--json", action="store_true", help="Print JSON")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="File, store, directory, 'pattern' or URL")
    if with_open:
        parser.add_options("open", skip=_NO_OPTIONS, title="opening, as by dasksc.open")


def check_paths(paths: Sequence[str]) -> None:
    """Raise an error for a missing local file before anything heavy is imported. Warnings go to stderr from here on."""
    logging.basicConfig(format="dasksc: warning: %(message)s")
    for path in paths:
        if ":/" not in path and not glob.has_magic(path) and not os.path.exists(path):
            folder, name = os.path.split(path)
            names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
            similar = ", ".join(difflib.get_close_matches(name, names))
            raise MissingPathError(f"there is nothing at {path}" + (f"; similar names: {similar}" if similar else ""))


def given_to_open(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `dasksc.open` that differ from their defaults."""
    given = arguments_of("open", options)
    return {
        one.name: given[one.name]
        for one in parameters_of("open")
        if one.name in given and one.name not in _NO_OPTIONS and given[one.name] != one.default
    }


def opened(options: Mapping[str, Any], *, names: bool = False) -> Any:
    """Return the atlas of a command line, with names of cells if they are needed, or the modalities of a MuData."""
    check_paths(options["paths"])
    from dasksc.atlas.modalities import is_modalities

    paths, given = options["paths"], given_to_open(options)
    if not any(map(is_modalities, paths)):
        return dasksc.open(data_of(paths), names=names or "index_unique" in given, **given)
    if len(paths) > 1 or given:
        raise InputError(
            f"{title_of(paths)} contains several modalities, which are read without options of dasksc.open and without "
            f"other atlases; leave out {', '.join(given) or 'the other paths'}"
        )
    return dasksc.Modalities(paths[0])


def data_of(paths: Sequence[str]) -> str | list[str]:
    """Return a single path as it is, since it may be a pattern or directory, and several paths as a list."""
    return paths[0] if len(paths) == 1 else list(paths)


def title_of(paths: Sequence[str]) -> str:
    """Return paths for display, without the secrets of URLs."""
    from dasksc.storage import is_url, redact_url

    return ", ".join(redact_url(path) if is_url(path) else path for path in paths)


def genes_of(text: Any) -> Any:
    """Return the names in ``A,B``, or the path of a vocabulary file."""
    return (Path(text) if os.path.isfile(text) else text.split(",")) if isinstance(text, str) else text


def shows_progress(given: bool | None) -> bool:
    """Return the given choice, by default True if stderr is a terminal and tqdm is installed."""
    return sys.stderr.isatty() and find_spec("tqdm") is not None if given is None else given


def show(report: Any, *, as_json: bool) -> None:
    """Print a report as text or as one line of JSON."""
    if as_json:
        print(report.to_json() if hasattr(report, "to_json") else json.dumps(report.as_dict()))
    else:
        print(report)
