"""``dasksc stats``: statistics of genes, groups and cells, in one pass."""

from __future__ import annotations

import os

import click

import dasksc
from dasksc.cli._shared import Features, StorageOptions, can_show_progress, data_options, opened, print_json

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  dasksc stats atlas.h5ad --by donor --out stats.h5ad
  dasksc stats atlas.h5ad --by donor --by cell_type --filter 'n_genes > 500'
  dasksc stats 'plates/*.h5ad' --layer counts --qc mito=MT- --out qc.h5ad
"""


@click.command(epilog=_EXAMPLES)
@data_options
@click.option("--by", multiple=True, metavar="COLUMN", help="Group cells by this obs column; repeatable.")
@click.option("--filter", metavar="EXPRESSION", help="Cells to use, such as 'n_genes > 500'.")
@click.option("--layer", metavar="NAME", help="Use this layer instead of X.")
@click.option(
    "--qc",
    multiple=True,
    metavar="NAME[=PREFIX]",
    help="Share of counts in these genes; repeatable.",
)
@click.option("--out", metavar="PATH", help="Write all statistics to this .h5ad file.")
@click.option("--progress/--no-progress", default=None, help="Show a progress bar.  [default: on a terminal]")
def command(
    paths: tuple[str, ...],
    join: str,
    features: Features,
    storage_options: StorageOptions,
    cache: str | None,
    as_json: bool,
    by: tuple[str, ...],
    filter: str | None,
    layer: str | None,
    qc: tuple[str, ...],
    out: str | None,
    progress: bool | None,
) -> None:
    """Compute statistics of genes, groups and cells in one pass.

    These are sums, means, variances and numbers of nonzeros of each gene, over all cells and in each group. With --qc,
    each cell gets its total, its number of genes, and the share of its counts in a set of genes: those whose names
    begin with PREFIX, or those that the var column NAME marks.
    """
    if out is not None:
        _check_destination(out)  # before the pass
    # Only the written table of cells shows their names.
    names = out is not None and bool(qc)
    atlas = opened(paths, join, features=features, storage_options=storage_options, cache=cache, names=names)
    if isinstance(atlas, dasksc.Modalities):
        raise dasksc.InputError(
            f"statistics need a single matrix, but this path contains several modalities ({', '.join(atlas)}). Store "
            "one of them as an .h5ad file: mudata.read(path)['rna'].write_h5ad('rna.h5ad')"
        )
    masks = {}
    for name, is_prefix, prefix in (one.partition("=") for one in qc):
        if is_prefix:
            masks[name] = atlas.var_names.str.startswith(prefix)
            if not masks[name].any():
                raise dasksc.InputError(
                    f"--qc {name}={prefix}: no gene name begins with {prefix!r}; the first names are "
                    f"{', '.join(map(repr, atlas.var_names[:3]))}. Give the prefix with the same case"
                )
        elif name in atlas.var and atlas.var[name].dtype == bool:
            masks[name] = atlas.var[name].to_numpy()
        else:
            raise dasksc.InputError(f"--qc {name}: var has no boolean column {name!r}; give {name}=PREFIX")
    found = dasksc.statistics(
        atlas,
        by=list(by) or None,
        filter=filter,
        layer=layer,
        qc=masks or None,
        progress=can_show_progress() if progress is None else progress,
    )
    if out is not None:
        found.to_anndata().write_h5ad(out)
    genes = found.genes
    n_cells = int(genes["n"].iloc[0]) if len(genes) else 0
    summary = {
        "n_cells": n_cells,
        "n_genes": len(genes),
        "n_expressed": int((genes["count_nonzero"] > 0).sum()),
        "total": float(genes["sum"].sum()),
        "n_groups": None if found.groups is None else found.groups.n_obs,
        "out": out,
    }
    if as_json:
        print_json(summary)
        return
    groups = "" if found.groups is None else f", {found.groups.n_obs:,} groups"
    expressed = f"{summary['n_expressed']:,} of {len(genes):,} genes expressed, total {summary['total']:,.0f}"
    click.echo(f"{n_cells:,} cells, {expressed}{groups}" + ("" if out is None else f"; written to {out}"))


def _check_destination(path: str) -> None:
    if not path.endswith(".h5ad"):
        raise dasksc.InputError(f"{path} must end in .h5ad")
    if os.path.exists(path):
        raise dasksc.InputError(f"{path} exists; give another path, or remove it")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise dasksc.InputError(f"there is no folder {os.path.dirname(path)} to write {os.path.basename(path)} to")
