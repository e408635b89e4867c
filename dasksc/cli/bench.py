"""``dasksc bench``: throughput of the user's own files."""

from __future__ import annotations

import statistics

import click

import dasksc
from dasksc.cli._shared import Features, StorageOptions, data_of, data_options, opened, print_json
from dasksc.inspection.reading_rates import rate_of
from dasksc.storage import Layout, is_url, redact_url

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  dasksc bench atlas.h5ad
  dasksc bench atlas.h5ad --layout csr
  dasksc bench atlas.zarr --block-size 1 --rounds 5 --json
"""


@click.command(epilog=_EXAMPLES)
@data_options
@click.option(
    "--layout", type=click.Choice(["dense", "csr"]), default="dense", show_default=True, help="Layout of batches."
)
@click.option(
    "--block-size", type=click.IntRange(1), default=64, show_default=True, metavar="N", help="Rows per block."
)
@click.option(
    "--batch-size", type=click.IntRange(1), default=64, show_default=True, metavar="N", help="Rows per batch."
)
@click.option(
    "--fetch-size", type=click.IntRange(1), default=16_384, show_default=True, metavar="N", help="Rows per fetch."
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=3.0,
    show_default=True,
    metavar="S",
    help="Duration of a round.",
)
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, metavar="N", help="Rounds; the median is printed."
)
def command(
    paths: tuple[str, ...],
    join: str,
    features: Features,
    storage_options: StorageOptions,
    cache: str | None,
    as_json: bool,
    layout: Layout,
    block_size: int,
    batch_size: int,
    fetch_size: int,
    seconds: float,
    rounds: int,
) -> None:
    """Measure the loading speed of an atlas in cells per second.

    Only loading is measured. The first fetch of each round is not counted, and the page cache is not cleared
    beforehand. To compare with other loaders, run benchmarks/compare.py from the source repository with --atlas FILE.
    """
    fetch_factor = max(fetch_size // batch_size, 1)
    dataset = dasksc.scDataset(
        opened(paths, join, features=features, storage_options=storage_options, cache=cache),
        dasksc.BlockShuffling(block_size),
        batch_size,
        fetch_factor,
        layout=layout,
        rank=0,
        world_size=1,
        seed=0,
    )
    rates = []
    for number in range(rounds):
        click.echo(f"round {number + 1} of {rounds}", err=True)
        rates.append(rate_of(dataset, layout=layout, block_size=block_size, seconds=seconds))
    each = [rate.rows_per_s for rate in rates]
    report = {
        # Storage options are left out, since they may contain secrets.
        "paths": data_of([redact_url(path) if is_url(path) else path for path in paths]),
        "join": join,
        "layout": layout,
        "block": block_size,
        "batch": batch_size,
        "fetch": fetch_factor * batch_size,
        "seconds": seconds,
        "rates": each,
        "rows_per_s": statistics.median(each),
        "first_batch_s": rates[0].first_batch_s,
    }
    if as_json:
        print_json(report)
    else:
        click.echo(
            f"{report['rows_per_s']:,.0f} cells/s ({min(each):,.0f} to {max(each):,.0f} in {rounds} "
            f"round{'s' * (rounds > 1)}); first batch after {report['first_batch_s']:.1f} s"
        )
