"""``dasksc info``: content, storage and reading speed of an atlas."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath
from typing import Any

import click

import dasksc
from dasksc.atlas.inputs import atlas_inputs
from dasksc.cli._messages import folded
from dasksc.cli._shared import Features, StorageOptions, cached_in, data_of, data_options, opened, print_json
from dasksc.storage import is_url, redact_url

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
    if storage_options and any(map(is_url, paths)):
        found = _behind_urls(paths, join, features, storage_options, cache, seconds)
    else:
        with cached_in(cache):
            chosen: Any = features
            how: Any = "outer" if join == "outer" else "inner"
            found = dasksc.describe(data_of(paths), join=how, seconds=seconds, **chosen)
    if as_json:
        print_json(found)
    else:
        click.echo(folded(repr(found)))


def _behind_urls(
    paths: tuple[str, ...],
    join: str,
    features: Features,
    storage_options: StorageOptions,
    cache: str | None,
    seconds: float,
) -> Any:
    """Describe atlases that need storage options. They are opened here, since `describe` has no such argument."""
    atlas = opened(paths, join, features=features, storage_options=storage_options, cache=cache)
    found = dasksc.describe(atlas, seconds=seconds)
    parts = atlas_inputs(data_of(paths), storage_options)
    named = [redact_url(path) if is_url(path) else path for path in paths]
    name = named[0] if len(named) == 1 else ", ".join(PurePath(one).name for one in named)
    return dataclasses.replace(found, name=name, n_files=1 if parts is None else len(parts))
