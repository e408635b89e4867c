"""``dasksc convert``: rewriting of atlases as a store that is fast to load."""

from __future__ import annotations

import json

import click
from dask.utils import format_bytes

import dasksc
from dasksc.cli._shared import StorageOptions, can_show_progress, url_options

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  dasksc convert atlas.h5ad atlas.zarr --verify
  dasksc convert 'plates/*.h5ad' all.zarr --join outer --label plate --merge same
  dasksc convert atlas.h5ad by-type.zarr --group-by cell_type --memory-limit 16GiB
  dasksc convert s3://bucket/atlas.h5ad atlas.zarr --cache /scratch/blocks
  dasksc convert atlas.h5ad atlas.zarr --scheduler tcp://node0:8786
"""


@click.command(epilog=_EXAMPLES)
@click.argument("inputs", nargs=-1, required=True, metavar="IN...")
@click.argument("target", type=click.Path(), metavar="OUT.zarr")
@click.option(
    "--order",
    type=click.Choice(["shuffle", "keep"]),
    default="shuffle",
    show_default=True,
    help="Draw an order of the cells once, every one as likely; or keep theirs.",
)
@click.option("--group-by", metavar="COLUMNS", help="Put cells together that agree in obs columns: cell_line,gene.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the shuffle.")
@click.option(
    "--join",
    type=click.Choice(["inner", "outer"]),
    default="inner",
    show_default=True,
    help="Of several inputs, keep the genes that all have, or any.",
)
@click.option("--label", metavar="COLUMN", help="Name of an obs column to say which input a cell is of.")
@click.option("--keys", metavar="NAME,...", help="What --label calls the inputs, by commas.  [default: their names]")
@click.option("--index-unique", metavar="TEXT", help="Put between the name of a cell and that of its input.")
@click.option(
    "--merge",
    type=click.Choice(["same", "unique", "first", "only"]),
    help="Of several inputs, keep what describes genes (var, varm) where it is the same in all, one value only, the "
    "first one's, or what only one has.  [default: leave it out]",
)
@click.option(
    "--fill-value",
    type=float,
    metavar="NUMBER",
    help="With --join outer, put this where an input lacks a gene.  [default: NaN in dense matrices, 0 in sparse ones]",
)
@click.option("--keep-types", is_flag=True, help="Store values in their own types, and columns as SciPy makes them.")
@click.option("--memory-limit", metavar="SIZE", help="Memory to use beside the tables.  [default: 2GiB]")
@click.option("--scheduler", metavar="ADDRESS", help="A Dask scheduler to run on.  [default: threads of this process]")
@url_options
@click.option("--overwrite", is_flag=True, help="Replace OUT.zarr, and drop another conversion begun there.")
@click.option("--verify", is_flag=True, help="Read the store again, and compare every row with the input.")
@click.option("--progress/--no-progress", default=None, help="Show a bar with the time left.  [default: on a terminal]")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    inputs: tuple[str, ...],
    target: str,
    order: str,
    group_by: str | None,
    seed: int,
    join: str,
    label: str | None,
    keys: str | None,
    index_unique: str | None,
    merge: str | None,
    fill_value: float | None,
    keep_types: bool,
    memory_limit: str | None,
    scheduler: str | None,
    storage_options: StorageOptions,
    cache: str | None,
    overwrite: bool,
    verify: bool,
    progress: bool | None,
    as_json: bool,
) -> None:
    """Write atlases to one shuffled Zarr store that is fast to load.

    IN is an .h5ad file, a Zarr store, a directory of these, a pattern, or a URL; several are joined. OUT.zarr appears
    when it is complete. After Ctrl-C, a crash or a full disk, the same command resumes the conversion.
    """
    report = dasksc.convert(
        inputs[0] if len(inputs) == 1 else list(inputs),
        target,
        order="keep" if order == "keep" else "shuffle",
        group_by=None if group_by is None else group_by.split(","),
        seed=seed,
        join="outer" if join == "outer" else "inner",
        label=label,
        keys=None if keys is None else keys.split(","),
        index_unique=index_unique,
        merge=merge,
        fill_value=fill_value,
        narrow=not keep_types,
        memory_limit=memory_limit,
        scheduler=scheduler,
        overwrite=overwrite,
        verify=verify,
        storage_options=dict(storage_options),
        cache=cache,
        progress=can_show_progress() if progress is None else progress,
    )
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=1))
        return
    click.echo(
        f"{report.path}: {report.n_obs:,} cells x {report.n_vars:,} genes, {format_bytes(report.n_bytes)}, in "
        f"{report.elapsed_s:.1f} s" + (", verified" if report.is_verified else "")
    )
    click.echo("  " + ", ".join(f"{name} ({dtype})" for name, dtype in report.types.items()))
    if report.left_out:
        click.echo(f"  left out: {', '.join(report.left_out)}")
