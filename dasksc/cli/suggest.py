"""``dasksc suggest``: recommended sizes for an atlas on this machine."""

from __future__ import annotations

import click

import dasksc
from dasksc.cli._shared import StorageOptions, data_options, opened, print_json

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  dasksc suggest atlas.h5ad --batch-size 256
  dasksc suggest atlas.h5ad --label-key cell_type
  dasksc suggest 'plates/*.h5ad' --join outer --json
"""


@click.command(epilog=_EXAMPLES)
@data_options
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True, help="Rows of a batch, per rank.")
@click.option(
    "--label-key",
    metavar="COLUMN",
    help="Measure block sizes by how well they mix its classes, and how fast they are read.",
)
@click.option(
    "--memory-share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.2,
    show_default=True,
    help="Of the memory that is available now, what loading may take.",
)
def command(
    paths: tuple[str, ...],
    join: str,
    storage_options: StorageOptions,
    cache: str | None,
    as_json: bool,
    batch_size: int,
    label_key: str | None,
    memory_share: float,
) -> None:
    """Suggest fetch_factor and block_size for an atlas on this machine."""
    atlas = opened(paths, join, storage_options=storage_options, cache=cache)
    if isinstance(atlas, dasksc.Modalities):
        raise dasksc.InputError(
            f"sizes are suggested for one matrix, and this holds several modalities ({', '.join(atlas)}). Try sizes: "
            "dasksc check tells what they need, and dasksc bench how fast they are read"
        )
    found = dasksc.suggest_parameters(atlas, batch_size, memory_share, verbose=not as_json, labels=label_key)
    if as_json:
        print_json(found)
