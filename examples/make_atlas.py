#!/usr/bin/env python
"""Write a synthetic single-cell atlas of any size, chunk by chunk, in AnnData's format.

    python make_atlas.py --cells 100000 --out atlas.h5ad
    python make_atlas.py --cells 100000 --compression gzip --out atlas-gzip.h5ad
    python make_atlas.py --cells 100000 --zarr --out atlas.zarr

`dasksc.datasets.synthetic` simulates the atlas. It has 14 plates and 50 cell types with few marker genes each. Counts
are integers stored as float32. Each cell expresses about 1,450 of 20,000 genes. Cells are sorted by type. The file
depends only on the arguments. Only a few chunks of cells are in memory at a time, but the whole atlas with --dense or
--compression.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Literal

import anndata

import dasksc


def make_atlas(
    path: str | os.PathLike[str],
    n_cells: int,
    n_genes: int = 20_000,
    *,
    seed: int = 0,
    n_types: int = 50,
    n_plates: int = 14,
    dense: bool = False,
    compression: Literal["gzip", "lzf"] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write an atlas with cell types and plates to `path`; see `dasksc.datasets.synthetic`."""
    path = dasksc.datasets.synthetic(
        path,
        n_cells,
        n_genes,
        n_types=n_types,
        n_donors=0,
        n_batches=n_plates,
        batch_key="plate",
        n_markers=max(2, round(0.002 * n_genes)),
        batch_effect=0.0,
        seed=seed,
        overwrite=overwrite,
    )
    if dense or compression:
        atlas = anndata.read_h5ad(path)
        atlas.X = atlas.X.toarray() if dense else atlas.X
        atlas.write_h5ad(path, compression=compression)
    return path


def main() -> None:
    """Read the command line and write the atlas."""
    parser = argparse.ArgumentParser(description="Write a synthetic single-cell atlas.")
    parser.add_argument("--cells", type=int, default=100_000, help="number of cells (default: 100,000)")
    parser.add_argument("--genes", type=int, default=20_000, help="number of genes (default: 20,000)")
    parser.add_argument("--out", type=Path, default=None, help="default: atlas.h5ad, or atlas.zarr with --zarr")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compression", choices=["gzip", "lzf"], help="compression of the arrays in the h5ad file")
    parser.add_argument("--dense", action="store_true", help="write X as a dense array")
    parser.add_argument("--zarr", action="store_true", help="write a Zarr v3 store with AnnData's defaults")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file or store")
    args = parser.parse_args()
    out = args.out or Path("atlas.zarr" if args.zarr else "atlas.h5ad")
    if args.zarr and out.suffix != ".zarr":
        parser.error("with --zarr the name given to --out must end in .zarr")
    if out.suffix == ".zarr" and (args.dense or args.compression):
        parser.error("--dense and --compression are for h5ad files")
    try:
        make_atlas(
            out,
            args.cells,
            args.genes,
            seed=args.seed,
            dense=args.dense,
            compression=args.compression,
            overwrite=args.overwrite,
        )
    except dasksc.InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
