"""``dasksc check``: summary of an epoch without reading X."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import click

import dasksc
from dasksc.cli._messages import as_options
from dasksc.cli._shared import Features, StorageOptions, data_options, opened, title_of
from dasksc.sampling.named import SHORT_NAMES, is_balanced, strategy_named

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  dasksc check atlas.h5ad --label-key cell_type --world-size 8
  dasksc check atlas.h5ad --strategy balance --label-key cell_type
  dasksc check atlas.h5ad --filter "n_genes > 500" --json
  dasksc check atlas.zarr --fetch-factor 0 --memory-limit 8GiB --strict
"""


@click.command(epilog=_EXAMPLES)
@data_options
@click.option(
    "--batch-size", type=click.IntRange(1), default=64, show_default=True, metavar="N", help="Rows per batch, per rank."
)
@click.option(
    "--fetch-factor",
    type=click.IntRange(0),
    default=16,
    show_default=True,
    metavar="N",
    help="Batches per fetch.",
)
@click.option(
    "--strategy",
    type=click.Choice(list(SHORT_NAMES)),
    default="shuffle",
    show_default=True,
    help="How rows are drawn.",
)
@click.option("--block-size", type=click.IntRange(1), default=8, show_default=True, metavar="N", help="Rows per block.")
@click.option("--label-key", metavar="COLUMN", help="obs column of classes to count or balance.")
@click.option("--filter", "expression", metavar="EXPRESSION", help="Rows to use, such as 'n_genes > 500'.")
@click.option(
    "--world-size", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Number of ranks."
)
@click.option("--drop-last", is_flag=True, help="Drop the last batch if it is incomplete.")
@click.option(
    "--layout", type=click.Choice(["dense", "csr"]), default="dense", show_default=True, help="Layout of batches."
)
@click.option(
    "--num-workers", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="DataLoader workers."
)
@click.option("--memory-limit", metavar="SIZE", help="Memory for fetches, such as 2GiB.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Random seed.")
@click.option("--strict", is_flag=True, help="Exit with code 1 if there is a warning.")
def command(
    paths: tuple[str, ...],
    join: str,
    features: Features,
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

    The summary gives the rows and batches of each rank, the mix of classes, memory, and warnings. PATH is as for
    `dasksc info`. For several modalities, columns are named with their modality: --label-key rna:cell_type.

    Strategies: `shuffle` draws blocks in random order, `stream` reads rows as they are stored, `balance` draws the
    classes of --label-key evenly. With --fetch-factor 0, fetches are as large as --memory-limit allows.
    """
    if is_balanced(strategy) and label_key is None:
        raise click.UsageError(f"--strategy {strategy} needs --label-key, the column whose classes are balanced")
    dataset = dasksc.scDataset(
        opened(paths, join, features=features, storage_options=storage_options, cache=cache),
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
    found = dasksc.check(_data_loader(dataset, num_workers), world_size, label_key=label_key)
    found["name"] = f"{title_of(paths)} by {type(dataset.strategy).__name__}"
    found["warnings"] = list(map(as_options, found.warnings))
    click.echo(found.to_json() if as_json else "\n".join([str(found), *_request(found)]))
    if strict and found.warnings:
        sys.exit(1)


def _request(found: Any) -> Iterator[str]:
    """Yield the resources to request from a job scheduler for all ranks, not counting what the model needs."""
    if found.request_bytes is None:
        return
    mebibytes, n_ranks = found.request_bytes // 2**20, found.world_size
    n_cpus = found.num_workers + 1  # one for the trainer
    yield f"Slurm    --ntasks={n_ranks} --cpus-per-task={n_cpus} --mem-per-cpu={-(-mebibytes // n_cpus)}M"
    if n_cpus == 1:
        yield "         (for N CPUs per task, divide this memory by N)"
    yield f"k8s      {n_ranks} pod{'s' * (n_ranks > 1)} with resources.limits.memory: {mebibytes}Mi"


def _data_loader(dataset: dasksc.scDataset, num_workers: int) -> Any:
    if not num_workers:
        return dataset
    import torch.utils.data

    with warnings.catch_warnings():
        # The workers will run on another machine, so the number of cores of this one does not matter.
        warnings.filterwarnings("ignore", message=".*worker processes in total")
        return torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=num_workers)
