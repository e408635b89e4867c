#!/usr/bin/env python
"""Check that the peak memory of passes over an atlas is independent of the number of cells.

    python benchmarks/flat.py --sizes 400000 1600000 4000000 --genes 500 --out benchmarks/results/flat

The program measures peaks of anonymous memory for `statistics`, `highly_variable_genes` (``seurat_v3``) and `predict`,
each in a separate process, on atlases of several sizes with the same genes. The baseline is the memory of the process
after the same work on 2,500 cells. The peak for the largest atlas should be at most max(1.2 p, p + 16 MiB), where p is
the peak for the smallest. Every size should exceed the number of rows in flight, because smaller atlases do not fill
the fetches of a pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _atlas import add_options, atlas
from _machine import rss_anon_bytes
from _reports import add_out, write_report
from memory import peak_of_rss_anon
from predict import Embedding

import dasksc

TARGET, SLACK_BYTES = 1.2, 2**24
WORK = ("statistics", "seurat_v3", "predict")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and write and return the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=0)
    parser.set_defaults(genes=500)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[400_000, 1_600_000, 4_000_000], help="numbers of cells"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--of", nargs=2, metavar=("WORK", "ATLAS"), help=argparse.SUPPRESS)
    add_out(parser)
    options = parser.parse_args(arguments)
    if options.of is not None:
        print(json.dumps(peak_of(options.of[0], Path(options.of[1]))))
        return {}
    paths = {n: atlas(argparse.Namespace(**{**vars(options), "cells": n, "atlas": None})) for n in options.sizes}
    peaks: dict[str, dict[int, list[int]]] = {name: {n: [] for n in paths} for name in WORK}
    for _ in range(options.rounds):
        for name in WORK:
            for n, path in paths.items():
                peaks[name][n].append(in_own_process(name, path))
    medians = {name: {n: sorted(found)[len(found) // 2] for n, found in of.items()} for name, of in peaks.items()}
    print(f"| MiB | {' | '.join(f'{n:,} cells' for n in paths)} |\n| --- |{' ---: |' * len(paths)}")
    for name, of in medians.items():
        print(f"| {name} | {' | '.join(f'{n_bytes / 2**20:.0f}' for n_bytes in of.values())} |")
    least, most = min(paths), max(paths)
    is_flat = {name: of[most] <= max(TARGET * of[least], of[least] + SLACK_BYTES) for name, of in medians.items()}
    print(f"target: flat; {'reached' if all(is_flat.values()) else 'missed'}")
    report = {
        "sizes": options.sizes,
        "genes": options.genes,
        "peak_bytes": medians,
        "rounds_bytes": peaks,
        "is_flat": is_flat,
        "load": os.getloadavg()[0],
    }
    write_report(options.out, report)
    print(json.dumps(report))
    return report


def in_own_process(name: str, path: Path) -> int:
    """Return the result of `peak_of` in a separate process, in bytes."""
    command = [sys.executable, "-W", "ignore", __file__, "--of", name, str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def peak_of(name: str, path: Path) -> int:
    """Return the growth of anonymous memory during a pass over an atlas, in bytes."""
    adata = dasksc.open(path)
    model = Embedding(adata.n_vars)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:

        def work(of: Any, out: str) -> None:
            if name == "statistics":
                dasksc.statistics(of)
            elif name == "seurat_v3":
                dasksc.highly_variable_genes(of, min(100, of.n_vars // 2), "seurat_v3")
            else:
                dasksc.predict(model, of, Path(folder) / out, batch_size=1024)

        torch.set_num_threads(2)
        work(adata[: min(2_500, adata.n_obs)], "few.zarr")  # Compiles kernels and fills persistent memory pools.
        before = rss_anon_bytes()
        with peak_of_rss_anon() as found:
            work(adata, "all.zarr")
    return max(0, max(found) - before)


if __name__ == "__main__":
    main()
