#!/usr/bin/env python
"""Measure the cost of augmentation between the file and the training loop.

    python benchmarks/augmentation.py --cells 100000 --genes 2000 --out benchmarks/results/augmentation

The program measures the cells per second that `BlockShuffling` delivers and the CPU time per cell on all threads,
without a transform and with each transform of `scDataset(transform=)`. Batches are CSR, dense from a CSR matrix, and
dense from a dense matrix. Contenders take turns after an unmeasured round. In each round, every figure is divided
by that of the untransformed batches, and the program reports medians of these ratios over rounds. On a busy machine,
only the ratios of CPU time are reliable.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from _atlas import add_options, atlas
from _harness import measure
from _machine import read_through
from _reports import add_out, write_report

import dasksc
from dasksc.transforms import Downsample, MaskGenes

_PROGRAM = Path(__file__).resolve().parent.parent / "examples" / "make_atlas.py"
TRANSFORMS: dict[str, Any] = {
    "as they are": lambda batch: batch,
    "Downsample(0.5)": Downsample(0.5),
    "Downsample(target_counts=)": Downsample(target_counts=200),
    "MaskGenes(0.2)": MaskGenes(0.2),
}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and write and return the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=100_000)
    parser.set_defaults(genes=2_000)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--fetch", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of a measurement in seconds")
    add_out(parser)
    options = parser.parse_args(arguments)

    csr = atlas(options)
    dense = csr.with_name(f"{csr.stem}-dense.h5ad")
    if not dense.exists():
        size = ["--cells", str(options.cells), "--genes", str(options.genes)]
        command = [sys.executable, str(_PROGRAM), "--dense", "--out", str(dense), *size]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    found: dict[str, Any] = {}
    for name, layout, path in (("CSR", "csr", csr), ("dense from CSR", "dense", csr), ("dense", "dense", dense)):
        read_through(path)
        for batch_size in options.batch:
            found[f"{name}, batches of {batch_size}"] = _in_turns(options, path, layout, batch_size)
    print(f"| cells/s; ratios of rate and of CPU time | {' | '.join(TRANSFORMS)} |")
    print(f"| --- | {' | '.join(['---:'] * len(TRANSFORMS))} |")
    for name, row in found.items():
        cells = [f"{one['cells_per_s']:,.0f}; {one['rate']:.2f}; {one['cpu']:.2f}" for one in row.values()]
        print(f"| {name} | {' | '.join(cells)} |")
    report = {
        **{name: getattr(options, name) for name in ("cells", "genes", "block", "batch", "fetch", "rounds")},
        "found": found,
        "load": os.getloadavg()[0],
    }
    write_report(options.out, report)
    print(json.dumps(report))
    return report


def _in_turns(options: argparse.Namespace, path: Path, layout: str, batch_size: int) -> dict[str, dict[str, float]]:
    """Return the medians of the rate, the CPU time, and the ratios to untransformed batches, for each transform."""
    epochs: dict[str, Callable[[], Iterator[Any]]] = {}
    for name, transform in TRANSFORMS.items():
        dataset = dasksc.scDataset(
            path,
            dasksc.BlockShuffling(options.block),
            batch_size=batch_size,
            fetch_factor=max(1, options.fetch // batch_size),
            layout=layout,
            transform=transform,
            rank=0,
            world_size=1,
            seed=0,
        )
        epochs[name] = lambda dataset=dataset: (batch.X for batch in dataset)
    rates: dict[str, list[float]] = {name: [] for name in epochs}
    cpu_us: dict[str, list[float]] = {name: [] for name in epochs}
    for i in range(-1, options.rounds):
        for name, epoch in epochs.items():
            measured = measure(epoch, seconds=options.seconds, fetch_rows=options.fetch, consume=None)
            if i >= 0:  # The first round, which is not measured, fills caches and compiles.
                rates[name].append(measured.rows_per_s)
                cpu_us[name].append(measured.cpu_s / measured.n_rows * 1e6)
    plain = next(iter(epochs))
    return {
        name: {
            "cells_per_s": statistics.median(rates[name]),
            "cpu_us": statistics.median(cpu_us[name]),
            "rate": statistics.median(one / other for one, other in zip(rates[name], rates[plain], strict=True)),
            "cpu": statistics.median(other / one for one, other in zip(cpu_us[name], cpu_us[plain], strict=True)),
        }
        for name in epochs
    }


if __name__ == "__main__":
    main()
