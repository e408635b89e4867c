"""The `dasksc` command, whose subcommands are modules that are imported on use.

A subcommand is a module of this package with a click command named `command`. The name of the subcommand is that of
the module, with hyphens instead of underscores. Subcommands with a report have an option `--json`. Exit codes: 0
success, 1 an error of the data or the run, 2 an invalid command line, 130 Ctrl-C.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from dasksc import DaskscError, __version__

__all__ = ["group", "main"]

_EXAMPLES = """
\b
Examples:
  dasksc info atlas.h5ad
  dasksc convert atlas.h5ad atlas.zarr --verify
  dasksc check atlas.zarr --label-key cell_type --world-size 8
  dasksc suggest atlas.zarr --batch-size 256
  dasksc stats atlas.h5ad --by donor --out stats.h5ad
  dasksc train --config classifier.yaml --nproc auto
  dasksc embed atlas.h5ad --model run/model.pt --out emb.zarr
"""


class _Commands(click.Group):
    """Group of the subcommands in this package, which are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = import_module(f"{__name__}.{cmd_name.replace('-', '_')}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # click would exit with code 1
            click.echo("\n".join(["dasksc: stopped by Ctrl-C.", *getattr(error, "__notes__", [])]), err=True)
            sys.exit(130)


@click.group(cls=_Commands, epilog=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dasksc")
def group() -> None:
    """Feed single-cell atlases on disk to PyTorch."""


def main(args: Sequence[str] | None = None) -> Any:
    """Run the `dasksc` command; errors of dasksc are printed as one line, with exit code 1."""
    try:
        group.main(args=None if args is None else list(args), prog_name="dasksc")
    except DaskscError as error:
        click.echo(f"dasksc: {error}", err=True)
        sys.exit(1)
