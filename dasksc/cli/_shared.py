"""Functions shared by subcommands: common options, opening of atlases, and output."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
import dask
from anndata import AnnData

import dasksc
from dasksc.atlas.modalities import is_modalities
from dasksc.cli._messages import collected_warnings, errors_as_options, print_warnings
from dasksc.storage import is_url, redact_url

__all__ = [
    "Features",
    "StorageOptions",
    "aligned",
    "cached_in",
    "can_show_progress",
    "data_of",
    "data_options",
    "feature_options",
    "opened",
    "options_of",
    "print_json",
    "title_of",
    "url_options",
]

Command = Callable[..., Any]
StorageOptions = Mapping[str, str | bool]
# Values of the arguments `genome` and `feature_types` of `dasksc.open`, if given.
Features = Mapping[str, list[str]]


def data_options(command: Command) -> Command:
    """Add the argument for paths of atlases, and the options for joining several."""
    options = (
        click.argument("paths", nargs=-1, required=True, metavar="PATH..."),
        click.option(
            "--join",
            type=click.Choice(["inner", "outer"]),
            default="inner",
            show_default=True,
            help="Keep shared or all genes.",
        ),
        feature_options,
        url_options,
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def feature_options(command: Command) -> Command:
    """Add the options that choose features of 10x files; the command receives them as `features`."""

    @functools.wraps(command)
    def wrapper(*args: Any, genome: str | None, feature_types: str | None, **options: Any) -> Any:
        given = {"genome": genome, "feature_types": feature_types}
        features = {name: text.split(",") for name, text in given.items() if text is not None}
        return command(*args, features=features, **options)

    of_genome = click.option("--genome", metavar="A,B", help="Genomes to keep (10x .h5 files).")
    of_type = click.option("--feature-types", metavar="A,B", help="Feature types to keep (10x .h5 files).")
    return of_genome(of_type(wrapper))


def url_options(command: Command) -> Command:
    """Add the options for reading URLs, and express errors and warnings in terms of the command line.

    The command receives `storage_options` as a dict.
    """

    @functools.wraps(command)
    def wrapper(*args: Any, **options: Any) -> Any:
        with errors_as_options(), collected_warnings():
            return command(*args, **options)

    stored = click.option(
        "--storage-option",
        "storage_options",
        multiple=True,
        metavar="K=V",
        callback=lambda _context, _option, given: options_of(given),
        help="Option for URLs, e.g. skip_signature=true.",
    )
    kept = click.option(
        "--cache", type=click.Path(file_okay=False), metavar="DIR", help="Cache remote data in this directory."
    )
    return stored(kept(wrapper))


def options_of(given: Sequence[str]) -> dict[str, str | bool]:
    """Parse ``NAME=VALUE`` options into a dict; true and false become booleans."""
    options: dict[str, str | bool] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals:
            raise click.UsageError(f"--storage-option {one} has no value; give it as NAME=VALUE")
        options[name] = {"true": True, "false": False}.get(value.lower(), value)
    return options


def data_of(paths: Sequence[str]) -> str | list[str]:
    """Return a single path as it is, since it may be a pattern or directory, and several paths as a list."""
    return paths[0] if len(paths) == 1 else list(paths)


def title_of(paths: Sequence[str]) -> str:
    """Return the paths of a command line for display, without the secrets of URLs."""
    return ", ".join(redact_url(path) if is_url(path) else path for path in paths)


@contextmanager
def cached_in(folder: str | None) -> Iterator[None]:
    """Return a context in which blocks of files at URLs are cached in a folder; None uses the configuration of Dask."""
    with dask.config.set({} if folder is None else {"dasksc.cache": folder}):
        yield


def opened(
    paths: Sequence[str],
    join: str,
    *,
    features: Features,
    storage_options: StorageOptions,
    cache: str | None,
    names: bool = False,
) -> AnnData | dasksc.Modalities:
    """Open the paths of a command line: several atlases as one, or the modalities of a MuData."""
    of_several = next((path for path in paths if is_modalities(path)), None)
    with cached_in(cache):
        if of_several is None:
            how: Any = "outer" if join == "outer" else "inner"
            chosen: Any = features
            atlas = dasksc.open(data_of(paths), names=names, join=how, storage_options=storage_options, **chosen)
            print_warnings()
            return atlas
        named = redact_url(of_several) if is_url(of_several) else of_several
        if len(paths) > 1:
            raise dasksc.InputError(
                f"{named} contains several modalities, which cannot be joined with other atlases. Give only this path"
            )
        if features:
            raise dasksc.InputError(
                f"{named} contains several modalities, but --genome and --feature-types are for 10x .h5 files. Leave "
                "them out"
            )
        if storage_options and is_url(of_several):
            raise dasksc.InputError(
                f"{named} contains several modalities, which take store settings from the environment only: set "
                "AWS_REGION, AWS_SKIP_SIGNATURE=true and the like instead of --storage-option"
            )
        return dasksc.Modalities(of_several)


def print_json(value: Any) -> None:
    """Print a dataclass or mapping as one line of JSON; NumPy numbers become plain numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    click.echo(json.dumps(value, default=_plain))


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def aligned(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Format rows of a table with columns two spaces apart; columns whose index is in `right` are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def can_show_progress() -> bool:
    """Return True if a progress bar can be shown: stderr is a terminal, and tqdm is installed."""
    if not sys.stderr.isatty():
        return False
    try:
        import tqdm  # noqa: F401
    except ImportError:
        return False
    return True
