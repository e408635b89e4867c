"""Synthetic atlases for the benchmarks, written once and reused."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# "shards" is the Zarr store that AnnData 0.13 writes by default: shards of 1 GB, with chunks compressed by Zstandard.
FILES = {"h5ad": ".h5ad", "gzip": "-gzip.h5ad", "zarr": ".zarr", "shards": "-shards.zarr"}
_PROGRAM = Path(__file__).resolve().parent.parent / "examples" / "make_atlas.py"


def add_options(parser: argparse.ArgumentParser, *, cells: int) -> None:
    """Add the options that `atlas` reads."""
    parser.add_argument("--atlas", type=Path, help="h5ad file or Zarr store (default: a synthetic atlas in --work)")
    parser.add_argument("--cells", type=int, default=cells, help="number of cells in the synthetic atlas")
    parser.add_argument("--genes", type=int, default=20_000, help="number of genes in the synthetic atlas")
    parser.add_argument("--files", choices=list(FILES), default="h5ad", help="file format of the synthetic atlas")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "dasksc-benchmarks",
        help="folder of the synthetic atlases, which are kept",
    )


def atlas(options: argparse.Namespace, files: str | None = None) -> Path:
    """Return the path of the atlas given by the options, and write the atlas first if it does not exist.

    Parameters
    ----------
    options
        Parsed options of a parser with `add_options`.
    files
        File format, a key of `FILES`; overrides ``--files`` and ``--atlas``.
    """
    if files is None and options.atlas is not None:
        return options.atlas
    files = files or options.files
    path = options.work / f"atlas-{options.cells}x{options.genes}{FILES[files]}"
    if not path.exists():
        print(f"writing {path}")
        options.work.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(_PROGRAM), "--out", str(path)]
        command += ["--cells", str(options.cells), "--genes", str(options.genes)]
        command += ["--compression", "gzip"] if files == "gzip" else []
        sharded = {"ANNDATA_AUTO_SHARD_ZARR_V3": str(int(files == "shards"))}
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, env=os.environ | sharded)
    return path
