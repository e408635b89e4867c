"""What subcommands have in common: their options, and how they print."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import click
from anndata import AnnData

import dasksc

__all__ = ["aligned", "data_of", "data_options", "opened", "print_json"]

Command = Callable[..., Any]


def data_options(command: Command) -> Command:
    """Add the argument that says which atlas, and the options that say how several are joined."""
    options = (
        click.argument("paths", nargs=-1, required=True, metavar="PATH..."),
        click.option(
            "--join",
            type=click.Choice(["inner", "outer"]),
            default="inner",
            show_default=True,
            help="Of several atlases, keep the genes that all have, or any.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def data_of(paths: Sequence[str]) -> str | list[str]:
    """Return one path, a pattern or directory among them, as it is; several as a list."""
    return paths[0] if len(paths) == 1 else list(paths)


def opened(paths: Sequence[str], join: str, *, raw: bool = False) -> AnnData:
    """Open what was named on the command line as one atlas."""
    return dasksc.open(data_of(paths), join="outer" if join == "outer" else "inner", raw=raw)


def print_json(value: Any) -> None:
    """Print a dataclass or a mapping as one line of JSON; NumPy's numbers as numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    click.echo(json.dumps(value, default=_plain))


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def aligned(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Return rows of a table, columns two spaces apart; those numbered in `right` flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
