"""``dasksc info``: content, storage and reading speed of an atlas."""

from __future__ import annotations

from typing import Any

import click

import dasksc
from dasksc.cli._shared import Features, StorageOptions, cached_in, data_of, data_options

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
    metavar="S",
    help="Seconds per speed test; 0: none.",
)
def command(
    paths: tuple[str, ...],
    join: str,
    features: Features,
    storage_options: StorageOptions,
    cache: str | None,
    as_json: bool,
    seconds: float,
) -> None:
    """Describe the content, storage and reading speed of an atlas.

    The description covers cells, obs, chunks, codecs, measured speeds, and recommendations. PATH is an .h5ad file, a
    10x .h5 file, a Zarr store (zipped or not), a directory of these, or a pattern in quotes; several are joined. For an
    .h5mu file or Zarr store of a MuData, the modalities are listed. Four tests of reading speed take --seconds each;
    with 0, no matrix is read.
    """
    with cached_in(cache):
        chosen: Any = features
        how: Any = "outer" if join == "outer" else "inner"
        found = dasksc.describe(data_of(paths), join=how, seconds=seconds, storage_options=storage_options, **chosen)
    click.echo(found.to_json() if as_json else str(found))
