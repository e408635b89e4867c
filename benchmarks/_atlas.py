"""The atlases that benchmarks read, made once and kept."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = {"h5ad": ".h5ad", "gzip": "-gzip.h5ad", "zarr": ".zarr"}
_PROGRAM = Path(__file__).resolve().parent.parent / "examples" / "make_atlas.py"


def add_options(parser: argparse.ArgumentParser, *, cells: int) -> None:
    """Add what `atlas` reads from a command line."""
    parser.add_argument("--atlas", type=Path, help="an AnnData file; default: one is made in --work")
    parser.add_argument("--cells", type=int, default=cells, help="cells of the atlas that is made")
    parser.add_argument("--genes", type=int, default=20_000, help="genes of the atlas that is made")
    parser.add_argument("--files", choices=list(FILES), default="h5ad", help="how it is stored")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "dasksc-benchmarks",
        help="where atlases are made and kept",
    )


def atlas(options: argparse.Namespace, files: str | None = None) -> Path:
    """Return the path of the atlas the command line asks for, made now if it is not there yet.

    Parameters
    ----------
    options
        Of a parser that `add_options` saw.
    files
        Stored in another way than the command line says, if given; ``--atlas`` is ignored then.
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
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return path
