"""``dasksc check``: summary of an epoch before X is read."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import click

import dasksc
from dasksc.cli._shared import StorageOptions, data_options, opened, print_json
from dasksc.sampling.named import SHORT_NAMES, is_balanced, strategy_named

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  dasksc check atlas.h5ad --label-key cell_type --world-size 8
  dasksc check atlas.h5ad --strategy balance --label-key cell_type --filter "n_genes > 500"
  dasksc check atlas.zarr --batch-size 256 --fetch-factor 0 --memory-limit 8GiB --strict --json
"""


@click.command(epilog=_EXAMPLES)
@data_options
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True, help="Rows of a batch, per rank.")
@click.option(
    "--fetch-factor",
    type=click.IntRange(0),
    default=16,
    show_default=True,
    help="Batches that are read at once; 0 for as many as the memory limit allows.",
)
@click.option(
    "--strategy",
    type=click.Choice(list(SHORT_NAMES)),
    default="shuffle",
    show_default=True,
    help="Blocks in a random order, rows as they are stored, or classes evenly (by --label-key).",
)
@click.option("--block-size", type=click.IntRange(1), default=8, show_default=True, help="Rows that stay together.")
@click.option("--label-key", metavar="COLUMN", help="The obs column whose classes are counted, or balanced.")
@click.option("--filter", "expression", metavar="EXPRESSION", help='Only rows for which it holds: "n_genes > 500".')
@click.option("--world-size", type=click.IntRange(1), default=1, show_default=True, help="Ranks that share the epoch.")
@click.option("--drop-last", is_flag=True, help="Leave out what fills no batch.")
@click.option("--layout", type=click.Choice(["dense", "csr"]), default="dense", show_default=True, help="Of batches.")
@click.option("--num-workers", type=click.IntRange(0), default=0, show_default=True, help="Of a DataLoader.")
@click.option("--memory-limit", metavar="SIZE", help='Such as "2GiB".')
@click.option("--seed", type=int, default=0, show_default=True, help="Of everything random.")
@click.option("--strict", is_flag=True, help="Exit with 1 if there is a warning.")
def command(
    paths: tuple[str, ...],
    join: str,
    storage_options: StorageOptions,
    cache: str | None,
    as_json: bool,
    batch_size: int,
    fetch_factor: int,
    strategy: str,
    block_size: int,
    label_key: str | None,
    expression: str | None,
    world_size: int,
    drop_last: bool,
    layout: str,
    num_workers: int,
    memory_limit: str | None,
    seed: int,
    strict: bool,
) -> None:
    """Summarize an epoch without reading X.

    The summary has the rows and batches of each rank, the mix of classes, memory, and warnings. PATH is as for `dasksc
    info`. For several modalities, columns are named with their modality: --label-key rna:cell_type.
    """
    if is_balanced(strategy) and label_key is None:
        raise click.UsageError(f"--strategy {strategy} needs --label-key, the column whose classes are balanced")
    dataset = dasksc.scDataset(
        opened(paths, join, storage_options=storage_options, cache=cache),
        strategy_named(strategy, label_key=label_key if is_balanced(strategy) else None, block_size=block_size),
        batch_size,
        fetch_factor or None,
        drop_last,
        rank=0,
        world_size=1,
        seed=seed,
        filter=expression,
        layout="csr" if layout == "csr" else "dense",
        memory_limit=memory_limit,
    )
    found = dasksc.check(_loader(dataset, num_workers), world_size, label_key=label_key)
    if as_json:
        print_json(dataclasses.asdict(found) | {"world_size": found.world_size, "rank_bytes": found.rank_bytes})
    else:
        click.echo(repr(found))
    if strict and found.warnings:
        sys.exit(1)


def _loader(dataset: dasksc.scDataset, num_workers: int) -> Any:
    if not num_workers:
        return dataset
    import torch.utils.data

    return torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=num_workers)
