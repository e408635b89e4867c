"""``dasksc suggest``: recommended fetch_factor and block_size for an atlas on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

import dasksc
from dasksc.cli._shared import Features, StorageOptions, data_of, data_options, opened

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
@click.option(
    "--batch-size", type=click.IntRange(1), default=64, show_default=True, metavar="N", help="Rows per batch, per rank."
)
@click.option(
    "--label-key",
    metavar="COLUMN",
    help="Choose block sizes that mix the labels of this column.",
)
@click.option(
    "--memory-share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.2,
    show_default=True,
    metavar="X",
    help="Share of free memory to use.",
)
def command(
    paths: tuple[str, ...],
    join: str,
    features: Features,
    storage_options: StorageOptions,
    cache: str | None,
    as_json: bool,
    batch_size: int,
    label_key: str | None,
    memory_share: float,
) -> None:
    """Suggest fetch_factor and block_size for an atlas.

    The suggestion ends with code to paste. With --label-key, the speed and the mix of classes of each block size are
    measured.
    """
    atlas = opened(paths, join, features=features, storage_options=storage_options, cache=cache)
    if isinstance(atlas, dasksc.Modalities):
        raise dasksc.InputError(
            "dasksc suggest chooses block_size and fetch_factor for a single matrix, but this path contains several "
            f"modalities ({', '.join(atlas)}). Try values yourself: dasksc check prints the memory that they need"
        )
    found = dasksc.suggest_parameters(atlas, batch_size, memory_share, verbose=False, labels=label_key)
    if as_json:
        click.echo(found.to_json())
        return
    click.echo(str(found))
    click.echo(f"\nCode to paste:\n\n{_code(paths, join, features, storage_options, cache, batch_size, found)}")


def _code(
    paths: tuple[str, ...],
    join: str,
    features: Features,
    storage_options: StorageOptions,
    cache: str | None,
    batch_size: int,
    found: Mapping[str, Any],
) -> str:
    """Return a program that reads the atlas with the suggested parameters, without the values of storage options."""
    options = {} if join == "inner" else {"join": repr(join)}
    options |= {name: repr(names) for name, names in features.items()}
    if storage_options:
        secret = ", ".join(f"{name!r}: ..." for name in storage_options)
        options["storage_options"] = f"{{{secret}}}"
    if cache is not None:
        options["cache"] = repr(cache)
    given = repr(data_of(paths))
    if options:
        given = f"dasksc.open({given}, {', '.join(f'{name}={value}' for name, value in options.items())})"
    return "\n".join(
        [
            "import dasksc",
            "",
            "dataset = dasksc.scDataset(",
            f"    {given},",
            f"    dasksc.BlockShuffling(block_size={found['block_size_balanced']}),",
            f"    batch_size={batch_size},",
            f"    fetch_factor={found['fetch_factor']},",
            ")",
            "for batch in dataset:",
            "    ...",
        ]
    )
