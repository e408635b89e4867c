"""`dasksc info`: what is in an atlas, how it is stored, and how fast it can be read."""

from __future__ import annotations

import click

import dasksc
from dasksc.cli._shared import data_of, data_options, print_json

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  dasksc info atlas.h5ad
  dasksc info 'plates/*.h5ad' --join outer --seconds 0
  dasksc info atlas.zarr --json | jq .rates
"""


@click.command(epilog=_EXAMPLES)
@data_options
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="For how long each of four probes reads; 0 reads nothing of the matrices.",
)
def command(paths: tuple[str, ...], join: str, as_json: bool, seconds: float) -> None:
    """Tell what is in an atlas: cells, obs, chunks and codecs, how fast it is read, and what to do about it.

    PATH is an .h5ad file, a Zarr store, a directory of them, or a pattern in quotes; several are one atlas. Or the
    .h5mu file or Zarr store of a MuData, whose modalities are listed.
    """
    found = dasksc.describe(data_of(paths), join="outer" if join == "outer" else "inner", seconds=seconds)
    if as_json:
        print_json(found)
    else:
        click.echo(repr(found))
