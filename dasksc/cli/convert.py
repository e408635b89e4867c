"""``dasksc convert``: rewriting of atlases as a store that is fast to load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from dask.utils import format_bytes

import dasksc
from dasksc.cli._shared import Features, StorageOptions, can_show_progress, feature_options, url_options
from dasksc.loader.genes import Missing, Repeated

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  dasksc convert atlas.h5ad atlas.zarr --verify
  dasksc convert 'plates/*.h5ad' all.zarr --join outer --label plate
  dasksc convert atlas.h5ad by-type.zarr --group-by cell_type
  dasksc convert atlas.h5ad t.zarr --filter "cell_type == 'T cell'"
  dasksc convert s3://bucket/atlas.h5ad atlas.zarr --cache /scratch/blocks
"""


@click.command(epilog=_EXAMPLES)
@click.argument("inputs", nargs=-1, required=True, metavar="IN...")
@click.argument("target", type=click.Path(), metavar="OUT.zarr")
@click.option(
    "--order",
    type=click.Choice(["shuffle", "keep"]),
    default="shuffle",
    show_default=True,
    help="Order of the cells.",
)
@click.option("--group-by", metavar="COLUMNS", help="Keep cells with equal obs values together.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Seed of the shuffle.")
@click.option("--filter", metavar="EXPRESSION", help="Cells to write, such as 'n_genes > 500'.")
@click.option("--genes", metavar="GENES", help="Genes to write: names or a file.")
@click.option(
    "--genes-missing",
    type=click.Choice(["error", "zero", "drop"]),
    default="error",
    show_default=True,
    help="Handle missing genes.",
)
@click.option("--genes-key", metavar="COLUMN", help="Match this var column.  [default: var_names]")
@click.option(
    "--genes-repeated",
    type=click.Choice(["error", "sum"]),
    default="error",
    show_default=True,
    help="Handle repeated genes.",
)
@click.option(
    "--join",
    type=click.Choice(["inner", "outer"]),
    default="inner",
    show_default=True,
    help="Keep shared or all genes.",
)
@click.option("--label", metavar="COLUMN", help="New obs column that names the input of a cell.")
@click.option("--keys", metavar="NAME,...", help="Values of --label.  [default: file names]")
@click.option("--index-unique", metavar="TEXT", help="Append TEXT and input name to cell names.")
@click.option(
    "--merge",
    type=click.Choice(["same", "unique", "first", "only"]),
    help="Which var and varm to keep.  [default: none]",
)
@click.option(
    "--fill-value",
    type=float,
    metavar="NUMBER",
    help="Fill missing genes.  [default: NaN; sparse: 0]",
)
@click.option("--layout", type=click.Choice(["csr"]), help="Write dense X and layers as CSR.")
@click.option("--keep-types", is_flag=True, help="Do not narrow the types of values.")
@click.option("--memory-limit", metavar="SIZE", help="Memory, except obs and var.  [default: 2GiB]")
@feature_options
@url_options
@click.option("--overwrite", is_flag=True, help="Replace OUT.zarr, finished or unfinished.")
@click.option("--verify", is_flag=True, help="Compare every stored row with the input.")
@click.option("--progress/--no-progress", default=None, help="Show progress.  [default: on a terminal]")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    inputs: tuple[str, ...],
    target: str,
    order: str,
    group_by: str | None,
    seed: int,
    filter: str | None,
    genes: str | None,
    genes_missing: Missing,
    genes_key: str | None,
    genes_repeated: Repeated,
    join: str,
    label: str | None,
    keys: str | None,
    index_unique: str | None,
    merge: str | None,
    fill_value: float | None,
    layout: Any,
    keep_types: bool,
    memory_limit: str | None,
    features: Features,
    storage_options: StorageOptions,
    cache: str | None,
    overwrite: bool,
    verify: bool,
    progress: bool | None,
    as_json: bool,
) -> None:
    """Write atlases to one shuffled Zarr store that is fast to load.

    IN is an .h5ad file, a 10x .h5 file, a Zarr store, a directory of these, a pattern, or a URL; several are joined.
    OUT.zarr appears when it is complete. After Ctrl-C, a crash or a full disk, the same command resumes the conversion.

    The cells are shuffled once. With --group-by (one or several columns, such as cell_line,gene), they are shuffled
    within groups. --overwrite also drops an unfinished conversion at OUT.zarr.

    GENES is a list of names (CD3E,CD4) or a vocabulary file (.json, .pkl, or one name per line). Genes that the input
    lacks raise an error, are written as columns of zeros, or are dropped (--genes-missing). Columns of the same gene
    raise an error or are added up (--genes-repeated).

    With several inputs, --label adds an obs column with the name of each cell's input; --keys a,b sets these names.
    --fill-value needs --join outer.

    --merge selects the columns of var and arrays of varm to keep: those that are the same in all inputs (same), those
    that are the same in the inputs that have them (unique), the first of each name (first), or those that exactly one
    input has (only).
    """
    chosen: Any = features
    report = dasksc.convert(
        inputs[0] if len(inputs) == 1 else list(inputs),
        target,
        order="keep" if order == "keep" else "shuffle",
        group_by=None if group_by is None else group_by.split(","),
        seed=seed,
        filter=filter,
        genes=None if genes is None else Path(genes) if Path(genes).is_file() else genes.split(","),
        genes_missing=genes_missing,
        genes_key=genes_key,
        genes_repeated=genes_repeated,
        join="outer" if join == "outer" else "inner",
        label=label,
        keys=None if keys is None else keys.split(","),
        index_unique=index_unique,
        merge=merge,
        fill_value=fill_value,
        layout=layout,
        narrow=not keep_types,
        memory_limit=memory_limit,
        overwrite=overwrite,
        verify=verify,
        **chosen,
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
    if report.genes:
        click.echo(f"  {report.genes}")
    if report.left_out:
        click.echo(f"  left out: {', '.join(report.left_out)}")
